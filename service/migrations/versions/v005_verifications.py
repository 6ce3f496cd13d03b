"""Best checkpoints, evaluated again before they are called best."""

import sqlalchemy as sa
from alembic import op

revision = "005"
down_revision = "004"


def upgrade() -> None:
    op.create_table(
        "fraternal_verifications",
        sa.Column(
            "sweep_id",
            sa.String(40),
            sa.ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("recorded_sha256", sa.String(64)),
        sa.Column("checkpoint_sha256", sa.String(64)),
        sa.Column("epoch", sa.Integer),
        sa.Column("recorded_valid_loss", sa.Float),
        sa.Column("valid_loss", sa.Float),
        sa.Column("tolerance", sa.Float),
        sa.Column("device", sa.Text),
        sa.Column("runtime", sa.Text),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("message", sa.Text),
        sa.Column("verified_at", sa.DateTime, nullable=False),
    )
