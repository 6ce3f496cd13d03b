"""Samplers whose values are a function of (seed, draw), whatever happens. adaptive.py has the others."""

import hashlib
import math
from functools import lru_cache
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from trials.spec import Choice, Integer, LogUniform, Range, SweepSpec, Uniform


class PerParameter(BaseSampler):
    """Asks for each value by itself when it is needed: what a trial has already, or a client chose, stays."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}


class CounterSampler(PerParameter):
    """Independent random values that do not depend on order, parallelism or restarts.

    The trials of one draw, one in each arm, get the same values: the arms are paired.
    """

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        u = unit_interval(self._spec.sampler.seed, self._spec.draw_of(trial.number), param_name)
        return value_at(u, param_distribution)


class SequenceSampler(CounterSampler):
    """Points of a sequence of the whole space, one after another: a draw's are the same in every arm.

    A draw that a client has chosen values for takes none of the sequence; what they leave out is random.
    """

    def __init__(self, spec: SweepSpec) -> None:
        super().__init__(spec)
        self._asked: tuple[int, int | None] = -1, None
        """The latest trial, and its draw's index in the sequence: it asks for one value after another."""

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if trial.number != self._asked[0]:
            self._asked = trial.number, self._index_of(study, self._spec.draw_of(trial.number))
        index = self._asked[1]
        if index is None:
            return super().sample_independent(study, trial, param_name, param_distribution)
        return self.value(index, param_name, param_distribution)

    def _index_of(self, study: Study, draw: int) -> int | None:
        rows = study.get_trials(deepcopy=False)
        chosen = {self._spec.draw_of(row.number) for row in rows if "fixed_params" in row.system_attrs}
        return None if draw in chosen else draw - sum(each < draw for each in chosen)

    def value(self, index: int, name: str, distribution: BaseDistribution) -> Any:
        raise NotImplementedError


class SobolSampler(SequenceSampler):
    """Sobol points, scrambled by Owen's method (scipy.stats.qmc.Sobol)."""

    def __init__(self, spec: SweepSpec) -> None:
        super().__init__(spec)
        self._axes = sorted(spec.searched)
        self._latest: tuple[int, list[float]] = -1, []

    def value(self, index: int, name: str, distribution: BaseDistribution) -> Any:
        if index != self._latest[0]:
            self._latest = index, sobol_point(self._spec.sampler.seed, len(self._axes), index)
        return value_at(self._latest[1][self._axes.index(name)], distribution)


def sobol_point(seed: int, dimensions: int, index: int) -> list[float]:
    """The point of this index, 0-based, in [0, 1)^dimensions."""
    from scipy.stats import qmc  # half a second, which other sweeps do without

    sequence = qmc.Sobol(dimensions, scramble=True, rng=seed)
    if index:
        sequence.fast_forward(index)
    return list(map(float, sequence.random(1)[0]))


class ShuffledGrid(SequenceSampler):
    """Every combination of values once, in an order of the seed's; then all again, in another order."""

    def __init__(self, spec: SweepSpec) -> None:
        super().__init__(spec)
        self._values = {name: grid_values(spec.searched[name]) for name in sorted(spec.searched)}
        self._latest = -1, 0

    def value(self, index: int, name: str, distribution: BaseDistribution) -> Any:
        if index != self._latest[0]:
            size = math.prod(map(len, self._values.values()))
            self._latest = index, shuffled(self._spec.sampler.seed, size, index)
        cell = self._latest[1]
        for axis, values in self._values.items():
            cell, place = divmod(cell, len(values))
            if axis == name:
                return values[place]
        raise KeyError(name)


def grid_values(choices: Range) -> Any:
    match choices:
        case Choice(values=values):
            return values
        case Integer(low=low, high=high):
            return range(low, high + 1)
    raise TypeError(f"no grid has {choices!r}")


def shuffled(seed: int, size: int, index: int) -> int:
    """The element of this index: range(size) in a random order, then again in another one, and so on."""
    turn, place = divmod(index, size)
    return _order(seed, size, turn)[place]


class _Order:
    """range(size) in a random order, by Fisher and Yates's shuffle.

    Only what has been moved is kept, as far as it has been asked for: the next element is a step away.
    """

    def __init__(self, seed: int, size: int, turn: int) -> None:
        self._seed, self._size, self._turn = seed, size, turn
        self._moved: dict[int, int] = {}
        self._elements: list[int] = []

    def __getitem__(self, index: int) -> int:
        while len(self._elements) <= index:
            place, moved = len(self._elements), self._moved
            u = unit_interval(self._seed, place, f"turn {self._turn} of a grid")
            other = min(self._size - 1, place + int(u * (self._size - place)))
            element, moved[other] = moved.get(other, other), moved.get(place, place)
            self._elements.append(element)
        return self._elements[index]


_order = lru_cache(maxsize=2)(_Order)
"""A driver is in one turn; the one before it, where an earlier trial is taken up."""


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


def unit_at(value: float, distribution: BaseDistribution) -> float:
    """The middle of the quantiles that come to this value of a range: value_at's inverse."""
    match distribution:
        case IntDistribution(low=low, high=high):
            return (value - low + 0.5) / (high - low + 1)
        case FloatDistribution(low=low, high=high, log=True):
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        case FloatDistribution(low=low, high=high):
            return (value - low) / (high - low)
    raise TypeError(f"no order in {distribution!r}")


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
