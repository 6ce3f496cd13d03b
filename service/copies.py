"""A database copied table by table while it is written to: between SQLite and PostgreSQL, either way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from optuna.storages._rdb.models import BaseModel, StudyModel, TrialModel, TrialUserAttributeModel
from sqlalchemy import Connection, Engine, and_, delete, func, insert, inspect, select, update

from service.records import metadata, migrate, open_engine, sweeps
from service.studies import open_storage

ROWS_AT_ONCE = 1000
TABLES = (*BaseModel.metadata.sorted_tables, *metadata.sorted_tables)


@dataclass(frozen=True)
class TrialInCopy:
    """What a database says of a trial at the moment of the copy."""

    sweep_id: str
    number: int
    finished: bool
    has_best: bool


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """A transaction that sees the database as it is at its first look, whatever is written meanwhile."""
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")  # Python's module would begin at the first write
            yield connection
    else:
        options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with engine.connect().execution_options(**options) as connection:
            yield connection


def count_sweeps(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(sweeps)).scalar_one()


def trials_in(connection: Connection) -> list[TrialInCopy]:
    """Every trial of every sweep."""
    best = and_(
        TrialUserAttributeModel.trial_id == TrialModel.trial_id,
        TrialUserAttributeModel.key == "checkpoint_sha256",
    )
    rows = connection.execute(
        select(sweeps.c.id, TrialModel.number, TrialModel.state, TrialUserAttributeModel.key)
        .join(StudyModel, StudyModel.study_name == sweeps.c.id)
        .join(TrialModel, TrialModel.study_id == StudyModel.study_id)
        .outerjoin(TrialUserAttributeModel, best)
        .order_by(sweeps.c.position, TrialModel.number)
    )
    return [
        TrialInCopy(sweep_id, number, state.is_finished(), key is not None)
        for sweep_id, number, state, key in rows
    ]


def copy_database(source: Connection, url: str) -> None:
    """All rows into a database that has none; its tables are made where they are missing.

    In the copy nobody is at work: it knows no driver, and the next look at a sweep starts one.
    """
    storage = open_storage(url)
    storage.remove_session()
    storage.engine.dispose()
    engine = open_engine(url)
    migrate(engine)
    with engine.begin() as target:
        for table in TABLES:
            target.execute(delete(table))  # Optuna's own version, which it wrote with the tables
            rows = source.execute(select(table).execution_options(yield_per=ROWS_AT_ONCE)).mappings()
            for some in rows.partitions():
                target.execute(insert(table), [dict(row) for row in some])
        held = sweeps.c.driver.is_not(None) | sweeps.c.lease_until.is_not(None)
        nobody = {"driver": None, "lease_until": None, "epochs_at_launch": -1}  # so it was not fruitless
        target.execute(update(sweeps).where(held).values(nobody))
        if target.dialect.name == "postgresql":
            _count_on(target)
    engine.dispose()


def _count_on(target: Connection) -> None:
    """Let the next number of every numbered table follow those that were copied."""
    for table in TABLES:
        column = table.autoincrement_column
        if column is not None:
            sequence = func.pg_get_serial_sequence(table.name, column.name)
            highest = func.coalesce(func.max(column), 0) + 1
            target.execute(select(func.setval(sequence, highest, False)).select_from(table))


def has_rows(url: str) -> bool:
    """Whether a database has a sweep or a study already."""
    engine = open_engine(url)
    there = set(inspect(engine).get_table_names())
    with engine.connect() as connection:
        found = any(
            connection.execute(select(table).limit(1)).first()
            for table in (sweeps, BaseModel.metadata.tables["studies"])
            if table.name in there
        )
    engine.dispose()
    return found
