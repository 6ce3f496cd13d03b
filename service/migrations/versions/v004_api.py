"""What an API that people build on keeps: revisions, points, wishes for single trials, answers to repeat,
tokens and sessions, webhooks.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "004"
down_revision = "003"


def to(table: str) -> sa.ForeignKey:
    return sa.ForeignKey(f"{table}.id", ondelete="CASCADE")


def number_what_is_tried_again(connection: sa.Connection) -> None:
    """By trial, where it was by class of failure."""
    sweeps = sa.table(
        "fraternal_sweeps",
        *(sa.column("id"), sa.column("study"), sa.column("retry_classes", sa.JSON)),
        sa.column("retry_numbers", sa.JSON),
    )
    asked = connection.execute(sa.select(sweeps).where(sweeps.c.retry_classes.is_not(None))).all()
    failed = sa.text(
        "SELECT t.number, a.value_json FROM trials t JOIN studies s ON s.study_id = t.study_id "
        "JOIN trial_user_attributes a ON a.trial_id = t.trial_id "
        "WHERE s.study_name = :study AND t.state = 'FAIL' AND a.key = 'failure_class' ORDER BY t.number"
    )
    if not asked or not sa.inspect(connection).has_table("trial_user_attributes"):
        return
    for sweep in asked:
        rows = connection.execute(failed, {"study": sweep.study}).all()
        numbers = [row.number for row in rows if json.loads(row.value_json) in sweep.retry_classes]
        connection.execute(sa.update(sweeps).where(sweeps.c.id == sweep.id).values(retry_numbers=numbers))


def upgrade() -> None:
    op.add_column("fraternal_sweeps", sa.Column("revision", sa.Integer, nullable=False, server_default="1"))
    op.add_column("fraternal_sweeps", sa.Column("retry_numbers", sa.JSON))
    op.add_column("fraternal_events", sa.Column("once", sa.String(96)))
    op.create_index("ix_fraternal_events_once", "fraternal_events", ["sweep_id", "once"], unique=True)
    number_what_is_tried_again(op.get_bind())
    op.execute("ALTER TABLE fraternal_sweeps DROP COLUMN retry_classes")
    op.create_table(
        "fraternal_points",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("sweep_id", sa.String(40), to("fraternal_sweeps"), nullable=False, index=True),
        sa.Column("params", sa.JSON, nullable=False),
        sa.Column("draw", sa.Integer),
        sa.Column("created_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "fraternal_trial_wishes",
        sa.Column("sweep_id", sa.String(40), to("fraternal_sweeps"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("stopping", sa.Boolean, nullable=False),
    )
    op.create_table(
        "fraternal_answers",
        sa.Column("owner", sa.String(32), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("request_sha256", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("headers", sa.JSON, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False, index=True),
    )
    op.create_table(
        "fraternal_tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("expires_at", sa.DateTime),
        sa.Column("revoked_at", sa.DateTime),
    )
    op.create_table(
        "fraternal_sessions",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("token_id", sa.String(32), to("fraternal_tokens"), nullable=False, index=True),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("expires_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "fraternal_webhooks",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("kinds", sa.JSON),
        sa.Column("sweep_id", sa.String(40), index=True),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.DateTime),
        sa.Column("delivered_at", sa.DateTime),
        sa.Column("failed_at", sa.DateTime),
        sa.Column("failure", sa.Text),
        sa.Column("dropped", sa.Integer, nullable=False),
        sa.Column("disabled_at", sa.DateTime),
    )
    op.create_table(
        "fraternal_deliveries",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("webhook_id", sa.String(32), to("fraternal_webhooks"), nullable=False, index=True),
        sa.Column("message_id", sa.String(80), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "fraternal_totals",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
    )
