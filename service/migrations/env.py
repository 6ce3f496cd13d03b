"""Alembic's entry: migrates over the connection it is given.

Optuna has a version table of its own in the same database.
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="fraternal_alembic_version",
    render_as_batch=True,  # SQLite cannot alter a column in place
)
with context.begin_transaction():
    context.run_migrations()
