"""What the tests on PostgreSQL rest on: nobody opens SQLite without being seen."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from service.database import open_engine
from service.settings import Settings
from tests.databases import database_of, on_postgresql, shared_server

pytestmark = pytest.mark.skipif(not on_postgresql(), reason="it is about FRATERNAL_TEST_DATABASE=postgresql")
SERVICE = """
import sys
from contextlib import closing
from pathlib import Path
from service.settings import Settings
from service.sweeps import build_controller
from tests.fakes import MemoryLauncher

build_controller(Settings(data_dir=Path(sys.argv[1])), MemoryLauncher())
"""


@pytest.mark.sqlite("that is to be seen")
def test_who_opens_sqlite_here_or_in_a_process_that_is_started_is_seen(
    everywhere: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "here.db")):
        pass
    (tmp_path / "there").mkdir()
    subprocess.run([sys.executable, "-c", SERVICE, tmp_path / "there"], check=True)
    seen = [line.split()[0] for line in everywhere.read_text().splitlines()]
    assert seen[0] == str(tmp_path / "here.db")
    assert set(seen[1:]) == {str(tmp_path / "there" / "fraternal.db")}


def test_a_service_of_this_process_is_on_postgresql_and_its_database_goes_with_the_test(
    tmp_path: Path,
) -> None:
    with shared_server().dropping():
        url = Settings(data_dir=tmp_path).resolved_database_url
        assert url == database_of(tmp_path)
        engine = open_engine(url)
        assert engine.dialect.name == "postgresql"
        with engine.connect():
            pass
    assert database_of(tmp_path) != url
