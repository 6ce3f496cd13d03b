"""Which trials are ended early: successive halving, within an arm."""

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.trial import FrozenTrial

from trials.spec import SuccessiveHalving, SweepSpec

MOST_INTERMEDIATE_VALUES = 50
"""Of one trial in Optuna: the dashboard takes seconds to draw 400 trials of 500 epochs."""


class HalvingWithinArms(BasePruner):
    """Asynchronous successive halving (Li et al. 2018) that compares a trial with those of its own arm.

    Arms whose curves cross would otherwise prune one another, and the comparison between them would be of who
    starts faster. Which rung a trial has reached is read off its intermediate values: a decision that a crash
    undid is made again, where Optuna's pruner, which writes rungs down, would let the trial pass.
    """

    def __init__(self, spec: SweepSpec, halving: SuccessiveHalving) -> None:
        self._spec = spec
        self._halving = halving
        self._rungs = rung_epochs(halving, spec.training.epochs)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        epoch = trial.last_step
        if epoch not in self._rungs:
            return False
        arm = self._spec.arm_of(trial.number)
        there = sorted(
            row.intermediate_values[epoch]
            for row in study.get_trials(deepcopy=False)
            if epoch in row.intermediate_values and self._spec.arm_of(row.number) == arm
        )
        passing = max(1, len(there) // self._halving.reduction_factor)
        return trial.intermediate_values[epoch] > there[passing - 1]


def build_pruner(spec: SweepSpec) -> BasePruner:
    return HalvingWithinArms(spec, spec.pruner) if spec.pruner.name == "successive_halving" else NopPruner()


def rung_epochs(halving: SuccessiveHalving, epochs: int) -> frozenset[int]:
    """Where a trial may be pruned: after min_epochs times the powers of the reduction factor, or the next
    epoch that Optuna hears of; never after the last.
    """
    reported = sorted(intermediate_epochs(epochs))
    rungs, rung = set(), halving.min_epochs
    while rung < epochs:
        rungs.add(next(epoch for epoch in reported if epoch >= rung))
        rung *= halving.reduction_factor
    return frozenset(rungs - {epochs})


def intermediate_epochs(epochs: int) -> frozenset[int]:
    """The epochs that go to Optuna: all of them while they are few, else log-spaced, the last one always."""
    if epochs <= MOST_INTERMEDIATE_VALUES:
        return frozenset(range(1, epochs + 1))
    steps = MOST_INTERMEDIATE_VALUES - 1
    return frozenset(round(epochs ** (i / steps)) for i in range(steps + 1))
