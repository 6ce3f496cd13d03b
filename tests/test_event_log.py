"""The laws of the table of events: nobody who reads it by ids misses one, and none is there twice."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from optuna.storages import InMemoryStorage
from sqlalchemy import update

import service.records
from service.database import migrate, open_engine
from service.event_log import EventLog, write_event
from service.events import KINDS, EventPage, MoveKind, OtherEvent, encode_event, read_event
from service.lifecycle import MOVES
from service.records import Records, SweepJournal
from service.tables import events
from tests.fakes import epoch_fields, reports, spec
from trials.ledger import StudyLedger
from trials.store import CheckpointStore


@pytest.fixture
def records(url: str) -> Iterator[Records]:
    engine = open_engine(url)
    migrate(engine)
    yield Records(engine)
    engine.dispose()


@pytest.fixture
def journal(records: Records) -> SweepJournal:
    """Of the driver of sweep s1."""
    records.claim(records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
    return SweepJournal(records, "s1", 1)


def opened(storage: InMemoryStorage, journal: SweepJournal) -> StudyLedger:
    return StudyLedger(spec(), "s1", storage, journal, CheckpointStore("memory://event-log"))


def kinds(records: Records, sweep_id: str = "s1") -> list[str]:
    return [event["kind"] for event in records.list_events(sweep_id)]


def test_who_reads_by_ids_misses_no_event_however_late_its_writer_commits(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers who held no lock would commit the higher id before the lower one."""
    records.claim(
        records.add_sweep(
            "s1",
            spec(),
        ),
        fruitless=0,
        epochs_done=0,
    )
    log, done, seen = EventLog(records.engine), threading.Event(), [0]

    def write_and_dawdle(*arguments: Any) -> None:
        write_event(*arguments)
        time.sleep(0.002 * (hash(threading.current_thread().name) % 5))

    def write(name: str) -> None:
        journal = SweepJournal(records, "s1", 1)
        for number in range(15):
            journal.record_event("trial_lost", number=number, message=name)

    def read() -> None:
        while not done.is_set() or log.newest_id("s1") > seen[-1]:
            seen.extend(row["id"] for row in log.after("s1", seen[-1], 7).events)

    monkeypatch.setattr(service.records, "write_event", write_and_dawdle)
    writers = [threading.Thread(target=write, args=[f"w{n}"], name=f"w{n}") for n in range(4)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen[1:] == [event["id"] for event in records.list_events("s1")]
    assert len(seen) == 1 + 2 + 4 * 15


def test_what_an_attempt_comes_to_is_told_once_however_often_it_is_said(
    records: Records, journal: SweepJournal
) -> None:
    for _ in range(3):
        journal.record_event("trial_started", number=0, arm="fd", attempt=1)
        journal.record_epoch(0, 1, epoch_fields(0, 1))
        journal.record_event("trial_finished", number=0, attempt=1, state="COMPLETE")
    journal.record_epoch(0, 2, epoch_fields(0, 1))
    told = Counter(kinds(records))
    assert (told["trial_started"], told["epoch_finished"], told["trial_finished"]) == (1, 2, 1)
    assert [event["detail"]["attempt"] for event in records.list_events("s1")[-2:]] == [1, 2]


def test_an_epoch_and_its_event_are_written_together_or_not_at_all(
    records: Records, journal: SweepJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(service.records, "write_event", die)
    with pytest.raises(KeyboardInterrupt):
        journal.record_epoch(0, 1, epoch_fields(0, 1))
    assert records.curve("s1", 0) == []


def test_requests_of_a_client_are_told_of_each_time(records: Records) -> None:
    records.add_sweep("s1", spec())
    for verb in ("pause", "resume", "pause"):
        records.ask("s1", verb)  # type: ignore[arg-type]
    assert kinds(records)[1:] == ["pause_requested", "resume_requested", "pause_requested"]


def test_an_end_that_a_crash_left_untold_is_told_by_the_next_driver(
    records: Records, journal: SweepJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = InMemoryStorage()
    ledger = opened(storage, journal)
    task = ledger.next_task()
    assert task is not None

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for said in reports(task):
        if said.finished:
            monkeypatch.setattr(journal, "record_event", die)
            with pytest.raises(KeyboardInterrupt):
                ledger.record(task, said)
        else:
            ledger.record(task, said)
    assert "trial_finished" not in kinds(records)
    records.claim(records.get_sweep("s1"), fruitless=0, epochs_done=0)
    for _ in range(2):
        opened(storage, SweepJournal(records, "s1", 2))
    (told,) = [event["detail"] for event in records.list_events("s1") if event["kind"] == "trial_finished"]
    assert (told["number"], told["attempt"], told["state"], told["best_epoch"]) == (0, 1, "COMPLETE", 3)


def test_every_event_that_is_written_has_the_form_that_is_described(
    records: Records, journal: SweepJournal
) -> None:
    ledger = opened(InMemoryStorage(), journal)
    first = ledger.next_task()
    assert first is not None
    ledger.lost(first, "killed")
    while (task := ledger.next_task()) is not None:
        for said in reports(task):
            ledger.record(task, said)
    records.release(records.get_sweep("s1"))
    records.fence(records.get_sweep("s1"))
    rows = records.list_events("s1")
    written = [read_event(encode_event(row)) for row in rows]
    assert not [event for event in written if isinstance(event, OtherEvent)]
    assert {"trial_started", "epoch_finished", "trial_lost", "trial_finished"} <= {
        event.kind for event in written
    }
    assert [event.id for event in written] == [row["id"] for row in rows]


def test_the_list_of_kinds_has_every_move() -> None:
    assert {move.event for move in MOVES.values()} == set(get_args(MoveKind))
    assert set(get_args(MoveKind)) < set(KINDS)
    described = str(EventPage.model_json_schema())
    assert all(f"'{kind}'" in described for kind in KINDS)


@pytest.mark.parametrize(
    "detail", [{"message": "half a pair \ud800, and \0"}, {"loss": float("nan")}, {"loss": float("inf")}]
)
def test_whatever_a_detail_has_it_is_json_on_one_line(records: Records, detail: Any) -> None:
    records.add_sweep("s1", spec())
    with records.engine.begin() as connection:
        write_event(connection, "s1", "sweep_submitted", detail)
    row = EventLog(records.engine).after("s1", 0, 9).events[-1]
    written = encode_event(row)
    assert b"\n" not in written
    assert read_event(written).kind == "sweep_submitted"
    assert row["detail"].keys() == detail.keys()


def test_a_damaged_detail_hides_no_other_event(records: Records) -> None:
    records.add_sweep("s1", spec())
    with records.engine.begin() as connection:
        connection.execute(update(events).values(detail="damaged"))
    (row,) = EventLog(records.engine).after("s1", 0, 9).events
    assert read_event(encode_event(row)).kind == "sweep_submitted"


def test_a_kind_that_a_client_does_not_know_is_told_all_the_same() -> None:
    written = b'{"id":1,"sweep_id":"s1","at":"2026-01-01T00:00:00Z","kind":"new","detail":{"a":1}}'
    event = read_event(written)
    assert (event.kind, event.detail) == ("new", {"a": 1})


def test_one_look_sees_a_state_and_all_events_that_led_to_it(records: Records, journal: SweepJournal) -> None:
    log = EventLog(records.engine)
    assert records.finish("s1", 1, "succeed")
    look = log.after("s1", 0, 100)
    assert (look.state, look.events[-1]["kind"]) == ("succeeded", "sweep_succeeded")
    assert log.after("s1", look.events[-1]["id"], 9).events == []
    assert [row["id"] for row in log.latest("s1", 2).events] == [row["id"] for row in look.events[-2:]]
    assert log.after("none", 0, 9).state is None


def test_ids_of_a_sweep_grow_also_where_another_one_was_deleted(records: Records) -> None:
    """SQLite gives the ids of deleted rows again, if they were the highest."""
    records.add_sweep("s1", spec())
    records.add_sweep("s2", spec())
    records.ask("s2", "delete")
    records.remove_sweep("s2")
    records.ask("s1", "pause")
    ids = [event["id"] for event in records.list_events("s1")]
    assert ids == sorted(set(ids))
