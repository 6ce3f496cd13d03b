"""Which trials are ended early, and at which epochs that is asked: within an arm, by all of these."""

from functools import cache
from typing import cast

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from trials.spec import Hyperband, MedianPruner, NoPruner, SuccessiveHalving, SweepSpec

MOST_INTERMEDIATE_VALUES = 50
"""Of one trial in Optuna: the dashboard takes seconds to draw 400 trials of 500 epochs."""


class HalvingWithinArms(BasePruner):
    """Asynchronous successive halving (Li et al. 2018), in Hyperband's brackets where the spec asks for them.

    It compares a trial with those of its own arm: arms whose curves cross would otherwise prune one another,
    and the comparison between them would be of who starts faster. A bracket is a function of the draw, so
    that arms have the same ones. Which rung a trial has reached is read off its intermediate values: a
    decision that a crash undid is made again, where Optuna's pruners, which write rungs down, would let the
    trial pass.
    """

    def __init__(self, spec: SweepSpec, halving: SuccessiveHalving | Hyperband) -> None:
        self._spec = spec
        self._factor = halving.reduction_factor

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        epoch, draw = trial.last_step, self._spec.draw_of(trial.number)
        rungs = rungs_of(self._spec, draw)
        if epoch not in rungs:
            return False
        bracket = bracket_of(self._spec, draw)
        there = sorted(
            row.intermediate_values[epoch]
            for row in OfOneArm(study, self._spec, trial.number).get_trials(deepcopy=False)
            if epoch in row.intermediate_values
            and bracket_of(self._spec, self._spec.draw_of(row.number)) == bracket
        )
        passing = max(1, len(there) // self._factor)
        return trial.intermediate_values[epoch] > there[passing - 1]


class MedianWithinArms(BasePruner):
    """Optuna's median pruner, which is shown a trial's own arm."""

    def __init__(self, spec: SweepSpec, median: MedianPruner) -> None:
        self._spec = spec
        self._pruner = optuna.pruners.MedianPruner(median.startup_trials, median.min_epochs)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        if trial.last_step not in rungs_of(self._spec, self._spec.draw_of(trial.number)):
            return False
        return self._pruner.prune(cast(optuna.Study, OfOneArm(study, self._spec, trial.number)), trial)


class OfOneArm:
    """What pruners ask of a study, narrowed to the arm of one trial."""

    direction = StudyDirection.MINIMIZE

    def __init__(self, study: optuna.Study, spec: SweepSpec, number: int) -> None:
        self._study, self._spec, self._arm = study, spec, spec.arm_of(number)

    def get_trials(
        self, deepcopy: bool = True, states: tuple[TrialState, ...] | None = None
    ) -> list[FrozenTrial]:
        rows = self._study.get_trials(deepcopy=deepcopy, states=states)
        return [row for row in rows if self._spec.arm_of(row.number) == self._arm]


def build_pruner(spec: SweepSpec) -> BasePruner:
    match spec.pruner:
        case SuccessiveHalving() | Hyperband() as halving:
            return HalvingWithinArms(spec, halving)
        case MedianPruner() as median:
            return MedianWithinArms(spec, median)
        case NoPruner():
            return NopPruner()


def rungs_of(spec: SweepSpec, draw: int) -> frozenset[int]:
    """The epochs after which the trials of a draw may be pruned: never the last one."""
    epochs = spec.training.epochs
    match spec.pruner:
        case SuccessiveHalving(min_epochs=first, reduction_factor=factor):
            return rung_epochs(first, factor, epochs)
        case Hyperband(reduction_factor=factor) as hyperband:
            return rung_epochs(hyperband.first_rungs(epochs)[bracket_of(spec, draw)], factor, epochs)
        case MedianPruner(min_epochs=first):
            return frozenset(epoch for epoch in intermediate_epochs(epochs) if first <= epoch < epochs)
        case NoPruner():
            return frozenset()


def bracket_of(spec: SweepSpec, draw: int) -> int:
    """Which of Hyperband's brackets, the one that prunes first being 0; 0 for other pruners."""
    if not isinstance(spec.pruner, Hyperband):
        return 0
    brackets = len(spec.pruner.first_rungs(spec.training.epochs))
    places = _brackets_in_turn(brackets, spec.pruner.reduction_factor)
    return places[draw % len(places)]


@cache
def _brackets_in_turn(brackets: int, factor: int) -> tuple[int, ...]:
    """Each bracket has its share of any run of draws, in proportion to the numbers of configurations of
    Algorithm 1 (Li et al. 2018): the k-th of its w places in a cycle of draws is at (k + 1/2) / w.
    """
    shares = [-(-brackets * factor**s // (s + 1)) for s in reversed(range(brackets))]
    places = sorted(
        ((k + 0.5) / share, bracket) for bracket, share in enumerate(shares) for k in range(share)
    )
    return tuple(bracket for _, bracket in places)


def rung_epochs(first: int, factor: int, epochs: int) -> frozenset[int]:
    """After `first` times the powers of the reduction factor, or the next epoch that Optuna hears of; never
    the last.
    """
    reported = sorted(intermediate_epochs(epochs))
    rungs, rung = set(), first
    while rung < epochs:
        rungs.add(next(epoch for epoch in reported if epoch >= rung))
        rung *= factor
    return frozenset(rungs - {epochs})


def intermediate_epochs(epochs: int) -> frozenset[int]:
    """The epochs that go to Optuna: all of them while they are few, else log-spaced, the last one always."""
    if epochs <= MOST_INTERMEDIATE_VALUES:
        return frozenset(range(1, epochs + 1))
    steps = MOST_INTERMEDIATE_VALUES - 1
    return frozenset(round(epochs ** (i / steps)) for i in range(steps + 1))
