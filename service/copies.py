"""A database copied table by table while it is written to: between SQLite and PostgreSQL, either way."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from optuna.storages._rdb.models import BaseModel, StudyModel, TrialModel, TrialUserAttributeModel
from sqlalchemy import Connection, Engine, and_, delete, func, insert, inspect, select, update

from service.database import migrate, open_engine
from service.studies import open_storage
from service.tables import leases, metadata, sessions, sweeps

ROWS_AT_ONCE = 1000
TABLES = [
    table
    for table in (*BaseModel.metadata.sorted_tables, *metadata.sorted_tables)
    if table not in (leases, sessions)  # in a copy nobody is at work, and browsers sign in again
]


@dataclass(frozen=True)
class TrialInCopy:
    """What a database says of a trial at the moment of the copy."""

    sweep_id: str
    number: int
    finished: bool
    has_best: bool
    """Whether its best checkpoint must be there: it has one, and no wish had it removed."""


def open_to_copy(url: str) -> Engine:
    """An engine to which JSON is text: what it does not understand, it copies all the same."""
    return open_engine(url, json_serializer=_as_text, json_deserializer=_as_text)


def _as_text(written: Any) -> Any:
    return written.decode() if isinstance(written, bytes) else written


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
            # Files may be read for long between two looks, and nobody waits for who only looks.
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
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
        .join(StudyModel, StudyModel.study_name == sweeps.c.study)
        .join(TrialModel, TrialModel.study_id == StudyModel.study_id)
        .outerjoin(TrialUserAttributeModel, best)
        .order_by(sweeps.c.position, TrialModel.number)
    )
    sparing = {
        sweep_id for sweep_id, spec in connection.execute(select(sweeps.c.id, sweeps.c.spec)) if _spares(spec)
    }
    return [
        TrialInCopy(sweep_id, number, state.is_finished(), key is not None and sweep_id not in sparing)
        for sweep_id, number, state, key in rows
    ]


def _spares(spec: str) -> bool:
    """Whether not every best checkpoint of a sweep stays."""
    try:
        return json.loads(spec)["retention"]["bests_per_arm"] is not None
    except (ValueError, KeyError, TypeError):  # of an earlier version, or damaged
        return False


def copy_database(source: Connection, url: str) -> None:
    """All rows, from an engine of `open_to_copy`, into a database that has none, or not even the tables.

    In the copy nobody is at work: it knows no driver, the next look at a sweep starts one, and until then the
    sweep's clock stands still.
    """
    storage = open_storage(url)
    storage.remove_session()
    storage.engine.dispose()
    engine = open_to_copy(url)
    migrate(engine)
    with engine.begin() as target:
        for table in TABLES:
            target.execute(delete(table))  # Optuna's own version, which it wrote with the tables
            with source.execute(select(table).execution_options(yield_per=ROWS_AT_ONCE)) as rows:
                for some in rows.mappings().partitions():
                    target.execute(insert(table), [dict(row) for row in some])
        _put_to_rest(target)
        if target.dialect.name == "postgresql":
            _count_on(target)
    engine.dispose()


def _put_to_rest(target: Connection) -> None:
    held = sweeps.c.driver.is_not(None) | sweeps.c.lease_until.is_not(None)
    nobody = {"driver": None, "lease_until": None, "epochs_at_launch": -1}  # so it was not fruitless
    target.execute(update(sweeps).where(held).values(nobody))
    moment = datetime.now(UTC).replace(tzinfo=None)
    clocks = select(sweeps.c.id, sweeps.c.ran_s, sweeps.c.running_since)
    for sweep_id, ran_s, since in target.execute(clocks.where(sweeps.c.running_since.is_not(None))).all():
        stopped = {"ran_s": ran_s + (moment - since).total_seconds(), "running_since": None}
        target.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(stopped))


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
