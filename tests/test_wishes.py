"""The laws of what clients wish for while a sweep runs: points, trials ended or kept, trials at once."""

import itertools
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState

import trials.shares
from tests.fakes import (
    SWEEP,
    Countdown,
    Crash,
    CrashingStorage,
    MemoryJournal,
    drive,
    failed,
    open_ledger,
    report,
    reports,
    rows,
    spec,
    states,
    taken,
    wish,
    with_loss,
)
from trials.ledger import StudyLedger
from trials.search import StudySearch
from trials.shares import Claim, Node, shares
from trials.spec import Resources, SweepSpec
from trials.store import CheckpointStore
from trials.tasks import Report, Task


def asked(**fields: Any) -> SweepSpec:
    space = {
        "kappa": {"type": "uniform", "low": 0.0, "high": 1.0},
        "batch_size": {"type": "choice", "values": [10, 20, 30]},
    }
    return spec(**{"space": space, **fields})


def params_of(storage: Any) -> list[dict[str, Any]]:
    return [row.params for row in rows(storage)]


# Points.


def test_points_are_tried_first_in_their_order_by_every_arm_and_what_they_leave_out_is_sampled(
    any_storage: BaseStorage,
) -> None:
    plain = InMemoryStorage()
    drive(open_ledger(asked(), plain, MemoryJournal()))
    journal = MemoryJournal()
    journal.points = [{"kappa": 1, "batch_size": 20}, {"batch_size": 30}]
    drive(open_ledger(asked(), any_storage, journal))
    sampled, tried = params_of(plain), params_of(any_storage)
    assert tried[0] == tried[1] == {"kappa": 1.0, "batch_size": 20}
    assert tried[2] == tried[3] == {**sampled[2], "batch_size": 30}
    assert tried[4:] == sampled[4:], "a draw without a point is what it would have been"
    assert [row.user_attrs["config"]["training"]["batch_size"] for row in rows(any_storage)[:3]] == [
        20,
        20,
        30,
    ]
    assert states(any_storage) == [TrialState.COMPLETE] * 6


def test_point_that_comes_while_a_draw_is_under_way_waits_for_the_next_one(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(asked(), storage, journal)
    first = ledger.next_task()
    assert first is not None
    journal.points = [{"kappa": 0.25}]
    others = [ledger.next_task() for _ in range(3)]
    kappas = [task.config.regularization.kappa for task in (first, *others) if task is not None]
    assert kappas[0] == kappas[1] != 0.25, "the arms of a draw are paired"
    assert kappas[2:] == [0.25, 0.25]


def test_arm_that_fixes_a_value_keeps_it_whatever_the_point_says(storage: BaseStorage) -> None:
    arms = {"fd": {"regularizer": "fraternal"}, "half": {"regularizer": "fraternal", "kappa": 0.5}}
    journal = MemoryJournal()
    journal.points = [{"kappa": 0.125}]
    drive(open_ledger(asked(arms=arms, budget={"trials": 2}), storage, journal))
    kappas = [row.user_attrs["config"]["regularization"]["kappa"] for row in rows(storage)]
    assert kappas == [0.125, 0.5]


def test_crash_before_any_write_leaves_every_point_where_it_was() -> None:
    points = [{"kappa": 0.25}, {"batch_size": 30}]

    def tried(crash_after: int) -> tuple[bool, list[dict[str, Any]]]:
        storage, journal = CrashingStorage(), MemoryJournal()
        journal.points = list(points)
        storage.before_write = journal.before_write = Countdown(crash_after)
        crashed = False
        for _ in range(2):
            try:
                drive(open_ledger(asked(budget={"trials": 6}), storage, journal))
            except Crash:
                crashed = True
                storage.before_write = journal.before_write = Countdown()
        return crashed, params_of(storage)

    _, undisturbed = tried(10**9)
    for writes in itertools.count():
        crashed, params = tried(writes)
        if not crashed:
            break
        assert params == undisturbed, f"after {writes} writes"
    assert writes > 60


# Single trials.


def test_trial_that_is_stopped_counts_with_what_it_has_reached(any_storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), any_storage, journal)
    task = ledger.next_task()
    assert task is not None
    assert ledger.record(task, report(task, 1))
    wish(journal, stopping=frozenset({0}))
    assert not ledger.record(task, report(task, 2))
    row = rows(any_storage)[0]
    assert (row.state, row.user_attrs["stopped"]) == (TrialState.PRUNED, True)
    assert row.user_attrs["best_epoch"] == 2
    drive(ledger)
    assert states(any_storage) == [TrialState.PRUNED, *[TrialState.COMPLETE] * 5]
    assert ledger.outcome() == ("succeed", None)


@pytest.mark.parametrize("epochs", [0, 1])
def test_trial_that_is_stopped_by_its_process_end_is_not_tried_again(
    epochs: int, storage: BaseStorage
) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    if epochs:
        assert ledger.record(task, report(task, 1))
    wish(journal, stopping=frozenset({0}))
    ledger.lost(task, "killed")
    row = rows(storage)[0]
    if epochs:
        assert row.state == TrialState.PRUNED
    else:
        assert (row.state, row.user_attrs["failure_class"]) == (TrialState.FAIL, "cancelled")
    assert "lost_attempts" not in row.user_attrs
    following = ledger.next_task()
    assert following is not None
    assert following.number == 1


def test_waiting_trial_that_is_to_stop_is_not_begun_again(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    first = open_ledger(spec(), storage, journal).next_task()
    assert first is not None
    wish(journal, stopping=frozenset({0}))
    drive(open_ledger(spec(), storage, journal))
    assert states(storage) == [TrialState.FAIL, *[TrialState.COMPLETE] * 5]


def test_trial_that_comes_to_its_end_before_it_is_stopped_is_complete(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    wish(journal, stopping=frozenset({0}))
    assert not ledger.record(task, report(task, 3))
    assert states(storage) == [TrialState.COMPLETE]


@pytest.mark.parametrize("spoken", [True, False])
def test_process_of_a_trial_that_is_stopped_is_killed_once_it_is_known(
    storage: BaseStorage, spoken: bool
) -> None:
    worker = subprocess.Popen(["sleep", "60"])
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    search = StudySearch(ledger, {})
    search.suggest("a")
    if spoken:
        search.on_report("a", worker.pid)
    search.end_stopped()
    assert worker.poll() is None, "nobody has asked for it"
    wish(journal, stopping=frozenset({0}))
    ledger.heed(journal.beat())
    search.end_stopped()
    if spoken:
        assert worker.wait(10) == -signal.SIGKILL
        search.on_trial_complete("a", error=True)
        assert search.suggest("b")["task"].number == 1
    else:
        assert worker.poll() is None
        worker.kill()
        worker.wait()


def test_pinned_best_stays_whatever_others_reach(storage: BaseStorage, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path.as_uri())
    journal = MemoryJournal()
    wanted = spec(retention={"bests_per_arm": 1})
    journal.orders = replace(journal.orders, budget=wanted.budget, pinned=frozenset({0}))
    ledger = StudyLedger(wanted, SWEEP, storage, journal, store)

    def work(task: Task) -> Iterator[Report]:
        store.save_best(SWEEP, task.number, {"weights": b"w"})
        yield replace(with_loss(report(task, 3), 5.0 - task.number / 10))

    drive(ledger, work)
    assert kept(store) == [0, 4, 5], "the pinned one, and the best of each arm"
    wish(journal, pinned=frozenset())
    StudyLedger(wanted, SWEEP, storage, journal, store)
    assert kept(store) == [4, 5]


def kept(store: CheckpointStore) -> list[int]:
    return sorted(file.number for file in store.files() if file.name == "best.tar")


# Trials at once.


def test_no_more_trials_run_at_once_than_may_and_the_number_may_change(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    wish(journal, max_concurrent=2)
    first, second = ledger.next_task(), ledger.next_task()
    assert first is not None
    assert second is not None
    assert ledger.next_task() is None
    assert not ledger.exhausted
    wish(journal, max_concurrent=3)
    assert ledger.next_task() is not None
    wish(journal, max_concurrent=1)
    assert not ledger.record(first, report(first, 3))
    assert ledger.next_task() is None, "two run, and one may"
    assert ledger.record(second, report(second, 1)), "what runs is not ended for it"
    ledger.lost(second, "killed")
    assert ledger.next_task() is None
    wish(journal, max_concurrent=None)
    drive(ledger)
    assert len(rows(storage)) == 6


def claims(journal: MemoryJournal, *others: tuple[int, int]) -> None:
    """This sweep, of priority 0 and the 10th that came, and others, by (priority, position)."""
    places = {SWEEP: (0, 10), **{f"other{place[1]}": place for place in others}}
    journal.others = [Claim(sweep, *place, Resources(), None) for sweep, place in places.items()]


def test_a_sweep_takes_what_others_leave_it_and_gives_back_what_is_theirs_with_the_state_saved(
    storage: BaseStorage,
) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    claims(journal)
    ledger.share([Node(2), Node(1)])
    tasks = [ledger.next_task() for _ in range(3)]
    assert ledger.is_full
    assert ledger.next_task() is None
    assert not ledger.exhausted
    for task in tasks:
        assert ledger.record(task, Report(epoch=None)) is True
    claims(journal, (0, 9))
    ledger.share([Node(2), Node(1)])
    assert ledger.record(tasks[0], report(tasks[0], 1)) is False, "two of three are the other's"
    assert ledger.record(tasks[1], report(tasks[1], 1)) is False
    assert ledger.record(tasks[2], report(tasks[2], 1)) is True, "which is its share"
    assert ledger.next_task() is None
    assert [name for name, _ in journal.events if name == "trial_lost"] == []
    claims(journal, (1, 11))
    ledger.share([Node(2), Node(1)])
    assert ledger.record(tasks[2], report(tasks[2], 2)) is False, "the other one has priority"
    claims(journal)
    ledger.share([Node(2), Node(1), Node(4)])
    again = [ledger.next_task() for _ in range(4)]
    assert [(task.number, task.attempt, task.recorded_epochs) for task in again] == [
        (0, 2, 1),
        (1, 2, 1),
        (2, 2, 2),
        (3, 1, 0),
    ]
    for task in again:
        for said in reports(task):
            ledger.record(task, said)
    drive(ledger)
    assert len(rows(storage)) == 6


def test_where_a_node_is_lost_no_trial_of_another_node_makes_room_for_one_that_has_not_begun(
    storage: BaseStorage,
) -> None:
    """Whoever was there is handed out again before the share has fallen, and waits for a place."""
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    claims(journal)
    ledger.share([Node(1), Node(1)])
    healthy, lost = taken(ledger), taken(ledger)
    for task in (healthy, lost):
        assert ledger.record(task, report(task, 1)) is True
    ledger.lost(lost, "its node has died")
    again = taken(ledger)
    ledger.share([Node(1)])
    assert ledger.record(healthy, report(healthy, 2)) is True
    assert ledger.next_task() is None
    assert ledger.record(again, Report(epoch=None)) is False, "it has found a place that is another's"
    assert ledger.record(healthy, report(healthy, 3)) is False, "it is done"
    assert [name for name, _ in journal.events].count("trial_paused") == 1
    assert (taken(ledger).attempt, len(rows(storage))) == (3, 2)


def test_a_sweep_wants_as_much_as_it_has_left_to_do(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(budget={"trials": 3}), storage, journal)
    ledger.share([Node(1)])
    assert journal.wants == 3
    task = ledger.next_task()
    for said in reports(task):
        ledger.record(task, said)
    ledger.share([Node(1)])
    assert journal.wants == 2
    ledger.next_task()
    wish(journal, state="stopping")
    ledger.heed(journal.beat())
    ledger.share([Node(1)])
    assert journal.wants == 1, "no other one begins"


def test_a_share_is_what_dividing_anew_would_give_after_whatever_changes(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the machines are divided anew only where something that matters has changed."""
    divided: list[object] = []

    def counted(nodes: Sequence[Node], claims: Sequence[Claim]) -> dict[str, int]:
        divided.append(claims)
        return shares(nodes, claims)

    monkeypatch.setattr(trials.shares, "shares", counted)
    journal = MemoryJournal()
    ledger = open_ledger(spec(budget={"trials": 20}), storage, journal)
    mine = Claim(SWEEP, 0, 10, Resources(), 20)
    other = Claim("other", 0, 9, Resources(), 20)

    def share(nodes: Sequence[Node], *claims: Claim) -> tuple[int, int]:
        """What it has then, and how often the machines were divided for it."""
        journal.others, before = list(claims), len(divided)
        ledger.share(nodes)
        own = Claim(SWEEP, 0, 0, Resources(), journal.wants)  # for who pauses, and is not listed
        listed = claims if mine.sweep_id in {claim.sweep_id for claim in claims} else [*claims, own]
        assert ledger._share == shares(nodes, listed)[SWEEP]
        return ledger._share, len(divided) - before

    four = [Node(2), Node(2)]
    assert share(four, mine) == (4, 1)
    assert share(four, mine) == (4, 0)
    assert share(four[::-1], replace(mine, wants=19)) == (4, 0), "a trial has ended"
    assert share(four, mine, other) == (2, 1), "another sweep has come"
    assert share(four, replace(other, wants=12), mine) == (2, 0)
    assert share(four, mine, replace(other, wants=1)) == (3, 1), "it has little left to do"
    assert share(four, mine, replace(other, wants=1, priority=-1)) == (4, 1)
    assert share(four, mine, replace(other, priority=1)) == (0, 1)
    assert share([*four, Node(1)], mine, replace(other, priority=1)) == (0, 1), "a node has joined"
    assert share(four, mine, replace(other, resources=Resources(max_concurrent=1))) == (3, 1)
    assert share(four, mine, replace(other, resources=Resources(cpus=2))) == (2, 1)
    assert share(four, mine) == (4, 1), "it has ended"
    assert share(four[:1], mine) == (2, 1), "a node has left"
    assert share(four[:1], replace(mine, wants=2)) == (2, 1)
    assert share(four[:1], replace(mine, wants=1)) == (1, 1)
    assert share(four[:1], other) == (1, 1), "this sweep pauses"
    assert share(four[:1], other) == (1, 0)


def test_where_there_is_no_machine_the_search_ends_for_now_rather_than_wait(storage: BaseStorage) -> None:
    """Tune would wait in vain, and hear of nothing meanwhile; the driver begins anew."""
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    ledger.share([])
    search = StudySearch(ledger, {})
    assert search.suggest("a") == StudySearch.FINISHED
    assert not ledger.exhausted
    ledger.share([Node(1)])
    assert search.suggest("a") is not None
    assert search.suggest("b") is None


def test_search_that_is_full_asks_nobody(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    wish(journal, max_concurrent=1)
    search = StudySearch(ledger, {})
    assert search.suggest("a") is not None
    journal.fenced = True  # whoever beats now is told so
    assert search.suggest("b") is None


@pytest.mark.parametrize("failure", ["diverged", "user_error"])
def test_trial_that_fails_while_it_is_being_stopped_keeps_its_own_words(
    storage: BaseStorage, failure: str
) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    wish(journal, stopping=frozenset({0}))
    assert not ledger.record(task, failed(failure))
    assert rows(storage)[0].user_attrs["failure_class"] == failure
