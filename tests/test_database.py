"""How the one database is connected to, whatever a server, a URL or a variable says of connections, and what
is done at it by one process at a time."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import Engine, create_engine, event, func, make_url, select, text
from sqlalchemy.pool import NullPool

from service.copies import snapshot
from service.database import migrate, open_engine
from service.errors import IllegalMove, IncompatibleDatabase, InvalidWebhook
from service.idempotency import Answer, Idempotency, KeyedRequest
from service.records import Records, SweepJournal
from service.revisions import check_schema
from service.studies import open_fenced_storage, open_storage
from service.tables import sweeps, tokens, webhooks
from service.tokens import Tokens
from service.webhook_schemas import WebhookRequest
from service.webhooks import Webhooks
from tests.databases import PostgreSQL
from tests.fakes import spec
from trials.ledger import JournalAway, StudyLedger
from trials.store import CheckpointStore

GIVEN = f"frt_{'a' * 12}_{'b' * 43}"
MEETING_S = 1.0
"""How long two wait for each other who ought not to meet."""


@pytest.fixture
def postgresql(server: PostgreSQL) -> str:
    """The URL of an empty database."""
    return server.create_database()


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Of either database, with our tables."""
    yield from _opened(url)


@pytest.fixture
def engine_there(postgresql: str) -> Iterator[Engine]:
    """The same of PostgreSQL alone."""
    yield from _opened(postgresql)


def _opened(url: str) -> Iterator[Engine]:
    engine = open_engine(url)
    migrate(engine)
    yield engine
    engine.dispose()


def close(storage: RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()


def set_for_all(url: str, words: str) -> None:
    """Of a PostgreSQL database, for whoever connects from now on."""
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {make_url(url).database} {words}"))
    engine.dispose()


def said(engine: Engine, setting: str) -> str:
    with engine.connect() as connection:
        return str(connection.exec_driver_sql(f"SHOW {setting}").scalar_one())


def both_said(url: str, setting: str) -> set[str]:
    """By our engine and by Optuna's."""
    ours, storage = open_engine(url), open_storage(url)
    answers = {said(ours, setting), said(storage.engine, setting)}
    close(storage)
    ours.dispose()
    return answers


# Connections.


@pytest.mark.parametrize("how", ["the URL", "PGOPTIONS"])
def test_tables_are_in_the_schema_that_is_named(
    postgresql: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_for_all(postgresql, "SET client_min_messages = 'warning'")
    maker = open_engine(postgresql)
    with maker.begin() as connection:
        connection.execute(text("CREATE SCHEMA mine"))
    url = postgresql
    if how == "the URL":
        url = f"{postgresql}&options=-csearch_path%3Dmine"
    else:
        monkeypatch.setenv("PGOPTIONS", "-csearch_path=mine")
    check_schema(url)
    engine = open_engine(url)
    migrate(engine)
    close(open_storage(url))
    check_schema(url, served=True)
    Records(engine).add_sweep("s1", spec())
    assert both_said(url, "idle_in_transaction_session_timeout") == {"30s"}
    with maker.connect() as connection:
        schemas = connection.execute(
            text("SELECT DISTINCT schemaname FROM pg_tables WHERE tablename ~ '^(fraternal|stud|trial)'")
        )
        assert schemas.scalars().all() == ["mine"]
    engine.dispose()
    maker.dispose()


def test_statements_see_what_was_written_while_they_waited_whatever_a_server_has_by_default(
    postgresql: str,
) -> None:
    set_for_all(postgresql, "SET default_transaction_isolation = 'serializable'")
    assert both_said(postgresql, "transaction_isolation") == {"read committed"}


def test_nothing_is_prepared_on_a_connection_that_a_pooler_gives_to_others(engine_there: Engine) -> None:
    for _ in range(10):
        with engine_there.begin() as connection:
            connection.execute(select(sweeps.c.id)).all()
    with engine_there.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() == 0


def test_text_is_sent_in_utf_8_whatever_a_client_has_by_default(
    postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    assert both_said(postgresql, "client_encoding") == {"UTF8"}


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_keep_every_text_is_refused_with_the_way_out(
    server: PostgreSQL, encoding: str
) -> None:
    url = server.create_database(f"template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'")
    with pytest.raises(IncompatibleDatabase, match=rf"{encoding}.*must be UTF8.*CREATE DATABASE"):
        check_schema(url)


def test_who_reads_one_moment_may_take_long_over_files(engine_there: Engine) -> None:
    with snapshot(engine_there) as connection:
        assert connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one() == "0"
    assert said(engine_there, "idle_in_transaction_session_timeout") == "30s"


# A database that is away for a time.


def test_a_server_that_may_only_be_read_is_away_and_is_looked_for_by_a_new_connection(
    engine_there: Engine, postgresql: str
) -> None:
    records = Records(engine_there)
    records.claim(records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
    journal, storage = SweepJournal(records, "s1", 1), open_fenced_storage(postgresql, "s1", 1)
    trial = optuna.create_study(study_name="s1", storage=storage).ask()
    set_for_all(postgresql, "SET default_transaction_read_only = on")
    engine_there.dispose()
    storage._backend.engine.dispose()
    with pytest.raises(JournalAway, match="read-only"):
        journal.beat()
    with pytest.raises(StorageInternalError):
        trial.set_user_attr("a", 1)
    admin = open_engine(f"{postgresql}&options=-cdefault_transaction_read_only%3Doff")
    with admin.begin() as connection:
        name = make_url(postgresql).database
        connection.execute(text(f"ALTER DATABASE {name} RESET default_transaction_read_only"))
    journal.beat()
    trial.set_user_attr("a", 1)
    admin.dispose()
    close(storage._backend)


def losing(engine: Engine, moment: str) -> list[str]:
    """Have a connection of an engine ended once, before that statement; empty once it was."""
    left = [moment]
    admin = create_engine(engine.url, poolclass=NullPool)

    def lose(connection: Any, statement: str) -> None:
        if left and statement.startswith(left[0]):
            left.clear()
            pid = connection.connection.dbapi_connection.info.backend_pid
            with admin.connect() as other:  # which waits until it is gone
                other.execute(select(func.pg_terminate_backend(pid, 10_000)))

    event.listen(engine, "before_cursor_execute", lambda on, _, statement, *__: lose(on, statement))
    event.listen(engine, "commit", lambda on: lose(on, "COMMIT"))
    return left


@pytest.mark.parametrize("moment", ["UPDATE fraternal_sweeps", "INSERT INTO trial_user_attributes", "COMMIT"])
def test_a_connection_that_is_lost_in_the_middle_of_a_drivers_write_is_a_database_that_is_away(
    engine_there: Engine, postgresql: str, moment: str
) -> None:
    """StorageInternalError is what the ledger waits after; and what is written next is fenced as ever."""
    records = Records(engine_there)
    claimed = records.add_sweep("s1", spec())
    records.claim(claimed, fruitless=0, epochs_done=0)
    storage = open_fenced_storage(postgresql, "s1", 1)
    trial = optuna.create_study(study_name="s1", storage=storage).ask()
    left = losing(storage._backend.engine, moment)
    with pytest.raises(StorageInternalError):
        trial.set_user_attr("a", 1)
    assert not left
    before = records.get_sweep("s1").writes
    trial.set_user_attr("a", 2)
    assert records.get_sweep("s1").writes == before + 1
    assert optuna.load_study(study_name="s1", storage=storage).trials[0].user_attrs == {"a": 2}
    close(storage._backend)


@pytest.mark.parametrize("moment", ["INSERT INTO trials", "INSERT INTO trial_user_attributes"])
def test_a_connection_that_is_lost_as_a_trial_begins_fails_no_trial(
    engine_there: Engine, postgresql: str, tmp_path: Path, moment: str
) -> None:
    """What is wrong with a trial's values ends it, as a database that is away does not."""
    records = Records(engine_there)
    records.claim(records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
    storage = open_fenced_storage(postgresql, "s1", 1)
    journal, store = SweepJournal(records, "s1", 1), CheckpointStore(tmp_path.as_uri())
    ledger = StudyLedger(spec(), "s1", storage, journal, store)
    left = losing(storage._backend.engine, moment)
    tasks = [ledger.next_task(), ledger.next_task()]
    assert not left
    assert [task.number for task in tasks if task is not None] == [0, 1]
    states = [row.state.name for row in optuna.load_study(study_name="s1", storage=storage).trials]
    assert states == ["RUNNING", "RUNNING"]
    close(storage._backend)


# One at a time.


SERVICE = """
import sys
from service.database import migrate, open_engine
from service.studies import open_storage

print("ready", flush=True)
sys.stdin.readline()
migrate(open_engine(sys.argv[1]))
open_storage(sys.argv[1])
"""


def test_services_that_start_at_once_make_the_tables_once(postgresql: str) -> None:
    command = [sys.executable, "-c", SERVICE, postgresql]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    services = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]
    for service in services:
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"
    for service in services:
        assert service.stdin is not None
        service.stdin.write("\n")
        service.stdin.flush()
    for service in services:
        _, errors = service.communicate(timeout=60)
        assert service.returncode == 0, errors
    check_schema(postgresql, served=True)


def both_before(engine: Engine, statement: str, *acts: Callable[[], Any]) -> list[Any]:
    """What comes of acts of two threads that are let go on together where both are before that statement."""
    meeting = threading.Barrier(2)
    outcomes: list[Any] = []

    def meet(_connection: Any, _cursor: Any, said: str, *_rest: Any) -> None:
        if said.startswith(statement):
            try:
                meeting.wait(MEETING_S)
            except threading.BrokenBarrierError:  # the other one waits for something else
                return

    def run(act: Callable[[], Any]) -> None:
        try:
            outcomes.append(act())
        except Exception as error:  # whatever a thread raises is what came of it, for the test to look at
            outcomes.append(error)

    event.listen(engine, "before_cursor_execute", meet)
    threads = [threading.Thread(target=run, args=[act]) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    event.remove(engine, "before_cursor_execute", meet)
    return outcomes


def test_services_that_are_given_a_token_at_once_know_it_both(engine: Engine) -> None:
    give = Tokens(engine).keep_given
    first, second = both_before(engine, "INSERT", lambda: give(GIVEN), lambda: give(GIVEN))
    assert first == second
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(tokens)).scalar_one() == 1


def test_webhooks_that_are_made_at_once_are_no_more_than_there_may_be(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.webhooks.MOST_WEBHOOKS", 1)
    request = WebhookRequest(url="http://127.0.0.1:9/")
    make = Webhooks(engine, to_private=True).create
    outcomes = both_before(engine, "INSERT", lambda: make(request), lambda: make(request))
    assert sum(isinstance(outcome, InvalidWebhook) for outcome in outcomes) == 1
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(webhooks)).scalar_one() == 1


def test_a_keyed_request_that_another_service_carries_out_meanwhile_is_answered_as_it_was_there(
    engine: Engine,
) -> None:
    """It finds the sweep moved, and by no other request than itself."""
    records, request = Records(engine), KeyedRequest("", "key", "0f" * 32)
    records.add_sweep("s1", spec())
    records.ask("s1", "pause")
    here, there = Idempotency(engine), Idempotency(engine)

    def resume(write: Any) -> Any:
        return records.ask("s1", "resume", write)

    def overtaken(write: Any) -> Any:
        there.once(request, resume, told)
        return resume(write)

    def told(sweep: Any) -> Answer:
        return Answer(202, {}, sweep.state)

    assert here.once(request, overtaken, told) == Answer(202, {}, "queued", replayed=True)
    with pytest.raises(IllegalMove):
        here.once(KeyedRequest("", "another", "0f" * 32), resume, told)
