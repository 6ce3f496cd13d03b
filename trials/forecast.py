"""How long a sweep will take, simulated many times: pure, no torch, the same of the same.

In each simulation the trials go to their slots in the order in which the ledger hands them out, pruned at
their own rungs against their own arm, of losses drawn at random; and what nobody knows in advance is drawn,
too: how fast the machine will be, when averaging begins, how long a driver takes to start. Nothing fails.
"""

import heapq
import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median

from trials.pruners import bracket_of, rungs_of
from trials.spec import Hyperband, MedianPruner, NoPruner, SuccessiveHalving, SweepSpec

SIMULATIONS = 200
FEWEST_SIMULATIONS = 30
MOST_EVENTS = 100_000
"""Over all simulations: about half a second."""
FEWEST_OF_AN_ARM = 16
"""Trials that are simulated where there are as many: of fewer no pruner would know what is good."""


@dataclass(frozen=True)
class Overheads:
    """What a sweep takes beyond its training, and how sure a forecast is: see benchmarks/RESULTS.md.

    Times are in units of what a process of the probe takes to load torch and the corpus: a driver's start is
    work of the same kind, and grows with it on a slow machine or a busy one.
    """

    start: float = 3.1
    """From a submission to the first step of a trial."""
    start_eased: float = 0.3
    """Power of the probe's share of its cores by which it grows less than loading on a busy machine."""
    trial: float = 0.04
    """Of each trial, besides."""
    epoch: float = 0.02
    """Of each report."""
    end: float = 0.6
    """From the last trial's end to the sweep's, besides the validation that verifies the best checkpoint."""
    slowdown: float = 1.1
    """Of training beside a driver, Ray and the service, by training beside other training alone."""
    drift: float = 0.14
    """Standard deviation of the logarithm of how fast the machine is, from one time to another."""
    uneven: float = 0.03
    """The same from trial to trial."""
    start_drift: float = 0.2
    """The same of the start."""


@dataclass(frozen=True)
class Load:
    """What one trial takes."""

    epoch_s: float
    """Seconds of an epoch."""
    averaged_s: float
    """Seconds more where its weights are averaged."""
    averaging_from: int
    """The first epoch in which they may be; from the first one on they are for sure."""
    fails: bool = False
    """It ends before its first step: its text is too short, say."""


@dataclass(frozen=True)
class Band:
    """Of ten sweeps like it, one is expected below `p10`, and one above `p90`."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class Simulated:
    wall_s: Band
    busy_s: Band
    """Of all trials, one after another."""
    epochs: Band
    """Trained by all trials."""
    capped: float
    """In which share of the simulations budget.wall_s ends the sweep."""


def simulate(
    spec: SweepSpec,
    loads: Sequence[Load],
    slots: int,
    loading_s: float,
    overheads: Overheads,
    drift: float = 0.0,
    share: float = 1.0,
    seed: int = 0,
) -> Simulated:
    """Of a sweep whose trial n takes what `loads[n % len(loads)]` says: of whole draws, or of all trials.

    `loading_s` is what overheads are in units of, `drift` the standard deviation of the logarithm of how fast
    the machine is, all that is unsure of it. `share` is what the probe had of its cores: a sweep has that, or
    more, up to all of them.
    """
    count, trials = _extent(spec)
    rng = random.Random(seed)
    machines = _stratified(count, drift, rng)
    starts = _stratified(count, overheads.start_drift, rng)
    freed = _triangular(count, rng)
    validation_s = median(load.averaged_s for load in loads)
    checks = _checks(spec)
    runs = []
    for machine, start, free in zip(machines, starts, freed, strict=True):
        less = share**free
        loading = loading_s * less * share ** (overheads.start_eased * (1 - free))
        start_s = start * overheads.start * loading
        pace = machine * less * overheads.slowdown
        race = _Race(spec, loads, pace, loading_s * less, overheads, checks, rng)
        run = race.run(trials, slots, start_s)
        ending = overheads.end * loading + (validation_s * pace if run.epochs else 0.0)
        runs.append(replace(run, wall_s=run.wall_s + ending))
    return Simulated(
        wall_s=band([run.wall_s for run in runs]),
        busy_s=band([run.busy_s for run in runs]),
        epochs=band([run.epochs for run in runs]),
        capped=sum(run.is_capped for run in runs) / count,
    )


def _checks(spec: SweepSpec) -> dict[int, list[int]]:
    """The epochs after which a trial may end, the last one among them, by its bracket."""
    if not _prunes(spec):
        return {0: [spec.training.epochs]}
    known: dict[int, list[int]] = {}
    for draw in range(spec.draws):
        bracket = bracket_of(spec, draw)
        if bracket not in known:
            known[bracket] = [*sorted(rungs_of(spec, draw)), spec.training.epochs]
        if not isinstance(spec.pruner, Hyperband) or len(known) == len(
            spec.pruner.first_rungs(spec.training.epochs)
        ):
            break
    return known


def _prunes(spec: SweepSpec) -> bool:
    """Whether any trial may be: a median is asked for once so many of its arm have come to their ends."""
    match spec.pruner:
        case MedianPruner(startup_trials=startup):
            return startup < spec.draws
    return not isinstance(spec.pruner, NoPruner)


def _extent(spec: SweepSpec) -> tuple[int, int]:
    """(simulations, trials of each): the first trials, of whole draws, where there is no time for all."""
    all_trials, arms = spec.budget.trials, len(spec.arms)
    most = MOST_EVENTS // FEWEST_SIMULATIONS
    if (events := _events(spec, all_trials)) > most:
        fitting = bisect_right(range(all_trials), most, key=lambda trials: _events(spec, trials)) - 1
        trials = max(fitting, arms * FEWEST_OF_AN_ARM) // arms * arms
        return FEWEST_SIMULATIONS, min(all_trials, trials)
    return min(SIMULATIONS, MOST_EVENTS // events), all_trials


def _events(spec: SweepSpec, trials: int) -> int:
    """How often so many trials are looked at, about: where some are pruned, most end at their first rung."""
    match spec.pruner:
        case MedianPruner(startup_trials=startup) if _prunes(spec):
            whole = min(trials, len(spec.arms) * startup)
            return whole * (1 + len(rungs_of(spec, 0))) + 3 * (trials - whole)
        case SuccessiveHalving() | Hyperband():
            return 3 * trials
    return trials


def band(values: Sequence[float]) -> Band:
    ordered = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return Band(quantile(0.1), quantile(0.5), quantile(0.9))


def scaled_band(value: float, sigma: float) -> Band:
    """Of a value whose logarithm has this standard deviation."""
    tail = math.exp(sigma * NormalDist().inv_cdf(0.9))
    return Band(value / tail, value, value * tail)


def epoch_band(seconds: Sequence[float], drift: float, share: float) -> Band:
    """Of epochs that take so many seconds where a probe had this share of its cores."""
    unsure = math.hypot(drift, math.log(1 / share) / math.sqrt(18))  # of `simulate`'s triangle, a third on
    over, around = band(seconds), scaled_band(1.0, unsure)
    less = share ** (1 / 3)
    return Band(less * over.p10 * around.p10, less * over.p50, less * over.p90 * around.p90)


def _stratified(count: int, sigma: float, rng: random.Random) -> list[float]:
    """Log-normal factors, one of each quantile, in random order: few of them tell as much as many."""
    normal = NormalDist()
    factors = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    rng.shuffle(factors)
    return factors


def _triangular(count: int, rng: random.Random) -> list[float]:
    """From 0 to 1, low ones likelier: one of each quantile, in random order."""
    drawn = [1 - math.sqrt(1 - (i + 0.5) / count) for i in range(count)]
    rng.shuffle(drawn)
    return drawn


@dataclass(frozen=True)
class _Run:
    """What one simulation came to."""

    wall_s: float
    busy_s: float
    epochs: float
    is_capped: bool
    """Whether budget.wall_s ended it."""


@dataclass
class _Sum:
    """Over some trials."""

    trials: int = 0
    busy_s: float = 0.0
    epochs: float = 0.0

    def add(self, busy_s: float, epochs: int) -> None:
        self.trials, self.busy_s, self.epochs = self.trials + 1, self.busy_s + busy_s, self.epochs + epochs


class _Race:
    """One simulation."""

    def __init__(
        self,
        spec: SweepSpec,
        loads: Sequence[Load],
        factor: float,
        loading_s: float,
        overheads: Overheads,
        checks: Mapping[int, Sequence[int]],
        rng: random.Random,
    ) -> None:
        self._spec, self._loads, self._factor, self._overheads, self._rng = (
            spec,
            loads,
            factor,
            overheads,
            rng,
        )
        self._loading_s = loading_s
        self._telling = rng.random()
        """How far the loss at one rung tells that at the next: nobody knows."""
        self._checks = checks
        self._there: dict[tuple[int, int, int], list[float]] = {}
        """Losses at a rung by arm, bracket and epoch, ascending."""
        self._seen: dict[int, list[tuple[int, float]]] = {}
        """Of a running trial, for the median pruner."""
        self._complete = [0] * len(spec.arms)

    def run(self, trials: int, slots: int, start_s: float) -> _Run:
        """Of the first so many trials; the others are like the later half of those."""
        spec = self._spec
        until = spec.budget.wall_s or math.inf
        start_s = min(start_s, until)
        waiting = iter(range(trials))
        running: list[tuple[float, int, int]] = []
        """(when it comes to its next rung, trial, which one that is)"""
        state: dict[int, _Running] = {}
        late_from = trials // 2 // len(spec.arms) * len(spec.arms) if _prunes(spec) else 0
        all_of, late_of = _Sum(), _Sum()
        wall = start_s

        def begin(at: float) -> None:
            if (number := next(waiting, None)) is not None and at < until:
                state[number] = one = self._begun(number, at)
                heapq.heappush(running, (one.reaches(one.next_check), number, one.next_check))

        def end(number: int, busy_s: float, epochs: int) -> None:
            for each in (all_of, late_of) if number >= late_from else (all_of,):
                each.add(busy_s, epochs)
            del state[number]

        for _ in range(min(slots, trials)):
            begin(start_s)
        while running:
            at, number, epoch = heapq.heappop(running)
            one = state[number]
            if at >= until:
                wall = until
                end(number, max(0.0, until - one.began), one.epochs_until(until))
                continue
            if 0 < epoch < spec.training.epochs and not self._is_pruned(number, epoch, one):
                one.passed(epoch)
                heapq.heappush(running, (one.reaches(one.next_check), number, one.next_check))
                continue
            if epoch == spec.training.epochs:
                self._has_completed(number)
            wall = max(wall, at)
            end(number, at - one.began, epoch)
            begin(at)
        if wall >= until:
            return _Run(wall, all_of.busy_s, all_of.epochs, True)
        more = (spec.budget.trials - trials) / max(1, late_of.trials)
        longer_s = more * late_of.busy_s / slots
        part = min(1.0, (until - wall) / longer_s) if longer_s else 1.0
        return _Run(
            wall + part * longer_s,
            all_of.busy_s + part * more * late_of.busy_s,
            all_of.epochs + part * more * late_of.epochs,
            part < 1,
        )

    def _begun(self, number: int, at: float) -> "_Running":
        load, spec = self._loads[number % len(self._loads)], self._spec
        factor = self._factor * math.exp(self._overheads.uneven * self._rng.gauss(0, 1))
        epochs = spec.training.epochs
        # Averaging begins once the loss stalls, which most short trainings never come to.
        averaged_from = min(load.averaging_from, epochs + 1)
        if 1 < averaged_from <= epochs:
            averaged_from = self._rng.randint(load.averaging_from, epochs + 1)
        return _Running(
            began=at,
            begins=at + self._overheads.trial * self._loading_s,
            epoch_s=load.epoch_s * factor + self._overheads.epoch * self._loading_s,
            averaged_s=load.averaged_s * factor,
            averaged_from=averaged_from,
            quality=self._rng.random(),
            checks=[0] if load.fails else self._checks[bracket_of(spec, spec.draw_of(number))],
        )

    def _is_pruned(self, number: int, epoch: int, one: "_Running") -> bool:
        spec = self._spec
        arm = number % len(spec.arms)
        loss = self._telling * one.quality + (1 - self._telling) * self._rng.random()
        match spec.pruner:
            case SuccessiveHalving(reduction_factor=factor) | Hyperband(reduction_factor=factor):
                there = self._there.setdefault((arm, bracket_of(spec, spec.draw_of(number)), epoch), [])
                insort(there, loss)
                return bisect_left(there, loss) >= max(1, len(there) // factor)
            case MedianPruner(startup_trials=startup):
                self._seen.setdefault(number, []).append((epoch, loss))
                there = self._there.get((arm, 0, epoch), [])
                return self._complete[arm] >= startup and bool(there) and loss > there[(len(there) - 1) // 2]
        return False

    def _has_completed(self, number: int) -> None:
        arm = number % len(self._spec.arms)
        self._complete[arm] += 1
        for epoch, loss in self._seen.pop(number, ()):
            insort(self._there.setdefault((arm, 0, epoch), []), loss)


@dataclass
class _Running:
    began: float
    begins: float
    """Its first step."""
    epoch_s: float
    averaged_s: float
    averaged_from: int
    quality: float
    checks: Sequence[int]
    """Epochs after which it may end, the last one among them; 0 alone where it fails at once."""

    @property
    def next_check(self) -> int:
        return self.checks[0]

    def passed(self, epoch: int) -> None:
        self.checks = [check for check in self.checks if check > epoch]

    def reaches(self, epoch: int) -> float:
        """When it has done so many epochs."""
        averaged = max(0, epoch - self.averaged_from + 1)
        return self.begins + epoch * self.epoch_s + averaged * self.averaged_s

    def epochs_until(self, at: float) -> int:
        """Those that it has done by then, the few where weights are averaged as long as the others."""
        return max(0, min(self.checks[-1], int((at - self.begins) / self.epoch_s)))
