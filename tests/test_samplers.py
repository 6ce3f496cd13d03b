"""The laws of the counter-based sampler: pure, paired, and as random as it says."""

import itertools
import math
from typing import Any

import optuna
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage
from scipy import stats

from tests.fakes import MemoryJournal, open_ledger, spec
from trials.adaptive import build_sampler
from trials.samplers import suggest, unit_interval, value_at
from trials.spec import SweepSpec, TrialConfig

SPACE = {
    "kappa": {"type": "uniform", "low": 0.0, "high": 0.3},
    "batch_size": {"type": "choice", "values": [10, 20, 30, 40]},
    "non_monotone_interval": {"type": "integer", "low": 5, "high": 8},
    "lr": {"type": "log_uniform", "low": 0.1, "high": 100.0},
}
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


def test_value_does_not_depend_on_who_runs_when_or_how_often_the_driver_restarts() -> None:
    asked = spec(space=SPACE, budget={"trials": 12})
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
