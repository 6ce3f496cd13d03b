"""Perplexity by epoch of small models for several kappas and seeds; beside the released code's on wt2mini.

    .venv/bin/python benchmarks/trajectories.py wt2mini --vocabulary all --released --test
    .venv/bin/python benchmarks/trajectories.py ptb --kappas 0,0.1 --test

wt2mini are 200,071, 20,100 and 20,134 tokens of WikiText-2, a directory as any corpus. One layer, E = 64,
batch 20, bptt 70, dropout .4/.25/.4/.1/.5, lr 30, no averaging; one CPU thread a run.
Prints Markdown.
"""

import argparse
import hashlib
import itertools
import math
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import safetensors.torch
import torch

from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from service.looks import Look, LookLog
from service.options import DEFAULT_DATA_DIR
from trials.corpora import Corpus, PathCorpus, load_corpus
from trials.evaluation import evaluate
from trials.perplexity import perplexity
from trials.spec import TrainingConfig
from trials.training import Training

MODEL = AWDLSTMConfig(embedding_size=64, hidden_size=64, layers=1)

COLUMNS = (
    "kappa",
    "",
    "valid by epoch, mean",
    "mean of the best ± sd",
    "its test",
    "train by epoch, running",
)

BEST_WITHIN = 8.0
"""Perplexity: how far the mean of the best epochs may lie from the released code's."""
TRAIN_WITHIN = 0.04
"""Likewise the running train perplexity of each epoch, relatively."""


@dataclass(frozen=True)
class Trajectory:
    """Perplexities of one run; or the means of several."""

    valid: tuple[float, ...]
    train: tuple[float, ...]
    best: float
    test: float
    """Of the weights of the best epoch."""


RELEASED = {  # the released code on wt2mini, mean of three seeds
    0.0: Trajectory((323.3, 304.7, 219.7, 205.6, 203.2, 183.2), (835, 468, 380, 333, 306, 284), 183.2, 183.5),
    0.1: Trajectory((342.5, 316.4, 212.9, 211.2, 192.7, 183.6), (807, 453, 363, 318, 288, 265), 180.1, 179.2),
    0.15: Trajectory(
        (353.4, 308.2, 213.6, 199.1, 188.8, 186.7), (811, 458, 367, 323, 293, 271), 177.4, 177.9
    ),
}


@dataclass(frozen=True)
class Run:
    corpus: PathCorpus
    kappa: float
    seed: int
    epochs: int
    test_log: Path | None = None
    """Data directory whose log has the look at the test split; None: the test split is not looked at."""


def train(run: Run) -> tuple[Run, Trajectory]:
    torch.set_num_threads(1)
    corpus = load_corpus(run.corpus, Path())
    regularization = Regularization("fraternal" if run.kappa else "none", run.kappa)
    training = Training(
        MODEL,
        TrainingConfig(epochs=run.epochs, batch_size=20, bptt=70, averaging="none"),
        regularization,
        len(corpus.vocabulary),
        corpus.train,
        corpus.valid,
        run.seed,
    )
    best = AWDLSTM(MODEL, len(corpus.vocabulary), torch.Generator())
    for result in training.epochs():
        if result.is_best:
            best.load_state_dict(training.weights_to_use())
    valid = tuple(result.valid_perplexity for result in training.history)
    trained = tuple(perplexity(result.train_loss) for result in training.history)
    return run, Trajectory(valid, trained, min(valid), test_perplexity(run, best, corpus))


def test_perplexity(run: Run, model: AWDLSTM, corpus: Corpus) -> float:
    """NaN where nobody asked for it."""
    if run.test_log is None:
        return math.nan
    look = Look(
        command="benchmarks/trajectories.py --test",
        file=f"kappa {run.kappa:g}, seed {run.seed}",
        sha256=hashlib.sha256(safetensors.torch.save(model.state_dict())).hexdigest(),
        corpus=run.corpus.model_dump(mode="json", exclude_none=True),
        split_sha256=corpus.sha256["test"],
        tokens=len(corpus.test) - 1,
    )
    return perplexity(LookLog(run.test_log).test_loss(look, lambda: evaluate(model, corpus.test)).loss)


def mean(trajectories: Sequence[Trajectory]) -> Trajectory:
    return Trajectory(
        tuple(map(fmean, zip(*(each.valid for each in trajectories), strict=True))),
        tuple(map(fmean, zip(*(each.train for each in trajectories), strict=True))),
        fmean(each.best for each in trajectories),
        fmean(each.test for each in trajectories),
    )


def rows(kappa: float, trajectories: Sequence[Trajectory], released: Trajectory | None) -> Iterator[str]:
    ours = mean(trajectories)
    spread = f" ± {stdev(each.best for each in trajectories):.1f}" if len(trajectories) > 1 else ""
    yield row(f"{kappa:g}", "ours", ours, spread)
    if released is not None:
        yield row("", "released", released)


def row(kappa: str, whose: str, each: Trajectory, spread: str = "") -> str:
    valid = " ".join(f"{value:.1f}" for value in each.valid)
    trained = " ".join(f"{value:.0f}" for value in each.train)
    test = "–" if math.isnan(each.test) else f"{each.test:.1f}"
    return f"| {kappa} | {whose} | {valid} | {each.best:.1f}{spread} | {test} | {trained} |"


def verdicts(kappa: float, ours: Trajectory, released: Trajectory) -> Iterator[str]:
    off = ours.best - released.best
    yield f"- kappa {kappa:g}: best {off:+.1f}, {_held(abs(off) <= BEST_WITHIN)} ±{BEST_WITHIN:g}"
    worst = max((one / other - 1 for one, other in zip(ours.train, released.train, strict=True)), key=abs)
    held = _held(abs(worst) <= TRAIN_WITHIN)
    yield f"- kappa {kappa:g}: running train perplexity at most {worst:+.1%} off, {held} ±{TRAIN_WITHIN:.0%}"


def _held(holds: bool) -> str:
    return "within" if holds else "NOT within"


def numbers(written: str) -> list[float]:
    return [float(number) for number in written.split(",")]


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path, help="a directory with train.txt, valid.txt, test.txt")
    parser.add_argument("--vocabulary", choices=["train", "all"], default="train")
    parser.add_argument("--kappas", type=numbers, default=[0.0, 0.1, 0.15])
    parser.add_argument("--seeds", type=numbers, default=[141, 321, 1111])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--released", action="store_true", help="beside the released code's numbers on wt2mini"
    )
    parser.add_argument("--test", action="store_true", help="also by the test split; each look is logged")
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="where that log is")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    corpus = PathCorpus(path=str(given.corpus.resolve()), vocabulary=given.vocabulary)
    runs = [
        Run(corpus, kappa, int(seed), given.epochs, given.data_dir if given.test else None)
        for seed, kappa in itertools.product(given.seeds, given.kappas)
    ]
    began = time.monotonic()
    with ProcessPoolExecutor(given.processes) as pool:
        done = list(pool.map(train, runs))
    seconds = time.monotonic() - began
    machine = f"torch {torch.__version__}, {platform.machine()}, {seconds:.0f} s"
    print(f"{given.corpus.name}, {len(given.seeds)} seeds, {machine}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    said: list[str] = []
    for kappa in given.kappas:
        trajectories = [trajectory for run, trajectory in done if run.kappa == kappa]
        released = RELEASED.get(kappa) if given.released else None
        print("\n".join(rows(kappa, trajectories, released)))
        said += verdicts(kappa, mean(trajectories), released) if released else []
    print("\n" + "\n".join(said) if said else "")


if __name__ == "__main__":
    main()
