"""The configurations that a sweep will try, told before it runs. No torch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from pydantic import ValidationError

from trials.adaptive import build_sampler
from trials.samplers import suggest
from trials.spec import (
    CMAESSampler,
    GPSampler,
    SweepSpec,
    TPESampler,
    TrialConfig,
    cmaes_population,
    has_one_value,
)

MOST_PLANNED = 512
"""Of a larger sweep, so many trials stand for the others: a third of a millisecond each."""


@dataclass(frozen=True)
class Planned:
    """A trial that is to come."""

    number: int
    arm: str
    draw: int
    seed: int
    params: Mapping[str, Any]
    config: TrialConfig
    is_exact: bool
    """Whether it will have these values; else they are an example of what its sampler may come to learn."""


def plan(spec: SweepSpec, most: int = MOST_PLANNED) -> list[Planned]:
    """The first trials as the ledger would hand them out, by the sweep's own sampler, in a study in memory.

    Nothing ever ends in that study, so a sampler that learns goes on drawing at random.
    """
    logging.getLogger("optuna.storages._in_memory").setLevel(logging.WARNING)  # it says each study's name
    study = optuna.create_study(sampler=build_sampler(spec))
    exact = {arm: _exact_draws(spec, arm) for arm in spec.arms}
    planned = []
    for number in range(min(spec.budget.trials, most)):
        arm, draw = spec.arm_of(number), spec.draw_of(number)
        trial = study.ask(fixed_distributions={})
        if draw < len(spec.points):
            values = spec.taken(dict(spec.points[draw]))
            study._storage.set_trial_system_attr(trial._trial_id, "fixed_params", values)
            trial = optuna.trial.Trial(study, trial._trial_id)
        params = {name: suggest(trial, name, choices) for name, choices in spec.sampled(arm)}
        try:
            config = spec.trial_config(arm, params)
        except ValidationError:  # that trial will fail, and no other
            continue
        planned.append(
            Planned(number, arm, draw, spec.seed_of(number), params, config, _is_exact(draw, exact[arm]))
        )
    return planned


def _is_exact(draw: int, exact_draws: int | None) -> bool:
    return exact_draws is None or draw < exact_draws


def _exact_draws(spec: SweepSpec, arm: str) -> int | None:
    """How many draws of an arm follow from the spec alone; None: all of them."""
    axes = sum(not has_one_value(choices) for _, choices in spec.sampled(arm))
    match spec.sampler:
        case TPESampler() | GPSampler() if axes:
            return spec.sampler.startup_trials
        case CMAESSampler() if axes:
            return cmaes_population(axes)
    return None
