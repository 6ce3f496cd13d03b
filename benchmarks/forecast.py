"""Forecasts against what came of them: real sweeps through the real service.

    .venv/bin/python -m benchmarks.forecast --sweeps 10 --seed 3

Each sweep is drawn at random by the seed: its corpus's length, model, arms, space, sampler, pruner, how many
trials at once. It is forecast, then submitted; idle, two cores take half a minute to a minute for it. Prints
Markdown: the forecast's wall time, the measured one from submission to `succeeded`, and whether that is
inside. What is calibrated on some seeds is reported on others.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from service.client import FraternalClient
from service.errors import INTERRUPTED
from service.forecast_schemas import Forecast
from service.running import Interrupted, Signals, running_service
from service.schemas import SweepDetail


@dataclass(frozen=True)
class Outcome:
    """Seconds, of one sweep."""

    what: str
    trials: int
    forecast: Forecast
    wall_s: float
    epochs: int

    @property
    def is_inside(self) -> bool:
        band = self.forecast.wall_s
        return band is not None and band.p10 <= self.wall_s <= band.p90

    @property
    def row(self) -> str:
        band, epochs, probe = self.forecast.wall_s, self.forecast.epochs, self.forecast.probe
        assert band
        assert epochs
        assert probe
        return (
            f"| {self.what} | {self.trials} | {band.p10:.0f} | {band.p50:.0f} | {band.p90:.0f} "
            f"| {self.wall_s:.0f} | {'in' if self.is_inside else 'out'} | {self.wall_s / band.p50:.2f} "
            f"| {band.p90 / band.p10:.2f} | {epochs.p10:.0f}–{epochs.p90:.0f} | {self.epochs} "
            f"| {probe.took_s:.0f} | {probe.share:.2f} |"
        )


def bodies(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what it is, the sweep) of so many, drawn at random; kinds of search in turn."""
    rng = random.Random(seed)
    for number in range(count):
        sampler, pruner = KINDS[number % len(KINDS)]
        width = rng.choice([32, 48, 64, 96, 128])
        layers, epochs = rng.choice([1, 1, 2]), rng.randint(3, 5)
        at_once = rng.choice([1, 2, 2])
        body = {
            "corpus": {
                "name": "sotu",
                "train_tokens": rng.randrange(15_000, 40_000, 1000),
                "valid_tokens": rng.randrange(3_000, 12_000, 1000),
                "test_tokens": 2_000,
                "vocabulary_size": rng.choice([1_000, 2_000, 5_000]),
            },
            "model": {"embedding_size": width, "hidden_size": width * rng.choice([1, 2]), "layers": layers},
            "training": {"epochs": epochs, "lr": 10, "non_monotone_interval": rng.choice([0, 5])},
            "arms": {name: {"regularizer": name} for name in rng.sample(REGULARIZERS, rng.choice([1, 2, 3]))},
            "space": dict(rng.sample(list(SPACE.items()), rng.choice([2, 3]))),
            "sampler": {**sampler, "seed": rng.randrange(2**31)},
            "pruner": pruner,
            "resources": {"max_concurrent": at_once},
        }
        body["budget"] = {"trials": len(body["arms"]) * max(3, rng.randint(6, 12) // len(body["arms"]))}
        arms, space = "/".join(SHORT[arm] for arm in body["arms"]), ", ".join(body["space"])
        what = f"{sampler['name']}, {pruner['name']}, {arms}; {space}; {layers}×{width}; {at_once} at once"
        yield what, body


KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "random"}, {"name": "none"}),
    ({"name": "random"}, {"name": "successive_halving", "min_epochs": 1, "reduction_factor": 2}),
    ({"name": "qmc"}, {"name": "none"}),
    ({"name": "qmc"}, {"name": "median", "min_epochs": 1, "startup_trials": 2}),
    ({"name": "tpe", "startup_trials": 2}, {"name": "none"}),
    ({"name": "random"}, {"name": "hyperband", "min_epochs": 1, "reduction_factor": 2}),
]
SHORT = {
    "none": "plain",
    "fraternal": "fd",
    "expectation_linear": "eld",
    "pi_model": "pi",
    "prediction_norm": "pn",
}
REGULARIZERS = list(SHORT)
SPACE: dict[str, Any] = {
    "batch_size": {"type": "choice", "values": [10, 20, 40]},
    "bptt": {"type": "integer", "low": 20, "high": 70},
    "lr": {"type": "log_uniform", "low": 1, "high": 20},
    "weight_p": {"type": "uniform", "low": 0.1, "high": 0.6},
    "embedding_size": {"type": "integer", "low": 32, "high": 96},
}


def ran(client: FraternalClient, signals: Signals, what: str, body: dict[str, Any]) -> Outcome:
    forecast = client.validate(body).forecast
    assert forecast is not None
    assert forecast.wall_s is not None, forecast.unknown
    sweep = client.create(body)
    while sweep.finished_at is None:
        signals.pause(0.5)
        sweep = client.get(sweep.id)
    if sweep.state != "succeeded":
        raise SystemExit(f"{what}: the sweep is {sweep.state}: {sweep.state_reason}")
    wall_s = (sweep.finished_at - sweep.created_at).total_seconds()
    print(parts(client, sweep, forecast), file=sys.stderr, flush=True)
    return Outcome(what, sweep.trials.budget, forecast, wall_s, sweep.epochs_done)


def parts(client: FraternalClient, sweep: SweepDetail, forecast: Forecast) -> str:
    """What the wall time was made of, for who calibrates: seconds, and measured epochs by forecast ones."""
    trials = [client.trial(sweep.id, trial.number) for trial in client.trials(sweep.id)]
    begun = [
        trial.curve[0].recorded_at.timestamp() - trial.curve[0].seconds for trial in trials if trial.curve
    ]
    start = min(begun) - sweep.created_at.timestamp()
    ratios, gaps, between = [], [], []
    for trial, sample in zip(trials, forecast.samples, strict=False):
        if sample.epoch_s is not None:
            ratios += [epoch.seconds / sample.epoch_s.p50 for epoch in trial.curve]
    for trial in trials:
        for earlier, epoch in pairwise(trial.curve):
            gaps.append((epoch.recorded_at - earlier.recorded_at).total_seconds() - epoch.seconds)
    if sweep.spec.resources.max_concurrent == 1:
        for earlier, later in pairwise(trials):
            began = later.curve[0].recorded_at.timestamp() - later.curve[0].seconds
            between.append(began - earlier.curve[-1].recorded_at.timestamp())
    last = max(trial.curve[-1].recorded_at.timestamp() for trial in trials if trial.curve)
    assert sweep.finished_at
    told = {
        "loading": forecast.probe.start_s if forecast.probe else 0.0,
        "start": start,
        "epochs by forecast": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "between epochs": median(gaps or [0.0]),
        "between trials": median(between or [0.0]),
        "end": sweep.finished_at.timestamp() - last,
    }
    return ", ".join(f"{name} {value:.2f}" for name, value in told.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    outcomes = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        signals = stack.enter_context(Signals())
        console = Console(file=sys.stderr)
        client = stack.enter_context(running_service(folder / "service", signals, console))
        for what, body in bodies(given.seed, given.sweeps):
            outcomes.append(ran(client, signals, what, body))
            print(outcomes[-1].row, file=sys.stderr, flush=True)
    columns = ["sweep", "trials", "P10, s", "P50", "P90", "measured", "", "measured by P50", "P90 by P10"]
    columns += ["epochs, P10–P90", "trained", "probe, s", "its share"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for outcome in outcomes:
        print(outcome.row)
    ratios = [outcome.wall_s / outcome.forecast.wall_s.p50 for outcome in outcomes if outcome.forecast.wall_s]
    inside = sum(outcome.is_inside for outcome in outcomes)
    print(f"\n{inside} of {len(outcomes)} inside; measured by P50: {median(ratios):.2f} in the median.")


if __name__ == "__main__":
    try:
        main()
    except Interrupted:
        sys.exit(INTERRUPTED)
