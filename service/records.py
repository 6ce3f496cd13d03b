"""Our tables beside Optuna's in the one database: sweeps, epochs, events. SQLAlchemy, made by Alembic.

Times are naive UTC in the database and aware in Python.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from pydantic_core import from_json, to_json
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    DateTime,
    Engine,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    RowMapping,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.sql import ColumnElement

from service.errors import SweepNotFound
from trials.ledger import Fenced
from trials.spec import SweepSpec

LEASE = timedelta(seconds=20)
"""How long a driver may be silent before another one is started."""
FIRST_LEASE = timedelta(seconds=60)
"""The same before its first word: on a busy machine, loading what a driver needs may outlast a lease."""

metadata = MetaData()

sweeps = Table(
    "fraternal_sweeps",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=True),  # the order in which sweeps came
    Column("id", String(40), unique=True, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("desired_state", String(16), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("state_reason", Text),
    Column("generation", Integer, nullable=False, default=0),
    Column("epochs_at_launch", Integer, nullable=False, default=0),
    Column("fruitless_launches", Integer, nullable=False, default=0),
    Column("driver", JSON(none_as_null=True)),
    Column("lease_until", DateTime),
    Column("created_at", DateTime, nullable=False),
    Column("started_at", DateTime),
    Column("finished_at", DateTime),
)

epochs = Table(
    "fraternal_epochs",
    metadata,
    Column("sweep_id", ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("recorded_at", DateTime, nullable=False),
    Column("train_loss", Float, nullable=False),
    Column("valid_loss", Float, nullable=False),
    Column("raw_valid_loss", Float, nullable=False),
    Column("averaged", Boolean, nullable=False),
    Column("optimised", Float, nullable=False),
    Column("penalty", Float, nullable=False),
    Column("ar", Float, nullable=False),
    Column("tar", Float, nullable=False),
    Column("gradient_norm", Float, nullable=False),
    Column("lr", Float),
    Column("pair_difference", Float),
    Column("prediction_variance", Float),
    Column("expectation_gap", Float),
    Column("tokens", Integer, nullable=False),
    Column("tokens_per_s", Float),
    Column("seconds", Float, nullable=False),
    Column("is_best", Boolean, nullable=False),
)

events = Table(
    "fraternal_events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("sweep_id", ForeignKey("fraternal_sweeps.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("at", DateTime, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("detail", JSON, nullable=False),
)


@dataclass(frozen=True)
class SweepRecord:
    """A sweep's row."""

    id: str
    spec: SweepSpec
    desired_state: str
    state: str
    state_reason: str | None
    generation: int
    epochs_at_launch: int
    fruitless_launches: int
    driver: dict[str, Any] | None
    lease_until: datetime | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @property
    def lease_expired(self) -> bool:
        return self.lease_until is None or self.lease_until < now()


class Records:
    """Reads and writes our tables. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add_sweep(self, sweep_id: str, spec: SweepSpec) -> SweepRecord:
        values = {
            "id": sweep_id,
            "spec": spec.model_dump(mode="json"),
            "desired_state": "running",
            "state": "queued",
            "created_at": _naive(now()),
        }
        with self.engine.begin() as connection:
            connection.execute(insert(sweeps).values(values))
            connection.execute(_event(sweep_id, "sweep_submitted", {}))
        return self.get_sweep(sweep_id)

    def get_sweep(self, sweep_id: str) -> SweepRecord:
        """Raises SweepNotFound."""
        with self.engine.connect() as connection:
            row = connection.execute(select(sweeps).where(sweeps.c.id == sweep_id)).mappings().one_or_none()
        if row is None:
            raise SweepNotFound(f"there is no sweep {sweep_id!r}; GET /v1/sweeps lists them")
        return _record(row)

    def list_sweeps(self, *states: str) -> list[SweepRecord]:
        """In the order in which they came; of all states if none is named."""
        query = select(sweeps).order_by(sweeps.c.position)
        if states:
            query = query.where(sweeps.c.state.in_(states))
        with self.engine.connect() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def list_left_behind(self) -> list[SweepRecord]:
        """Sweeps that have ended, but whose drivers nobody has cleaned up after."""
        left = sweeps.c.state.not_in(("queued", "running")) & sweeps.c.driver.is_not(None)
        with self.engine.connect() as connection:
            return [_record(row) for row in connection.execute(select(sweeps).where(left)).mappings()]

    def ask_to_cancel(self, sweep_id: str) -> bool:
        """Wish for a sweep's end; False if it has ended by itself."""
        running = (sweeps.c.id == sweep_id) & sweeps.c.state.in_(("queued", "running"))
        with self.engine.begin() as connection:
            changed = connection.execute(
                update(sweeps).where(running).values(desired_state="cancelled")
            ).rowcount
            if changed:
                connection.execute(_event(sweep_id, "cancel_requested", {}))
        return bool(changed)

    def claim(self, record: SweepRecord, *, fruitless: int, epochs_done: int) -> int | None:
        """Take a sweep over for a new driver: from here on, nothing that an earlier one writes is accepted.

        Returns the new generation, or None if somebody else was faster.
        """
        generation = record.generation + 1
        values = {
            "generation": generation,
            "state": "running",
            "lease_until": _naive(now() + FIRST_LEASE),
            "started_at": _naive(record.started_at or now()),
            "driver": None,
            "fruitless_launches": fruitless,
            "epochs_at_launch": epochs_done,
        }
        return generation if self._move(record.id, record.generation, "driver_started", values) else None

    def fence(self, record: SweepRecord) -> int | None:
        """As `claim`, but for nobody: a sweep is ended once its driver can write no more."""
        generation = record.generation + 1
        values = {"generation": generation, "driver": None, "lease_until": None}
        return generation if self._move(record.id, record.generation, "driver_fenced", values) else None

    def release(self, record: SweepRecord) -> None:
        """Write down that a driver was stopped for no fault of its own; the next look starts another."""
        values = {"driver": None, "lease_until": None, "epochs_at_launch": -1}  # so it was not fruitless
        self._move(record.id, record.generation, "driver_stopped", values)

    def finish(self, sweep_id: str, generation: int, state: str, reason: str | None) -> bool:
        """Write a sweep's end, unless another generation has taken it over."""
        values = {"state": state, "state_reason": reason, "finished_at": _naive(now()), "lease_until": None}
        return self._move(sweep_id, generation, f"sweep_{state}", values)

    def set_driver(self, sweep_id: str, generation: int, driver: dict[str, Any] | None) -> None:
        current = (sweeps.c.id == sweep_id) & (sweeps.c.generation == generation)
        with self.engine.begin() as connection:
            connection.execute(update(sweeps).where(current).values(driver=driver))

    def _move(self, sweep_id: str, generation: int, kind: str, values: dict[str, Any]) -> bool:
        at_generation = (
            (sweeps.c.id == sweep_id)
            & (sweeps.c.generation == generation)
            & sweeps.c.state.in_(("queued", "running"))
        )
        with self.engine.begin() as connection:
            moved = connection.execute(update(sweeps).where(at_generation).values(values)).rowcount == 1
            if moved:
                connection.execute(
                    _event(sweep_id, kind, {"generation": values.get("generation", generation)})
                )
        return moved

    def count_epochs(self, sweep_id: str, number: int | None = None) -> int:
        of_sweep: ColumnElement[bool] = epochs.c.sweep_id == sweep_id
        if number is not None:
            of_sweep = of_sweep & (epochs.c.number == number)
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(epochs).where(of_sweep)).scalar_one()

    def latest_epochs(self, sweep_id: str) -> dict[int, RowMapping]:
        """The latest recorded epoch of every trial, by trial number."""
        latest = (
            select(epochs.c.number, func.max(epochs.c.epoch).label("epoch"))
            .where(epochs.c.sweep_id == sweep_id)
            .group_by(epochs.c.number)
            .subquery()
        )
        query = select(epochs).join(
            latest, (epochs.c.number == latest.c.number) & (epochs.c.epoch == latest.c.epoch)
        )
        with self.engine.connect() as connection:
            rows = connection.execute(query.where(epochs.c.sweep_id == sweep_id)).mappings()
            return {row["number"]: row for row in rows}

    def curve(self, sweep_id: str, number: int) -> list[RowMapping]:
        query = (
            select(epochs)
            .where((epochs.c.sweep_id == sweep_id) & (epochs.c.number == number))
            .order_by(epochs.c.epoch)
        )
        with self.engine.connect() as connection:
            return list(connection.execute(query).mappings())

    def list_events(self, sweep_id: str) -> list[RowMapping]:
        query = select(events).where(events.c.sweep_id == sweep_id).order_by(events.c.id)
        with self.engine.connect() as connection:
            return list(connection.execute(query).mappings())

    def ping(self) -> None:
        """Raises sqlalchemy.exc.SQLAlchemyError if the database does not answer."""
        with self.engine.connect() as connection:
            connection.execute(select(sweeps.c.id).limit(1))


class SweepJournal:
    """trials.ledger.Journal of one driver generation: refuses to write once another generation has begun."""

    def __init__(self, records: Records, sweep_id: str, generation: int) -> None:
        self._engine = records.engine
        self._sweep_id = sweep_id
        self._generation = generation

    def beat(self) -> None:
        with self._engine.begin() as connection:
            self._renew(connection)

    def record_epoch(self, number: int, attempt: int, epoch: Mapping[str, Any]) -> None:
        key = {"sweep_id": self._sweep_id, "number": number, "epoch": epoch["epoch"]}
        values = {name: value for name, value in epoch.items() if name in epochs.c}
        same = (
            (epochs.c.sweep_id == self._sweep_id)
            & (epochs.c.number == number)
            & (epochs.c.epoch == epoch["epoch"])
        )
        with self._engine.begin() as connection:
            self._renew(connection)
            connection.execute(delete(epochs).where(same))
            connection.execute(
                insert(epochs).values({**values, **key, "attempt": attempt, "recorded_at": _naive(now())})
            )

    def recorded_epochs(self, number: int) -> int:
        mine = (epochs.c.sweep_id == self._sweep_id) & (epochs.c.number == number)
        with self._engine.connect() as connection:
            return connection.execute(select(func.max(epochs.c.epoch)).where(mine)).scalar_one() or 0

    def record_event(self, kind: str, **detail: Any) -> None:
        with self._engine.begin() as connection:
            self._renew(connection)
            connection.execute(_event(self._sweep_id, kind, detail))

    def _renew(self, connection: Any) -> None:
        """Renew the lease and take the row's write lock: what follows in this transaction is fenced."""
        mine = (
            (sweeps.c.id == self._sweep_id)
            & (sweeps.c.generation == self._generation)
            & (sweeps.c.state == "running")
        )
        renewed = connection.execute(update(sweeps).where(mine).values(lease_until=_naive(now() + LEASE)))
        if renewed.rowcount != 1:
            raise Fenced(f"sweep {self._sweep_id} is no longer driver generation {self._generation}'s")


def open_engine(url: str) -> Engine:
    """An engine for our tables; SQLite in WAL mode with a patient lock."""
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(url, connect_args={"timeout": 60} if sqlite else {}, pool_pre_ping=not sqlite)
    if sqlite:
        tune_sqlite(engine)
    return engine


def tune_sqlite(engine: Engine) -> None:
    """WAL lets readers and a writer work at once; NORMAL keeps a commit unless the machine loses power."""

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def migrate(engine: Engine) -> None:
    """Bring our tables to this version's shape, or change nothing; what is there already keeps its rows."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":  # Python's module would commit after every CREATE TABLE
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")


def now() -> datetime:
    return datetime.now(UTC)


def _naive(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(tzinfo=None)


def aware(at: datetime | None) -> datetime | None:
    """A naive UTC time of the database, as an aware one."""
    return at.replace(tzinfo=UTC) if at is not None else None


def _event(sweep_id: str, kind: str, detail: dict[str, Any]) -> Any:
    return insert(events).values(sweep_id=sweep_id, at=_naive(now()), kind=kind, detail=detail)


def _record(row: RowMapping) -> SweepRecord:
    values = {name: value for name, value in row.items() if name != "position"}
    for name in ("lease_until", "created_at", "started_at", "finished_at"):
        values[name] = aware(values[name])
    return SweepRecord(**{**values, "spec": _spec(to_json(values["spec"]))})


@lru_cache(maxsize=256)
def _spec(written: bytes) -> SweepSpec:
    """Read a stored spec, whose every value is checked anew: milliseconds. Its readers share it, and change
    nothing in it."""
    values = from_json(written)
    # It was laid out in full when it came: what its preset says by now must not matter.
    spec = SweepSpec.model_validate({**values, "preset": None})
    return spec.model_copy(update={"preset": values["preset"]})
