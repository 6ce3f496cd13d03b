"""Whether this program knows a database: of which revisions its tables are, and which are known here.

Two sets of tables, ours and Optuna's, each with a version table of its own. Looking changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from optuna.storages import _rdb
from sqlalchemy import Connection
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from service.database import bare_engine
from service.errors import CommandFailed, IncompatibleDatabase
from trials.version import own_version

VERSION_TABLE = "fraternal_alembic_version"


@dataclass(frozen=True)
class TableSet:
    """Tables that one program makes and migrates."""

    program: str
    version: str
    version_table: str
    migrations: Path

    def found(self, connection: Connection) -> str | None:
        """The revision of a database's tables; None where it has none of them."""
        options = {"version_table": self.version_table}
        return MigrationContext.configure(connection, opts=options).get_current_revision()

    def known(self) -> list[str]:
        """Every revision that this program knows, the newest first."""
        return [script.revision for script in ScriptDirectory(str(self.migrations)).walk_revisions()]


OURS = TableSet("fraternal", own_version(), VERSION_TABLE, Path(__file__).with_name("migrations"))
OPTUNAS = TableSet("Optuna", optuna.__version__, "alembic_version", Path(_rdb.__file__).with_name("alembic"))


def check_schema(url: str, *, served: bool = False) -> None:
    """Raises IncompatibleDatabase where this program must not touch the database at all.

    That is where it is newer than this program, or where Optuna's tables are older: it migrates only its own.
    A driver, and a backup, need one that a service of this version has `served`, and so migrated.
    """
    if is_missing(url):
        if served:
            raise IncompatibleDatabase(f"there is no database {shown(url)}: name the service's --data-dir")
        return
    engine = bare_engine(url)
    with engine.connect() as connection:
        _require_unicode(url, connection)
        ours, optunas = OURS.found(connection), OPTUNAS.found(connection)
    for tables, found in ((OURS, ours), (OPTUNAS, optunas)):
        if found is not None and found not in tables.known():
            raise IncompatibleDatabase(_too_new(url, tables, found))
    if optunas not in (None, OPTUNAS.known()[0]):
        raise IncompatibleDatabase(_optunas_too_old(url, str(optunas)))
    if served and ours != OURS.known()[0]:
        raise IncompatibleDatabase(_not_served(url, ours))


def _require_unicode(url: str, connection: Connection) -> None:
    """SQLite's text always is, PostgreSQL's as the machine was when its cluster was made."""
    if connection.dialect.name == "sqlite":
        return
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding != "UTF8":
        raise IncompatibleDatabase(
            f"the database {shown(url)} keeps text as {encoding}, which has not every name that a sweep may "
            "have: it must be UTF8. Nothing was changed. Make one with "
            f"CREATE DATABASE {make_url(url).database} ENCODING 'UTF8' TEMPLATE template0"
        )


def _too_new(url: str, tables: TableSet, found: str) -> str:
    known = tables.known()
    return (
        f"the database {shown(url)} is newer than this program: its tables of {tables.program} are of "
        f"revision {found}, and {tables.program} {tables.version} knows {known[-1]} to {known[0]}. Nothing "
        "was changed. Use the version of fraternal that last served it, or a newer one; or restore a backup "
        "from before"
    )


def _optunas_too_old(url: str, found: str) -> str:
    return (
        f"the database {shown(url)} has Optuna's tables of revision {found}, and Optuna {OPTUNAS.version} "
        f"needs {OPTUNAS.known()[0]}. Nothing was changed. Make a copy of the database, then upgrade them "
        "with `optuna storage upgrade --storage URL`"
    )


def _not_served(url: str, found: str | None) -> str:
    what = f"is of revision {found}, and this program of {OURS.known()[0]}" if found else "holds no sweeps"
    return (
        f"the database {shown(url)} {what}. Nothing was changed. Start `fraternal serve` of this version, "
        "which brings it up to date, or use the version that serves it"
    )


def is_missing(url: str) -> bool:
    """Whether it is a file that is not there: to connect would make it."""
    parsed = make_url(url)
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists()


def shown(url: str) -> str:
    """Without what may hold a password."""
    return make_url(url).set(query={}).render_as_string(hide_password=True)


@contextmanager
def database_errors() -> Iterator[None]:
    """Raises CommandFailed with a line for people where the database cannot be used at all."""
    try:
        yield
    except SQLAlchemyError as error:
        raise CommandFailed(f"the database cannot be used: {str(error).splitlines()[0]}") from error
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"this database needs {error.name}; for PostgreSQL: pip install 'fraternal[postgres]'"
        ) from error
