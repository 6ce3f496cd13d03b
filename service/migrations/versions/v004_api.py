"""What an API that people build on keeps: revisions, points, wishes for single trials, answers to repeat,
tokens, webhooks, totals.
"""

import sqlalchemy as sa
from alembic import op

revision = "004"
down_revision = "003"


def to(table: str) -> sa.ForeignKey:
    return sa.ForeignKey(f"{table}.id", ondelete="CASCADE")


def upgrade() -> None:
    op.add_column("fraternal_sweeps", sa.Column("revision", sa.Integer, nullable=False, server_default="1"))
    op.add_column("fraternal_sweeps", sa.Column("retry_numbers", sa.JSON))
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
        sa.Column("session_of", sa.String(32), to("fraternal_tokens")),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("expires_at", sa.DateTime),
        sa.Column("revoked_at", sa.DateTime),
    )
    op.create_table(
        "fraternal_webhooks",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("kinds", sa.JSON),
        sa.Column("sweep_id", sa.String(40), to("fraternal_sweeps"), index=True),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("delivered_at", sa.DateTime),
        sa.Column("failed_at", sa.DateTime),
        sa.Column("failure", sa.Text),
    )
    op.create_table(
        "fraternal_deliveries",
        sa.Column(
            "webhook_id",
            sa.String(32),
            to("fraternal_webhooks"),
            primary_key=True,
        ),
        sa.Column("event_id", sa.Integer, to("fraternal_events"), primary_key=True),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.DateTime, nullable=False, index=True),
    )
    op.create_table(
        "fraternal_totals",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
    )
