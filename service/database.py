"""The one database: how it is opened, and brought to this version's shape."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from pydantic_core import from_json
from sqlalchemy import Connection, Engine, create_engine, event, func, select
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import InternalError, OperationalError
from sqlalchemy.pool import NullPool

IDLE = "-c idle_in_transaction_session_timeout=30000"
"""To PostgreSQL: a process that is frozen in the middle of a write would keep its locks for ever."""
READ_ONLY = "25006"
"""What PostgreSQL calls it that nothing can be written there: it has become another server's standby, say."""
LOCK_OF_ONE = 7_257_108
"""The number of PostgreSQL's advisory lock, in each database, for `one_at_a_time`."""

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
    sqlite = is_sqlite(url)
    pool = {"pool_size": 40} if sqlite else {"pool_pre_ping": True, **POOL}
    engine = create_engine(url, **connecting(url), **pool, **{"json_deserializer": _lenient_json, **options})
    tune(engine)
    return engine


def bare_engine(url: str) -> Engine:
    """One that keeps no connection, and has none of our pragmas: those would write."""
    return create_engine(url, poolclass=NullPool, **connecting(url))


def is_sqlite(url: str) -> bool:
    return make_url(url).get_backend_name() == "sqlite"


def connecting(url: str) -> dict[str, Any]:
    """How whoever makes an engine connects, as arguments of SQLAlchemy's `create_engine`.

    What the URL or PGOPTIONS say stays: a schema, say. But what we write counts on READ COMMITTED, where a
    statement that has waited for a lock sees what came of it, and on UTF-8, whatever a server has by default.
    """
    if is_sqlite(url):
        return {"connect_args": {"timeout": PATIENCE_S}}
    parsed = make_url(url)
    given = parsed.normalized_query.get("options") or [os.environ.get("PGOPTIONS", "")]
    arguments: dict[str, Any] = {"options": " ".join([IDLE, *given]).strip(), "client_encoding": "utf8"}
    if parsed.get_driver_name() == "psycopg":
        arguments |= {"prepare_threshold": None}  # PgBouncer gives each transaction another connection
    return {"connect_args": arguments, "isolation_level": "READ COMMITTED"}


def tune(engine: Engine) -> None:
    """What an engine needs beside how it connects, Optuna's too."""
    if engine.dialect.name == "sqlite":
        tune_sqlite(engine)
    else:
        event.listen(engine, "handle_error", _say_that_it_is_away)


def _say_that_it_is_away(context: ExceptionContext) -> OperationalError | None:
    """PostgreSQL that has ended a transaction in which somebody slept, or that may no longer be written to,
    says so by errors of their own kind; to ask again, by a new connection, is what helps with either."""
    original = context.original_exception
    if getattr(original, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True  # a new one may lead to the server that has taken its place
    if context.is_disconnect and isinstance(context.sqlalchemy_exception, InternalError):
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
    with one_at_a_time(engine) as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, revision)


@contextmanager
def one_at_a_time(engine: Engine) -> Iterator[Connection]:
    """A transaction of which there is one at a time, whatever process at this database has it: what it finds
    missing, nobody else makes meanwhile."""
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":  # Python's module would begin it later, and commit it too soon
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.execute(select(func.pg_advisory_xact_lock(LOCK_OF_ONE)))
        yield connection


def now() -> datetime:
    return datetime.now(UTC)


def naive(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(tzinfo=None)


def utc(at: datetime) -> datetime:
    """A naive UTC time of the database, as an aware one."""
    return at.replace(tzinfo=UTC)


def aware(at: datetime | None) -> datetime | None:
    return utc(at) if at is not None else None
