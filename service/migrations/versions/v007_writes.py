"""How often something of a sweep's trials was written: what is told of them is as of such a number."""

import sqlalchemy as sa
from alembic import op

revision = "007"
down_revision = "006"


def upgrade() -> None:
    op.add_column("fraternal_sweeps", sa.Column("writes", sa.Integer))
