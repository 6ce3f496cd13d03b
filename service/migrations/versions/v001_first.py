"""The first tables: sweeps, epochs, events."""

import sqlalchemy as sa
from alembic import op

revision = "001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "fraternal_sweeps",
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(40), unique=True, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("desired_state", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False, index=True),
        sa.Column("state_reason", sa.Text),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("epochs_at_launch", sa.Integer, nullable=False),
        sa.Column("fruitless_launches", sa.Integer, nullable=False),
        sa.Column("driver", sa.JSON),
        sa.Column("lease_until", sa.DateTime),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("started_at", sa.DateTime),
        sa.Column("finished_at", sa.DateTime),
    )
    op.create_table(
        "fraternal_epochs",
        sa.Column(
            "sweep_id",
            sa.String(40),
            sa.ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("recorded_at", sa.DateTime, nullable=False),
        *(
            sa.Column(name, kind, nullable=False)
            for name, kind in (
                ("train_loss", sa.Float),
                ("valid_loss", sa.Float),
                ("raw_valid_loss", sa.Float),
                ("averaged", sa.Boolean),
                ("optimised", sa.Float),
                ("penalty", sa.Float),
                ("ar", sa.Float),
                ("tar", sa.Float),
                ("gradient_norm", sa.Float),
                ("tokens", sa.Integer),
                ("seconds", sa.Float),
                ("is_best", sa.Boolean),
            )
        ),
    )
    op.create_table(
        "fraternal_events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column(
            "sweep_id",
            sa.String(40),
            sa.ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
    )
