"""The one database: how it is opened, and brought to this version's shape."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from pydantic_core import from_json
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url

POSTGRESQL = {"options": "-c idle_in_transaction_session_timeout=30000"}
"""How it is connected to. A process that is frozen in the middle of a write would keep its locks for ever."""


def open_engine(url: str, **options: Any) -> Engine:
    """An engine for our tables; SQLite in WAL mode with a patient lock."""
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        connect_args={"timeout": 60} if sqlite else POSTGRESQL,
        pool_pre_ping=not sqlite,
        **{"json_deserializer": _lenient_json, **options},
    )
    if sqlite:
        tune_sqlite(engine)
    return engine


def _lenient_json(written: str) -> Any:
    """A damaged row is told of where it is read, and hides no other."""
    try:
        return from_json(written)
    except ValueError:
        return f"damaged: {written[:40]}"


def tune_sqlite(engine: Engine) -> None:
    """WAL lets readers and a writer work at once; NORMAL keeps a commit unless the machine loses power."""

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()


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
