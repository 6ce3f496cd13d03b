"""The laws of the ledger: exactly the budget, each trial once, whatever dies and whenever."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event, text

import trials.ledger
from service.studies import open_storage
from tests.databases import NO_TYPES, database_of
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
    valid_loss,
    wish,
    with_loss,
)
from trials.ledger import DATABASE_PATIENCE_S, Fenced, JournalAway, StudyLedger, perplexity
from trials.pruners import MOST_INTERMEDIATE_VALUES, intermediate_epochs, rung_epochs
from trials.shares import Claim, Node
from trials.spec import Budget, Resources, SweepSpec
from trials.store import CheckpointStore
from trials.studies import (
    DamagedRows,
    close_open_trials,
    delete_study,
    find_rows,
    open_study,
    reopen_failed,
    studies_of,
)
from trials.tasks import Failure, Report, Task

Work = Callable[[Task], Iterator[Report]]
HALVING = {"name": "successive_halving", "min_epochs": 1, "reduction_factor": 2}


def essence(row: FrozenTrial) -> dict[str, Any]:
    """All of a row but when it ran and in how many goes."""
    attributes = {
        name: value for name, value in row.user_attrs.items() if name not in {"attempt", "failures"}
    }
    return {
        "number": row.number,
        "state": row.state,
        "values": row.values,
        "params": row.params,
        "curve": row.intermediate_values,
        **attributes,
    }


def test_undisturbed_sweep_completes_its_budget_and_says_how_each_trial_did(any_storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), any_storage, journal)
    drive(ledger)
    assert ledger.exhausted
    assert ledger.outcome() == ("succeed", None)
    assert states(any_storage) == [TrialState.COMPLETE] * 6
    for row in rows(any_storage):
        best = min(range(1, 4), key=lambda epoch: valid_loss(row.number, epoch))
        assert row.value == perplexity(valid_loss(row.number, best)), "a trial's objective is its best epoch"
        assert row.user_attrs["best_epoch"] == best
        assert row.user_attrs["best_valid_loss"] == valid_loss(row.number, best)
        assert row.user_attrs["checkpoint_sha256"] == f"sha256 of {row.number} after {best}"
        assert row.user_attrs["attempt"] == 1
        assert row.user_attrs["config"]["regularization"]["kappa"] == row.params["kappa"]
    assert sorted(journal.epochs) == [(number, epoch) for number in range(6) for epoch in (1, 2, 3)]


def test_objective_of_a_trial_that_gets_worse_is_not_its_last_epoch() -> None:
    storage = InMemoryStorage()
    drive(open_ledger(spec(), storage, MemoryJournal()))
    row = rows(storage)[1]
    assert row.user_attrs["best_epoch"] == 2
    assert row.value is not None
    assert row.value < row.intermediate_values[3]


def test_arms_take_turns_and_share_draws_and_seeds() -> None:
    tasks: list[Task] = []

    def noted(task: Task) -> Iterator[Report]:
        tasks.append(task)
        return reports(task)

    drive(open_ledger(spec(), InMemoryStorage(), MemoryJournal()), noted)
    assert [task.arm for task in tasks] == ["fd", "eld"] * 3
    for fd, eld in zip(tasks[::2], tasks[1::2], strict=True):
        assert fd.seed == eld.seed
        assert fd.config.training == eld.config.training
        assert fd.config.regularization.kappa == eld.config.regularization.kappa
    assert len({task.seed for task in tasks}) == 3


def random_work(
    seed: int, diverging: float, dying: float, broken: float
) -> Callable[[StudyLedger, Task], None]:
    """A worker to which anything may happen after any epoch."""
    chance = random.Random(seed)

    def work(ledger: StudyLedger, task: Task) -> None:
        for said in reports(task):
            luck = chance.random()
            if luck < diverging:
                ledger.record(task, failed("diverged"))
            elif luck < diverging + dying:
                ledger.lost(task, "killed")
            elif luck < diverging + dying + broken:
                ledger.record(task, failed("infrastructure", "the disk is full"))
            elif ledger.record(task, said):
                continue
            return

    return work


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    trials=st.integers(1, 9),
    rates=st.tuples(st.sampled_from([0, 0.1, 1]), st.sampled_from([0, 0.3]), st.sampled_from([0, 0.3])),
    pruner=st.sampled_from([{"name": "none"}, HALVING]),
    reopen_every=st.integers(1, 5),
)
def test_exactly_the_budget_ends_whatever_happens(
    seed: int, trials: int, rates: tuple[float, float, float], pruner: dict[str, Any], reopen_every: int
) -> None:
    storage, journal = InMemoryStorage(), MemoryJournal()
    asked = spec(budget={"trials": trials}, pruner=pruner, retry={"identical_failures": None})
    work = random_work(seed, *rates)
    for count in itertools.count(1):
        ledger = open_ledger(asked, storage, journal)
        tasks = list(itertools.islice(iter(ledger.next_task, None), reopen_every))
        for task in tasks[: count % (reopen_every + 1)]:  # the others are lost with their driver
            work(ledger, task)
        if not tasks:
            break
    assert len(rows(storage)) == trials
    assert all(state.is_finished() for state in states(storage))
    assert ledger.outcome()[0] == ("succeed" if TrialState.COMPLETE in states(storage) else "fail")


def test_what_an_earlier_driver_left_running_comes_first_and_is_the_same_but_for_its_attempt(
    any_storage: BaseStorage,
) -> None:
    first = open_ledger(spec(), any_storage, MemoryJournal())
    left = [first.next_task() for _ in range(3)]
    second = open_ledger(spec(), any_storage, MemoryJournal())
    taken_up = [second.next_task() for _ in range(3)]
    assert taken_up == [replace(task, attempt=2) for task in left if task is not None]
    following = second.next_task()
    assert following is not None
    assert (following.number, following.attempt) == (3, 1)


def test_resumed_trial_reports_from_its_latest_recorded_epoch_on(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    assert ledger.record(task, report(task, 1))
    assert ledger.record(task, report(task, 2))
    again = open_ledger(spec(), storage, journal).next_task()
    assert again is not None
    assert again.recorded_epochs == 2


def test_epochs_reported_again_change_nothing(any_storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), any_storage, journal)
    task = ledger.next_task()
    assert task is not None
    for epoch in (1, 2):
        ledger.record(task, report(task, epoch))
    before, recorded = essence(rows(any_storage)[0]), dict(journal.epochs)
    ledger = open_ledger(spec(), any_storage, journal)
    task = ledger.next_task()
    assert task is not None
    for epoch in (1, 2):  # all of them, as after the loss of `last`
        assert ledger.record(task, report(task, epoch))
    assert essence(rows(any_storage)[0]) == before
    assert journal.epochs == recorded, "the attempt that trained an epoch stays on record"


def crash_after(writes: int, asked: SweepSpec, work: Work) -> tuple[bool, CrashingStorage, MemoryJournal]:
    """Drive a sweep, crash once before a write, go on with a new ledger; whether there was a crash at all."""
    storage, journal = CrashingStorage(), MemoryJournal()
    storage.before_write = journal.before_write = Countdown(writes)
    try:
        drive(open_ledger(asked, storage, journal), work)
        return False, storage, journal
    except Crash:
        storage.before_write = journal.before_write = Countdown()
        drive(open_ledger(asked, storage, journal), work)
        return True, storage, journal


def some_fail(task: Task) -> Iterator[Report]:
    """Trial 1 diverges after an epoch; trial 2 fails on its first attempt, and would not on another."""
    said = reports(task)
    if task.number == 1:
        yield next(said)
        yield failed("diverged")
    if task.number == 2 and task.attempt == 1:
        yield failed("out_of_memory")
    yield from said


@pytest.mark.parametrize("pruner", [{"name": "none"}, HALVING], ids=["none", "halving"])
def test_crash_before_any_write_leaves_no_trace_in_the_final_rows(pruner: dict[str, Any]) -> None:
    asked = spec(budget={"trials": 5}, training={"epochs": 4}, pruner=pruner)
    _, undisturbed, journal = crash_after(10**9, asked, reports)
    crashed = True
    for writes in itertools.count():
        crashed, storage, written = crash_after(writes, asked, reports)
        if not crashed:
            break
        assert [*map(essence, rows(storage))] == [*map(essence, rows(undisturbed))], f"after {writes} writes"
        assert written.epochs.keys() == journal.epochs.keys()
        assert storage.get_study_user_attrs(0) == undisturbed.get_study_user_attrs(0)
        assert storage.get_study_system_attrs(0) == undisturbed.get_study_system_attrs(0)
    assert writes > 80


def test_crash_before_any_write_never_revives_a_failed_trial() -> None:
    for writes in itertools.count():
        crashed, storage, _ = crash_after(writes, spec(budget={"trials": 4}), some_fail)
        if not crashed:
            break
        diverged, other = rows(storage)[1:3]
        assert diverged.state == TrialState.FAIL
        assert diverged.user_attrs["failure_class"] == "diverged"
        if other.state == TrialState.COMPLETE:  # only if nothing said yet that it had failed
            assert "failure_class" not in other.user_attrs
        else:
            assert other.user_attrs["failure_message"] == "no words"


def test_trial_lost_too_often_fails_and_the_others_go_on(storage: BaseStorage) -> None:
    asked = spec(retry={"max_failures": 2}, budget={"trials": 3})
    journal = MemoryJournal()
    ledger = open_ledger(asked, storage, journal)
    attempts: Counter[int] = Counter()
    while (task := ledger.next_task()) is not None:
        attempts[task.number] += 1
        if task.number == 0:
            ledger.lost(task, "killed by nobody we know")
        else:
            [ledger.record(task, said) for said in reports(task)]
    assert attempts == {0: 3, 1: 1, 2: 1}
    hopeless = rows(storage)[0]
    assert hopeless.state == TrialState.FAIL
    assert hopeless.user_attrs["failure_class"] == "infrastructure"
    assert "3 attempts" in hopeless.user_attrs["failure_message"]
    assert "killed by nobody we know" in hopeless.user_attrs["failure_message"]
    assert [kind for kind, _ in journal.events].count("trial_lost") == 2
    assert ledger.outcome()[0] == "succeed"


def test_trial_that_reports_trouble_around_it_is_tried_again() -> None:
    storage = InMemoryStorage()
    ledger = open_ledger(spec(budget={"trials": 1}), storage, MemoryJournal())
    first = ledger.next_task()
    assert first is not None
    assert not ledger.record(first, failed("infrastructure"))
    drive(ledger)
    assert states(storage) == [TrialState.COMPLETE]
    assert rows(storage)[0].user_attrs["attempt"] == 2


PACKED = {"resources": {"gpus": 0.25}, "budget": {"trials": 3}}


def test_trial_too_large_for_its_part_of_a_gpu_is_tried_again_once_with_two(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(**PACKED), storage, journal)
    given: list[tuple[int, int, float]] = []

    def work(task: Task) -> Iterator[Report]:
        given.append((task.number, task.attempt, task.gpu_share))
        full = failed("out_of_memory", "CUDA out of memory")
        # The first fits the second time, the second never does.
        return iter([full]) if task.number == 1 or given[-1][:2] == (0, 1) else reports(task)

    drive(ledger, work)
    assert given == [(0, 1, 0.25), (0, 2, 0.5), (1, 1, 0.25), (1, 2, 0.5), (2, 1, 0.25)]
    assert states(storage) == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert rows(storage)[1].user_attrs["failure_class"] == "out_of_memory"
    lost = [told for kind, told in journal.events if kind == "trial_lost"]
    words = "CUDA out of memory; it is tried again with 0.5 of a GPU"
    assert [(told["number"], told["message"]) for told in lost] == [(0, words), (1, words)]


@pytest.mark.parametrize("resources", [{"gpus": 1}, {"gpus": 0}])
def test_trial_that_has_all_there_is_is_not_tried_again(
    resources: dict[str, Any], storage: BaseStorage
) -> None:
    ledger = open_ledger(spec(resources=resources, budget={"trials": 1}), storage, MemoryJournal())
    drive(ledger, lambda task: iter([failed("out_of_memory")]))
    assert rows(storage)[0].user_attrs["attempt"] == 1


def test_trial_that_was_too_large_for_the_machine_gets_no_more_of_a_gpu(storage: BaseStorage) -> None:
    ledger = open_ledger(spec(resources={"gpus": 0.25}, budget={"trials": 1}), storage, MemoryJournal())
    words = Failure("out_of_memory", "can't allocate memory", of_gpu=False)
    drive(ledger, lambda task: iter([Report(epoch=None, finished=True, failure=words)]))
    (row,) = rows(storage)
    assert (row.state, row.user_attrs["attempt"]) == (TrialState.FAIL, 1)


def test_two_parts_of_a_gpu_stay_two_after_a_crash_anywhere() -> None:
    def work(task: Task) -> Iterator[Report]:
        return iter([failed("out_of_memory")]) if task.gpu_share < 0.5 else reports(task)

    for writes in itertools.count():
        crashed, storage, _ = crash_after(writes, spec(**PACKED), work)
        attempts = [row.user_attrs["attempt"] for row in rows(storage)]
        assert set(states(storage)) == {TrialState.COMPLETE}
        assert all(attempt >= 2 for attempt in attempts)
        if not crashed:
            break
        assert sum(attempts) <= 7, "a crash loses one attempt at most"


def test_larger_trials_count_for_what_they_take() -> None:
    ledger = open_ledger(spec(resources={"gpus": 0.25}), InMemoryStorage(), MemoryJournal())
    ledger.share([Node(8, 1)])
    first, second = (taken(ledger) for _ in range(2))
    ledger.record(first, failed("out_of_memory"))
    assert (taken(ledger).number, ledger.is_full) == (first.number, False)
    third = taken(ledger)
    assert ledger.is_full, "2 + 1 + 1 quarters"
    ledger.record(third, failed("out_of_memory"))
    assert ledger.is_full, "which two quarters are not free for"
    [ledger.record(second, said) for said in reports(second)]
    assert taken(ledger).number == third.number


def test_a_larger_trial_begins_also_where_less_is_ones_share() -> None:
    ledger = open_ledger(spec(resources={"gpus": 0.5}), InMemoryStorage(), MemoryJournal())
    ledger.share([Node(1, 1)])
    ledger.record(taken(ledger), failed("out_of_memory"))
    assert taken(ledger).gpu_share == 1
    assert ledger.is_full


def test_a_larger_trial_takes_one_place_where_a_gpu_has_only_one() -> None:
    ledger = open_ledger(spec(resources={"gpus": 0.6}), InMemoryStorage(), MemoryJournal())
    ledger.share([Node(8, 2)])
    ledger.record(taken(ledger), failed("out_of_memory"))
    assert (taken(ledger).gpu_share, ledger.is_full) == (1.0, False), "the other GPU has room"
    taken(ledger)
    assert ledger.is_full


@pytest.mark.parametrize("others_wants", [0, 10])
def test_a_larger_trial_that_is_the_only_one_left_runs_to_its_end(others_wants: int) -> None:
    """Its sweep could make use of one place, or has no more beside another sweep, and it takes two."""

    class Beside(MemoryJournal):
        def claims(self, wants: int) -> Sequence[Claim]:
            halves = Resources(gpus=0.5)
            return [Claim(SWEEP, 0, 0, halves, wants), Claim("another", 0, 1, halves, others_wants)]

    storage, journal = InMemoryStorage(), Beside()
    ledger = open_ledger(spec(resources={"gpus": 0.5}, budget={"trials": 1}), storage, journal)
    ledger.share([Node(8, 1)])
    ledger.record(taken(ledger), failed("out_of_memory"))
    again = taken(ledger)
    for said in reports(again):
        ledger.share([Node(8, 1)])
        assert ledger.record(again, said) or said.finished, "it would be parked and begun for ever"
    assert states(storage) == [TrialState.COMPLETE]


@pytest.mark.parametrize("failure_class", ["diverged", "out_of_memory", "user_error"])
def test_trials_own_failure_ends_it_at_once_and_no_other(failure_class: str, storage: BaseStorage) -> None:
    ledger = open_ledger(spec(), storage, MemoryJournal())
    drive(ledger, lambda task: iter([failed(failure_class, "why")]) if task.number == 4 else reports(task))
    assert Counter(states(storage)) == {TrialState.COMPLETE: 5, TrialState.FAIL: 1}
    row = rows(storage)[4]
    assert row.user_attrs["attempt"] == 1
    assert (row.user_attrs["failure_class"], row.user_attrs["failure_message"]) == (failure_class, "why")


def test_sweep_whose_trials_all_failed_has_failed(storage: BaseStorage) -> None:
    ledger = open_ledger(spec(), storage, MemoryJournal())
    drive(ledger, lambda task: iter([failed("diverged")]))
    state, reason = ledger.outcome()
    assert state == "fail"
    assert reason is not None
    assert "none of the 6 trials completed" in reason


def test_fenced_driver_writes_nothing(any_storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), any_storage, journal)
    task = ledger.next_task()
    assert task is not None
    before = [essence(row) for row in rows(any_storage)]
    journal.fenced = True
    late: list[Callable[[], Any]] = [
        ledger.next_task,
        lambda: ledger.record(task, report(task, 1)),
        lambda: ledger.record(task, failed("diverged")),
        lambda: ledger.lost(task, "killed"),
    ]
    for write in late:
        with pytest.raises(Fenced):
            write()
    assert [essence(row) for row in rows(any_storage)] == before


def test_driver_that_is_fenced_from_the_start_makes_no_study(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    journal.fenced = True
    with pytest.raises(Fenced):
        open_ledger(spec(), storage, journal)
    with pytest.raises(KeyError):
        rows(storage)


# Pruning.


def run_side_by_side(asked: SweepSpec, losses: dict[int, float]) -> dict[int, TrialState]:
    """All trials at once, epoch by epoch in the order of their numbers; each keeps one loss."""
    storage = InMemoryStorage()
    ledger = open_ledger(asked, storage, MemoryJournal())
    running = {task.number: task for task in iter(ledger.next_task, None)}
    for epoch in range(1, asked.training.epochs + 1):
        for number, task in list(running.items()):
            said = report(task, epoch)
            if not ledger.record(task, with_loss(said, losses[number])):
                del running[number]
    return dict(enumerate(states(storage)))


def test_arm_is_never_pruned_for_the_other_arms_sake() -> None:
    asked = spec(pruner=HALVING, training={"epochs": 8}, budget={"trials": 8})
    ahead = {number: 1.0 + number / 100 if number % 2 else 9.0 + number / 100 for number in range(8)}
    level = {number: 1.0 + number / 100 for number in range(8)}
    assert run_side_by_side(asked, ahead) == run_side_by_side(asked, level)


def test_worst_of_an_arm_is_pruned_and_its_best_never_is() -> None:
    asked = spec(pruner=HALVING, training={"epochs": 8}, budget={"trials": 8})
    ended = run_side_by_side(asked, {number: 2.0 + number / 10 for number in range(8)})
    assert ended[0] == ended[1] == TrialState.COMPLETE
    assert ended[6] == ended[7] == TrialState.PRUNED


def test_trial_that_passed_a_rung_stays_passed_when_its_worker_dies() -> None:
    storage = InMemoryStorage()
    asked = spec(pruner=HALVING, arms={"fd": {}}, training={"epochs": 4}, budget={"trials": 2})
    ledger = open_ledger(asked, storage, MemoryJournal())
    first, second = ledger.next_task(), ledger.next_task()
    assert first is not None
    assert second is not None
    assert ledger.record(first, with_loss(report(first, 1), 3.0)), "the first at a rung passes"
    assert ledger.record(second, with_loss(report(second, 1), 2.0))
    ledger.lost(first, "killed")
    again = ledger.next_task()
    assert again is not None
    assert (again.number, again.recorded_epochs) == (first.number, 1)
    assert ledger.record(again, with_loss(report(again, 1), 3.0)), "and is not judged again by a better one"
    assert ledger.record(second, with_loss(report(second, 2), 2.0))
    assert not ledger.record(again, with_loss(report(again, 2), 3.0)), "the next rung is a new question"


def test_pruned_trial_keeps_its_last_value() -> None:
    storage = InMemoryStorage()
    drive(open_ledger(spec(pruner=HALVING, budget={"trials": 8}), storage, MemoryJournal()))
    pruned = [row for row in rows(storage) if row.state == TrialState.PRUNED]
    assert pruned
    for row in pruned:
        assert row.last_step is not None
        assert row.value == row.intermediate_values[row.last_step]


def test_no_trial_is_pruned_at_its_last_epoch() -> None:
    asked = spec(pruner={**HALVING, "min_epochs": 3}, budget={"trials": 8})
    ended = run_side_by_side(asked, {number: 2.0 + number / 10 for number in range(8)})
    assert set(ended.values()) == {TrialState.COMPLETE}


@given(
    epochs=st.integers(1, 2000),
    min_epochs=st.integers(1, 40),
    factor=st.integers(2, 5),
)
def test_rungs_are_epochs_that_optuna_hears_of_and_never_the_last(
    epochs: int, min_epochs: int, factor: int
) -> None:
    rungs = rung_epochs(min_epochs, factor, epochs)
    assert rungs <= intermediate_epochs(epochs) - {epochs}
    assert all(rung >= min_epochs for rung in rungs)
    if min_epochs < epochs <= MOST_INTERMEDIATE_VALUES:
        assert min(rungs) == min_epochs


# What Optuna is told.


@given(st.integers(1, 100_000))
def test_optuna_hears_of_at_most_fifty_epochs_the_last_always_among_them(epochs: int) -> None:
    heard = intermediate_epochs(epochs)
    assert len(heard) <= MOST_INTERMEDIATE_VALUES
    assert {1, epochs} <= heard <= set(range(1, epochs + 1))


def test_trial_of_500_epochs_leaves_at_most_fifty_values_and_a_whole_curve() -> None:
    storage, journal = InMemoryStorage(), MemoryJournal()
    drive(open_ledger(spec(training={"epochs": 500}, budget={"trials": 1}), storage, journal))
    assert len(rows(storage)[0].intermediate_values) <= MOST_INTERMEDIATE_VALUES
    assert 500 in rows(storage)[0].intermediate_values
    assert len(journal.epochs) == 500


def test_loss_too_large_for_a_perplexity_is_an_infinite_objective(any_storage: BaseStorage) -> None:
    ledger = open_ledger(spec(budget={"trials": 1}), any_storage, MemoryJournal())
    task = ledger.next_task()
    assert task is not None
    said = report(task, 3)
    assert said.epoch is not None
    huge = {**said.epoch, "valid_loss": 1e6}
    assert not ledger.record(task, replace(said, epoch=huge, best_epoch=3, best_valid_loss=1e6))
    assert rows(any_storage)[0].state == TrialState.COMPLETE
    assert rows(any_storage)[0].value == math.inf


def test_rows_of_a_cancelled_sweep_say_so_and_ended_ones_stay_as_they_are(any_storage: BaseStorage) -> None:
    ledger = open_ledger(spec(), any_storage, MemoryJournal())
    done = ledger.next_task()
    ledger.next_task()
    assert done is not None
    [ledger.record(done, said) for said in reports(done)]
    close_open_trials(SWEEP, any_storage, Failure("cancelled", "the sweep was cancelled"))
    close_open_trials(SWEEP, any_storage, Failure("infrastructure", "twice"))
    assert states(any_storage) == [TrialState.COMPLETE, TrialState.FAIL]
    assert "failure_class" not in rows(any_storage)[0].user_attrs
    assert rows(any_storage)[1].user_attrs["failure_class"] == "cancelled"


def test_to_close_the_trials_of_a_sweep_without_a_study_is_harmless(storage: BaseStorage) -> None:
    close_open_trials("s-never-was", storage, Failure("cancelled", "the sweep was cancelled"))


# Wishes and limits.


def test_paused_trials_stay_open_and_the_next_driver_goes_on_with_them(any_storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), any_storage, journal)
    first, second = ledger.next_task(), ledger.next_task()
    assert first is not None
    assert second is not None
    assert ledger.record(first, report(first, 1))
    wish(journal, state="pausing")
    assert ledger.next_task() is None
    assert not ledger.record(first, report(first, 2)), "its state is saved: it need not go on"
    assert not ledger.record(second, Report(epoch=None))
    assert ledger.exhausted
    assert not ledger.done
    assert states(any_storage) == [TrialState.RUNNING] * 2
    wish(journal, state="running")
    drive(open_ledger(spec(), any_storage, journal))
    assert states(any_storage) == [TrialState.COMPLETE] * 6
    assert [row.user_attrs["attempt"] for row in rows(any_storage)] == [2, 2, 1, 1, 1, 1]


def test_trial_that_comes_to_its_end_while_the_sweep_is_paused_has_ended(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(budget={"trials": 1}), storage, journal)
    task = ledger.next_task()
    assert task is not None
    wish(journal, state="pausing")
    assert not ledger.record(task, report(task, 3))
    assert states(storage) == [TrialState.COMPLETE]
    assert ledger.done


def test_pause_that_is_taken_back_costs_the_trials_an_attempt_and_nothing_else(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    wish(journal, state="pausing")
    assert not ledger.record(task, report(task, 1))
    wish(journal, state="running")
    drive(ledger)
    assert states(storage) == [TrialState.COMPLETE] * 6
    assert rows(storage)[0].user_attrs["attempt"] == 2


def test_stopped_sweep_begins_no_trial_and_ends_with_those_that_run(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    wish(journal, state="stopping")
    assert ledger.next_task() is None
    for said in reports(task):
        ledger.record(task, said)
    assert ledger.done
    assert ledger.outcome() == ("succeed", "stopped on request after 1 of 6 trials")


def test_budget_that_grows_while_the_sweep_runs_is_used_up(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    drive(ledger)
    assert ledger.done
    wish(journal, budget=Budget(trials=8))
    drive(ledger)
    assert states(storage) == [TrialState.COMPLETE] * 8


def in_parallel(ledger: StudyLedger, workers: int, until: Callable[[], bool]) -> None:
    """Trials that run side by side and report in turn, until the driver would end them."""
    running: dict[int, tuple[Task, Iterator[Report]]] = {}
    while not until():
        while len(running) < workers and (task := ledger.next_task()) is not None:
            running[task.number] = task, reports(task)
        if not running:
            return
        for number, (task, said) in list(running.items()):
            if not ledger.record(task, next(said)):
                del running[number]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("limit", ["wall_s", "target", "max_failed"])
def test_no_row_is_open_once_a_limit_is_reached_at_any_parallelism(
    storage: BaseStorage, limit: str, workers: int
) -> None:
    of_limit = {"wall_s": 100.0, "target": perplexity(valid_loss(2, 2)), "max_failed": 0}[limit]
    asked = spec(budget={"trials": 50, limit: of_limit})
    journal = MemoryJournal()
    ledger = open_ledger(asked, storage, journal)
    in_parallel(ledger, workers, lambda: ledger.limit is not None or len(rows(storage)) > 6)
    if limit == "wall_s":
        wish(journal, running_s=100.5)
        ledger.heed(journal.beat())
    elif limit == "max_failed":
        task = ledger.next_task()
        assert task is not None
        ledger.record(task, failed("user_error"))
    assert ledger.limit is not None
    begun = len(rows(storage))
    assert ledger.next_task() is None
    ledger.end_open_trials()
    assert ledger.done
    assert all(state.is_finished() for state in states(storage))
    assert len(rows(storage)) == begun
    verb, words = ledger.outcome()
    assert verb == ("fail" if limit == "max_failed" else "succeed")
    assert words is not None
    assert f"budget.{limit}" in words
    ended = [row for row in rows(storage) if row.user_attrs.get("failure_class") == "cancelled"]
    assert all(f"budget.{limit}" in row.user_attrs["failure_message"] for row in ended)


def test_trial_that_reached_the_target_is_complete_whoever_writes_that_down(storage: BaseStorage) -> None:
    asked = spec(budget={"trials": 6, "target": perplexity(valid_loss(0, 2))})
    ledger = open_ledger(asked, storage, MemoryJournal())
    first, second = ledger.next_task(), ledger.next_task()
    assert first is not None
    assert second is not None
    ledger.record(second, report(second, 1))
    for epoch in (1, 2):
        ledger.record(first, report(first, epoch))
    again = open_ledger(asked, storage, MemoryJournal())  # the driver died before it could end them
    assert again.limit is not None
    again.end_open_trials()
    assert states(storage) == [TrialState.COMPLETE, TrialState.FAIL]
    assert rows(storage)[0].value == perplexity(valid_loss(0, 2))
    assert again.outcome()[0] == "succeed"


def test_failures_alike_in_a_row_pause_the_sweep_with_their_words(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(retry={"identical_failures": 2}), storage, journal)
    trace = "Traceback: line 1 of trial {}\nKeyError: 'weights'"
    done = ledger.next_task()
    assert done is not None
    for said in reports(done):
        ledger.record(done, said)
    for _ in range(2):
        assert journal.orders.state == "running"
        task = ledger.next_task()
        assert task is not None
        ledger.record(task, failed("user_error", trace.format(task.number)))
    assert journal.orders.state == "pausing"
    _, detail = next(event for event in journal.events if event[0] == "pause_requested")
    assert detail["reason"].startswith("2 trials in a row failed alike (user_error)")
    assert "KeyError: 'weights'" in detail["reason"]


def test_failures_alike_but_for_the_file_of_the_trial_are_alike(storage: BaseStorage) -> None:
    """As of a store that can no longer be written."""
    journal = MemoryJournal()
    ledger = open_ledger(spec(retry={"identical_failures": 2}), storage, journal)
    for _ in range(2):
        assert journal.orders.state == "running"
        task = ledger.next_task()
        assert task is not None
        error = OSError(30, "Read-only file system", f"/store/t{task.number:05d}/best.tar.part")
        ledger.record(task, failed("user_error", f"Traceback:\nOSError: {error}"))
    assert journal.orders.state == "pausing"


@pytest.mark.parametrize(
    ("classes", "messages"),
    [
        (["diverged"] * 3, ["the loss is nan"] * 3),
        (["user_error"] * 3, ["one", "two", "one"]),
        (["user_error", "out_of_memory", "user_error"], ["one"] * 3),
        (["user_error", None, "user_error"], ["one", None, "one"]),
    ],
)
def test_failures_that_are_not_alike_pause_nothing(
    storage: BaseStorage, classes: list[str | None], messages: list[str | None]
) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(retry={"identical_failures": 2}), storage, journal)
    for failure_class, message in zip(classes, messages, strict=True):
        task = ledger.next_task()
        assert task is not None
        for said in reports(task) if failure_class is None else [failed(failure_class, str(message))]:
            ledger.record(task, said)
    assert journal.orders.state == "running"


# A database that goes away.


class LeavingJournal(MemoryJournal):
    """Answers again after some time; or does what it is asked, and does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.away = 0
        self.done_unanswered = False

    def record_epoch(self, number: int, attempt: int, epoch: Any) -> None:
        if self.done_unanswered:
            super().record_epoch(number, attempt, epoch)
        self._answer()
        super().record_epoch(number, attempt, epoch)

    def record_event(self, kind: str, **detail: Any) -> None:
        self._answer()
        super().record_event(kind, **detail)

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise JournalAway("nobody listens")


@pytest.mark.parametrize("done_unanswered", [False, True])
@pytest.mark.parametrize("away", [1, 3])
def test_driver_waits_for_its_database_and_loses_and_doubles_nothing(
    storage: BaseStorage, away: int, done_unanswered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(trials.ledger.time, "sleep", slept.append)
    journal = LeavingJournal()
    journal.done_unanswered = done_unanswered
    ledger = open_ledger(spec(), storage, journal)

    def unreliable(task: Task) -> Iterator[Report]:
        for said in reports(task):
            journal.away = away
            yield said
        journal.away = away
        if task.attempt == 1 and task.number == 3:
            yield failed("infrastructure")

    drive(ledger, unreliable)
    assert states(storage) == [TrialState.COMPLETE] * 6
    assert set(journal.epochs) == set(itertools.product(range(6), (1, 2, 3)))
    assert slept
    assert Counter(kind for kind, _ in journal.events)["trial_finished"] == 6


def test_row_that_was_made_without_an_answer_is_used_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unanswering(InMemoryStorage):
        away = True

        def create_new_trial(self, *args: Any, **kwargs: Any) -> int:
            made = super().create_new_trial(*args, **kwargs)
            if self.away:
                self.away = False
                raise StorageInternalError("the answer was lost")
            return made

    monkeypatch.setattr(trials.ledger.time, "sleep", lambda seconds: None)
    storage = Unanswering()
    drive(open_ledger(spec(), storage, MemoryJournal()))
    assert states(storage) == [TrialState.COMPLETE] * 6


def test_driver_that_has_waited_for_its_database_long_enough_gives_up(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(trials.ledger.time, "sleep", slept.append)
    journal = LeavingJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    journal.away = 10**6
    with pytest.raises(JournalAway):
        ledger.record(task, report(task, 1))
    assert DATABASE_PATIENCE_S <= sum(slept) < DATABASE_PATIENCE_S + 10


# Failed trials, once more.


def test_failed_trials_are_open_again_under_their_numbers_and_the_others_as_they_were(
    any_storage: BaseStorage,
) -> None:
    journal = MemoryJournal()

    def work(task: Task) -> Iterator[Report]:
        if task.number == 1:
            return iter([report(task, 1), failed("out_of_memory", "no memory")])
        return iter([failed("diverged")]) if task.number == 2 else reports(task)

    drive(open_ledger(spec(), any_storage, journal), work)
    before = rows(any_storage)
    for _ in range(2):  # a driver may have died in the middle of it
        reopen_failed(SWEEP, f"{SWEEP}~2", spec(), any_storage, [1, 3])
    delete_study(SWEEP, any_storage)
    assert studies_of(SWEEP, any_storage) == [f"{SWEEP}~2"]
    ledger = StudyLedger(
        spec(), SWEEP, any_storage, journal, CheckpointStore("memory://ledger"), f"{SWEEP}~2"
    )
    tasks: list[Task] = []

    def noted(task: Task) -> Iterator[Report]:
        tasks.append(task)
        return reports(task)

    drive(ledger, noted)
    assert [(task.number, task.attempt, task.recorded_epochs) for task in tasks] == [(1, 2, 1)]
    after = optuna.load_study(study_name=f"{SWEEP}~2", storage=any_storage).get_trials()
    assert after[1].state == TrialState.COMPLETE
    assert "failure_class" not in after[1].user_attrs
    for old, new in zip(before, after, strict=True):
        assert (old.number, old.params, old.distributions) == (new.number, new.params, new.distributions)
        if new.number != 1:
            assert (old.state, old.values, old.user_attrs) == (new.state, new.values, new.user_attrs)
            assert old.intermediate_values == new.intermediate_values


def test_sampler_that_fails_ends_that_trial_with_a_traceback_and_pauses_the_sweep_in_the_end(
    storage: BaseStorage,
) -> None:
    """The values of a row of an earlier driver do not belong to this space, nor then can any other's."""
    journal = MemoryJournal()
    assert open_ledger(spec(), storage, journal).next_task() is not None
    other = spec(space={"kappa": {"type": "choice", "values": [0.1, 0.2]}})
    drive(open_ledger(other, storage, journal))
    assert states(storage) == [TrialState.FAIL] * 3
    for row in rows(storage):
        assert row.user_attrs["failure_class"] == "user_error"
        assert "Traceback" in row.user_attrs["failure_message"]
    assert journal.orders.state == "pausing"


def test_full_disk_pauses_the_sweep_and_fails_no_trial(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    task = ledger.next_task()
    assert task is not None
    assert ledger.record(task, report(task, 1))
    assert not ledger.record(task, failed("disk_full", "OSError: no space left on device"))
    assert journal.orders.state == "pausing"
    assert any("no space left on device" in str(detail) for _, detail in journal.events)
    assert states(storage) == [TrialState.RUNNING]
    wish(journal, state="running")
    drive(open_ledger(spec(), storage, journal))
    assert states(storage) == [TrialState.COMPLETE] * 6


def test_sweep_that_is_paused_before_or_between_trials_is_not_over(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(), storage, journal)
    wish(journal, state="pausing")
    assert ledger.next_task() is None
    assert not ledger.done
    wish(journal, state="running")
    task = ledger.next_task()
    assert task is not None
    for said in reports(task):
        ledger.record(task, said)
    wish(journal, state="pausing")
    assert ledger.next_task() is None
    assert not ledger.done


def test_id_of_a_removed_study_is_never_given_to_another_one(tmp_path: Path) -> None:
    """Another process's cache may still have the old trials under it; SQLite would give it again."""
    backends = [open_storage(database_of(tmp_path)) for _ in range(2)]
    storage, other = map(get_storage, backends)
    used = set()
    for name in ("s1", "s2", "s3"):
        drive(StudyLedger(spec(), name, storage, sixfold(), CheckpointStore("memory://ledger")))
        assert len(find_rows(name, other)) == 6
        study_id = storage.get_study_id_from_name(name)
        assert study_id not in used
        used.add(study_id)
        delete_study(name, storage)
    open_study(spec(), "s4", storage).ask()
    (row,) = find_rows("s4", other)
    assert row.state == TrialState.RUNNING
    assert len(storage.get_all_studies()) == 2, "one marker, and no more"
    for backend in backends:
        backend.remove_session()
        backend.engine.dispose()


def sixfold() -> MemoryJournal:
    journal = MemoryJournal()
    journal.orders = replace(journal.orders, budget=Budget(trials=6))
    return journal


def test_trial_that_reaches_the_target_is_complete_at_once_and_what_comes_after_changes_nothing(
    storage: BaseStorage,
) -> None:
    ledger = open_ledger(
        spec(budget={"trials": 6, "target": perplexity(valid_loss(0, 2))}), storage, MemoryJournal()
    )
    task = ledger.next_task()
    assert task is not None
    assert ledger.record(task, report(task, 1))
    assert not ledger.record(task, report(task, 2))
    assert states(storage) == [TrialState.COMPLETE]
    assert not ledger.record(task, failed("user_error"))
    assert ledger.outcome()[0] == "succeed"


def test_limit_that_was_raised_before_it_was_enforced_ends_nothing(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(budget={"trials": 6, "wall_s": 10}), storage, journal)
    assert ledger.next_task() is not None
    wish(journal, running_s=11.0)
    ledger.heed(journal.beat())
    assert ledger.limit is not None
    wish(journal, budget=Budget(trials=6, wall_s=20))
    assert not ledger.end_open_trials()
    assert states(storage) == [TrialState.RUNNING]
    assert ledger.next_task() is not None


def test_full_disk_fails_the_trials_of_a_sweep_that_is_being_stopped(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(retry={"max_failures": 1}), storage, journal)
    assert (first := ledger.next_task()) is not None
    wish(journal, state="stopping")
    assert not ledger.record(first, failed("disk_full"))
    assert (second := ledger.next_task()) is not None
    assert not ledger.record(second, failed("disk_full"))
    assert ledger.done
    assert rows(storage)[0].user_attrs["failure_class"] == "disk_full"


def test_many_trials_whose_values_make_no_sense_each_fail(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trial: Any, name: str, choices: Any) -> Any:
        raise ValueError(f"no value for {name} of trial {trial.number}")

    monkeypatch.setattr(trials.ledger, "suggest", fail)
    ledger = open_ledger(spec(budget={"trials": 1500}), storage, MemoryJournal())
    assert ledger.next_task() is None
    assert len(rows(storage)) == 1500
    assert ledger.done


class AbsentStore(CheckpointStore):
    """Its network is down."""

    def numbers_with_last(self, sweep_id: str) -> list[int]:
        raise ConnectionError("nobody there")

    def discard_last(self, sweep_id: str, number: int) -> None:
        raise ConnectionError("nobody there")


def test_store_that_is_away_keeps_no_trial_from_its_end(storage: BaseStorage) -> None:
    store, journal = AbsentStore("memory://absent"), sixfold()
    for _ in range(2):
        drive(StudyLedger(spec(), SWEEP, storage, journal, store))
    assert states(storage) == [TrialState.COMPLETE] * 6


class TellingJournal(MemoryJournal):
    """Does not answer when it is first told that a trial has finished."""

    away = 1

    def record_event(self, kind: str, **detail: Any) -> None:
        if kind == "trial_finished" and self.away:
            self.away -= 1
            raise JournalAway("it restarts")
        super().record_event(kind, **detail)


class UnansweringStorage(InMemoryStorage):
    """Ends a trial, and does not say so."""

    away = 1

    def set_trial_state_values(self, trial_id: int, state: Any, values: Any = None) -> bool:
        done = super().set_trial_state_values(trial_id, state, values)
        if state.is_finished() and self.away:
            self.away -= 1
            raise StorageInternalError("the connection was lost")
        return done


@pytest.mark.parametrize("what", ["finished", "failed", "limit", "sampler"])
@pytest.mark.parametrize("unanswered", ["event", "end"])
def test_end_that_was_written_and_not_answered_is_taken_note_of(
    what: str, unanswered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.ledger, "_pauses", lambda total: iter([0.0] * 3))
    storage = UnansweringStorage() if unanswered == "end" else InMemoryStorage()
    journal = MemoryJournal() if unanswered == "end" else TellingJournal()
    never = {"identical_failures": None}
    asked = spec(budget={"trials": 4, "wall_s": 100}, training={"epochs": 1}, retry=never)
    ledger = open_ledger(asked, storage, journal)
    if what == "sampler":
        monkeypatch.setattr(trials.ledger, "suggest", refuse)
        assert ledger.next_task() is None
        assert states(storage) == [TrialState.FAIL] * 4
        return
    tasks = [ledger.next_task() for _ in range(3)]
    first = tasks[0]
    assert first is not None
    if what == "limit":
        wish(journal, running_s=101.0)
        ledger.heed(journal.beat())
        assert ledger.end_open_trials()
        assert states(storage) == [TrialState.FAIL] * 3
        return
    ledger.record(first, report(first, 1) if what == "finished" else failed("user_error"))
    assert states(storage)[0] == (TrialState.COMPLETE if what == "finished" else TrialState.FAIL)
    drive(ledger)
    ends = [told for kind, told in journal.events if kind == "trial_finished" and told["number"] == 0]
    assert [end["state"] for end in ends] == [states(storage)[0].name]


def refuse(*arguments: Any) -> Any:
    raise ValueError("there is no value")


def test_rung_that_a_trial_has_passed_is_not_decided_again_where_optuna_hears_nothing() -> None:
    halving = {"name": "successive_halving", "min_epochs": 20, "reduction_factor": 2}
    asked = spec(
        training={"epochs": 100},
        arms={"fd": {"regularizer": "fraternal"}},
        budget={"trials": 2},
        pruner=halving,
    )
    storage = InMemoryStorage()
    ledger = open_ledger(asked, storage, MemoryJournal())
    first, second = ledger.next_task(), ledger.next_task()
    assert first is not None
    assert second is not None
    rung = min(rung_epochs(20, 2, 100))
    unheard = next(epoch for epoch in range(rung + 1, 100) if epoch not in intermediate_epochs(100))
    for epoch in range(1, rung + 1):
        assert ledger.record(first, with_loss(report_of(first, epoch), 5.0))
    for epoch in range(1, rung + 1):
        assert ledger.record(second, with_loss(report_of(second, epoch), 4.0))
    for epoch in range(rung + 1, unheard + 1):
        assert ledger.record(first, with_loss(report_of(first, epoch), 4.9)), epoch


def report_of(task: Task, epoch: int) -> Report:
    said = report(task, 1)
    assert said.epoch is not None
    return replace(said, epoch={**said.epoch, "epoch": epoch}, finished=False)


def test_limit_that_was_raised_at_the_last_moment_is_none(storage: BaseStorage) -> None:
    journal = MemoryJournal()
    ledger = open_ledger(spec(budget={"trials": 6, "wall_s": 3600}), storage, journal)
    ledger.next_task()
    wish(journal, running_s=3601.0)
    ledger.heed(journal.beat())
    assert ledger.end_open_trials()
    assert ledger.done
    wish(journal, budget=Budget(trials=6, wall_s=7200))
    ledger.refreshed_orders()
    assert not ledger.done, "five trials are to come"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("UPDATE trials SET state = 'ODD'", marks=NO_TYPES),
        "UPDATE trial_user_attributes SET value_json = '{dam'",
        "UPDATE trial_params SET distribution_json = '{dam'",
        "UPDATE trial_params SET distribution_json = '{}'",
        pytest.param("UPDATE trials SET datetime_start = 'yesterday'", marks=NO_TYPES),
    ],
)
def test_damaged_rows_are_told_of_as_such_and_hide_no_other_study(
    optunas: RDBStorage, tmp_path: Path, damage: str
) -> None:
    written = open_storage(database_of(tmp_path))
    drive(open_ledger(spec(), written, MemoryJournal()))
    open_study(spec(), "s2", written)
    with written.engine.begin() as connection:
        connection.execute(text(damage))
        connection.execute(text("UPDATE study_user_attributes SET value_json = '{dam' WHERE study_id = 1"))
    written.remove_session()
    written.engine.dispose()
    storage = get_storage(optunas)
    with pytest.raises(DamagedRows):
        find_rows(SWEEP, storage)
    assert find_rows("s2", storage) == []
    assert studies_of("s2", storage) == ["s2"]
    delete_study("s2", storage)
    assert studies_of("s2", storage) == []
    assert studies_of(SWEEP, storage) == [SWEEP]


@pytest.fixture
def stored(optunas: RDBStorage) -> BaseStorage:
    return get_storage(optunas)


def test_a_report_asks_the_database_for_no_other_trial(stored: BaseStorage) -> None:
    """A sweep on a hundred GPUs would read a hundred rows, with all that is theirs, an epoch."""
    ledger = open_ledger(spec(budget={"trials": 30}), stored, MemoryJournal())
    first = ledger.next_task()
    assert first is not None
    ledger.record(first, report(first, 1))
    alone = _statements_of(stored, lambda: ledger.record(first, report(first, 2)))
    second, *_ = [ledger.next_task() for _ in range(20)]
    assert second is not None
    ledger.record(second, report(second, 1))
    beside = _statements_of(stored, lambda: ledger.record(second, report(second, 2)))
    assert len(beside) == len(alone)
    assert not [words for words in beside if "trials.study_id =" in words]


def test_what_a_report_says_of_its_trial_is_one_transaction_and_reads_back(stored: BaseStorage) -> None:
    ledger = open_ledger(spec(), stored, MemoryJournal())
    task = ledger.next_task()
    assert task is not None
    said = _statements_of(stored, lambda: ledger.record(task, report(task, 1)), what="commit")
    assert len(said) == 2, "the attributes, and what the dashboard draws"
    attributes = rows(stored)[0].user_attrs
    told = {
        name: attributes[name] for name in ("best_epoch", "best_valid_loss", "checkpoint_sha256", "device")
    }
    assert told == {
        "best_epoch": 1,
        "best_valid_loss": valid_loss(0, 1),
        "checkpoint_sha256": "sha256 of 0 after 1",
        "device": "cpu",
    }
    assert attributes == ledger._trials[0].user_attrs


def _statements_of(storage: BaseStorage, do: Callable[[], Any], what: str = "statement") -> list[str]:
    """Those that it has the database carry out, or its commits."""
    engine = storage._backend.engine  # type: ignore[attr-defined]  # behind Optuna's cache
    seen: list[str] = []

    if what == "commit":
        event.listen(engine, "commit", lambda connection: seen.append(what))
    else:
        event.listen(engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    do()
    return list(seen)
