"""Sweeps that were never run, for reports to be drawn of."""

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from service.lifecycle import State
from service.pictures import Epoch, Story
from service.report import build_report
from tests.test_report import trial
from trials.spec import SweepSpec

BEGAN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
SPEC: dict[str, Any] = {
    "name": "FD against ELD",
    "corpus": {"name": "sotu"},
    "budget": {"trials": 48},
    "baseline": 62.0,
    "space": {
        "kappa": {"type": "log_uniform", "low": 0.01, "high": 0.3},
        "batch_size": {"type": "choice", "values": [20, 40, 80]},
        "non_monotone_interval": {"type": "integer", "low": 2, "high": 9},
        "output_p": {"type": "uniform", "low": 0.2, "high": 0.6},
    },
}


def story(
    trials: int = 48, epochs: int = 12, pruned: float = 0.2, state: State = "succeeded", **changes: Any
) -> Story:
    """Two at a time; the second arm is 2 % worse, and κ is best at 0.1."""
    spec = SweepSpec.model_validate({**SPEC, **changes})
    chance, free = random.Random(0), [BEGAN, BEGAN]
    views, curves = [], []
    for number in range(trials):
        params = _params(spec, number)
        worse = 1.2 * list(spec.arms).index(spec.arm_of(number))
        last = 60 + 3 * abs(math.log(params.get("kappa", 0.1) / 0.1)) + chance.gauss(0, 0.5) + worse
        is_pruned = chance.random() < pruned
        reached = max(1, epochs // 3) if is_pruned else epochs
        worker = free.index(min(free))
        started = at = free[worker]
        for epoch in range(1, reached + 1):
            at += timedelta(seconds=8)
            curves.append(Epoch(number, epoch, last + 500 * math.exp(-epoch / 2), at, 8.0, 90_000))
        free[worker] = at + timedelta(seconds=1)
        views.append(
            trial(
                number,
                spec.arm_of(number),
                curves[-1].perplexity if reached else None,
                "PRUNED" if is_pruned else "COMPLETE",
                draw=spec.draw_of(number),
                params=params,
                epochs_done=reached,
                started_at=started,
                finished_at=at,
            )
        )
    return Story(spec, build_report("s0123456789", state, spec, views, max(free)), views, curves)


def _params(spec: SweepSpec, number: int) -> dict[str, Any]:
    chance = random.Random(spec.draw_of(number))
    drawn: dict[str, Any] = {}
    for name, choices in spec.sampled(spec.arm_of(number)):
        if choices.type == "choice":
            drawn[name] = chance.choice(choices.values)
        elif choices.type == "integer":
            drawn[name] = chance.randint(choices.low, choices.high)
        elif choices.type == "log_uniform":
            drawn[name] = math.exp(chance.uniform(math.log(choices.low), math.log(choices.high)))
        else:
            drawn[name] = chance.uniform(choices.low, choices.high)
    return drawn
