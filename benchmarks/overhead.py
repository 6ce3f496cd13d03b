"""What a sweep takes beyond its training, beside bare Ray Tune running the same training.

    .venv/bin/python -m benchmarks.overhead --rounds 5

In turn: a service, up and idle, is sent a sweep; a script of its own starts Ray Tune on the same trials, with
random search and actors that are used again, and keeps nothing. Each trial is one epoch of a small model (E =
64, one layer), one at a time. Prints Markdown: seconds from the start, a submission or a script's launch, to
the first epoch that is reported; for each further trial, from one trial's end to the next one's without its
training and validation; and from start to end over the sum of the training.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from service.client import FraternalClient
from service.errors import INTERRUPTED
from service.launcher import DRIVER_ENVIRONMENT, OWN_RAY
from service.running import Interrupted, Signals, running_service

TRIALS = 20
MODEL = {"embedding_size": 64, "hidden_size": 64, "layers": 1}
TRAINING = {"epochs": 1, "batch_size": 20, "bptt": 35}


@dataclass(frozen=True)
class Overhead:
    """In seconds, all but the last."""

    first_epoch: float
    further_trial: float
    over_training: float
    """Whole time by that of the training."""


def write_text(folder: Path, tokens: int) -> Path:
    rng = np.random.default_rng(1)
    for split, size in (("train", tokens), ("valid", 1000), ("test", 1000)):
        words = " ".join(f"w{word}" for word in rng.integers(0, 1000, size))
        (folder / f"{split}.txt").write_text(words)
    return folder


def of_a_sweep(client: FraternalClient, text: Path, signals: Signals) -> Overhead:
    body = {
        "corpus": {"path": str(text)},
        "model": MODEL,
        "training": TRAINING,
        "arms": {"fd": {"regularizer": "fraternal"}},
        "space": {"kappa": {"type": "uniform", "low": 0.05, "high": 0.2}},
        "budget": {"trials": TRIALS},
        "resources": {"max_concurrent": 1},
    }
    began = time.time()
    sweep = client.create(body)
    first = None
    while sweep.finished_at is None:
        signals.pause(0.02 if first is None else 0.2)
        sweep = client.get(sweep.id)
        first = first or (time.time() - began if sweep.epochs_done else None)
    assert sweep.state == "succeeded", sweep
    assert first is not None
    ended = [trial.finished_at.timestamp() for trial in client.trials(sweep.id) if trial.finished_at]
    seconds = [client.trial(sweep.id, number).curve[0].seconds for number in range(TRIALS)]
    return overhead(first, sorted(ended), seconds, sweep.finished_at.timestamp() - began)


def overhead(first: float, ended: list[float], seconds: list[float], whole: float) -> Overhead:
    between = (ended[-1] - ended[0]) / (len(ended) - 1)
    return Overhead(first, between - sum(seconds[1:]) / (len(seconds) - 1), whole / sum(seconds))


BARE = """
import json, sys, tempfile, time
import ray, torch
from ray import tune

given = json.loads(sys.argv[1])

class Trial(tune.Trainable):
    def setup(self, config):
        torch.set_num_threads(1)
        self.reset_config(config)

    def reset_config(self, config):
        from pathlib import Path
        from models.config import AWDLSTMConfig
        from regularizers.config import Regularization
        from trials.corpora import PathCorpus, load_corpus
        from trials.spec import TrainingConfig
        from trials.training import Training
        if not hasattr(self, "corpus"):
            self.corpus = load_corpus(PathCorpus(path=given["text"]), Path("."))
        regularization = Regularization("fraternal", kappa=config["kappa"])
        self.epochs = Training(
            AWDLSTMConfig(**given["model"]), TrainingConfig(**given["training"]), regularization,
            len(self.corpus.vocabulary), self.corpus.train, self.corpus.valid, 1,
        ).epochs()
        return True

    def step(self):
        epoch = next(self.epochs)
        return {"valid_loss": epoch.valid_loss, "seconds": epoch.seconds, "done": True}

class Watch(tune.Callback):
    ended, seconds = [], []

    def on_trial_complete(self, iteration, trials, trial, **info):
        self.ended.append(time.time())
        self.seconds.append(trial.last_result["seconds"])

watch = Watch()
with tempfile.TemporaryDirectory() as folder:
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20,
        _temp_dir=folder,
    )
    tune.Tuner(
        tune.with_resources(Trial, {"cpu": 1}),
        param_space={"kappa": tune.uniform(0.05, 0.2)},
        tune_config=tune.TuneConfig(num_samples=given["trials"], max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(
            storage_path=folder,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            verbose=0,
            callbacks=[watch],
        ),
    ).fit()
    ended = time.time()
    ray.shutdown()
print(json.dumps({"ended": watch.ended, "seconds": watch.seconds, "at": ended}))
"""


def of_bare_tune(text: Path) -> Overhead:
    given = {"text": str(text), "model": MODEL, "training": TRAINING, "trials": TRIALS}
    began = time.time()
    ended = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps(given)],
        env={**os.environ, **DRIVER_ENVIRONMENT, **OWN_RAY, "RAY_AUTH_TOKEN": "0" * 64},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"bare Ray Tune ended with exit code {ended.returncode}: {ended.stderr}")
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return overhead(said["ended"][0] - began, said["ended"], said["seconds"], said["at"] - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the training split")
    given = parser.parse_args()
    found: dict[str, list[Overhead]] = {"fraternal": [], "bare Ray Tune": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "text").mkdir()
        text = write_text(folder / "text", given.tokens)
        signals = stack.enter_context(Signals())
        console = Console(file=sys.stderr)
        client = stack.enter_context(running_service(folder / "service", signals, console))
        of_a_sweep(client, text, signals)  # files are in memory from here on
        for number in range(given.rounds):
            for name in list(found)[:: 1 if number % 2 == 0 else -1]:
                one = of_a_sweep(client, text, signals) if name == "fraternal" else of_bare_tune(text)
                found[name].append(one)
                print(name, one, file=sys.stderr, flush=True)
    print(
        f"{TRIALS} trials of one epoch, one at a time; medians of {given.rounds} alternating runs (range).\n"
    )
    print("|  | to the first epoch, s | each further trial, s | whole time by training |\n|---|---|---|---|")
    for name, each in found.items():
        columns = [[one.first_epoch for one in each], [one.further_trial for one in each]]
        columns.append([one.over_training for one in each])
        cells = [f"{median(column):.2f} ({min(column):.2f}–{max(column):.2f})" for column in columns]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        main()
    except Interrupted:
        sys.exit(INTERRUPTED)
