"""The laws of a sweep's life: one table, whatever is asked, whatever dies, and in whatever order."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState
from sqlalchemy import update

from service.database import migrate, naive, now, open_engine
from service.errors import IllegalMove, InvalidSpec, SweepNotFound
from service.lifecycle import (
    MOVES,
    MOVING,
    REQUESTS,
    TERMINAL_STATES,
    WISHES,
    WITH_DRIVER,
    State,
    legal_requests,
)
from service.reconciler import Reconciler
from service.records import Records, SweepJournal
from service.schemas import Extension, RetryRequest
from service.studies import study_to_go_on_with, write_down
from service.sweeps import SweepController
from service.tables import sweeps
from tests.databases import fresh_database
from tests.fakes import MemoryLauncher, failed, report, spec
from trials.ledger import Fenced, StudyLedger
from trials.store import CheckpointStore
from trials.tasks import Task

STATES: tuple[State, ...] = get_args(State)


def test_every_state_is_reached_and_left_but_by_what_the_table_says() -> None:
    reached = {"queued", *(after for move in MOVES.values() for after in move.states.values())}
    assert reached == set(STATES) == set(WISHES)
    left = {before for move in MOVES.values() for before, after in move.states.items() if after != before}
    assert left == set(STATES) - {"deleting"}, "a sweep that is deleted leaves by vanishing"


def test_from_a_terminal_state_only_clients_lead_on() -> None:
    for state in TERMINAL_STATES:
        assert legal_requests(state) == ["extend", "retry-failed", "delete"]
        assert {verb for verb, move in MOVES.items() if state in move.states} <= set(REQUESTS)


def test_every_state_is_at_rest_or_somebody_moves_it_on() -> None:
    assert set(STATES) - MOVING == TERMINAL_STATES | {"paused"}
    assert WITH_DRIVER < MOVING


@pytest.mark.parametrize("state", STATES)
def test_every_sweep_that_has_not_ended_can_be_got_rid_of(state: State) -> None:
    assert {"cancel", "delete"} & set(legal_requests(state))


OFTEN_ASKED = (*REQUESTS, *("pause", "resume", "stop") * 2)


class Driver:
    """A driver's process, but for Ray: it takes one report at a time, and can die between any two."""

    def __init__(self, world: "SweepsThatLive", sweep_id: str, generation: int) -> None:
        records, storage = world.records, world.storage
        record = records.get_sweep(sweep_id)
        self.journal = SweepJournal(records, sweep_id, generation)
        self.journal.beat()
        study = study_to_go_on_with(records, storage, sweep_id, generation)
        self.ledger = StudyLedger(record.spec, sweep_id, storage, self.journal, world.store, study)
        self._end = lambda: write_down(records, sweep_id, generation, self.ledger)
        self.running: dict[int, tuple[Task, int]] = {}
        """Each trial that is under way, and the epoch it is to report next."""

    def step(self, fails: bool) -> bool:
        """As trials.driver does it, one thing at a time; False when the process ends."""
        self.ledger.heed(self.journal.beat())
        if self.ledger.limit is not None:
            self.ledger.end_open_trials()
            self._end()
            return False
        task = self.ledger.next_task() if len(self.running) < 2 else None
        if task is not None:
            self.running[task.number] = task, max(1, task.recorded_epochs)
        if not self.running:
            self._end()
            return False
        number = min(self.running)
        task, epoch = self.running.pop(number)
        said = failed("user_error", "no sense") if fails else report(task, epoch)
        if self.ledger.record(task, said):
            self.running[number] = task, epoch + 1
        return True


class SweepsThatLive(RuleBasedStateMachine):
    """Clients, a service and drivers, any of which may do anything that it can at any time, or die."""

    @initialize()
    def begin(self) -> None:
        engine = open_engine(fresh_database())
        migrate(engine)
        self.records, self.storage = Records(engine), InMemoryStorage()
        self.launcher, self.store = MemoryLauncher(), CheckpointStore("memory://lifecycle")
        self.controller = SweepController(
            self.records, self.storage, self.store, self.launcher, Path("nowhere")
        )
        self.reconciler = Reconciler(self.records, self.storage, self.store, self.launcher, running_sweeps=1)
        self.drivers: dict[str, Driver] = {}
        self.trials = {"s1": 3, "s2": 2}
        self.deleted: set[str] = set()
        self.stopped: set[str] = set()
        """Those that were asked to stop, so that they may end before their budget does."""
        for name, trials in self.trials.items():
            self.records.add_sweep(name, spec(budget={"trials": trials}, training={"epochs": 2}))

    def teardown(self) -> None:
        if not hasattr(self, "records"):
            return
        try:
            self.settle()
        finally:
            self.records.engine.dispose()

    def settle(self) -> None:
        """Whatever has happened: a sweep that is let alone comes to its end, and its budget is exact."""
        for _ in range(300):
            self.look()
            if all(record.state in TERMINAL_STATES for record in self.records.list_sweeps()):
                break
            for name in list(self.drivers):
                self.drive(name, fails=False)
            for record in self.records.list_sweeps("paused"):
                self.records.ask(record.id, "resume")
        for record in self.records.list_sweeps():
            assert record.state in TERMINAL_STATES, record.state
            rows = self.rows(record.id)
            assert all(row.state.is_finished() for row in rows)
            if record.state == "succeeded" and record.state_reason is None:
                assert len(rows) == self.trials[record.id]
        assert not self.launcher.alive

    def rows(self, name: str) -> list[Any]:
        try:
            study = self.storage.get_study_id_from_name(self.records.get_sweep(name).study)
        except KeyError:
            return []
        return self.storage.get_all_trials(study)

    @rule(name=st.sampled_from(["s1", "s2"]), verb=st.sampled_from(OFTEN_ASKED))
    def ask(self, name: str, verb: Any) -> None:
        """Legal or not: either the table's move, or a refusal that changes nothing."""
        if name in self.deleted:
            with pytest.raises(SweepNotFound):
                self.records.ask(name, verb)
            return
        before = self.records.get_sweep(name)
        events = len(self.records.list_events(name))
        legal = before.state in MOVES[verb].states
        if legal:
            try:
                self.request(name, verb)
            except InvalidSpec:
                assert verb == "retry_failed", "nothing has failed"
            else:
                assert self.records.get_sweep(name).state == MOVES[verb].states[before.state]
                return
        else:
            with pytest.raises((IllegalMove, InvalidSpec)) as refusal:
                self.request(name, verb)
            assert getattr(refusal.value, "legal", None) in (None, legal_requests(before.state))
        assert self.records.get_sweep(name) == before
        assert len(self.records.list_events(name)) == events

    def request(self, name: str, verb: Any) -> None:
        match verb:
            case "extend":
                self.controller.extend(name, Extension(trials=1))
                self.trials[name] += 1
            case "retry_failed":
                self.controller.retry_failed(name, RetryRequest())
            case _:
                self.controller.ask(name, verb)
        if verb == "stop":
            self.stopped.add(name)

    @rule()
    def look(self) -> None:
        """The reconciler's round. What it launches lives from now on; what it ends is dead."""
        self.reconciler.reconcile()
        for name, generation in self.launcher.alive.items():
            driver = self.drivers.get(name)
            if driver is None or driver.journal._generation != generation:
                self.drivers[name] = Driver(self, name, generation)
        self.drivers = {name: driver for name, driver in self.drivers.items() if name in self.launcher.alive}
        self.deleted = {"s1", "s2"} - {record.id for record in self.records.list_sweeps()}

    @precondition(lambda self: self.drivers)
    @rule(fails=st.booleans(), data=st.data())
    def a_driver_works(self, fails: bool, data: st.DataObject) -> None:
        self.drive(data.draw(st.sampled_from(sorted(self.drivers))), fails)

    def drive(self, name: str, fails: bool) -> None:
        try:
            goes_on = self.drivers[name].step(fails)
        except Fenced:
            goes_on = False
        if not goes_on:
            self.dies(name)

    def dies(self, name: str) -> None:
        del self.drivers[name]
        self.launcher.alive.pop(name, None)

    @precondition(lambda self: self.drivers)
    @rule(data=st.data())
    def a_driver_dies(self, data: st.DataObject) -> None:
        self.dies(data.draw(st.sampled_from(sorted(self.drivers))))

    @rule(name=st.sampled_from(["s1", "s2"]))
    def a_lease_runs_out(self, name: str) -> None:
        """The driver was frozen: it lives, and is about to go on."""
        with self.records.engine.begin() as connection:
            long_ago = naive(now() - timedelta(minutes=10))
            connection.execute(update(sweeps).where(sweeps.c.id == name).values(lease_until=long_ago))

    @invariant()
    def nothing_is_twice_or_too_much(self) -> None:
        if not hasattr(self, "records"):
            return
        for record in self.records.list_sweeps():
            rows = self.rows(record.id)
            assert len(rows) <= self.trials[record.id]
            assert [row.number for row in rows] == list(range(len(rows)))
            assert (record.finished_at is not None) == (record.state in TERMINAL_STATES) or (
                record.state == "deleting"
            )
            assert (record.running_since is not None) == (record.state in WITH_DRIVER)
            if record.state in {"succeeded", "failed"} and record.id not in self.stopped:
                given_up = "drivers in a row" in (record.state_reason or "")
                assert given_up or len(rows) == self.trials[record.id], record.state_reason
            if record.state in TERMINAL_STATES and record.retry_numbers is None:
                assert not [row for row in rows if row.state == TrialState.RUNNING]
            counts = Counter(
                (row["number"], row["epoch"]) for n in range(9) for row in self.records.curve(record.id, n)
            )
            assert set(counts.values()) <= {1}


TestSweepsThatLive = pytest.mark.slow(SweepsThatLive.TestCase)
TestSweepsThatLive.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
