"""The laws of upgrades: rows of every released schema are kept, and what is newer is left alone."""

import os
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import (
    JSON,
    Boolean,
    DateTime,
    Engine,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    event,
    insert,
    select,
    text,
)

from service.app import create_app
from service.database import migrate, open_engine
from service.errors import IncompatibleDatabase
from service.launcher import LocalLauncher
from service.records import Records
from service.revisions import OPTUNAS, OURS, VERSION_TABLE, check_schema, shown
from service.settings import Settings
from service.studies import open_storage
from service.tables import metadata
from tests.databases import environment_of
from tests.fakes import spec

REVISIONS = list(reversed(OURS.known()))
VALUES = {
    Integer: 7,
    Float: 1.25,
    Boolean: True,
    DateTime: datetime(2026, 1, 2, 3, 4, 5),
    JSON: {"z": [1, None], "a": "κ"},
    String: "s1",
}


def tables_of(engine: Engine) -> list[Table]:
    """Ours, as the database has them, those first that others refer to."""
    found = MetaData()
    found.reflect(engine, only=lambda name, _: name.startswith("fraternal_") and name != VERSION_TABLE)
    return found.sorted_tables


def fill(engine: Engine) -> None:
    """A row in every table, and a value in every column."""
    with engine.begin() as connection:
        for table in tables_of(engine):
            values = {column.name: value_for(column.type) for column in table.columns}
            connection.execute(insert(table).values(values))


def value_for(kind: Any) -> Any:
    return next(value for known, value in VALUES.items() if isinstance(kind, known))


def rows_of(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    with engine.connect() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(select(table)).mappings()]
            for table in tables_of(engine)
        }


def revision_of(engine: Engine) -> str | None:
    with engine.connect() as connection:
        return OURS.found(connection)


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_of_every_released_schema_are_kept_and_the_schema_is_the_newest(url: str, revision: str) -> None:
    engine = open_engine(url)
    migrate(engine, revision)
    fill(engine)
    before = rows_of(engine)
    migrate(engine)
    after = rows_of(engine)
    for name, (row,) in before.items():
        (kept,) = after[name]
        assert {column: kept[column] for column in row.keys() & kept.keys()} == {
            column: value for column, value in row.items() if column in kept
        }
    assert_schema_is_the_codes(engine)
    engine.dispose()


def assert_schema_is_the_codes(engine: Engine) -> None:
    def ours(name: str | None, kind: str, _: Any) -> bool:
        return kind != "table" or (str(name).startswith("fraternal_") and name != VERSION_TABLE)

    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_name": ours, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []


@pytest.mark.parametrize(("before", "after"), list(pairwise(REVISIONS)))
def test_migration_that_fails_at_its_last_statement_changes_nothing(
    url: str, before: str, after: str
) -> None:
    def fail(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(f"UPDATE {VERSION_TABLE}"):
            raise OSError("the disk is full")

    engine = open_engine(url)
    migrate(engine, before)
    fill(engine)
    tables, rows = describe(engine), rows_of(engine)
    event.listen(engine, "before_cursor_execute", fail)
    with pytest.raises(OSError, match="full"):
        migrate(engine, after)
    event.remove(engine, "before_cursor_execute", fail)
    assert (describe(engine), rows_of(engine), revision_of(engine)) == (tables, rows, before)
    migrate(engine, after)
    assert revision_of(engine) == after
    engine.dispose()


def describe(engine: Engine) -> list[str]:
    return [
        f"{column} {column.type!r} {column.nullable}" for table in tables_of(engine) for column in table.c
    ]


# Databases that this program does not know.


def make_database(url: str) -> None:
    """As a service leaves it, with a sweep."""
    engine = open_engine(url)
    migrate(engine)
    storage = open_storage(url)
    Records(engine).add_sweep("s1", spec())
    storage.remove_session()
    storage.engine.dispose()
    engine.dispose()


def write_revision(url: str, table: str, revision: str) -> None:
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {table} SET version_num = :revision"), {"revision": revision})
    engine.dispose()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


NEWER = [
    pytest.param(
        OURS, f"tables of fraternal are of revision 999.* knows 001 to {OURS.known()[0]}", id="ours"
    ),
    pytest.param(
        OPTUNAS, "tables of Optuna are of revision 999.*, and Optuna 5.0.0 knows v0.9.0.a to", id="optuna"
    ),
]


@pytest.mark.parametrize(("tables", "words"), NEWER)
def test_newer_database_refuses_service_and_driver_and_keeps_every_byte(
    tmp_path: Path, tables: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from service.drive import EXIT_INCOMPATIBLE, main

    settings = Settings(data_dir=tmp_path)
    make_database(settings.resolved_database_url)
    write_revision(settings.resolved_database_url, tables.version_table, "999")
    before = contents(tmp_path)
    with pytest.raises(IncompatibleDatabase, match=words):
        create_app(settings, LocalLauncher(settings))
    assert contents(tmp_path) == before
    assert main("s1", 1, tmp_path / "scratch", settings) == EXIT_INCOMPATIBLE
    assert "999" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("tables", "words"), NEWER)
def test_newer_database_is_named_without_its_password(url: str, tables: Any, words: str) -> None:
    make_database(url)
    write_revision(url, tables.version_table, "999")
    secret = url.replace("//postgres:@", "//postgres:xyzzy@") if "postgres" in url else url
    with pytest.raises(IncompatibleDatabase, match=words) as raised:
        check_schema(secret)
    assert "Nothing was changed" in str(raised.value)
    assert "xyzzy" not in str(raised.value)


def test_serve_says_in_one_line_that_a_database_is_newer(tmp_path: Path) -> None:
    url = Settings(data_dir=tmp_path).resolved_database_url
    make_database(url)
    write_revision(url, VERSION_TABLE, "999")
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    environment = {**os.environ, **environment_of(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fraternal: the database {shown(url)} is newer than this program")


def test_database_whose_optuna_is_older_is_refused_with_the_way_out(url: str) -> None:
    make_database(url)
    older = OPTUNAS.known()[1]
    write_revision(url, "alembic_version", older)
    with pytest.raises(IncompatibleDatabase, match=f"revision {older}, .*optuna storage upgrade"):
        check_schema(url)


def test_driver_needs_the_newest_schema_and_a_service_brings_it(url: str) -> None:
    make_database(url)
    write_revision(url, VERSION_TABLE, "001")
    check_schema(url)
    with pytest.raises(IncompatibleDatabase, match=r"revision 001.*fraternal serve"):
        check_schema(url, served=True)


@pytest.mark.sqlite_only("nobody makes another by connecting")
def test_database_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'fraternal.db'}"
    check_schema(url)
    with pytest.raises(IncompatibleDatabase, match="there is no database"):
        check_schema(url, served=True)
    assert contents(tmp_path) == {}


def test_empty_database_is_for_a_service_only(url: str, tmp_path: Path) -> None:
    (tmp_path / "fraternal.db").touch()
    check_schema(url)
    with pytest.raises(IncompatibleDatabase, match="holds no sweeps"):
        check_schema(url, served=True)
