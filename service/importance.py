"""How much each sampled parameter matters, by Optuna."""

from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import TrialState, create_trial

from service.schemas import TrialView
from trials.adaptive import distribution_of
from trials.spec import SweepSpec

MOST = 2000
"""Trials, about, evenly chosen: of more it takes minutes."""
FEWEST = 10
"""Trials; from fewer nothing can be said."""


def find_importances(spec: SweepSpec, trials: Sequence[TrialView]) -> dict[str, float]:
    """Of each parameter, the largest first; they add up to 1. Empty where too few trials completed.

    PED-ANOVA (Watanabe et al. 2023), over the completed trials of the arms that sample a parameter.
    """
    completed = [trial for trial in trials if trial.state == "COMPLETE" and trial.best_valid_loss is not None]
    every = max(1, len(completed) // MOST)
    completed = [trial for trial in completed if trial.draw % every == 0]
    distributions = {name: distribution_of(choices) for name, choices in spec.space.items()}
    found = {}
    for name, distribution in distributions.items():
        some = [trial for trial in completed if name in trial.params]
        values = {repr(trial.params[name]) for trial in some}
        if len(some) >= FEWEST and len(values) > 1 and not distribution.single():
            found[name] = _importance(name, distribution, some)
    total = sum(found.values())
    shares = {name: value / total for name, value in found.items()} if total > 0 else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _importance(name: str, distribution: BaseDistribution, trials: Sequence[TrialView]) -> float:
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    study.add_trials(
        [
            create_trial(
                state=TrialState.COMPLETE,
                value=trial.best_valid_loss,
                params={name: trial.params[name]},
                distributions={name: distribution},
            )
            for trial in trials
        ]
    )
    return PedAnovaImportanceEvaluator().evaluate(study, params=[name])[name]
