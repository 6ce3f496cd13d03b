"""The simulation of a sweep: laws that hold whatever the numbers are."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trials.forecast
from tests.fakes import spec
from trials.forecast import Band, Load, Overheads, Simulated, band, scaled_band, simulate
from trials.spec import SweepSpec

NOTHING = Overheads(start=0, trial=0, epoch=0, end=0, slowdown=1, uneven=0, start_drift=0)
"""A machine that is always the same, and takes nothing but training."""
PLAIN = Load(2.0, 0.0, averaging_from=1000)


def sweep(trials: int, epochs: int = 3, arms: int = 1, **changes: Any) -> SweepSpec:
    named = {f"a{i}": {"clip": 1.0 + i} for i in range(arms)}
    return spec(arms=named, budget={"trials": trials}, training={"epochs": epochs}, space={}, **changes)


def run(
    asked: SweepSpec,
    loads: list[Load],
    slots: int = 1,
    overheads: Overheads = NOTHING,
    loading_s: float = 0.0,
    drift: float = 0.0,
    share: float = 1.0,
) -> Simulated:
    return simulate(asked, loads, slots, loading_s, overheads, drift, share)


def always(value: float) -> Band:
    return Band(*[pytest.approx(value)] * 3)


def test_one_trial_takes_its_epochs() -> None:
    found = run(sweep(1, epochs=3), [PLAIN])
    assert (found.wall_s, found.busy_s, found.epochs) == (always(6), always(6), always(3))


def test_trials_on_one_slot_follow_one_another_with_what_lies_between() -> None:
    overheads = replace(NOTHING, start=3, trial=0.1, epoch=0.02, end=0.5)
    found = run(sweep(4, epochs=3), [PLAIN], overheads=overheads, loading_s=5)
    assert found.wall_s == always(15 + 4 * (0.5 + 3 * (2 + 0.1)) + 2.5)


def test_the_next_trial_goes_to_the_slot_that_is_free_first() -> None:
    """In the order of their numbers: 5 | 1, 1, 1, 4 and not as a better packing would have it."""
    seconds = [5.0, 1.0, 1.0, 1.0, 4.0]
    loads = [Load(each, 0.0, 1000) for each in seconds]
    found = run(sweep(5, epochs=1), loads, slots=2)
    assert (found.wall_s, found.busy_s) == (always(7), always(12))


def test_averaged_epochs_are_validated_twice() -> None:
    once_it_stalls, from_start = Load(2.0, 1.0, averaging_from=3), Load(2.0, 1.0, averaging_from=1)
    least = run(sweep(1, epochs=30), [once_it_stalls]).busy_s
    assert 60 <= least.p10 < least.p90 <= 2 * 60 - 30 - 2
    assert run(sweep(1, epochs=30), [from_start]).busy_s == always(90)


def test_the_best_checkpoint_is_verified_in_the_end() -> None:
    found = run(sweep(1, epochs=3), [Load(2.0, 0.7, averaging_from=1000)])
    assert (found.wall_s, found.busy_s) == (always(6.7), always(6))


def test_halving_trains_fewer_epochs_and_at_least_one_trial_to_its_end() -> None:
    pruner = {"name": "successive_halving", "min_epochs": 1, "reduction_factor": 3}
    pruned = run(sweep(27, epochs=9, pruner=pruner), [PLAIN])
    assert 27 + 2 + 6 <= pruned.epochs.p10 <= pruned.epochs.p90 < 27 * 9 / 2
    assert pruned.busy_s.p50 == pytest.approx(2 * pruned.epochs.p50)


def test_as_many_pass_a_rung_as_the_ledger_would_let_pass() -> None:
    """Of losses in any order, the n-th to come is among the best max(1, n // 3) so far by that chance."""
    pruner = {"name": "successive_halving", "min_epochs": 1, "reduction_factor": 3}
    expected = 60 + sum(max(1, n // 3) / n for n in range(1, 61))
    assert run(sweep(60, epochs=2, pruner=pruner), [PLAIN]).epochs.p50 == pytest.approx(expected, abs=1.5)


def test_a_median_is_that_of_trials_that_came_to_their_ends() -> None:
    """Which are ever better ones: of pruned ones, too, half of all trials would pass."""
    pruner = {"name": "median", "min_epochs": 1, "startup_trials": 1}
    assert run(sweep(200, epochs=2, pruner=pruner), [PLAIN]).epochs.p90 < 200 + 60


@pytest.mark.parametrize("name", ["successive_halving", "hyperband", "median"])
def test_arms_never_prune_one_another(name: str) -> None:
    """With one trial an arm there is nobody to be compared with."""
    arms = 6
    pruner = {"name": name, "min_epochs": 1}
    assert run(sweep(arms, epochs=9, arms=arms, pruner=pruner), [PLAIN] * arms).epochs == always(6 * 9)


def test_median_prunes_nothing_before_its_startup_trials_are_complete() -> None:
    def epochs(startup: int) -> float:
        pruner = {"name": "median", "min_epochs": 1, "startup_trials": startup}
        return run(sweep(20, epochs=8, pruner=pruner), [PLAIN]).epochs.p50

    assert epochs(20) == 160
    assert epochs(5) < epochs(15) < 160
    assert epochs(5) >= 5 * 8 + 15


def test_a_budgets_wall_s_is_the_longest_that_it_takes() -> None:
    asked = sweep(10, epochs=3)
    asked = asked.model_copy(update={"budget": asked.budget.model_copy(update={"wall_s": 20.0})})
    found = run(asked, [PLAIN], slots=2)
    assert (found.wall_s, found.capped) == (always(20), 1.0)
    assert (found.busy_s, found.epochs) == (always(40), always(20))
    assert run(sweep(2), [PLAIN]).capped == 0


def test_a_limit_before_the_first_step_ends_it_there() -> None:
    asked = sweep(10)
    asked = asked.model_copy(update={"budget": asked.budget.model_copy(update={"wall_s": 5.0})})
    load = replace(PLAIN, averaged_s=7.0)  # there is no checkpoint to be verified
    found = run(asked, [load], overheads=replace(NOTHING, start=4), loading_s=3.0)
    assert (found.wall_s, found.epochs, found.capped) == (always(5), always(0), 1.0)


def test_what_is_unsure_widens_the_band_and_leaves_its_middle() -> None:
    bands = [run(sweep(40), [PLAIN], drift=drift).wall_s for drift in (0, 0.05, 0.2)]
    widths = [one.p90 / one.p10 for one in bands]
    assert widths == sorted(widths)
    assert widths[0] == pytest.approx(1)
    assert widths[-1] == pytest.approx(scaled_band(1, 0.2).p90 ** 2, rel=0.05)
    for one in bands:
        assert one.p50 == pytest.approx(bands[0].p50, rel=0.03)


def test_a_machine_that_was_busy_may_be_free_or_busy_still() -> None:
    free, busy = run(sweep(40), [PLAIN]).wall_s, run(sweep(40), [PLAIN], share=0.5).wall_s
    assert free.p50 / 2 < busy.p10 < 0.7 * free.p50 < busy.p50 < 0.9 * free.p50 < busy.p90 < free.p50


LOADS = st.lists(st.builds(Load, st.floats(0.1, 50), st.just(0.0), st.just(1000)), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(LOADS, st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_more_of_anything_takes_longer_and_more_at_once_no_longer(
    loads: list[Load], trials: int, epochs: int, slots: int
) -> None:
    found = run(sweep(trials, epochs), loads, slots)
    assert found == run(sweep(trials, epochs), loads, slots)  # the same of the same
    assert found.wall_s.p50 <= found.busy_s.p50 * (1 + 1e-9) <= slots * found.wall_s.p50 * (1 + 2e-9)
    assert run(sweep(trials + 1, epochs), loads, slots).busy_s.p10 >= found.busy_s.p10 * 0.9
    slower = [replace(load, epoch_s=2 * load.epoch_s, averaged_s=2 * load.averaged_s) for load in loads]
    assert run(sweep(trials, epochs), slower, slots).wall_s.p50 == pytest.approx(2 * found.wall_s.p50)
    # On one slot nothing is lost at the end; Graham's bound holds for any list.
    alone = run(sweep(trials, epochs), loads, 1)
    assert found.wall_s.p90 <= alone.wall_s.p90 * (1 + 1e-9)


def test_a_large_sweep_is_simulated_less_often_and_still_tells() -> None:
    large = run(sweep(20_000, epochs=1), [PLAIN] * 10, slots=2, drift=0.1)
    assert large.wall_s.p50 == pytest.approx(20_000, rel=0.03)
    assert 1.2 < large.wall_s.p90 / large.wall_s.p10 < 1.4


@pytest.mark.parametrize(
    "pruner",
    [{"name": "none"}, {"name": "median", "startup_trials": 2}, {"name": "hyperband"}],
    ids=lambda pruner: pruner["name"],
)
def test_the_largest_sweep_there_may_be_is_told_by_a_part_of_it(pruner: dict[str, Any]) -> None:
    """Its epochs, too: no more events than there is time for."""
    asked = sweep(100_000, epochs=500, arms=3, pruner=pruner)
    found = run(asked, [PLAIN] * 3, slots=2)
    assert found.wall_s.p50 == pytest.approx(found.busy_s.p50 / 2, rel=0.05)
    assert found.busy_s.p50 == pytest.approx(2 * found.epochs.p50)
    assert 100_000 <= found.epochs.p50 <= 100_000 * 500
    capped = asked.model_copy(update={"budget": asked.budget.model_copy(update={"wall_s": 3_000.0})})
    short = run(capped, [PLAIN] * 3, slots=2)
    assert (short.wall_s.p90, short.capped) == (pytest.approx(3_000), 1.0)
    assert short.busy_s.p50 == pytest.approx(6_000, rel=0.01)


@pytest.mark.parametrize("trials", [1, 10, 31])
def test_fewer_trials_than_arms_are_simulated_too(trials: int) -> None:
    asked = sweep(trials, epochs=100, arms=32, pruner={"name": "median"})
    assert run(asked, [PLAIN] * 32).epochs == always(100 * trials)


@pytest.mark.parametrize(("name", "arms"), [("median", 2), ("median", 32), ("successive_halving", 32)])
def test_a_part_of_a_large_sweep_tells_how_much_is_pruned_in_all_of_it(
    name: str, arms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials that run before any is pruned are few of many, and stand for no others."""
    asked = sweep(3_000, epochs=30, arms=arms, pruner={"name": name})
    part = run(asked, [PLAIN] * arms, slots=2)
    monkeypatch.setattr(trials.forecast, "MOST_EVENTS", 30 * 10**6)
    monkeypatch.setattr(trials.forecast, "SIMULATIONS", 10)
    whole = run(asked, [PLAIN] * arms, slots=2)
    assert part.epochs.p50 == pytest.approx(whole.epochs.p50, rel=0.3)
    assert part.wall_s.p50 == pytest.approx(whole.wall_s.p50, rel=0.3)


def test_a_limit_ends_the_part_that_is_not_simulated_too() -> None:
    asked = sweep(100_000, epochs=2)
    asked = asked.model_copy(update={"budget": asked.budget.model_copy(update={"wall_s": 100_000.0})})
    found = run(asked, [PLAIN], slots=2)
    assert (found.wall_s, found.capped) == (always(100_000), 1.0)
    assert (found.busy_s.p50, found.epochs.p50) == (
        pytest.approx(2e5, rel=1e-3),
        pytest.approx(1e5, rel=1e-3),
    )


def test_a_trial_that_fails_at_once_trains_no_epoch() -> None:
    fails = Load(0.0, 0.0, 1000, fails=True)
    found = run(sweep(10, epochs=3), [PLAIN, fails], overheads=replace(NOTHING, trial=0.1), loading_s=1.0)
    assert (found.epochs, found.busy_s) == (always(15), always(5 * 6.1 + 5 * 0.1))


def test_a_band_is_of_deciles() -> None:
    assert band([float(i) for i in itertools.chain(range(50, 101), range(50))]) == Band(10, 50, 90)
    assert band([3.0]) == Band(3, 3, 3)
