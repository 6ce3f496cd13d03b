"""The laws of our tables: migrations, fencing, compare-and-set, UTC. On SQLite, and on PostgreSQL."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any, get_args

import optuna
import pytest
from pydantic_core import to_json
from sqlalchemy import event, inspect, text, update
from sqlalchemy.exc import OperationalError

from service import database
from service.database import migrate, naive, now, open_engine
from service.errors import IllegalMove, SweepNotFound
from service.pages import SweepOrder, SweepQuery, read_page
from service.records import FIRST_LEASE, LEASE, Records, SweepJournal, SweepRecord
from service.studies import open_fenced_storage, open_storage
from service.tables import epochs, metadata, sweeps
from tests.databases import PostgreSQL, absent_database
from tests.fakes import epoch_fields, spec
from trials.ledger import Fenced
from trials.spec import Budget, Resources
from trials.verification import Verification

OURS = set(metadata.tables)


@pytest.fixture
def records(url: str) -> Iterator[Records]:
    engine = open_engine(url)
    migrate(engine)
    yield Records(engine)
    engine.dispose()


@pytest.fixture
def claimed(records: Records) -> SweepRecord:
    """A sweep with a driver of generation 1."""
    record = records.add_sweep("s1", spec())
    assert records.claim(record, fruitless=0, epochs_done=0) == 1
    return records.get_sweep("s1")


def everything(records: Records) -> dict[str, Any]:
    """All rows of our tables."""
    with records.engine.connect() as connection:
        return {
            table.name: sorted(map(repr, connection.execute(table.select())))
            for table in metadata.sorted_tables
        }


# The schema.


def test_to_migrate_again_is_harmless(records: Records) -> None:
    records.add_sweep("s1", spec())
    before = everything(records)
    migrate(records.engine)
    assert everything(records) == before


def test_epochs_of_the_first_version_are_kept_by_the_next(url: str) -> None:
    engine = open_engine(url)
    migrate(engine, "001")
    records = Records(engine)
    written = to_json(spec().model_dump(mode="json")).decode()
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO fraternal_sweeps (id, spec, desired_state, state, generation, epochs_at_launch, "
                "fruitless_launches, created_at) VALUES ('s1', :spec, 'cancelled', 'running', 1, 0, 0, :at)"
            ),
            {"spec": written, "at": "2026-01-01 00:00:00.000000"},
        )
    older = {column.name: 1 for column in epochs.columns if not column.nullable}
    older |= {"sweep_id": "s1", "recorded_at": datetime(2026, 1, 1), "averaged": False, "is_best": True}
    with engine.begin() as connection:
        connection.execute(epochs.insert().values(older))
    migrate(engine)
    (row,) = records.curve("s1", 1)
    sweep = records.get_sweep("s1")
    assert (sweep.state, sweep.study, sweep.spec) == ("cancelling", "s1", spec())
    assert sweep.state_since == datetime(2026, 1, 1, tzinfo=UTC)
    assert (row["valid_loss"], row["lr"], row["tokens_per_s"]) == (1, None, None)
    engine.dispose()


def test_migration_that_dies_half_way_changes_nothing(url: str) -> None:
    def die(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "fraternal_events" in statement:
            raise KeyboardInterrupt

    engine = open_engine(url)
    event.listen(engine, "before_cursor_execute", die)
    with pytest.raises(KeyboardInterrupt):
        migrate(engine)
    event.remove(engine, "before_cursor_execute", die)
    assert not OURS & set(inspect(engine).get_table_names())
    migrate(engine)
    assert set(inspect(engine).get_table_names()) >= OURS
    engine.dispose()


@pytest.mark.parametrize("optuna_first", [True, False])
def test_optunas_tables_and_ours_share_a_database(url: str, optuna_first: bool) -> None:
    engine = open_engine(url)
    if not optuna_first:
        migrate(engine)
    storage = open_storage(url)
    migrate(engine)
    Records(engine).add_sweep("s1", spec())
    optuna.create_study(study_name="s1", storage=storage).ask()
    migrate(engine)
    assert len(Records(engine).list_sweeps()) == 1
    assert len(optuna.load_study(study_name="s1", storage=storage).trials) == 1
    assert {"alembic_version", "fraternal_alembic_version"} <= set(inspect(engine).get_table_names())
    storage.remove_session()
    storage.engine.dispose()
    engine.dispose()


# Sweeps.


def test_sweep_comes_back_as_it_was_submitted(records: Records) -> None:
    asked = spec(name="κ", labels={"who": "me"}, arms={"z": {"kappa": 0}, "a": {"kappa": 1}})
    record = records.add_sweep("s1", asked)
    assert record == records.get_sweep("s1")
    assert record.spec == asked
    assert list(record.spec.arms) == ["z", "a"]
    assert (record.state, record.generation, record.running_s()) == ("queued", 0, 0)


def test_sweep_of_an_earlier_version_has_the_defaults_of_what_that_did_not_know(records: Records) -> None:
    """Nor need its preset be there any more."""
    record = records.add_sweep("s1", spec())
    written = record.spec.model_dump(mode="json")
    written["preset"] = "one that is gone"
    for name in ("precision", "recompute", "cuda_graphs"):
        del written["training"][name]
    with records.engine.begin() as connection:
        connection.execute(update(sweeps).values(spec=written))
    found = records.get_sweep("s1").spec
    assert found.preset == "one that is gone"
    assert found.model_copy(update={"preset": None}) == spec()


def test_sweep_that_is_not_there_is_named(records: Records) -> None:
    with pytest.raises(SweepNotFound, match="s-none"):
        records.get_sweep("s-none")


def test_sweeps_are_listed_in_the_order_in_which_they_came(records: Records) -> None:
    for name in ("s3", "s1", "s2"):
        records.add_sweep(name, spec())
    records.claim(records.get_sweep("s1"), fruitless=0, epochs_done=0)
    assert [record.id for record in records.list_sweeps()] == ["s3", "s1", "s2"]
    assert [record.id for record in records.list_sweeps("queued")] == ["s3", "s2"]
    assert records.list_sweeps("failed") == []


def test_of_two_claimers_one_wins(records: Records) -> None:
    record = records.add_sweep("s1", spec())
    start, won = threading.Barrier(4), []

    def claim() -> None:
        start.wait()
        won.append(records.claim(record, fruitless=0, epochs_done=0))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won, key=str) == [1, None, None, None]
    assert records.get_sweep("s1").generation == 1


def test_claim_begins_a_lease_and_the_sweep(claimed: SweepRecord, records: Records) -> None:
    assert claimed.state == "running"
    assert claimed.started_at is not None
    assert claimed.lease_until is not None
    assert now() + LEASE < claimed.lease_until <= now() + FIRST_LEASE
    assert not claimed.lease_expired
    assert records.claim(claimed, fruitless=1, epochs_done=7) == 2
    again = records.get_sweep("s1")
    assert (again.fruitless_launches, again.epochs_at_launch) == (1, 7)
    assert again.started_at == claimed.started_at


def test_finished_sweep_can_be_neither_claimed_nor_fenced_nor_finished_again(
    claimed: SweepRecord, records: Records
) -> None:
    assert records.finish("s1", 1, "succeed")
    before = everything(records)
    assert records.claim(claimed, fruitless=0, epochs_done=0) is None
    assert records.fence(claimed) is None
    assert not records.finish("s1", 1, "fail", "too late")
    with pytest.raises(IllegalMove, match="legal now: extend, retry-failed, delete"):
        records.ask("s1", "cancel")
    assert everything(records) == before


def test_driver_of_an_earlier_generation_cannot_end_the_sweep(claimed: SweepRecord, records: Records) -> None:
    assert records.claim(claimed, fruitless=0, epochs_done=0) == 2
    assert not records.finish("s1", 1, "succeed")
    records.set_driver("s1", 1, {"pid": 1})
    assert records.get_sweep("s1").state == "running"
    assert records.get_sweep("s1").driver is None


@pytest.mark.parametrize("how", ["claimed", "fenced", "finished", "cancelled"])
def test_journal_of_a_driver_that_is_over_refuses_everything_and_changes_nothing(
    claimed: SweepRecord, records: Records, how: str
) -> None:
    journal = SweepJournal(records, "s1", 1)
    journal.record_epoch(0, 1, epoch_fields(0, 1))
    if how == "claimed":
        records.claim(claimed, fruitless=0, epochs_done=0)
    elif how == "fenced":
        records.fence(claimed)
    else:
        records.finish("s1", 1, "succeed" if how == "finished" else "fail")
    before = everything(records)
    for write in (
        journal.beat,
        lambda: journal.record_epoch(0, 1, epoch_fields(0, 2)),
        lambda: journal.record_epoch(0, 9, epoch_fields(0, 1)),
        lambda: journal.record_event("trial_finished", number=0),
        lambda: journal.record_verification(0, Verification("verified", "0f" * 32)),
    ):
        with pytest.raises(Fenced, match="s1"):
            write()
    assert everything(records) == before


def test_what_came_of_verifying_is_kept_once_a_trial_and_told_each_time(
    claimed: SweepRecord, records: Records
) -> None:
    journal = SweepJournal(records, "s1", 1)
    journal.record_verification(3, Verification("impossible", "0f" * 32, message="no \0 text"))
    found = Verification("verified", "0f" * 32, "1e" * 32, 4, 5.5, 5.5, 1e-6, "cpu: one", "torch", 2.5)
    journal.record_verification(3, found)
    assert journal.verifications() == {3: ("verified", "0f" * 32)}
    kept = records.verifications("s1")
    assert set(kept) == {3}
    assert {name: kept[3][name] for name in asdict(found)} == asdict(found)
    events = [event for event in records.list_events("s1") if event["kind"] == "checkpoint_checked"]
    assert [event["detail"]["outcome"] for event in events] == ["impossible", "verified"]
    assert events[0]["detail"]["message"] == "no \N{REPLACEMENT CHARACTER} text"


def test_of_a_trial_that_is_tried_again_nothing_is_known(claimed: SweepRecord, records: Records) -> None:
    """It comes to the same file, bit for bit: one that was damaged would be refused for ever."""
    journal = SweepJournal(records, "s1", 1)
    for number in (2, 3):
        journal.record_verification(number, Verification("damaged", "0f" * 32))
    records.finish("s1", 1, "fail")
    records.retry("s1", [3])
    assert set(records.verifications("s1")) == {2}


def test_beat_renews_the_lease(claimed: SweepRecord, records: Records) -> None:
    SweepJournal(records, "s1", 1).beat()
    renewed = records.get_sweep("s1").lease_until
    assert renewed is not None
    assert now() + LEASE - timedelta(seconds=5) < renewed <= now() + LEASE


def test_running_sweeps_say_what_they_could_use_and_hear_it_of_one_another(
    claimed: SweepRecord, records: Records
) -> None:
    journal = SweepJournal(records, "s1", 1)
    for name, changes in (("s2", {"priority": 7}), ("s3", {}), ("s4", {})):
        records.add_sweep(name, spec(**changes, resources={"cpus": 2, "labels": {"zone": "a"}}))
    for name in ("s2", "s3", "s4"):
        records.claim(records.get_sweep(name), fruitless=0, epochs_done=0)
    damage(records, "s3", {"resources": {"cpus": "many"}})
    records.ask("s4", "pause")
    found = {claim.sweep_id: claim for claim in journal.claims(wants=4)}
    assert found.keys() == {"s1", "s2"}, "one is damaged, one pauses"
    assert (found["s1"].wants, found["s1"].priority) == (4, 0)
    assert (found["s2"].wants, found["s2"].priority) == (None, 7)
    assert found["s2"].resources == Resources(cpus=2, labels={"zone": "a"})
    assert found["s1"].position < found["s2"].position
    SweepJournal(records, "s2", 1).claims(wants=2)
    assert {claim.sweep_id: claim.wants for claim in journal.claims(wants=3)} == {"s1": 3, "s2": 2}
    records.claim(records.get_sweep("s2"), fruitless=0, epochs_done=0)
    assert {claim.sweep_id: claim.wants for claim in journal.claims(wants=3)} == {"s1": 3, "s2": None}
    with pytest.raises(Fenced):
        SweepJournal(records, "s2", 1).claims(wants=9)


def damage(records: Records, sweep_id: str, written: Any) -> None:
    """Its spec makes no sense any more."""
    with records.engine.begin() as connection:
        connection.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(spec=written))


@pytest.mark.parametrize(
    "written",
    [*({"priority": wrong} for wrong in ("high", 1.5, 1e300, {})), {"labels": 3}, [], "x", 3],
    ids=str,
)
def test_a_sweep_whose_spec_is_damaged_keeps_no_other_from_the_queue_or_the_list(
    claimed: SweepRecord, records: Records, written: Any
) -> None:
    for name in ("s2", "s3"):
        records.add_sweep(name, spec(name=name, priority=7, labels={"of": "me"}))
    damage(records, "s2", written)
    assert "s3" in [record.id for record in records.first_in_queue(2)]
    filters: list[dict[str, Any]] = [{}, {"name": "S3"}, {"labels": [("of", "me")]}]
    for order, asked in product(get_args(SweepOrder), filters):
        stamps, _ = records.page(SweepQuery(read_page(SweepOrder, order, 100, None), **asked))
        assert "s3" in [stamp.id for stamp in stamps]
    records.claim(records.get_sweep("s2"), fruitless=0, epochs_done=0)
    assert {claim.sweep_id for claim in SweepJournal(records, "s1", 1).claims(wants=1)} == {"s1"}


def test_released_driver_does_not_count_as_fruitless(claimed: SweepRecord, records: Records) -> None:
    records.release(claimed)
    released = records.get_sweep("s1")
    assert released.state == "running"
    assert released.lease_expired
    assert released.epochs_at_launch != records.count_epochs("s1")


# Epochs and events.


def test_epoch_recorded_twice_is_there_once_as_it_was_said_last(
    claimed: SweepRecord, records: Records
) -> None:
    journal = SweepJournal(records, "s1", 1)
    journal.record_epoch(3, 1, epoch_fields(3, 1))
    journal.record_epoch(3, 2, {**epoch_fields(3, 1), "valid_loss": 1.25})
    (row,) = records.curve("s1", 3)
    assert (row["valid_loss"], row["attempt"]) == (1.25, 2)


def test_epochs_are_counted_and_found_by_trial(claimed: SweepRecord, records: Records) -> None:
    journal = SweepJournal(records, "s1", 1)
    records.add_sweep("s2", spec())
    for number, latest in ((0, 3), (4, 1)):
        for epoch in range(1, latest + 1):
            journal.record_epoch(number, 1, epoch_fields(number, epoch))
    assert [journal.recorded_epochs(number) for number in (0, 4, 5)] == [3, 1, 0]
    assert records.count_epochs("s1") == 4
    assert records.count_epochs("s1", 0) == 3
    assert records.count_epochs("s2") == 0
    assert {number: row["epoch"] for number, row in records.latest_epochs("s1").items()} == {0: 3, 4: 1}
    assert records.latest_epochs("s2") == {}
    assert [row["epoch"] for row in records.curve("s1", 0)] == [1, 2, 3]
    everything = [(row.number, row.epoch) for row in records.epochs_of("s1", 2, 1)]
    assert everything == sorted(everything)
    assert len(everything) == records.count_epochs("s1")
    assert [pair for pair in everything if pair[0] // 2 % 2 == 0] == [
        (row.number, row.epoch) for row in records.epochs_of("s1", 2, 2)
    ]
    for name, value in epoch_fields(0, 2).items():
        assert records.curve("s1", 0)[1][name] == value


def test_events_tell_the_sweeps_story_in_order(claimed: SweepRecord, records: Records) -> None:
    SweepJournal(records, "s1", 1).record_event("trial_lost", number=2, message="\0 killed")
    records.ask("s1", "cancel")
    records.finish("s1", records.fence(records.get_sweep("s1")) or 0, "close")
    told = records.list_events("s1")
    assert [event["kind"] for event in told] == [
        "sweep_submitted",
        "driver_started",
        "trial_lost",
        "cancel_requested",
        "driver_fenced",
        "sweep_cancelled",
    ]
    assert told[2]["detail"] == {"number": 2, "message": "\0 killed"}


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
def test_times_come_back_aware_and_in_utc_wherever_the_process_is(
    url: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        engine = open_engine(url)
        migrate(engine)
        records = Records(engine)
        records.claim(records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
        records.finish("s1", 1, "succeed")
        record = records.get_sweep("s1")
        for at in (record.created_at, record.started_at, record.finished_at):
            assert at is not None
            assert at.tzinfo == UTC
            assert abs(at - datetime.now(UTC)) < timedelta(minutes=1)
        engine.dispose()
    finally:
        monkeypatch.undo()
        time.tzset()


def test_database_that_does_not_answer_says_so(tmp_path: Path) -> None:
    with pytest.raises(OperationalError):
        Records(open_engine(absent_database(tmp_path))).ping()


@pytest.mark.slow
def test_who_is_frozen_in_the_middle_of_a_write_loses_its_locks_on_postgresql(
    server: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.create_database()
    engine = open_engine(url)
    migrate(engine)
    engine.dispose()
    sooner = database.IDLE.replace("idle_in_transaction_session_timeout=30000", "lock_timeout=20s")
    assert sooner != database.IDLE
    monkeypatch.setattr(database, "IDLE", f"{sooner} -c idle_in_transaction_session_timeout=300")
    engine = open_engine(url)
    records = Records(engine)
    records.add_sweep("s1", spec())
    with engine.connect() as frozen:
        frozen.execute(update(sweeps).values(state="failed"))
        assert records.ask("s1", "pause").state == "paused"
        with pytest.raises(OperationalError, match="idle-in-transaction timeout"):
            frozen.execute(update(sweeps).values(state="failed"))
    assert records.get_sweep("s1").state == "paused"
    engine.dispose()


# Requests.


def at_once(count: int, do: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=do) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_extensions_that_come_at_once_all_count(records: Records) -> None:
    records.add_sweep("s1", spec())

    def extend() -> None:
        for _ in range(5):
            records.extend("s1", lambda record: Budget(trials=record.spec.budget.trials + 1))

    at_once(4, extend)
    assert records.get_sweep("s1").spec.budget.trials == 6 + 20


def test_sweep_does_not_end_under_orders_that_have_changed(claimed: SweepRecord, records: Records) -> None:
    before = SweepJournal(records, "s1", 1).beat()
    records.extend("s1", lambda record: Budget(trials=9))
    assert not records.finish("s1", 1, "succeed", under=before)
    extended = SweepJournal(records, "s1", 1).beat()
    records.ask("s1", "stop")
    assert not records.finish("s1", 1, "park", under=extended)
    records.ask("s1", "resume")
    assert records.finish("s1", 1, "succeed", under=extended)


def test_stop_that_comes_when_a_driver_ends_is_not_forgotten(claimed: SweepRecord, records: Records) -> None:
    records.ask("s1", "stop")
    assert records.finish("s1", 1, "park")
    parked = records.get_sweep("s1")
    assert parked.state == "stopping"
    assert parked.lease_expired


def test_point_that_is_taken_back_as_its_draw_begins_is_the_values_of_none(
    claimed: SweepRecord, records: Records, url: str
) -> None:
    """Else one arm of the draw would have them, and the arms that begin later would not."""
    taken_back, next_one = (records.add_point("s1", {"kappa": kappa})["id"] for kappa in (1.0, 2.0))
    client, left = Records(open_engine(url)), [taken_back]

    def take_back(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if left and statement.startswith("SELECT") and "draw IS NULL" in statement:
            client.remove_point("s1", left.pop())

    event.listen(records.engine, "after_cursor_execute", take_back)
    journal = SweepJournal(records, "s1", 1)
    assert journal.point_of(0, take=True) == {"kappa": 2.0} == journal.point_of(0, take=False)
    assert [(point["id"], point["draw"]) for point in records.list_points("s1")] == [(next_one, 0)]
    client.engine.dispose()


def test_retry_that_was_asked_for_is_off_when_the_sweep_is_cancelled(records: Records) -> None:
    records.add_sweep("s1", spec())
    records.ask("s1", "pause")
    records.retry("s1", [0])
    records.ask("s1", "cancel")
    assert records.get_sweep("s1").retry_numbers is None


def test_why_a_running_sweep_waits_is_told_once_and_only_for_as_long(
    claimed: SweepRecord, records: Records
) -> None:
    journal = SweepJournal(records, "s1", 1)

    def told() -> list[tuple[str, object]]:
        events = [(event["kind"], event["detail"]) for event in records.list_events("s1")]
        return [event for event in events if event[0] in {"sweep_waiting", "sweep_going_on"}]

    journal.record_waiting(None)
    assert told() == []
    for reason in ("no cluster \0", "no cluster \0", "no room", None, None):
        journal.record_waiting(reason)
    waits = [("sweep_waiting", {"reason": reason}) for reason in ("no cluster \ufffd", "no room")]
    assert told() == [*waits, ("sweep_going_on", {})]
    assert records.get_sweep("s1").state_reason is None
    journal.record_waiting("no room")
    assert records.get_sweep("s1").state_reason == "no room"
    records.ask("s1", "pause")
    assert records.get_sweep("s1").state_reason is None, "it is paused because somebody asked for it"
    journal.record_waiting("no cluster")
    assert records.get_sweep("s1").state_reason is None


def test_a_pause_has_its_own_reason_whatever_was_waited_for(claimed: SweepRecord, records: Records) -> None:
    journal = SweepJournal(records, "s1", 1)
    journal.record_waiting("no room")
    journal.ask_to_pause("ten failures alike")
    assert records.get_sweep("s1").state_reason == "ten failures alike"


def test_reason_may_have_any_text(claimed: SweepRecord, records: Records) -> None:
    SweepJournal(records, "s1", 1).ask_to_pause("a NUL \0 and half a pair \ud800")
    paused = records.get_sweep("s1")
    assert (paused.state, paused.state_reason) == ("pausing", "a NUL \ufffd and half a pair ?")


def test_clock_that_is_set_back_takes_no_time_from_a_sweep(claimed: SweepRecord, records: Records) -> None:
    with records.engine.begin() as connection:
        later = naive(now() + timedelta(hours=1))
        connection.execute(update(sweeps).values(running_since=later, ran_s=5.0))
    assert records.get_sweep("s1").running_s() == 5.0


def test_driver_writes_nothing_through_a_fenced_storage_once_it_is_over(
    claimed: SweepRecord, records: Records, url: str
) -> None:
    storage = open_fenced_storage(url, "s1", 1)
    study = optuna.create_study(study_name="s1", storage=storage)
    trial = study.ask()
    trial.set_user_attr("a", 1)
    records.claim(claimed, fruitless=0, epochs_done=0)
    for write in (
        study.ask,
        lambda: trial.set_user_attr("a", 2),
        lambda: trial.report(1.0, 1),
        lambda: trial.suggest_float("x", 0, 1),
        lambda: study.tell(trial, 1.0),
        lambda: study.set_user_attr("a", 1),
        lambda: optuna.create_study(study_name="s2", storage=storage),
        lambda: storage.delete_study(study._study_id),
    ):
        with pytest.raises(Fenced):
            write()
    reader = open_storage(url)
    (row,) = optuna.load_study(study_name="s1", storage=reader).trials
    assert (row.state.name, row.user_attrs, row.intermediate_values, row.params) == (
        "RUNNING",
        {"a": 1},
        {},
        {},
    )
    assert [found.study_name for found in reader.get_all_studies()] == ["s1"]
    for opened in (reader, storage._backend):
        opened.remove_session()
        opened.engine.dispose()
