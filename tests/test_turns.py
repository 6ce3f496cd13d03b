"""Who looks never waits for who writes, and who writes waits in line."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from service.database import migrate, open_engine
from service.studies import open_storage
from service.tables import totals
from tests.databases import held
from tests.played_service import SPEC, played_service


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_those_who_look_are_answered_while_those_who_write_wait(data_dir: Path) -> None:
    with played_service(data_dir, plays=False) as client, ThreadPoolExecutor(70) as clients:
        sweep_id = client.post("/v1/sweeps", json=SPEC).json()["id"]

        def submit(_: int) -> int:
            return client.post("/v1/sweeps", json=SPEC, timeout=60).status_code

        with held(data_dir):
            waiting = [clients.submit(submit, number) for number in range(12)]
            asked = [
                clients.submit(client.post, f"/v1/sweeps/{sweep_id}:pause", timeout=60) for _ in range(50)
            ]
            time.sleep(1.2)  # by then, who may ask is read anew
            for path in ("", f"/{sweep_id}", f"/{sweep_id}/trials", f"/{sweep_id}/points"):
                assert client.get(f"/v1/sweeps{path}", timeout=10).status_code == 200
            events = client.get(f"/v1/sweeps/{sweep_id}/events", headers={"accept": "application/json"})
            assert events.status_code == 200
            assert not any(future.done() for future in waiting + asked), "the lock is held all the time"
        assert [future.result() for future in waiting] == [201] * 12
        assert {future.result().status_code for future in asked} == {202}


def test_an_endpoint_that_takes_turns_is_described_as_it_was(data_dir: Path) -> None:
    with played_service(data_dir, plays=False) as client:
        described = client.get("/openapi.json").json()["paths"]["/v1/sweeps"]
        assert described["get"]["description"].startswith("Sweeps, the newest first")
        assert {parameter["name"] for parameter in described["get"]["parameters"]} >= {"label", "page_size"}
        assert client.get("/v1/sweeps", params={"page_size": 0}).status_code == 422


# SQLite's own lock.


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One that would say at once that the database is locked."""
    opened = impatient(open_engine(f"sqlite:///{tmp_path / 'fraternal.db'}"))
    migrate(opened)
    yield opened
    opened.dispose()


ONE_LOCK = pytest.mark.sqlite_only("one lock for all who write")


def impatient(engine: Engine) -> Engine:
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=0"))
    return engine


def add(engine: Engine, name: str, dawdle_s: float = 0.0) -> None:
    with engine.begin() as connection:
        connection.execute(insert(totals).values(name=name, value=1))
        time.sleep(dawdle_s)


def count(engine: Engine) -> int:
    with engine.connect() as connection:
        return len(connection.execute(select(totals)).all())


def in_time(act: Callable[[], None]) -> None:
    """In another thread, which would otherwise wait for a turn that nobody gives back."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@ONE_LOCK
def test_writers_of_a_process_are_never_told_that_the_database_is_locked(
    engine: Engine, tmp_path: Path
) -> None:
    optunas = open_storage(f"sqlite:///{tmp_path / 'fraternal.db'}")
    impatient(optunas.engine).dispose()
    with ThreadPoolExecutor(16) as writers:
        engines = [engine, optunas.engine]
        futures = [writers.submit(add, engines[n % 2], f"n{n}", 0.002) for n in range(100)]
        for future in futures:
            future.result()
    assert count(engine) == 100
    optunas.remove_session()
    optunas.engine.dispose()


@ONE_LOCK
def test_a_turn_is_given_back_however_a_transaction_ends(engine: Engine) -> None:
    add(engine, "a")
    with pytest.raises(IntegrityError):
        add(engine, "a")
    in_time(lambda: add(engine, "b"))
    with suppress(KeyboardInterrupt), engine.begin() as connection:
        connection.execute(insert(totals).values(name="c", value=1))
        raise KeyboardInterrupt
    in_time(lambda: add(engine, "d"))
    with engine.connect() as connection:
        connection.execute(insert(totals).values(name="e", value=1))  # and is closed without a commit
    in_time(lambda: add(engine, "f"))
    with engine.connect() as connection:
        connection.execute(insert(totals).values(name="g", value=1))
        connection.invalidate()
    in_time(lambda: add(engine, "h"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(insert(totals).values(name="i", value=1))
    in_time(lambda: add(engine, "j"))
    assert count(engine) == 7


@ONE_LOCK
def test_who_only_reads_waits_for_nobody(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(insert(totals).values(name="a", value=1))
        in_time(lambda: None if count(engine) == 0 else pytest.fail("not committed yet"))
    assert count(engine) == 1


@ONE_LOCK
def test_another_process_may_hold_the_lock_all_the_same(engine: Engine, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "fraternal.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperationalError, match="locked"):
            add(engine, "a")
        other.execute("ROLLBACK")
    in_time(lambda: add(engine, "b"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT name FROM fraternal_totals")).scalars().all() == ["b"]


@ONE_LOCK
def test_in_memory_databases_share_no_turn() -> None:
    first, second = open_engine("sqlite://"), open_engine("sqlite://")
    for opened in (first, second):
        migrate(opened)
    with first.begin() as connection:
        connection.execute(insert(totals).values(name="a", value=1))
        add(second, "b")
    assert count(first) == count(second) == 1
    first.dispose()
    second.dispose()
