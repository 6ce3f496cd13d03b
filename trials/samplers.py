"""Samplers by name. Ours is counter-based: what a trial draws is a function of (seed, draw, parameter)."""

import hashlib
import math
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from trials.spec import Choice, Integer, LogUniform, SweepSpec, Uniform


class CounterSampler(BaseSampler):
    """Independent random values that do not depend on order, parallelism or restarts.

    The trials of one draw, one in each arm, get the same values: the arms are paired.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        u = unit_interval(self._spec.sampler.seed, self._spec.draw_of(trial.number), param_name)
        return value_at(u, param_distribution)


def unit_interval(seed: int, draw: int, name: str) -> float:
    """A number in [0, 1) that is a function of its arguments: the top 53 bits of their SHA-256."""
    digest = hashlib.sha256(f"{seed}/{draw}/{name}".encode()).digest()
    return (int.from_bytes(digest[:8]) >> 11) * 2.0**-53


def value_at(u: float, distribution: BaseDistribution) -> Any:
    """The quantile `u` of a distribution; u in [0, 1)."""
    match distribution:
        case CategoricalDistribution(choices=choices):
            return choices[int(u * len(choices))]
        case IntDistribution(low=low, high=high):
            return low + int(u * (high - low + 1))
        case FloatDistribution(low=low, high=high, log=True):
            return _between(low, high, math.exp(math.log(low) + u * (math.log(high) - math.log(low))))
        case FloatDistribution(low=low, high=high):
            return _between(low, high, low + u * (high - low))
    raise TypeError(f"no quantile for {distribution!r}")


def _between(low: float, high: float, value: float) -> float:
    """Rounding may carry a quantile past the ends."""
    return min(high, max(low, value))


def suggest(trial: Trial, name: str, choices: Choice | Uniform | LogUniform | Integer) -> Any:
    """Ask Optuna for a value of a range of the wire format; a trial that has one already keeps it."""
    match choices:
        case Choice(values=values):
            return trial.suggest_categorical(name, values)
        case Integer(low=low, high=high):
            return trial.suggest_int(name, low, high)
        case LogUniform(low=low, high=high):
            return trial.suggest_float(name, low, high, log=True)
        case Uniform(low=low, high=high):
            return trial.suggest_float(name, low, high)


def build_sampler(spec: SweepSpec) -> BaseSampler:
    return {"random": CounterSampler}[spec.sampler.name](spec)
