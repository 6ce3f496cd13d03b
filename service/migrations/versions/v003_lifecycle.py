"""Sweeps: states for what is under way in place of a wish beside the state, time spent running, retries."""

import sqlalchemy as sa
from alembic import op

revision = "003"
down_revision = "002"


def upgrade() -> None:
    for column in (
        sa.Column("state_since", sa.DateTime),
        sa.Column("ran_s", sa.Float, nullable=False, server_default="0"),
        sa.Column("running_since", sa.DateTime),
        sa.Column("study", sa.String(64)),
        sa.Column("retry_classes", sa.JSON),
    ):
        op.add_column("fraternal_sweeps", column)
    op.execute(
        "UPDATE fraternal_sweeps SET state = 'cancelling' "
        "WHERE desired_state = 'cancelled' AND state IN ('queued', 'running')"
    )
    op.execute("UPDATE fraternal_sweeps SET state_since = COALESCE(finished_at, started_at, created_at)")
    op.execute(
        "UPDATE fraternal_sweeps SET running_since = started_at WHERE state IN ('running', 'cancelling')"
    )
    op.execute("UPDATE fraternal_sweeps SET study = id")
    # Not in Alembic's batch: on SQLite that makes the table anew, and what refers to the old one would go.
    op.execute("ALTER TABLE fraternal_sweeps DROP COLUMN desired_state")
    op.create_table(
        "fraternal_leases",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("holder", sa.JSON, nullable=False),
        sa.Column("until", sa.DateTime, nullable=False),
    )
