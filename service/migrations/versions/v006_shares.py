"""How many trials a running sweep could run at once, for the sweeps that share its machines with it."""

import sqlalchemy as sa
from alembic import op

revision = "006"
down_revision = "005"


def upgrade() -> None:
    op.add_column("fraternal_sweeps", sa.Column("wants", sa.Integer))
