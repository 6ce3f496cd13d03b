"""The laws of pruners: within an arm, never the best, and by the brackets that Hyperband has."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from tests.fakes import MemoryJournal, open_ledger, report, rows, spec, with_loss
from trials.pruners import bracket_of, intermediate_epochs, rungs_of
from trials.spec import SweepSpec

PRUNERS: dict[str, dict[str, Any]] = {
    "halving": {"name": "successive_halving", "reduction_factor": 2},
    "hyperband": {"name": "hyperband", "reduction_factor": 2},
    "median": {"name": "median", "startup_trials": 1},
}
EPOCHS = 8


def pruning(name: str, trials: int = 12, **changes: Any) -> SweepSpec:
    given = {"pruner": PRUNERS[name], "training": {"epochs": EPOCHS}, "budget": {"trials": trials}}
    return spec(**{**given, **changes})


def run(asked: SweepSpec, losses: dict[int, float], at_once: int) -> list[FrozenTrial]:
    """So many trials at a time, an epoch of each in turn; each keeps one loss."""
    storage = InMemoryStorage()
    ledger = open_ledger(asked, storage, MemoryJournal())
    running: list[Any] = []
    while True:
        while len(running) < at_once and (task := ledger.next_task()) is not None:
            running.append((task, 1))
        if not running:
            return rows(storage)
        task, epoch = running.pop(0)
        if ledger.record(task, with_loss(report(task, epoch), losses[task.number])):
            running.append((task, epoch + 1))


LOSSES = st.lists(st.sampled_from([2.0, 2.5, 3.0, 3.5, 4.0, 5.0]), min_size=12, max_size=12).map(
    lambda losses: dict(enumerate(losses))
)


@pytest.mark.parametrize("pruner", PRUNERS)
@settings(max_examples=25, deadline=None)
@given(losses=LOSSES, at_once=st.integers(1, 12))
def test_the_best_of_an_arm_is_never_pruned_and_none_at_its_last_epoch(
    pruner: str, losses: dict[int, float], at_once: int
) -> None:
    asked = pruning(pruner)
    found = run(asked, losses, at_once)
    assert len(found) == 12
    for arm in range(2):
        best = min(losses[number] for number in range(arm, 12, 2))
        for row in found[arm::2]:
            assert losses[row.number] > best or row.state == TrialState.COMPLETE
    for row in found:
        assert (row.state == TrialState.COMPLETE) == (row.last_step == EPOCHS)


@pytest.mark.parametrize("pruner", PRUNERS)
@settings(max_examples=10, deadline=None)
@given(losses=LOSSES, at_once=st.sampled_from([2, 12]))
def test_an_arm_is_pruned_as_if_it_were_alone(pruner: str, losses: dict[int, float], at_once: int) -> None:
    both = run(pruning(pruner), losses, at_once)
    alone = run(
        pruning(pruner, trials=6, arms={"fd": {"regularizer": "fraternal"}}),
        {number // 2: losses[number] for number in range(0, 12, 2)},
        at_once // 2,
    )
    assert [row.state for row in both[0::2]] == [row.state for row in alone]


@pytest.mark.parametrize("pruner", PRUNERS)
@given(epochs=st.integers(4, 500), draw=st.integers(0, 1000), min_epochs=st.integers(1, 2))
def test_who_may_be_pruned_when_is_among_what_optuna_hears_and_never_last(
    pruner: str, epochs: int, draw: int, min_epochs: int
) -> None:
    asked = pruning(pruner, training={"epochs": epochs}, pruner={**PRUNERS[pruner], "min_epochs": min_epochs})
    rungs = rungs_of(asked, draw)
    assert rungs <= intermediate_epochs(epochs) - {epochs}
    assert all(rung >= min_epochs for rung in rungs)


# Hyperband.


def test_brackets_begin_to_prune_later_and_later_and_the_last_does_not() -> None:
    asked = pruning("hyperband", training={"epochs": 9}, pruner={"name": "hyperband"})
    rungs = {bracket_of(asked, draw): rungs_of(asked, draw) for draw in range(17)}
    assert rungs == {0: {1, 3}, 1: {3}, 2: set()}


def test_brackets_have_algorithm_1s_shares_of_any_run_of_draws() -> None:
    """9, 5 and 3 of 17 for nine epochs by three."""
    asked = pruning("hyperband", training={"epochs": 9}, pruner={"name": "hyperband"})
    for first in range(17):
        assert Counter(bracket_of(asked, draw) for draw in range(first, first + 17)) == {0: 9, 1: 5, 2: 3}
    for draws in range(1, 60):
        counts = Counter(bracket_of(asked, draw) for draw in range(draws))
        for bracket, share in {0: 9, 1: 5, 2: 3}.items():
            assert abs(counts[bracket] - draws * share / 17) < 2


def test_a_trial_is_compared_with_its_bracket_alone() -> None:
    """The first of a bracket passes its rung, however good another bracket's trials were there."""
    arm = {"arms": {"fd": {"regularizer": "fraternal"}}}
    asked = pruning("hyperband", pruner={"name": "hyperband"}, training={"epochs": 9}, **arm)
    brackets = [bracket_of(asked, draw) for draw in range(12)]
    losses = {number: 2.0 if brackets[number] == 0 else 5.0 for number in range(12)}
    found = run(asked, losses, 1)
    assert {row.state for row, bracket in zip(found, brackets, strict=True) if bracket == 1} == {
        TrialState.COMPLETE
    }


def test_arms_of_a_draw_are_in_one_bracket() -> None:
    asked = pruning("hyperband")
    alike = run(asked, {number: 2.0 + number // 2 / 10 for number in range(12)}, 2)
    assert [row.state for row in alike[0::2]] == [row.state for row in alike[1::2]]
    assert TrialState.PRUNED in {row.state for row in alike}


# Median.


def test_median_prunes_what_is_above_the_median_of_complete_trials() -> None:
    arm = {"arms": {"fd": {"regularizer": "fraternal"}}}
    asked = pruning("median", trials=6, pruner={"name": "median", "startup_trials": 3}, **arm)
    found = run(asked, {0: 2.0, 1: 4.0, 2: 3.0, 3: 3.1, 4: 2.9, 5: 2.96}, 1)
    assert [row.last_step for row in found] == [EPOCHS, EPOCHS, EPOCHS, 1, EPOCHS, 1]


def test_median_lets_every_trial_run_its_first_epochs() -> None:
    arm = {"arms": {"fd": {"regularizer": "fraternal"}}}
    median = {"name": "median", "startup_trials": 1, "min_epochs": 5}
    found = run(pruning("median", trials=2, pruner=median, **arm), {0: 2.0, 1: 3.0}, 1)
    assert [row.last_step for row in found] == [EPOCHS, 5]
