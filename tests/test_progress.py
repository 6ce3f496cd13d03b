"""What is told of a sweep that runs: always what its rows say, which are read anew only once they change."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from optuna.storages import BaseStorage, get_storage
from sqlalchemy import Engine, event, update

from service.database import migrate, open_engine
from service.lifecycle import Verb
from service.pages import SweepOrder, SweepQuery, read_page
from service.records import Records, SweepJournal
from service.schemas import SweepView
from service.studies import (
    open_closing_storage,
    open_fenced_storage,
    open_storage,
    study_to_go_on_with,
    write_down,
)
from service.tables import sweeps
from service.views import SweepViews
from tests.fakes import failed, report, spec, verified, with_loss
from trials.ledger import StudyLedger
from trials.store import CheckpointStore
from trials.studies import close_open_trials
from trials.tasks import Failure, Task


class Web:
    """A web process: it remembers what it has told."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.records = Records(engine_of(url, stack))
        self.storage = get_storage(open_storage(url))
        stack.callback(engine_below(self.storage).dispose)
        self.views = SweepViews(self.records, self.storage)

    def told(self, sweep_id: str) -> SweepView:
        """But for what goes on by itself."""
        return steady(self.views.sweep(self.records.get_sweep(sweep_id)))

    def listed(self) -> list[SweepView]:
        asked = SweepQuery(read_page(SweepOrder, "-created_at", 100, None))
        return [steady(view) for view in self.views.sweeps(self.records.page(asked)[0])]

    def told_by_one_that_has_never_looked(self, sweep_id: str) -> SweepView:
        return steady(SweepViews(self.records, self.storage).sweep(self.records.get_sweep(sweep_id)))

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """The statements that it sends."""
        sent: list[str] = []

        def count(*given: Any) -> None:
            sent.append(given[2])

        engines = self.records.engine, engine_below(self.storage)
        for engine in engines:
            event.listen(engine, "before_cursor_execute", count)
        yield sent
        for engine in engines:
            event.remove(engine, "before_cursor_execute", count)


def engine_of(url: str, stack: ExitStack) -> Engine:
    engine = open_engine(url)
    stack.callback(engine.dispose)
    return engine


def engine_below(storage: BaseStorage) -> Engine:
    engine: Engine = storage._backend.engine  # type: ignore[attr-defined]  # behind Optuna's cache
    return engine


def steady(view: SweepView) -> SweepView:
    return view.model_copy(update={"ran_s": 0.0, "time_left_s": None})


class Driving:
    """Drivers of sweeps, each with connections of its own, as in a process of its own."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url, self._stack = url, stack
        self.records = Records(engine_of(url, stack))
        migrate(self.records.engine)
        self.engines = [self.records.engine]
        self.store = CheckpointStore("memory://progress")

    def submit(self, sweep_id: str, **fields: Any) -> None:
        self.records.add_sweep(sweep_id, spec(**fields))

    def begin(self, sweep_id: str, after_commit: Any = None) -> StudyLedger:
        """Another generation's driver."""
        record = self.records.get_sweep(sweep_id)
        generation = self.records.claim(record, fruitless=0, epochs_done=0)
        assert generation is not None
        storage = open_fenced_storage(self.url, sweep_id, generation)
        self._stack.callback(engine_below(storage).dispose)
        if after_commit is not None:
            event.listen(engine_below(storage), "checkin", after_commit)
        self.journal = SweepJournal(self.records, sweep_id, generation)
        study = study_to_go_on_with(self.records, storage, sweep_id, generation)
        return StudyLedger(record.spec, sweep_id, storage, self.journal, self.store, study)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def driving(url: str, stack: ExitStack) -> Driving:
    return Driving(url, stack)


@pytest.fixture
def web(driving: Driving, url: str, stack: ExitStack) -> Web:
    return Web(url, stack)


def take(ledger: StudyLedger) -> Task:
    task = ledger.next_task()
    assert task is not None
    return task


def test_after_every_single_transaction_what_is_remembered_is_what_the_rows_say(
    driving: Driving, web: Web, url: str, stack: ExitStack
) -> None:
    """Of two web processes, of which one looks after each, and the other now and then."""
    seldom = Web(url, stack)
    looks: list[bool] = []
    driving.submit("s1")

    def look(*_: object) -> None:
        fresh = web.told_by_one_that_has_never_looked("s1")
        looks.append(web.told("s1") == fresh)
        if len(looks) % 5 == 0:
            looks.append(seldom.told("s1") == fresh)

    def ask(verb: Verb) -> None:
        driving.records.ask("s1", verb)

    event.listen(driving.records.engine, "checkin", look)
    ledger = driving.begin("s1", look)
    tasks = [take(ledger) for _ in range(3)]
    for epoch in (1, 2):
        for task in tasks:
            ledger.record(task, with_loss(report(task, epoch), 4.0 - task.number - epoch / 10))
    ledger.record(tasks[0], failed("infrastructure"))  # it is tried again
    ledger.record(tasks[1], failed("diverged"))
    ledger.record(tasks[2], with_loss(report(tasks[2], 3), 1.0))
    check = ledger.next_check()
    assert check is not None
    ledger.record_verification(check.number, replace(verified(check), outcome="differs", valid_loss=9.0))
    driving.records.wish("s1", 0, "trial_pinned", pinned=True)
    again = take(ledger)
    ledger.record(again, report(again, 1))
    ask("pause")
    ledger.record(again, report(again, 2))  # it is parked
    write_down(driving.records, "s1", 1, ledger)
    assert web.told("s1").state == "paused"
    ask("resume")
    ledger = driving.begin("s1", look)
    stopped = take(ledger)
    driving.records.wish("s1", stopped.number, "trial_stop_requested", stopping=True)
    ledger.record(stopped, report(stopped, 3))
    ask("cancel")
    fenced = driving.records.fence(driving.records.get_sweep("s1"))
    assert fenced is not None
    with open_closing_storage(url, "s1", fenced) as closing:
        event.listen(closing.engine, "checkin", look)  # type: ignore[attr-defined]
        close_open_trials("s1", closing, Failure("cancelled", "the sweep was cancelled"))
    driving.records.finish("s1", fenced, "close")
    driving.records.retry("s1", [1])
    ledger = driving.begin("s1", look)
    retried = take(ledger)
    assert retried.number == 1
    for epoch in (1, 2, 3):
        ledger.record(retried, report(retried, epoch))
    assert len(looks) > 100
    assert all(looks)
    assert web.told("s1").epochs_done == seldom.told("s1").epochs_done > 6


def test_a_list_of_running_sweeps_costs_as_many_statements_as_one_of_none(driving: Driving, web: Web) -> None:
    ledgers = {}
    for sweep_id in ("s1", "s2", "s3"):
        driving.submit(sweep_id)
        ledgers[sweep_id] = driving.begin(sweep_id)
        task = take(ledgers[sweep_id])
        ledgers[sweep_id].record(task, report(task, 1))
    told = web.listed()
    assert [view.epochs_done for view in told] == [1, 1, 1]
    driving.journal.beat()
    driving.journal.claims(5)
    with web.counting() as sent:
        assert web.listed() == told
    assert len(sent) == 2, "which sweeps, and their rows"
    with web.counting() as sent:
        web.told("s1")
    assert len(sent) == 1
    task = take(ledgers["s2"])
    with web.counting() as sent:
        assert [view.trials.running for view in web.listed()] == [1, 2, 1]
    assert len(sent) > 2
    with web.counting() as sent:
        web.listed()
    assert len(sent) == 2


def test_of_a_sweep_whose_driver_does_not_count_nothing_is_remembered(driving: Driving, web: Web) -> None:
    """One of an earlier version that ran when the database was migrated."""
    driving.submit("s1")
    ledger = driving.begin("s1")
    with driving.records.engine.begin() as connection:
        connection.execute(update(sweeps).values(writes=None))
    assert web.told("s1").trials.running == 0
    first = take(ledger)
    assert web.told("s1").trials.running == 1
    with driving.records.engine.connect() as connection:
        assert connection.execute(sweeps.select()).one().writes is None
    ledger.record(first, report(first, 1))
    driving.records.claim(driving.records.get_sweep("s1"), fruitless=0, epochs_done=0)
    with driving.records.engine.connect() as connection:
        assert connection.execute(sweeps.select()).one().writes == 0, "a new one does"
