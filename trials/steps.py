"""How long an epoch of a configuration takes, from what a probe has measured of a few others. No torch.

A step over L time steps of B columns takes a + L (c + d B) seconds: what is done once a window, the masks
of the weights say, what is done once a time step, and what every token takes. Of a kind of trial that was not
measured, the time is that of measured ones by the operations that each of them needs.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from statistics import NormalDist, fmean, median, pstdev
from typing import Any

from pydantic import TypeAdapter

from models.pieces import MOST_COLUMNS, SHORTEST_COLUMN, WARM_UP
from trials.corpora import CorpusSpec
from trials.spec import DROPOUTS, TrainingConfig, TrialConfig

MOST_POINTS = 12
MOST_POINTS_OF_A_KIND = 4
MOST_KINDS = 6
"""Each takes a second or more of a probe."""

EXIT_CORPUS = 65  # EX_DATAERR
"""Of a probe whose text cannot be used: it prints the pointer to the field of the corpus that is at fault."""

TYPICAL_VOCABULARY = 10_000
"""Word types, where only an order is asked for."""


@dataclass(frozen=True)
class ProbeOrder:
    """What a probe is to measure."""

    corpus: CorpusSpec
    device: str
    threads: int
    """Of each trial."""
    processes: int
    """That train at once, as trials will."""
    gpu_share: float
    points: tuple[TrialConfig, ...]
    """In the order of their importance: there may not be time for all."""
    stamp: str = ""
    """Of the text, which another one changes."""


@dataclass(frozen=True)
class Timed:
    """A point that was measured, over all processes."""

    config: TrialConfig
    step_s: tuple[float, ...]
    """Seconds of a step over a whole window: a mean each time that it was measured."""
    word_s: float
    """Seconds that the evaluation of a word takes, in full columns."""
    dynamics_s: float
    """That the measurements of an epoch's masks take."""
    save_s: float
    """Seconds that both checkpoints take to be saved."""


@dataclass(frozen=True)
class Probe:
    """What a probe has found."""

    device: str
    """Its name."""
    train_tokens: int
    valid_tokens: int
    vocabulary_size: int
    start_s: float
    """Until torch and the corpus were loaded, in each of the processes at once."""
    took_s: float
    share: float
    """Of the time of the cores that its processes wanted, and would have had alone, that which they had:
    others had the rest."""
    timed: tuple[Timed, ...]
    not_timed: tuple[str, ...] = ()
    """What was left out, and why."""
    is_of_the_moment: bool = False
    """Whether something was left out for memory that others had: a minute later it may be free."""


PROBE_ORDER: TypeAdapter[ProbeOrder] = TypeAdapter(ProbeOrder)
PROBE: TypeAdapter[Probe] = TypeAdapter(Probe)


def timed_as(config: TrialConfig) -> TrialConfig:
    """The same, with all that takes no time set to one value: what is equal here takes equally long."""
    model, training, regularization = config.model, config.training, config.regularization
    rates: dict[str, Any] = {name: 0.5 if getattr(model, name) else 0.0 for name in DROPOUTS}
    factors: dict[str, Any] = {
        name: 1.0 if getattr(regularization, name) else 0.0 for name in ("kappa", "alpha", "beta")
    }
    return TrialConfig(
        replace(model, **rates),
        TrainingConfig(
            epochs=100_000,
            batch_size=training.batch_size,
            bptt=training.bptt,
            windows="fixed",
            lr=1.0,
            averaging="none",
            precision=training.precision,
            recompute=training.recompute,
            cuda_graphs=training.cuda_graphs,
        ),
        replace(regularization, **factors),
    )


def kind_of(config: TrialConfig) -> TrialConfig:
    """The same for every batch size and window."""
    timed = timed_as(config)
    return replace(timed, training=replace(timed.training, batch_size=1, bptt=5))


def operations(config: TrialConfig, vocabulary_size: int) -> float:
    """Floating-point operations of a step over a whole window, about."""
    tokens = config.training.batch_size * config.training.bptt
    sizes = config.model.layer_sizes
    layers: float = sum(8 * outputs * (inputs + outputs) for inputs, outputs in sizes)
    head = 2 * vocabulary_size * sizes[-1][1]
    passes = 3.0
    if config.regularization.declaration.second_pass != "none":
        passes += 3.0 if config.regularization.second_pass_has_gradient else 1.0
    if config.training.recompute:
        layers *= 4 / 3
    return tokens * passes * (layers + head)


def points_to_probe(configs: Iterable[TrialConfig]) -> tuple[TrialConfig, ...]:
    """A few that tell of all the others: of each kind one that many are like first, then its extremes."""
    kinds: dict[TrialConfig, list[TrialConfig]] = {}
    for config in configs:
        kinds.setdefault(kind_of(config), []).append(timed_as(config))
    of_kinds = [_points_of(kinds[kind]) for kind in _spread(list(kinds))]
    in_turn = [point for turn in zip_longest(*of_kinds) for point in turn if point is not None]
    return tuple(in_turn[: max(MOST_POINTS, len(of_kinds))])


def _spread(kinds: list[TrialConfig]) -> list[TrialConfig]:
    """Of many kinds, some: of each way of training the smallest, the largest and some in between."""
    ways: dict[Any, list[TrialConfig]] = {}
    for kind in sorted(kinds, key=lambda kind: operations(kind, TYPICAL_VOCABULARY)):
        ways.setdefault(_way(kind), []).append(kind)
    most = max(1, MOST_KINDS // len(ways))
    return [kind for way in ways.values() for kind in _evenly(way, most)]


def _evenly(ordered: list[TrialConfig], most: int) -> list[TrialConfig]:
    if len(ordered) <= most:
        return ordered
    if most == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def _way(kind: TrialConfig) -> tuple[Any, ...]:
    regularization, training = kind.regularization, kind.training
    declaration = regularization.declaration
    return (
        declaration.second_pass,
        regularization.second_pass_has_gradient,
        declaration.penalty,
        training.precision,
        training.recompute,
        training.cuda_graphs,
    )


def _points_of(alike: list[TrialConfig]) -> list[TrialConfig]:
    """Of one kind: the median by tokens, then the most and the fewest, the widest and the narrowest."""

    def shape(config: TrialConfig) -> tuple[int, int]:
        return config.training.batch_size, config.training.bptt

    ordered = sorted(alike, key=lambda config: math.prod(shape(config)))
    by_ratio = sorted(alike, key=lambda config: config.training.batch_size / config.training.bptt)
    wished = [ordered[len(ordered) // 2], ordered[-1], ordered[0], by_ratio[-1], by_ratio[0]]
    return list(dict.fromkeys(wished))[:MOST_POINTS_OF_A_KIND]


@dataclass(frozen=True)
class EpochTime:
    """Seconds of an epoch: what each part of it takes."""

    training: float
    validation: float
    """Once; an epoch whose weights are averaged has it twice."""
    rest: float
    """The measurements of the masks, and checkpoints."""
    was_measured: bool
    """Whether it was this very configuration that the probe has timed."""

    @property
    def seconds(self) -> float:
        return self.training + self.validation + self.rest


@dataclass(frozen=True)
class _Line:
    """Of one kind: seconds of a step = a + L (c + d B)."""

    a: float
    c: float
    d: float

    def step_s(self, batch_size: float, length: float) -> float:
        return self.a + length * (self.c + self.d * batch_size)


class StepTimes:
    """What a probe that has timed something tells of any configuration of its sweep."""

    def __init__(self, probe: Probe) -> None:
        kinds: dict[TrialConfig, list[Timed]] = {}
        for timed in probe.timed:
            kinds.setdefault(kind_of(timed.config), []).append(timed)
        self.probe = probe
        self._lines = {kind: _fitted(points) for kind, points in kinds.items()}
        self._timed = {timed.config for timed in probe.timed}
        self._known: dict[tuple[TrialConfig, str, float], EpochTime | None] = {}

    @property
    def spread(self) -> float:
        """How far the measurements of one point lie apart, by their mean: the median over the points."""
        return median(pstdev(one.step_s) / fmean(one.step_s) for one in self.probe.timed)

    def epoch(self, config: TrialConfig, checkpoint_every_s: float) -> EpochTime | None:
        """None where the text is too short for so many columns: such a trial fails."""
        key = timed_as(config), config.training.windows, checkpoint_every_s
        if key not in self._known:
            self._known[key] = self._epoch(config, key[0], checkpoint_every_s)
        return self._known[key]

    def _epoch(self, config: TrialConfig, timed: TrialConfig, checkpoint_every_s: float) -> EpochTime | None:
        steps = self.probe.train_tokens // config.training.batch_size - 1
        if steps < 1:
            return None
        bptt = config.training.bptt
        length = bptt if config.training.windows == "fixed" else mean_random_length(bptt)
        windows = max(1.0, steps / length)
        training = windows * self._step_s(timed, steps / windows)
        like = min(self.probe.timed, key=lambda other: _distance(timed, other.config, self._vocabulary))
        weight = self._parameters(config) / self._parameters(like.config)
        saving, valid = like.save_s * weight, self.probe.valid_tokens
        if training > checkpoint_every_s:  # in the middle of epochs, too
            saving += saving * training / max(checkpoint_every_s, 40 * saving)
        return EpochTime(
            training=training,
            validation=like.word_s * weight * evaluated_words(valid, evaluated_columns(valid)),
            rest=like.dynamics_s * weight + saving,
            was_measured=timed in self._timed,
        )

    @property
    def _vocabulary(self) -> int:
        return self.probe.vocabulary_size

    def _parameters(self, config: TrialConfig) -> int:
        return config.model.parameter_count(self._vocabulary)

    def _step_s(self, config: TrialConfig, length: float) -> float:
        batch_size, kind = config.training.batch_size, kind_of(config)
        if (line := self._lines.get(kind)) is not None:
            return line.step_s(batch_size, length)
        alike = [other for other in self._lines if _way(other) == _way(kind)] or list(self._lines)
        alike.sort(key=lambda other: operations(other, self._vocabulary))
        sizes = [math.log(operations(other, self._vocabulary)) for other in alike]
        rates = [self._rate(other, batch_size, length) for other in alike]
        mine = operations(kind, self._vocabulary)
        return _interpolated(math.log(mine), sizes, rates) * mine

    def _rate(self, kind: TrialConfig, batch_size: int, length: float) -> float:
        """Seconds of a step by the operations of a token."""
        return self._lines[kind].step_s(batch_size, length) / operations(kind, self._vocabulary)


@lru_cache(maxsize=1024)
def mean_random_length(bptt: int) -> float:
    """Of the windows that `trials.training` draws: the sum of the chances that one has so many steps."""
    return 0.95 * _mean_length(bptt) + 0.05 * _mean_length(bptt / 2)


def _mean_length(base: float) -> float:
    lengths = NormalDist(base, 5.0)
    sure = max(5, int(base - 40))
    return sure + sum(1 - lengths.cdf(length) for length in range(sure + 1, int(base + 10) + 1))


def evaluated_columns(tokens: int) -> int:
    """Those that a stream is evaluated in."""
    return min(MOST_COLUMNS, max(1, tokens // SHORTEST_COLUMN))


def evaluated_words(tokens: int, columns: int) -> float:
    """Words that the evaluation of a stream looks at, what its columns begin early included."""
    return tokens + (WARM_UP * columns if columns > 1 else 0)


def _fitted(points: Sequence[Timed]) -> _Line:
    """Non-negative least squares of the relative errors."""
    import numpy as np
    from scipy.optimize import nnls  # half a second, of which only forecasts have need

    shapes = [(one.config.training.batch_size, one.config.training.bptt) for one in points]
    seconds = [fmean(one.step_s) for one in points]
    rows = [[1 / s, L / s, L * B / s] for (B, L), s in zip(shapes, seconds, strict=True)]
    if len(points) == 1:  # by the token, for windows of any length
        (B, L), s = shapes[0], seconds[0]
        return _Line(0.0, 0.0, s / (L * B))
    a, c, d = nnls(np.array(rows), np.ones(len(rows)))[0]
    return _Line(float(a), float(c), float(d))


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Between neighbours on a logarithmic scale, beyond the ends as at them; xs ascend."""
    place = bisect_left(xs, x)
    if place in {0, len(xs)}:
        return ys[min(place, len(ys) - 1)]
    below, above = xs[place - 1], xs[place]
    share = (x - below) / (above - below) if above > below else 0.5
    return math.exp((1 - share) * math.log(ys[place - 1]) + share * math.log(ys[place]))


def _distance(one: TrialConfig, other: TrialConfig, vocabulary_size: int) -> float:
    """Between the sizes of two models."""
    return abs(
        math.log(one.model.parameter_count(vocabulary_size) / other.model.parameter_count(vocabulary_size))
    )
