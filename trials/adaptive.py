"""Samplers that learn from trials: TPE, Gaussian processes, CMA-ES.

Each arm learns from its own trials alone, and from as many as any other arm: taken over from one arm,
suggestions would be where that one is good. A suggestion is a function of (spec, draw, what the arm's trials
have come to); no sampler keeps anything. So a driver that starts again asks as the one before would have.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from trials.samplers import CounterSampler, PerParameter, ShuffledGrid, SobolSampler, unit_at, value_at
from trials.spec import (
    Choice,
    CMAESSampler,
    GPSampler,
    GridSampler,
    Integer,
    LogUniform,
    QMCSampler,
    RandomSampler,
    Range,
    SweepSpec,
    TPESampler,
    Uniform,
    cmaes_population,
)

log = logging.getLogger(__name__)

MOST_FITTED = 400
"""Trials that a Gaussian process is fitted to, whose time grows with the cube of their number."""
MOST_SHOWN = 1000
"""Trials that TPE is shown, which takes 0.1 ms for each: Tune's main loop waits for it."""
INITIAL_SIGMA = 0.25
"""Of CMA-ES, in the widths of the ranges, from their middle: Hansen (2016) has the optimum within 2 or so."""

SUGGESTED = "suggested"
"""The attribute of a trial that keeps what was suggested for it; nothing where it is drawn at random."""

Space = dict[str, BaseDistribution]


@dataclass(frozen=True)
class Seen:
    """A trial as a sampler sees it."""

    params: dict[str, Any]
    loss: float | None
    """In nats per token; of a pruned trial, what it might have come to; None while it runs."""


Suggest = Callable[[Space, Sequence[Seen], int], dict[str, Any]]
"""Values for (space, trials, seed); the trials in the order in which they ended, those that run last."""


class AdaptiveSampler(PerParameter):
    """Learns, arm by arm, from the trials that have ended; draws at random until there are enough."""

    def __init__(self, spec: SweepSpec, suggest: Suggest, startup_trials: int) -> None:
        super().__init__(spec)
        self._suggest, self._startup_trials = suggest, startup_trials
        self._random = CounterSampler(spec)
        self._latest: tuple[int, dict[str, Any]] = -1, {}
        """The trial that values were suggested for, and they: it asks for one after another."""

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if self._latest[0] != trial.number:
            self._latest = trial.number, self._kept_or_suggested(study, trial)
        if param_name in self._latest[1]:
            return self._latest[1][param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _kept_or_suggested(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        """Kept whole before any value of it is: what a crash leaves out is not taken from another model."""
        rows = study.get_trials(deepcopy=False)
        kept: dict[str, Any] | None = rows[trial.number].system_attrs.get(SUGGESTED)
        if kept is not None:
            return kept
        suggested = self._suggested(rows, trial.number)
        study._storage.set_trial_system_attr(trial._trial_id, SUGGESTED, suggested)
        return suggested

    def _suggested(self, rows: Sequence[FrozenTrial], number: int) -> dict[str, Any]:
        arm = self._spec.arm_of(number)
        ranges = {name: distribution_of(choices) for name, choices in sorted(self._spec.sampled(arm))}
        space = {name: axis for name, axis in ranges.items() if not axis.single()}
        seen = seen_in([row for row in rows if self._spec.arm_of(row.number) == arm], space, number)
        if sum(trial.loss is not None for trial in seen) < self._startup_trials:
            return {}
        try:
            return self._suggest(space, seen, _seed(self._spec.sampler.seed, self._spec.draw_of(number)))
        except Exception:  # whatever a library makes of these trials ends no other
            log.exception("no model fits the trials of arm %s: trial %d is drawn at random", arm, number)
            return {}


def _seed(seed: int, draw: int) -> int:
    """Of the random numbers of one suggestion, 32 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{draw}/suggestion".encode()).digest()[:4])


def distribution_of(choices: Range) -> BaseDistribution:
    match choices:
        case Choice(values=values):
            return CategoricalDistribution(values)
        case Integer(low=low, high=high):
            return IntDistribution(low, high)
        case LogUniform(low=low, high=high):
            return FloatDistribution(low, high, log=True)
        case Uniform(low=low, high=high):
            return FloatDistribution(low, high)


def seen_in(rows: Sequence[FrozenTrial], space: Space, but: int) -> list[Seen]:
    """One arm's trials, those that have ended in the order in which they did, then those that run.

    A trial that diverged is as bad as the worst: samplers that were not told would go there again. Other
    failures say nothing of a configuration. `but` is the trial that this is asked for.
    """
    rows = [row for row in rows if space.keys() <= row.params.keys() and row.number != but]
    ended = [row for row in rows if row.datetime_complete is not None]
    ended.sort(key=lambda row: (row.datetime_complete or row.datetime_start, row.number))
    gains = _Gains(ended)
    losses = {row.number: gains.final_loss(row) for row in ended if row.state != TrialState.FAIL}
    losses = {number: loss for number, loss in losses.items() if math.isfinite(loss)}
    worst = max(losses.values(), default=math.inf)
    for row in ended:
        if row.user_attrs.get("failure_class") == "diverged" and math.isfinite(worst):
            losses[row.number] = worst
    return [Seen(row.params, losses[row.number]) for row in ended if row.number in losses] + [
        Seen(row.params, None) for row in rows if row.state == TrialState.RUNNING
    ]


class _Gains:
    """By how much the losses of an arm's complete trials fell after an epoch, in the median.

    A pruned trial has the loss of few epochs, which compares with none of many.
    """

    def __init__(self, ended: Sequence[FrozenTrial]) -> None:
        self._complete = [row for row in ended if row.state == TrialState.COMPLETE]
        self._known: dict[int, float] = {}

    def final_loss(self, row: FrozenTrial) -> float:
        """Infinite where a trial has none, which one that ended well always has."""
        loss = float(row.user_attrs.get("best_valid_loss", math.inf))
        if row.state == TrialState.COMPLETE or row.last_step is None:
            return loss
        return loss - self._after(row.last_step)

    def _after(self, epoch: int) -> float:
        if epoch not in self._known:
            there = ((row, row.intermediate_values.get(epoch, math.inf)) for row in self._complete)
            falls = [
                math.log(perplexity) - self.final_loss(row)
                for row, perplexity in there
                if math.isfinite(perplexity)
            ]
            self._known[epoch] = max(0.0, median(falls)) if falls else 0.0
        return self._known[epoch]


def suggest_by(sampler: Callable[[int], BaseSampler]) -> Suggest:
    """Have one of Optuna's samplers, made anew of a seed, look at a study of nothing but these trials."""

    logging.getLogger("optuna.storages._in_memory").setLevel(logging.WARNING)  # it says each study's name

    def suggest(space: Space, seen: Sequence[Seen], seed: int) -> dict[str, Any]:
        study = optuna.create_study(sampler=sampler(seed))
        study.add_trials([_row(trial, space) for trial in seen])
        return study.ask(fixed_distributions=space).params

    return suggest


def _fewer(seen: Sequence[Seen], most: int) -> Sequence[Seen]:
    """Of more than so many, the best half and the latest."""
    if len(seen) <= most:
        return seen
    best = sorted(range(len(seen)), key=lambda index: _or_infinite(seen[index].loss))[: most // 2]
    latest = range(len(seen) - most // 2, len(seen))
    return [seen[index] for index in sorted({*best, *latest})]


def _or_infinite(loss: float | None) -> float:
    return math.inf if loss is None else loss


def _row(trial: Seen, space: Space) -> FrozenTrial:
    state = TrialState.RUNNING if trial.loss is None else TrialState.COMPLETE
    params = {name: trial.params[name] for name in space}
    return create_trial(state=state, value=trial.loss, params=params, distributions=space)


def suggest_by_cmaes(space: Space, seen: Sequence[Seen], seed: int) -> dict[str, Any]:
    """CMA-ES (Hansen 2016) told of all that has ended, population by population in the order of the ends.

    So some of a population may have been drawn from the distribution before; a client's points count, too.
    """
    import cmaes
    import numpy as np

    size = len(space)
    strategy = cmaes.CMA(
        mean=np.full(size, 0.5),
        sigma=INITIAL_SIGMA,
        bounds=np.array([[0.0, 1.0]] * size),
        seed=seed,
        population_size=cmaes_population(size),
    )
    told = [
        (np.array([unit_at(trial.params[name], axis) for name, axis in space.items()]), trial.loss)
        for trial in seen
        if trial.loss is not None
    ]
    for first in range(0, len(told) - strategy.population_size + 1, strategy.population_size):
        strategy.tell(told[first : first + strategy.population_size])
    us = np.clip(strategy.ask(), 0.0, np.nextafter(1.0, 0.0))
    return {name: value_at(float(u), axis) for u, (name, axis) in zip(us, space.items(), strict=True)}


def build_sampler(spec: SweepSpec) -> BaseSampler:
    match spec.sampler:
        case RandomSampler():
            return CounterSampler(spec)
        case QMCSampler():
            return SobolSampler(spec)
        case GridSampler():
            return ShuffledGrid(spec)
        case TPESampler(startup_trials=startup_trials):
            return AdaptiveSampler(spec, suggest_by_tpe, startup_trials)
        case GPSampler(startup_trials=startup_trials):
            return AdaptiveSampler(spec, suggest_by_gp, startup_trials)
        case CMAESSampler():
            return AdaptiveSampler(spec, suggest_by_cmaes, 0)


def suggest_by_tpe(space: Space, seen: Sequence[Seen], seed: int) -> dict[str, Any]:
    return suggest_by(_tpe)(space, _fewer(seen, MOST_SHOWN), seed)


def _tpe(seed: int) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)


def suggest_by_gp(space: Space, seen: Sequence[Seen], seed: int) -> dict[str, Any]:
    import torch  # some seconds, which other sweeps do without

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the cores are the workers'
    try:
        return suggest_by(_gp)(space, _fewer(seen, MOST_FITTED), seed)
    finally:
        torch.set_num_threads(threads)


def _gp(seed: int) -> BaseSampler:
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
