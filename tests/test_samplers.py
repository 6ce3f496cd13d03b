"""The laws of the counter-based sampler: pure, paired, and as random as it says."""

import itertools
import math
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from scipy import stats

import trials.samplers
from tests.fakes import MemoryJournal, open_ledger, rows, spec
from trials.adaptive import build_sampler
from trials.samplers import shuffled, sobol_point, suggest, unit_at, unit_interval, value_at
from trials.spec import SweepSpec, TrialConfig

SPACE = {
    "kappa": {"type": "uniform", "low": 0.0, "high": 0.3},
    "batch_size": {"type": "choice", "values": [10, 20, 30, 40]},
    "non_monotone_interval": {"type": "integer", "low": 5, "high": 8},
    "lr": {"type": "log_uniform", "low": 0.1, "high": 100.0},
}
GRID = {name: SPACE[name] for name in ("batch_size", "non_monotone_interval")}
LARGEST_U = 1 - 2.0**-53
DRAWS = 4000


def drawn(asked: SweepSpec, numbers: int, order: list[str] | None = None) -> list[dict[str, Any]]:
    """What each trial gets, its parameters asked for in this order."""
    study = optuna.create_study(sampler=build_sampler(asked))
    params = []
    for _ in range(numbers):
        trial = study.ask()
        for name in order or list(asked.space):
            suggest(trial, name, asked.space[name])
        params.append(trial.params)
    return params


def test_values_are_known_for_ever() -> None:
    assert unit_interval(0, 0, "kappa") == 0.7933897795585789
    assert unit_interval(1, 0, "kappa") != unit_interval(0, 0, "kappa")


def test_value_does_not_depend_on_the_order_in_which_parameters_are_asked_for() -> None:
    asked = spec(space=SPACE)
    assert drawn(asked, 8) == drawn(asked, 8, order=sorted(SPACE, reverse=True))


def test_value_does_not_depend_on_the_rest_of_the_space() -> None:
    alone = drawn(spec(space={"kappa": SPACE["kappa"]}), 8)
    together = drawn(spec(space=SPACE), 8)
    assert [params["kappa"] for params in alone] == [params["kappa"] for params in together]


@pytest.mark.parametrize("name", ["random", "qmc", "grid"])
def test_value_does_not_depend_on_who_runs_when_or_how_often_the_driver_restarts(name: str) -> None:
    asked = spec(space=GRID if name == "grid" else SPACE, sampler={"name": name}, budget={"trials": 12})
    one_by_one, ledger = {}, open_ledger(asked, InMemoryStorage(), MemoryJournal())
    for task in iter(ledger.next_task, None):
        one_by_one[task.number] = task.config
    storage = InMemoryStorage()
    restarted: dict[int, TrialConfig] = {}
    for tasks in range(1, 13):  # each driver dies one task later than the one before it
        ledger = open_ledger(asked, storage, MemoryJournal())
        for task in itertools.islice(iter(ledger.next_task, None), tasks):
            assert restarted.setdefault(task.number, task.config) == task.config
    assert restarted == one_by_one


def test_arms_of_a_draw_are_paired_and_draws_differ() -> None:
    params = drawn(spec(space=SPACE), 40)
    assert params[0::2] == params[1::2]
    assert len({each["kappa"] for each in params}) == 20


def test_another_seed_gives_other_values() -> None:
    first, second = (drawn(spec(space=SPACE, sampler={"seed": seed}), 2)[0] for seed in (1, 2))
    assert first["kappa"] != second["kappa"]


# Sobol points and the grid: functions of (seed, draw), too.

SEQUENCES = {
    "qmc": {"space": SPACE, "sampler": {"name": "qmc", "seed": 7}},
    "grid": {"space": GRID, "sampler": {"name": "grid", "seed": 7}},
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_is_the_same_in_both_arms_in_any_order_and_in_any_process(name: str) -> None:
    asked = spec(**SEQUENCES[name])
    params = drawn(asked, 24)
    assert params[0::2] == params[1::2]
    assert drawn(asked, 24, order=sorted(asked.space, reverse=True)) == params
    study = optuna.create_study(sampler=build_sampler(asked))
    late = [study.ask() for _ in range(24)]
    for trial in reversed(late):
        for parameter in asked.space:
            suggest(trial, parameter, asked.space[parameter])
    assert [trial.params for trial in late] == params


@pytest.mark.parametrize("name", SEQUENCES)
def test_arm_that_fixes_a_parameter_has_the_others_values(name: str) -> None:
    asked = spec(**SEQUENCES[name], arms={"free": {}, "fixed": {"batch_size": 10}}, budget={"trials": 12})
    storage, seen = InMemoryStorage(), []
    ledger = open_ledger(asked, storage, MemoryJournal())
    for task in iter(ledger.next_task, None):
        seen.append(task.config.training.non_monotone_interval)
    assert seen[0::2] == seen[1::2]


@pytest.mark.parametrize("name", SEQUENCES)
def test_points_take_none_of_the_sequence_whenever_they_come(name: str) -> None:
    asked = spec(**SEQUENCES[name], budget={"trials": 30})
    storage, journal = InMemoryStorage(), MemoryJournal()
    journal.points = [{"batch_size": 10}, {"batch_size": 20, "non_monotone_interval": 5}]
    for tasks in (9, 16, 20):  # the trials of a driver that died come first: it may be amid a draw
        ledger = open_ledger(asked, storage, journal)
        for _ in itertools.islice(iter(ledger.next_task, None), tasks):
            pass
        journal.points.append({"batch_size": 30})
    for _ in iter(open_ledger(asked, storage, journal).next_task, None):
        pass
    found = [row.params for row in rows(storage)]
    assert found[0::2] == found[1::2]
    left = [draw for draw in range(15) if draw not in journal.points_of_draws]
    assert len(left) == 10
    assert left != list(range(5, 15)), "some points came later"
    assert [found[2 * draw] for draw in left] == drawn(asked, 2 * len(left))[0::2]


@given(seed=st.integers(0, 2**63 - 1), k=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_sobol_points_fall_evenly_into_every_interval_of_every_axis(seed: int, k: int) -> None:
    points = [sobol_point(seed, 3, index) for index in range(2**k)]
    for axis in range(3):
        assert sorted(int(point[axis] * 2**k) for point in points) == list(range(2**k))


def test_sobol_points_are_known_for_ever() -> None:
    """They are scipy's: were another version's others, a sweep that goes on would try some twice."""
    assert sobol_point(7, 2, 5) == [0.4575215242803097, 0.18157068639993668]


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(1, 40))
def test_the_grid_is_gone_through_once_and_then_again_in_another_order(seed: int, size: int) -> None:
    turns = [[shuffled(seed, size, turn * size + index) for index in range(size)] for turn in range(2)]
    assert sorted(turns[0]) == sorted(turns[1]) == list(range(size))
    assert size < 10 or turns[0] != turns[1]


def test_every_order_of_a_grid_comes_equally_often() -> None:
    orders = [tuple(shuffled(seed, 3, index) for index in range(3)) for seed in range(DRAWS)]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert stats.chisquare(counts).pvalue > 0.01


def test_the_next_cell_of_a_grid_is_a_step_away(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def counted(seed: int, draw: int, name: str) -> float:
        steps.append(draw)
        return unit_interval(seed, draw, name)

    monkeypatch.setattr(trials.samplers, "unit_interval", counted)
    cells = [shuffled(90210, 1000, index) for index in range(1000)]
    assert [shuffled(90210, 1000, index) for index in range(1000)] == cells
    assert steps == list(range(1000))


def test_a_grid_of_more_cells_than_can_be_listed_is_one() -> None:
    cells = [shuffled(1, 10**30, index) for index in range(100)]
    assert len(set(cells)) == 100
    assert all(0 <= cell < 10**30 for cell in cells)


def test_a_budget_of_the_grids_size_tries_every_combination_in_every_arm() -> None:
    params = drawn(spec(**SEQUENCES["grid"]), 2 * 16)
    combinations = set(itertools.product([10, 20, 30, 40], range(5, 9)))
    assert {(each["batch_size"], each["non_monotone_interval"]) for each in params[0::2]} == combinations


@given(u=st.floats(0, LARGEST_U), log=st.booleans())
def test_a_values_quantile_gives_the_value_again(u: float, log: bool) -> None:
    wide, whole = FloatDistribution(0.1, 100, log=log), IntDistribution(5, 800)
    value = value_at(u, wide)
    assert value_at(min(LARGEST_U, unit_at(value, wide)), wide) == pytest.approx(value)
    assert value_at(unit_at(value_at(u, whole), whole), whole) == value_at(u, whole)


def us(name: str) -> list[float]:
    return [unit_interval(7, draw, name) for draw in range(DRAWS)]


def test_quantiles_are_uniform() -> None:
    assert stats.kstest(us("kappa"), "uniform").pvalue > 0.01


def test_quantiles_of_two_parameters_are_independent() -> None:
    assert abs(stats.spearmanr(us("kappa"), us("weight_decay")).statistic) < 3 / math.sqrt(DRAWS)


def test_choices_come_equally_often() -> None:
    choices = CategoricalDistribution([10, 20, 30, 40])
    values = [value_at(u, choices) for u in us("batch_size")]
    assert stats.chisquare([values.count(value) for value in choices.choices]).pvalue > 0.01


def test_integers_come_equally_often_and_include_both_ends() -> None:
    values = [value_at(u, IntDistribution(5, 8)) for u in us("n")]
    assert set(values) == {5, 6, 7, 8}
    assert stats.chisquare([values.count(value) for value in range(5, 9)]).pvalue > 0.01


def test_log_uniform_is_uniform_in_the_logarithm() -> None:
    logs = [math.log10(value_at(u, FloatDistribution(0.1, 100, log=True))) for u in us("lr")]
    assert stats.kstest(logs, stats.uniform(-1, 3).cdf).pvalue > 0.01


@given(
    ends=st.lists(st.floats(5e-324, 1.7e308), min_size=2, max_size=2, unique=True).map(sorted),
    u=st.floats(0, LARGEST_U) | st.sampled_from([0, LARGEST_U]),
    log=st.booleans(),
)
def test_quantile_never_leaves_its_range(ends: list[float], u: float, log: bool) -> None:
    low, high = ends
    assert low <= value_at(u, FloatDistribution(low, high, log=log)) <= high


@given(ends=st.lists(st.integers(-(2**53), 2**53), min_size=2, max_size=2, unique=True).map(sorted))
def test_integer_quantiles_reach_from_end_to_end_and_survive_the_study(ends: list[int]) -> None:
    low, high = ends
    distribution = IntDistribution(low, high)
    assert value_at(0, distribution) == low
    last = value_at(LARGEST_U, distribution)
    assert low <= last <= high
    assert high - last <= (high - low) * 2.0**-52
    assert distribution.to_external_repr(distribution.to_internal_repr(last)) == last
