"""The laws of samplers that learn: arm by arm, from all that says something, the same after a restart."""

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

import trials.adaptive
from tests.fakes import (
    Countdown,
    Crash,
    CrashingStorage,
    MemoryJournal,
    drive,
    failed,
    open_ledger,
    report,
    rows,
    spec,
    with_loss,
)
from trials.adaptive import MOST_FITTED, Seen, distribution_of, seen_in, suggest_by_cmaes, suggest_by_tpe
from trials.spec import SweepSpec, TrialConfig
from trials.tasks import Report, Task

RANGES = {
    "kappa": {"type": "uniform", "low": 0.0, "high": 0.3},
    "lr": {"type": "log_uniform", "low": 0.1, "high": 100.0},
    "bptt": {"type": "integer", "low": 10, "high": 90},
}
CHOICES = {
    "batch_size": {"type": "choice", "values": [10, 20, 40]},
    "tied": {"type": "choice", "values": [True, False]},
}
GRID = {**CHOICES, "kappa": {"type": "choice", "values": [0.3, 0.2, 0.1]}}
SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {"name": "random"},
    "qmc": {"name": "qmc"},
    "grid": {"name": "grid"},
    "tpe": {"name": "tpe", "startup_trials": 3},
    "gp": {"name": "gp", "startup_trials": 8},
    "cmaes": {"name": "cmaes"},
}
ADAPTIVE = ("tpe", "gp", "cmaes")
FAST = ("tpe", "cmaes")
"""A Gaussian process takes half a second a trial, and differs in nothing but what it suggests."""
PRUNERS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "halving": {"name": "successive_halving", "reduction_factor": 2},
    "hyperband": {"name": "hyperband", "reduction_factor": 2},
    "median": {"name": "median", "startup_trials": 2},
}
ONE_ARM = {"arms": {"fd": {"regularizer": "fraternal"}}}


def searching(name: str, trials: int, epochs: int = 1, **changes: Any) -> SweepSpec:
    space = {"grid": GRID, "cmaes": RANGES}.get(name, {**RANGES, **CHOICES})
    given = {
        "space": space,
        "sampler": SAMPLERS[name],
        "budget": {"trials": trials},
        "training": {"epochs": epochs},
    }
    return spec(**{**given, **changes})


def loss_of(config: TrialConfig) -> float:
    """Smooth, with its least, 4, in the middle of things."""
    away = (
        math.log10(config.training.lr / 10),
        ((config.regularization.kappa or 0) - 0.1) / 0.1,
        (config.training.bptt - 60) / 40,
    )
    return 4 + 0.3 * sum(each**2 for each in away) + 0.15 * away[0] * away[2]


def by_value(task: Task) -> Iterator[Report]:
    """A worker whose curves fall from nearly the same loss to that of the configuration."""
    for epoch in range(max(1, task.recorded_epochs), task.config.training.epochs + 1):
        yield with_loss(report(task, epoch), loss_of(task.config) + 2 / epoch)


def by_value_or_diverging(task: Task) -> Iterator[Report]:
    return iter([failed("diverged")]) if task.config.training.lr > 30 else by_value(task)


def searched(asked: SweepSpec, work: Any = by_value) -> list[FrozenTrial]:
    storage = InMemoryStorage()
    drive(open_ledger(asked, storage, MemoryJournal()), work)
    return rows(storage)


# The arms.


@pytest.mark.parametrize("sampler", FAST)
def test_an_arm_is_searched_as_if_it_were_alone(sampler: str) -> None:
    """Whatever the other arm's trials come to."""
    asked = searching(sampler, 24)

    def other_arm_is_odd(task: Task) -> Iterator[Report]:
        if task.arm == "fd":
            return by_value(task)
        return iter([with_loss(report(task, 1), 9 - loss_of(task.config))])

    both, odd = searched(asked), searched(asked, other_arm_is_odd)
    assert [row.params for row in both[0::2]] == [row.params for row in odd[0::2]]
    assert [row.params for row in both[1::2]] != [row.params for row in odd[1::2]]


@pytest.mark.parametrize("sampler", FAST)
def test_arms_that_do_equally_well_are_searched_alike(sampler: str) -> None:
    found = searched(searching(sampler, 24))
    assert [row.params for row in found[0::2]] == [row.params for row in found[1::2]]


def test_arm_that_fixes_a_parameter_learns_about_the_others() -> None:
    arms = {"free": {"regularizer": "fraternal"}, "fixed": {"regularizer": "fraternal", "kappa": 0.2}}
    found = searched(searching("cmaes", 24, arms=arms))
    assert set(found[0].params) == {"kappa", "lr", "bptt"}
    assert set(found[1].params) == {"lr", "bptt"}
    assert all(row.user_attrs["config"]["regularization"]["kappa"] == 0.2 for row in found[1::2])


# Restarts and parallelism.


@pytest.mark.parametrize("sampler", ["qmc", "grid", "tpe", "cmaes"])
def test_crash_before_any_write_leaves_no_trace_in_what_is_suggested(sampler: str) -> None:
    asked = searching(sampler, 10, **ONE_ARM)
    undisturbed = searched(asked)
    for writes in itertools.count(30, 7):
        storage, journal = CrashingStorage(), MemoryJournal()
        storage.before_write = journal.before_write = Countdown(writes)
        crashed = False
        try:
            drive(open_ledger(asked, storage, journal), by_value)
        except Crash:
            crashed = True
            storage.before_write = journal.before_write = Countdown()
            drive(open_ledger(asked, storage, journal), by_value)
        assert [row.params for row in rows(storage)] == [row.params for row in undisturbed], writes
        if not crashed:
            break
    assert writes > 90


@pytest.mark.parametrize("sampler", FAST)
@pytest.mark.parametrize("begun", [3, 7, 9])
def test_crash_amid_a_suggestion_mixes_it_with_no_other(sampler: str, begun: int) -> None:
    """Though another trial ends before the rest is asked for."""
    asked = searching(sampler, 12, **ONE_ARM)

    def suggested(values: int | None) -> dict[str, Any]:
        """For the trial after so many, the last of which runs; a crash comes once so many values are kept."""
        storage, journal = CrashingStorage(), MemoryJournal()
        ledger = open_ledger(asked, storage, journal)
        for number in range(begun):
            task = ledger.next_task()
            assert task is not None
            for said in by_value(task) if number < begun - 1 else ():
                ledger.record(task, said)
        if values is not None:
            storage.before_write = lambda: crash_at(values, storage)
            with pytest.raises(Crash):
                ledger.next_task()
            storage.before_write = Countdown()
            ledger = open_ledger(asked, storage, journal)
            task = ledger.next_task()
            assert task is not None
            assert task.number == begun - 1
            for said in by_value(task):
                ledger.record(task, said)
        ledger.next_task()
        return rows(storage)[begun].params

    def crash_at(values: int, storage: CrashingStorage) -> None:
        if len(rows(storage)) > begun and len(rows(storage)[begun].params) == values:
            raise Crash

    whole = suggested(None)
    assert [suggested(values) for values in range(1, len(whole))] == [whole] * (len(whole) - 1)


@pytest.mark.parametrize(("sampler", "at_once"), [("tpe", 4), ("cmaes", 4), ("gp", 2)])
def test_trials_that_run_at_once_differ_and_are_the_same_for_the_next_driver(
    sampler: str, at_once: int
) -> None:
    asked = searching(sampler, 9 + at_once, **ONE_ARM)
    storage, journal = InMemoryStorage(), MemoryJournal()
    ledger = open_ledger(asked, storage, journal)
    for _ in range(9):
        task = ledger.next_task()
        assert task is not None
        for said in by_value(task):
            ledger.record(task, said)
    left = [ledger.next_task() for _ in range(at_once)]
    after = [row.params for row in rows(storage)[9:]]
    assert len({tuple(map(str, params.items())) for params in after}) == at_once
    again = open_ledger(asked, storage, journal)
    taken_up = [again.next_task() for _ in range(at_once)]
    assert [task and task.config for task in taken_up] == [task and task.config for task in left]
    drive(again, by_value)
    assert len({tuple(map(str, row.params.items())) for row in rows(storage)}) == 9 + at_once, (
        "none comes twice"
    )


# What is learnt from.


def seen(asked: SweepSpec, found: list[FrozenTrial]) -> list[Seen]:
    space = {name: distribution_of(choices) for name, choices in asked.sampled("fd")}
    return seen_in(found, space, len(found))


def test_a_diverged_trial_is_as_bad_as_the_worst_and_other_failures_are_not_seen() -> None:
    asked = searching("tpe", 6, **ONE_ARM)

    def some_fail(task: Task) -> Iterator[Report]:
        return (
            iter([failed({1: "diverged", 2: "user_error"}[task.number])])
            if task.number in (1, 2)
            else by_value(task)
        )

    found = searched(asked, some_fail)
    losses = [each.loss for each in seen(asked, found)]
    finite = [row.user_attrs["best_valid_loss"] for row in found if row.state == TrialState.COMPLETE]
    assert losses == [finite[0], max(finite), *finite[1:]]


def test_a_pruned_trial_is_seen_with_what_it_might_have_come_to() -> None:
    """Its own loss, less what the complete ones gained after that epoch."""
    asked = searching("tpe", 12, epochs=4, pruner=PRUNERS["halving"], **ONE_ARM)
    found = searched(asked)
    pruned = [row for row in found if row.state == TrialState.PRUNED]
    assert pruned
    by_params = {tuple(each.params.values()): each.loss for each in seen(asked, found)}
    for row in pruned:
        assert row.last_step is not None
        expected = row.user_attrs["best_valid_loss"] - (2 / row.last_step - 2 / 4)
        assert by_params[tuple(row.params.values())] == pytest.approx(expected)


def test_a_trial_that_runs_is_seen_and_the_one_to_be_sampled_is_not() -> None:
    asked = searching("tpe", 6, **ONE_ARM)
    storage = InMemoryStorage()
    ledger = open_ledger(asked, storage, MemoryJournal())
    ledger.next_task()
    ledger.next_task()
    space = {name: distribution_of(choices) for name, choices in asked.sampled("fd")}
    (other,) = seen_in(rows(storage), space, 1)
    assert (other.params, other.loss) == (rows(storage)[0].params, None)


def test_points_come_first_and_are_learnt_from() -> None:
    asked = searching("tpe", 6, **ONE_ARM)
    journal = MemoryJournal()
    point = {"kappa": 0.1, "lr": 10.0, "bptt": 60, "batch_size": 20, "tied": True}
    journal.points = [dict(point)]
    storage = InMemoryStorage()
    drive(open_ledger(asked, storage, journal), by_value)
    assert rows(storage)[0].params == point
    assert seen(asked, rows(storage))[0].params == point


@pytest.mark.parametrize("sampler", FAST)
def test_where_trials_diverge_a_sampler_goes_less_and_less(sampler: str) -> None:
    found = searched(searching(sampler, 30, **ONE_ARM), by_value_or_diverging)
    late = [row.state for row in found[15:]]
    assert late.count(TrialState.FAIL) <= 3, "a third of random ones do"


@pytest.mark.parametrize("error", [ValueError, KeyError, TypeError, AssertionError])
def test_where_no_model_fits_a_trial_is_drawn_at_random(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def singular(*arguments: Any) -> Any:
        raise error("a matrix is singular")

    monkeypatch.setattr(trials.adaptive, "suggest_by_cmaes", singular)
    random = searched(searching("random", 8, space=RANGES, **ONE_ARM))
    assert [row.params for row in searched(searching("cmaes", 8, **ONE_ARM))] == [
        row.params for row in random
    ]


@pytest.mark.parametrize("sampler", ADAPTIVE)
def test_a_choice_of_one_value_is_no_axis(sampler: str, caplog: pytest.LogCaptureFixture) -> None:
    space = {**RANGES, "batch_size": {"type": "choice", "values": [20]}}
    found = searched(searching(sampler, 12, space=space, **ONE_ARM))
    without = searched(searching(sampler, 12, space=RANGES, **ONE_ARM))
    assert [row.params for row in found] == [{**row.params, "batch_size": 20} for row in without]
    assert "no model fits" not in caplog.text


def test_cmaes_learns_from_a_population_at_a_time() -> None:
    space = {
        name: distribution_of(choices) for name, choices in searching("cmaes", 8, **ONE_ARM).sampled("fd")
    }
    told = [Seen({"kappa": 0.3, "lr": 100.0, "bptt": 90}, float(loss)) for loss in range(7)]
    assert suggest_by_cmaes(space, told[:6], 1) == suggest_by_cmaes(space, [], 1)
    assert suggest_by_cmaes(space, told, 1) != suggest_by_cmaes(space, [], 1)


def test_a_gaussian_process_is_fitted_to_the_best_and_the_latest() -> None:
    many = [Seen({}, float(index % 1000)) for index in range(3000)]
    kept = trials.adaptive._fewer(many, MOST_FITTED)
    assert len(kept) <= MOST_FITTED
    assert many[0] in kept
    assert kept[-1] is many[-1]


def test_tpe_is_shown_no_more_trials_however_many_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def counted(trial: Seen, space: Any) -> FrozenTrial:
        shown.append(trial)
        return row_of(trial, space)

    row_of = trials.adaptive._row
    monkeypatch.setattr(trials.adaptive, "_row", counted)
    monkeypatch.setattr(trials.adaptive, "MOST_SHOWN", 20)
    space = {"lr": distribution_of(searching("tpe", 99).space["lr"])}
    suggest_by_tpe(space, [Seen({"lr": 1.0 + index}, float(index)) for index in range(60)], 1)
    assert [trial.loss for trial in shown] == [*range(10), *range(50, 60)]


# What they are good for.


@pytest.mark.parametrize("sampler", ADAPTIVE)
def test_it_finds_a_better_optimum_of_a_smooth_function_than_chance(sampler: str) -> None:
    def best(of: str, seed: int) -> float:
        trials = 14 if sampler == "gp" else 30
        asked = searching(of, trials, space=RANGES, sampler={**SAMPLERS[of], "seed": seed}, **ONE_ARM)
        return min(row.user_attrs["best_valid_loss"] for row in searched(asked))

    seeds = range(3)
    assert median(best(sampler, seed) for seed in seeds) < median(best("random", seed) for seed in seeds)


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_goes_with_every_pruner(sampler: str, pruner: str) -> None:
    asked = searching(sampler, 18, epochs=4, pruner=PRUNERS[pruner])
    found = searched(asked)
    assert len(found) == 18
    assert {row.state for row in found} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert (TrialState.PRUNED in {row.state for row in found}) == (pruner != "none")
    for row in found:
        arm = asked.arm_of(row.number)
        assert row.params.keys() == {name for name, _ in asked.sampled(arm)}
        assert row.params == asked.taken(row.params), "inside the space, and of its types"
    for arm in asked.arms:
        best = min(
            (row for row in found if row.user_attrs["arm"] == arm),
            key=lambda row: row.user_attrs["best_valid_loss"],
        )
        assert best.state == TrialState.COMPLETE


def test_the_web_process_and_a_driver_that_asks_for_no_gaussian_process_load_no_torch() -> None:
    code = (
        "import sys; from tests.fakes import *; from tests.test_adaptive import searching, ONE_ARM\n"
        "drive(open_ledger(searching('tpe', 6, **ONE_ARM), InMemoryStorage(), MemoryJournal()))\n"
        "open_ledger(searching('gp', 9, **ONE_ARM), InMemoryStorage(), MemoryJournal())\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
