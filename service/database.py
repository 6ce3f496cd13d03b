"""The one database: how it is opened, and brought to this version's shape."""

import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from pydantic_core import from_json
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import InternalError, OperationalError

POSTGRESQL = {"options": "-c idle_in_transaction_session_timeout=30000"}
"""How it is connected to. A process that is frozen in the middle of a write would keep its locks for ever."""

POOL = {"pool_size": 10, "max_overflow": 55}
"""A connection for every thread that may want one, 40 of anyio's, those of service/turns.py and a few of our
own: else who waits for a lock would have those that readers need. Ten are kept."""
TURN = "turn to write"
WRITING = ("INSERT", "UPDATE", "DELETE", "BEGIN IMMEDIATE")
PATIENCE_S = 60

_turns: dict[str, threading.Lock] = {}
"""Of each file."""


def open_engine(url: str, **options: Any) -> Engine:
    """An engine for our tables; SQLite in WAL mode with a patient lock."""
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        connect_args={"timeout": PATIENCE_S} if sqlite else POSTGRESQL,
        pool_pre_ping=not sqlite,
        **({"pool_size": 40} if sqlite else POOL),
        **{"json_deserializer": _lenient_json, **options},
    )
    if sqlite:
        tune_sqlite(engine)
    else:
        event.listen(engine, "handle_error", _say_that_it_is_away)
    return engine


def _say_that_it_is_away(context: ExceptionContext) -> OperationalError | None:
    """PostgreSQL that has ended a transaction in which somebody slept says so by an error of its own kind;
    to be asked again is what helps, as with any other connection that is lost."""
    if context.is_disconnect and isinstance(context.sqlalchemy_exception, InternalError):
        original = context.original_exception
        return OperationalError(context.statement, None, original, connection_invalidated=True)
    return None


def _lenient_json(written: str) -> Any:
    """A damaged row is told of where it is read, and hides no other."""
    try:
        return from_json(written)
    except ValueError:
        return f"damaged: {written[:40]}"


def tune_sqlite(engine: Engine) -> None:
    """WAL lets readers and a writer work at once; NORMAL keeps a commit unless the machine loses power."""
    _have_writers_take_turns(engine)

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


def _have_writers_take_turns(engine: Engine) -> None:
    """Of one process: SQLite has who finds the database locked look again later, up to a tenth of a second
    later, and whoever comes in between is served first. Twenty at once waited a second so."""
    file = engine.url.database
    in_memory = file in {None, "", ":memory:"}
    turn = threading.Lock() if in_memory else _turns.setdefault(os.path.abspath(str(file)), threading.Lock())

    @event.listens_for(engine, "before_cursor_execute")
    def take(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if TURN not in connection.info and statement.startswith(WRITING):
            connection.info[TURN] = turn.acquire(timeout=PATIENCE_S / 2)  # in vain: SQLite decides

    # Its transaction is over then, in whatever way: SQLAlchemy tells of a commit before it makes it.
    @event.listens_for(engine, "checkin")
    @event.listens_for(engine, "invalidate")
    def give(_connection: Any, record: Any, *_error: Any) -> None:
        if record.info.pop(TURN, False):
            turn.release()


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring our tables to this version's shape, or change nothing; what is there already keeps its rows."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":  # Python's module would commit after every CREATE TABLE
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, revision)


def now() -> datetime:
    return datetime.now(UTC)


def naive(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(tzinfo=None)


def utc(at: datetime) -> datetime:
    """A naive UTC time of the database, as an aware one."""
    return at.replace(tzinfo=UTC)


def aware(at: datetime | None) -> datetime | None:
    return utc(at) if at is not None else None
