"""Epochs: learning rate, how far the masks move the predictions, and speed; unknown for what came before."""

import sqlalchemy as sa
from alembic import op

revision = "002"
down_revision = "001"


def upgrade() -> None:
    for name in ("lr", "pair_difference", "prediction_variance", "expectation_gap", "tokens_per_s"):
        op.add_column("fraternal_epochs", sa.Column(name, sa.Float))
