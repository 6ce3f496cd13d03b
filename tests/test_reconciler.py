"""The laws of the reconciler, over drivers that are entries of a dict."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from sqlalchemy import event, update
from sqlalchemy.exc import OperationalError

from service.database import migrate, naive, now, open_engine
from service.launcher import MARK, OWNER, LocalLauncher, findable, owner_of
from service.reconciler import (
    LONG_BETWEEN_LOOKS,
    LONG_LIFE_S,
    MOST_FRUITLESS_LAUNCHES,
    TIME_TO_END,
    TIME_TO_PAUSE,
    Reconciler,
)
from service.records import LEASE, Records, SweepJournal
from service.settings import Settings
from service.studies import open_closing_storage, open_fenced_storage, open_storage, study_to_go_on_with
from service.tables import leases, sweeps
from service.views import SweepViews
from tests.fakes import MemoryLauncher, epoch_fields, report, spec
from trials.ledger import StudyLedger
from trials.store import CheckpointStore
from trials.studies import reopen_failed, studies_of
from trials.tasks import Task


class World:
    """A reconciler with all that it looks at."""

    def __init__(self, records: Records, running_sweeps: int = 1) -> None:
        self.records = records
        self.storage = InMemoryStorage()
        self.launcher = MemoryLauncher()
        self.store = CheckpointStore("memory://reconciler")
        self.reconciler = Reconciler(records, self.storage, self.store, self.launcher, running_sweeps)

    def submit(self, *names: str) -> None:
        for name in names:
            self.records.add_sweep(name, spec())

    def look(self) -> None:
        self.reconciler.reconcile()

    def states(self) -> dict[str, str]:
        return {record.id: record.state for record in self.records.list_sweeps()}

    def generation(self, name: str) -> int:
        return self.records.get_sweep(name).generation

    def journal(self, name: str) -> SweepJournal:
        """That of the present driver."""
        return SweepJournal(self.records, name, self.generation(name))

    def finish(self, name: str) -> None:
        """Let the driver end its sweep and itself."""
        assert self.records.finish(name, self.generation(name), "succeed")
        del self.launcher.alive[name]

    def expire(self, name: str) -> None:
        past = naive(now() - timedelta(seconds=1))
        with self.records.engine.begin() as connection:
            connection.execute(update(sweeps).where(sweeps.c.id == name).values(lease_until=past))


@pytest.fixture
def world(records: Records) -> World:
    return World(records)


def test_queued_sweep_gets_a_driver_of_generation_1(world: World) -> None:
    world.submit("s1")
    world.look()
    record = world.records.get_sweep("s1")
    assert (record.state, record.generation) == ("running", 1)
    assert world.launcher.alive == {"s1": 1}
    assert record.driver == {"sweep": "s1", "generation": 1}


def test_another_look_at_a_running_sweep_starts_nothing(world: World) -> None:
    world.submit("s1")
    for _ in range(3):
        world.look()
    assert world.launcher.calls == ["end s1", "launch s1"]


@pytest.mark.parametrize("limit", [1, 2])
def test_sweeps_run_in_the_order_in_which_they_came_and_no_more_than_allowed(
    records: Records, limit: int
) -> None:
    world = World(records, running_sweeps=limit)
    names = ["s3", "s1", "s2"]
    world.submit(*names)
    started = []
    for _ in names:
        world.look()
        running = [name for name, state in world.states().items() if state == "running"]
        assert len(running) <= limit
        started += [name for name in running if name not in started]
        world.finish(running[0])
    assert started == names


def test_sweep_that_already_runs_counts_though_it_came_later(world: World) -> None:
    world.submit("s1", "s2")
    second = world.records.get_sweep("s2")
    world.records.claim(second, fruitless=0, epochs_done=0)
    world.records.set_driver("s2", 1, world.launcher.launch("s2", 1))
    world.look()
    assert world.states() == {"s1": "queued", "s2": "running"}


@pytest.mark.parametrize("how", ["died", "silent"])
def test_driver_that_is_gone_is_ended_before_the_next_one_starts(world: World, how: str) -> None:
    world.submit("s1")
    world.look()
    if how == "died":
        del world.launcher.alive["s1"]
    else:
        world.expire("s1")
    world.launcher.calls.clear()
    world.look()
    assert world.launcher.calls == ["end s1", "launch s1"]
    assert world.launcher.alive == {"s1": 2}
    assert world.generation("s1") == 2


def test_driver_that_was_never_written_down_is_given_its_lease(world: World) -> None:
    world.submit("s1")
    world.records.claim(world.records.get_sweep("s1"), fruitless=0, epochs_done=0)
    world.look()
    assert world.generation("s1") == 1
    world.expire("s1")
    world.look()
    assert world.launcher.alive == {"s1": 2}


def test_driver_that_finished_at_the_moment_of_the_look_is_not_restarted(world: World) -> None:
    world.submit("s1")
    world.look()
    stale = world.records.get_sweep("s1")
    world.finish("s1")
    world.records.list_sweeps = lambda *states: [stale]  # type: ignore[method-assign]
    world.launcher.calls.clear()
    world.look()
    assert "launch s1" not in world.launcher.calls
    assert world.records.get_sweep("s1").state == "succeeded"


def test_finished_driver_is_cleaned_up_after_once_it_is_gone_and_only_once(world: World) -> None:
    world.submit("s1")
    world.look()
    world.records.finish("s1", 1, "succeed")
    world.launcher.calls.clear()
    world.look()
    assert world.launcher.calls == [], "it is given time to end by itself"
    del world.launcher.alive["s1"]
    for _ in range(3):
        world.look()
    assert world.launcher.calls == ["end s1"]


def test_finished_driver_that_does_not_end_is_ended(world: World) -> None:
    world.submit("s1")
    world.look()
    world.records.finish("s1", 1, "succeed")
    with world.records.engine.begin() as connection:
        long_ago = naive(now() - TIME_TO_END)
        connection.execute(update(sweeps).values(state_since=long_ago))
    world.look()
    assert world.launcher.alive == {}


def test_service_that_stops_its_drivers_ends_one_whose_sweep_has_just_finished(world: World) -> None:
    world.submit("s1")
    world.look()
    world.records.finish("s1", 1, "succeed")
    world.reconciler.start()
    world.reconciler.stop(stop_drivers=True)
    assert world.launcher.alive == {}
    assert world.states() == {"s1": "succeeded"}


def test_cancelled_queued_sweep_ends_without_a_driver(world: World) -> None:
    world.submit("s1", "s2")
    world.look()
    world.records.ask("s2", "cancel")
    world.look()
    assert world.states() == {"s1": "running", "s2": "cancelled"}
    assert "launch s2" not in world.launcher.calls
    cancelled = world.records.get_sweep("s2")
    assert cancelled.started_at is None
    assert cancelled.finished_at is not None
    assert [event["kind"] for event in world.records.list_events("s2")] == [
        "sweep_submitted",
        "cancel_requested",
        "driver_fenced",
        "sweep_cancelled",
    ]


def open_rows(world: World, name: str) -> StudyLedger:
    """A ledger that has handed out two trials."""
    ledger = StudyLedger(
        spec(), name, world.storage, world.journal(name), CheckpointStore("memory://reconciler")
    )
    ledger.next_task()
    ledger.next_task()
    return ledger


def rows(world: World, name: str) -> list[Any]:
    return world.storage.get_all_trials(world.storage.get_study_id_from_name(name))


def test_cancelled_running_sweep_ends_with_its_driver_and_its_open_rows(world: World) -> None:
    world.submit("s1", "s2")
    world.look()
    open_rows(world, "s1")
    world.records.ask("s1", "cancel")
    world.look()
    assert world.states()["s1"] == "cancelled"
    assert world.launcher.alive.get("s1") is None
    assert [row.state for row in rows(world, "s1")] == [TrialState.FAIL, TrialState.FAIL]
    assert {row.user_attrs["failure_class"] for row in rows(world, "s1")} == {"cancelled"}
    world.look()
    assert world.launcher.alive == {"s2": 1}


def test_cancel_goes_on_where_a_dying_controller_left_it(world: World) -> None:
    world.submit("s1")
    world.look()
    world.records.ask("s1", "cancel")
    world.records.fence(world.records.get_sweep("s1"))
    world.look()
    assert world.states() == {"s1": "cancelled"}
    assert world.launcher.alive == {}


def test_sweep_whose_drivers_keep_dying_is_given_up_with_their_last_words(world: World) -> None:
    world.submit("s1")
    world.launcher.log = "ImportError: no module named torch"
    world.look()
    open_rows(world, "s1")
    for _ in range(MOST_FRUITLESS_LAUNCHES):
        assert world.states() == {"s1": "running"}
        world.launcher.alive.clear()
        world.look()
    record = world.records.get_sweep("s1")
    assert record.state == "failed"
    assert world.launcher.calls.count("launch s1") == MOST_FRUITLESS_LAUNCHES
    assert record.state_reason is not None
    assert "5 drivers in a row" in record.state_reason
    assert "no module named torch" in record.state_reason
    assert {row.user_attrs["failure_class"] for row in rows(world, "s1")} == {"infrastructure"}


def test_one_recorded_epoch_is_progress_and_the_count_begins_again(world: World) -> None:
    world.submit("s1")
    world.look()
    for epoch in range(1, 3):
        for _ in range(MOST_FRUITLESS_LAUNCHES - 1):
            world.launcher.alive.clear()
            world.look()
        world.journal("s1").record_epoch(0, 1, epoch_fields(0, epoch))
        world.launcher.alive.clear()
        world.look()
        assert world.states() == {"s1": "running"}
        assert world.records.get_sweep("s1").fruitless_launches == 0


def test_trouble_with_one_sweep_keeps_no_other_waiting(records: Records) -> None:
    world = World(records, running_sweeps=3)
    world.submit("s1", "s2", "s3")
    world.launcher.broken.add("s1")
    world.look()
    assert world.launcher.alive == {"s2": 1, "s3": 1}


def test_sweep_whose_driver_cannot_be_started_is_given_up_in_the_end(world: World) -> None:
    world.submit("s1", "s2")
    world.launcher.broken.add("s1")
    for _ in range(MOST_FRUITLESS_LAUNCHES + 1):
        world.look()
        world.expire("s1")
    assert world.states()["s1"] == "failed"
    world.look()
    assert world.launcher.alive == {"s2": 1}


def test_drivers_go_on_when_the_service_stops(world: World) -> None:
    world.submit("s1")
    world.look()
    world.reconciler.start()
    world.reconciler.stop(stop_drivers=False)
    assert world.launcher.alive == {"s1": 1}


def test_drivers_stopped_with_the_service_resume_with_the_next_and_are_never_fruitless(
    records: Records,
) -> None:
    records.add_sweep("s1", spec())
    for generation in range(1, MOST_FRUITLESS_LAUNCHES + 3):
        world = World(records)
        world.look()
        assert world.launcher.alive == {"s1": generation}
        world.reconciler.start()
        world.reconciler.stop(stop_drivers=True)
        assert world.launcher.alive == {}
        assert world.states() == {"s1": "running"}


# Pauses, deletion, and several controllers.


def test_sweep_whose_driver_dies_while_it_pauses_is_paused(world: World) -> None:
    world.submit("s1", "s2")
    world.look()
    world.records.ask("s1", "pause")
    world.look()
    assert world.states() == {"s1": "pausing", "s2": "queued"}, "its driver is at it"
    world.launcher.alive.clear()
    world.look()
    world.look()
    assert world.states() == {"s1": "paused", "s2": "running"}


def test_driver_that_does_not_come_to_pause_is_ended(world: World) -> None:
    world.submit("s1")
    world.look()
    world.records.ask("s1", "pause")
    with world.records.engine.begin() as connection:
        connection.execute(update(sweeps).values(state_since=naive(now() - TIME_TO_PAUSE)))
    world.look()
    assert world.states() == {"s1": "paused"}
    assert world.launcher.alive == {}


def test_resumed_sweep_waits_for_its_turn_and_its_driver_is_not_counted_as_fruitless(world: World) -> None:
    world.submit("s1", "s2")
    world.look()
    for _ in range(MOST_FRUITLESS_LAUNCHES + 1):
        world.records.ask("s1", "pause")
        world.launcher.alive.clear()
        world.look()
        world.records.ask("s1", "resume")
        world.records.ask("s2", "pause")
        world.look()
        assert world.states()["s1"] == "running"
        world.records.ask("s2", "resume")


def test_deleted_sweep_leaves_nothing_and_a_crash_on_the_way_is_made_good(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("s1", "s2")
    world.look()
    open_rows(world, "s1")
    world.store.save_last("s1", 0, {"weights": b"1"})
    world.records.ask("s1", "cancel")
    world.look()
    world.records.ask("s1", "delete")
    with monkeypatch.context() as patch:
        patch.setattr(world.storage, "delete_study", lambda study: 1 / 0)
        world.look()
        assert world.states()["s1"] == "deleting"
    world.look()
    assert world.states() == {"s2": "running"}
    assert world.store.find_last("s1", 0) is None
    assert studies_of("s1", world.storage) == []
    assert world.records.list_events("s1") == []
    assert "forget s1" in world.launcher.calls


def second(world: World) -> World:
    """Another service at the same database, on the same machine."""
    other = World(world.records)
    other.launcher.me = {"controller": 2}
    other.launcher.alive = world.launcher.alive
    other.launcher.dead_controllers = world.launcher.dead_controllers
    return other


def test_of_two_controllers_the_first_acts_as_long_as_it_lives(world: World) -> None:
    other = second(world)
    world.look()
    world.submit("s1")
    for _ in range(3):
        other.look()
        assert world.states() == {"s1": "queued"}
    world.look()
    assert world.states() == {"s1": "running"}
    assert other.launcher.calls == []


@pytest.mark.parametrize("how", ["died", "silent", "stopped"])
def test_second_controller_takes_over_and_the_first_one_no_longer_acts(world: World, how: str) -> None:
    other = second(world)
    world.look()
    world.submit("s1")
    if how == "died":
        world.launcher.dead_controllers.append(1)
    elif how == "stopped":
        world.reconciler.start()
        world.reconciler.stop(stop_drivers=False)
    else:
        with world.records.engine.begin() as connection:
            connection.execute(update(leases).values(until=naive(now() - timedelta(seconds=1))))
    world.records.ask("s1", "pause")
    world.records.ask("s1", "resume")
    other.look()
    assert world.states() == {"s1": "running"}
    assert other.launcher.calls.count("launch s1") == 1
    world.launcher.calls.clear()
    world.records.ask("s1", "cancel")
    world.look()
    assert world.states() == {"s1": "cancelling"}
    assert world.launcher.calls == []


def test_cancelled_sweep_whose_driver_had_just_changed_its_study_leaves_no_open_row(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("s1")
    world.look()
    open_rows(world, "s1")
    stale = world.records.get_sweep("s1")
    reopen_failed("s1", "s1~1", spec(), world.storage, [])
    reopen_failed("s1", "s1~2", spec(), world.storage, [])
    world.records.switch_study("s1", 1, "s1~1")
    world.records.ask("s1", "cancel")
    listed = dataclasses.replace(stale, state="cancelling")
    monkeypatch.setattr(world.records, "list_sweeps", lambda *states: [listed])
    world.look()
    monkeypatch.undo()
    assert world.states() == {"s1": "cancelled"}
    assert studies_of("s1", world.storage) == ["s1~1"]
    rows_left = world.storage.get_all_trials(world.storage.get_study_id_from_name("s1~1"))
    assert {row.state for row in rows_left} == {TrialState.FAIL}


def test_driver_is_given_a_lease_after_a_time_in_which_it_could_not_be_heard(world: World) -> None:
    """The database was away, for both of them, or the machine asleep."""
    world.submit("s1")
    world.look()
    world.look()
    world.expire("s1")
    world.reconciler._looked_at = now() - LONG_BETWEEN_LOOKS - timedelta(seconds=20)
    world.look()
    assert world.generation("s1") == 1
    del world.launcher.alive["s1"]
    world.look()
    assert world.generation("s1") == 2, "one that is dead is not waited for"


def test_driver_that_lived_long_was_not_fruitless(world: World) -> None:
    world.submit("s1")
    world.look()
    for _ in range(MOST_FRUITLESS_LAUNCHES + 1):
        driver = {
            "sweep": "s1",
            "generation": world.generation("s1"),
            "started": now().timestamp() - LONG_LIFE_S - 60,
        }
        world.records.set_driver("s1", world.generation("s1"), driver)
        world.launcher.alive.clear()
        world.look()
    assert world.states() == {"s1": "running"}


def test_sweep_whose_trials_are_damaged_can_be_cancelled_and_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("s1", "s2")
    world.look()
    open_rows(world, "s1")

    def damaged(*arguments: Any, **named: Any) -> Any:
        return json.loads("{dam")

    with monkeypatch.context() as patch:
        patch.setattr(world.storage, "get_all_trials", damaged)
        world.records.ask("s1", "cancel")
        world.look()
        assert world.states()["s1"] == "cancelled"
        reason = world.records.get_sweep("s1").state_reason
        assert reason is not None
        assert "could not be closed" in reason
        world.records.ask("s1", "delete")
        world.look()
    assert world.states() == {"s2": "running"}


def test_time_in_which_nothing_ran_is_none_that_the_sweep_has_had(world: World) -> None:
    world.submit("s1")
    world.look()
    world.journal("s1").beat()
    hours = timedelta(hours=8)
    with world.records.engine.begin() as connection:
        connection.execute(
            update(sweeps).values(
                running_since=naive(now() - hours - timedelta(minutes=1)),
                lease_until=naive(now() - hours + LEASE),
            )
        )
    world.launcher.alive.clear()
    world.look()
    assert world.generation("s1") == 2
    assert 59 < world.journal("s1").beat().running_s < 65


def test_clock_stands_while_the_service_has_stopped_its_drivers(world: World) -> None:
    world.submit("s1")
    world.look()
    with world.records.engine.begin() as connection:
        connection.execute(update(sweeps).values(running_since=naive(now() - timedelta(minutes=1))))
    world.reconciler._threads = []
    world.reconciler.stop(stop_drivers=True)
    record = world.records.get_sweep("s1")
    assert record.running_since is None
    assert 59 < record.running_s() < 65


def test_driver_that_is_frozen_in_the_middle_of_a_write_is_killed_and_another_begins(world: World) -> None:
    """It keeps SQLite's write lock: no lease can be taken before it is dead."""
    for name in ("s1", "s2"):
        world.submit(name)
    world.reconciler._running_sweeps = 2
    world.look()
    world.look()
    world.expire("s1")
    world.expire("s2")
    refused = OperationalError("UPDATE", {}, Exception("database is locked"))
    world.launcher.frozen = {"s1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.records, "hold_lease", raiser(refused))
        rounds = [True, False]
        patch.setattr(world.reconciler._stopped, "wait", lambda seconds: rounds.pop())
        world.reconciler._run()
    assert world.launcher.calls[-1] == "end s1", "only the frozen one: the others wait for the database"
    world.look()
    assert world.generation("s1") == 2


def test_controller_that_has_lost_its_lease_in_the_middle_of_a_round_does_nothing_more(world: World) -> None:
    world.submit("s1", "s2")
    world.reconciler._running_sweeps = 2
    launch = world.launcher.launch

    def slowly(sweep_id: str, generation: int) -> dict[str, Any]:
        past = {"until": naive(now() - timedelta(seconds=1)), "holder": {"controller": 2}}
        with world.records.engine.begin() as connection:
            connection.execute(update(leases).values(past))
        world.records.hold_lease("controller", {"controller": 2}, timedelta(minutes=1), lambda holder: False)
        return launch(sweep_id, generation)

    world.launcher.launch = slowly  # type: ignore[method-assign]
    world.look()
    assert world.states() == {"s1": "running", "s2": "queued"}


def test_a_look_at_sweeps_that_are_as_wished_asks_for_the_lease_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("s1", "s2", "s3")
    world.reconciler._running_sweeps = 3
    world.look()
    asked: list[str] = []
    hold = world.records.hold_lease

    def counted(name: str, *rest: Any) -> bool:
        asked.append(name)
        return hold(name, *rest)

    monkeypatch.setattr(world.records, "hold_lease", counted)
    world.records.ask("s2", "stop")
    world.records.ask("s3", "pause")
    world.look()
    assert len(asked) == 1
    world.finish("s1")
    world.records.ask("s2", "cancel")
    world.look()
    assert len(asked) == 1 + 1 + 2, "and once for each that is moved, or cleaned up after"
    assert world.states() == {"s1": "succeeded", "s2": "cancelled", "s3": "pausing"}


def test_controller_that_wakes_after_another_one_has_acted_ends_no_trial(url: str) -> None:
    """It slept between taking a cancelled sweep's generation and writing its trials' ends."""
    engine = open_engine(url)
    migrate(engine)
    records, store = Records(engine), CheckpointStore("memory://two")
    launchers = [MemoryLauncher(), MemoryLauncher()]
    launchers[1].me = {"controller": 2}
    launchers[1].alive = launchers[0].alive
    closing = partial(open_closing_storage, url)
    storages = [open_storage(url) for _ in launchers]
    first, second = (
        Reconciler(records, storage, store, launcher, 1, closing=closing)
        for storage, launcher in zip(storages, launchers, strict=True)
    )

    def begin_trial() -> tuple[StudyLedger, Task]:
        """As a driver of the present generation."""
        record = records.get_sweep("s1")
        storage = open_fenced_storage(url, "s1", record.generation)
        storages.append(storage._backend)  # type: ignore[attr-defined]
        study = study_to_go_on_with(records, storage, "s1", record.generation)
        journal = SweepJournal(records, "s1", record.generation)
        ledger = StudyLedger(record.spec, "s1", storage, journal, store, study)
        task = ledger.next_task()
        assert task is not None
        return ledger, task

    records.add_sweep("s1", spec())
    first.reconcile()
    begin_trial()
    records.ask("s1", "cancel")
    end, tasks = launchers[0].end, []

    def sleep_and_end(sweep_id: str) -> None:
        launchers[0].end = end  # type: ignore[method-assign]
        end(sweep_id)
        with engine.begin() as connection:
            connection.execute(update(leases).values(until=naive(now() - timedelta(seconds=1))))
        second.reconcile()
        assert records.get_sweep("s1").state == "cancelled"
        records.retry("s1", [0])
        second.reconcile()
        tasks.append(begin_trial())

    launchers[0].end = sleep_and_end  # type: ignore[method-assign]
    first.reconcile()
    assert records.get_sweep("s1").state == "running"
    ((ledger, task),) = tasks
    assert ledger.record(task, report(task, 1)), "the trial runs on"
    for storage in storages:
        storage.remove_session()
        storage.engine.dispose()
    engine.dispose()


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    return fail


def test_what_is_closed_under_a_state_that_a_client_gave_is_looked_at_anew(world: World) -> None:
    """It pauses a queued sweep that is being given up: what was told of the pause is not told again."""
    world.submit("s1")
    end, views = world.launcher.end, SweepViews(world.records, world.storage)
    world.look()
    ledger = StudyLedger(spec(), "s1", world.storage, world.journal("s1"), world.store)
    assert ledger.next_task() is not None
    world.records.ask("s1", "pause")
    world.records.finish("s1", world.generation("s1"), "park")
    world.records.ask("s1", "resume")
    waiting = views.sweep(world.records.get_sweep("s1")).trials
    assert (waiting.waiting, waiting.failed) == (1, 0)

    def pause_and_end(sweep_id: str) -> None:
        world.launcher.end = end  # type: ignore[method-assign]
        world.records.ask("s1", "pause")
        assert views.sweep(world.records.get_sweep("s1")).trials == waiting
        assert views.trials(world.records.get_sweep("s1"))[0].state == "WAITING"
        end(sweep_id)

    world.launcher.end = pause_and_end  # type: ignore[method-assign]
    fruitless = {"fruitless_launches": MOST_FRUITLESS_LAUNCHES, "epochs_at_launch": 0, "lease_until": None}
    with world.records.engine.begin() as connection:
        connection.execute(update(sweeps).values(fruitless))
    world.look()
    record = world.records.get_sweep("s1")
    counts = views.sweep(record).trials
    assert (record.state, counts.waiting, counts.failed) == ("paused", 0, 1)
    assert views.trials(record)[0].state == "FAIL"


FROZEN_WRITER = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE fraternal_sweeps SET position = position")
print("frozen", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


class OneDriver(LocalLauncher):
    """Whose drivers are never started, and ended for real."""

    def launch(self, sweep_id: str, generation: int) -> dict[str, Any]:
        return self.identity()


@pytest.mark.sqlite_only("one lock for all who write; PostgreSQL ends who sleeps in a transaction")
def test_real_process_that_is_frozen_with_the_write_lock_is_killed_for_it(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    engine = open_engine(settings.resolved_database_url)
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=300"))
    migrate(engine)
    records = Records(engine)
    records.add_sweep("s1", spec())
    launcher = OneDriver(settings)
    reconciler = Reconciler(records, InMemoryStorage(), CheckpointStore(tmp_path.as_uri()), launcher, 1)
    reconciler.reconcile()
    writer = subprocess.Popen(
        [sys.executable, "-c", FROZEN_WRITER, str(tmp_path / "fraternal.db")],
        env={**os.environ, MARK: "s1", OWNER: owner_of(settings)},
        stdout=subprocess.PIPE,
    )
    try:
        past = {"driver": findable(writer.pid), "lease_until": naive(now() - timedelta(seconds=60))}
        with engine.begin() as connection:
            connection.execute(update(sweeps).values(past))
            connection.execute(update(leases).values(until=naive(now() + timedelta(seconds=1))))
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"frozen\n"
        reconciler.start()
        writer.wait(20)  # for ever, if it is not killed; its status went to who killed it
        deadline = time.monotonic() + 20
        while records.get_sweep("s1").generation == 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        reconciler.stop(stop_drivers=False)
        writer.kill()
        writer.communicate()
        engine.dispose()
