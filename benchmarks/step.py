"""One training step, ours beside the textbook way: time, memory, and the matrix products alone.

    .venv/bin/python -m benchmarks.step
    .venv/bin/python -m benchmarks.step --configurations ptb --regularizers fraternal --threads 1,2

Each measurement is a process of its own; ours and the textbook alternate, the order changing with the round,
and medians are shown with the ratio's range. CPU-seconds of random text of the configuration's vocabulary,
windows of 70 steps. `shipped` is glibc's allocator as it is, `tuned` that of a sweep's workers. The floor is
the matrix products of the same shapes and nothing else. Prints Markdown.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.plain import PlainStep, largest_difference
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from service.launcher import DRIVER_ENVIRONMENT
from trials.spec import TrainingConfig
from trials.training import Training

BPTT = 70


@dataclass(frozen=True)
class Configuration:
    model: AWDLSTMConfig
    vocabulary_size: int
    batch_size: int
    steps: int
    """Measured at once."""


CONFIGURATIONS = {
    "small": Configuration(AWDLSTMConfig(64, 64, 1), 10_000, 20, 20),
    "medium": Configuration(AWDLSTMConfig(200, 200, 1), 10_000, 20, 10),
    "ptb": Configuration(AWDLSTMConfig(), 10_000, 20, 2),
    "wt2": Configuration(AWDLSTMConfig(), 33_278, 40, 1),
}


@dataclass(frozen=True)
class Measurement:
    """What a worker is asked for."""

    way: str
    configuration: str
    regularizer: str
    threads: int
    allocator: str
    what: str = "time"
    """Or memory."""


# In a worker.


def measure(asked: Measurement) -> float:
    """CPU-seconds a token, or bytes of a step's peak beyond what was resident before it."""
    torch.set_num_threads(asked.threads)
    configuration = CONFIGURATIONS[asked.configuration]
    steps = configuration.steps if asked.what == "time" else 1
    take = WAYS[asked.way](configuration, Regularization(asked.regularizer), steps)
    if asked.what == "memory":
        before = _resident("VmRSS")
        take()
        return _resident("VmHWM") - before
    take()  # what is allocated and built once
    began = time.process_time()
    take()
    return (time.process_time() - began) / (steps * BPTT * configuration.batch_size)


def _resident(name: str) -> int:
    with open("/proc/self/status") as status:
        found = re.search(name + r":\s+(\d+)", status.read())
    assert found is not None
    return int(found[1]) * 1024


def _text(configuration: Configuration, steps: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    size = configuration.batch_size * (steps * BPTT + 1)
    return np.random.default_rng(1).integers(0, configuration.vocabulary_size, size, dtype=np.int32)


def _ours(configuration: Configuration, regularization: Regularization, steps: int) -> Callable[[], Any]:
    text = _text(configuration, steps)
    config = TrainingConfig(
        epochs=100_000, batch_size=configuration.batch_size, bptt=BPTT, windows="fixed", averaging="none"
    )
    size = configuration.vocabulary_size
    training = Training(configuration.model, config, regularization, size, text, text[:2], 1)
    epochs = training.epochs()
    return lambda: next(epochs)


def _plain(configuration: Configuration, regularization: Regularization, steps: int) -> Callable[[], Any]:
    ids = torch.from_numpy(_text(configuration, steps).astype(np.int64))
    columns_TB = ids.view(configuration.batch_size, -1).t().contiguous()
    generator = torch.Generator().manual_seed(1)
    model = AWDLSTM(configuration.model, configuration.vocabulary_size, generator)
    step = PlainStep(model, regularization, 30.0, 0.25, 1.2e-6).step

    def take() -> None:
        state = model.zero_state(configuration.batch_size)
        for start in range(0, steps * BPTT, BPTT):
            end = start + BPTT
            state = step(columns_TB[start:end], columns_TB[start + 1 : end + 1], state, generator)

    return take


def _floor(configuration: Configuration, regularization: Regularization, steps: int) -> Callable[[], Any]:
    """Forward, and both gradients, of each product; a pass without gradient has the first of the three."""
    declaration = regularization.declaration
    backward = [True]
    if declaration.second_pass != "none":
        backward.append(regularization.second_pass_has_gradient)
    heads = [True] * (2 if declaration.target == "mean" else 1)
    tokens, size = BPTT * configuration.batch_size, configuration.vocabulary_size
    shapes: list[tuple[int, int, int, int]] = []  # rows, inner, columns, how often

    def product(rows: int, inner: int, columns: int, often: int, with_backward: bool) -> None:
        shapes.append((rows, inner, columns, often))
        if with_backward:
            shapes.append((rows, columns, inner, often))
            shapes.append((inner, rows * often, columns, 1))

    for with_backward in backward:
        for inputs, outputs in configuration.model.layer_sizes:
            product(tokens, inputs, 4 * outputs, 1, with_backward)
            product(configuration.batch_size, outputs, 4 * outputs, BPTT, with_backward)
    for with_backward in heads:
        product(tokens, configuration.model.layer_sizes[-1][1], size, 1, with_backward)
    matrices = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n), often) for m, k, n, often in shapes]

    def take() -> None:
        for _ in range(steps):
            for one, other, out, often in matrices:
                for _ in range(often):
                    torch.mm(one, other, out=out)

    return take


WAYS: dict[str, Callable[[Configuration, Regularization, int], Callable[[], Any]]] = {
    "ours": _ours,
    "textbook": _plain,
    "floor": _floor,
}


# In the parent.


def ask(asked: Measurement) -> float:
    tuned = {name: value for name, value in DRIVER_ENVIRONMENT.items() if name.startswith("MALLOC_")}
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
        **(tuned if asked.allocator == "tuned" else {}),
        "OMP_NUM_THREADS": str(asked.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--worker", json.dumps(asked.__dict__)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ended.stdout)


def alternate(asked: Iterable[Measurement], rounds: int) -> dict[Measurement, list[float]]:
    found: dict[Measurement, list[float]] = {one: [] for one in asked}
    for number in range(rounds):
        for one in list(found)[:: 1 if number % 2 == 0 else -1]:
            found[one].append(ask(one))
    return found


def row(configuration: str, regularizer: str, threads: int, rounds: int) -> str:
    ours = Measurement("ours", configuration, regularizer, threads, "tuned")
    textbook = replace(ours, way="textbook")
    shipped, floor = replace(textbook, allocator="shipped"), replace(ours, way="floor")
    times = alternate([ours, textbook, shipped, floor], rounds)
    memory = alternate([replace(one, what="memory") for one in (ours, textbook)], min(rounds, 3))
    peaks = [median(values) / 2**20 for values in memory.values()]
    cells = [
        *[configuration, regularizer, str(threads)],
        *(f"{1 / median(times[one]):,.0f}" for one in (ours, textbook, shipped)),
        *(_ratio(times[other], times[ours]) for other in (textbook, shipped)),
        _ratio(times[ours], times[floor]),
        *(f"{peak:,.0f}" for peak in peaks),
        f"{peaks[0] / peaks[1]:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(one: list[float], other: list[float]) -> str:
    each = [a / b for a, b in zip(one, other, strict=True)]
    return f"{median(one) / median(other):.2f} ({min(each):.2f}–{max(each):.2f})"


HEAD = (
    *("configuration", "regularizer", "threads", "ours, tokens/CPU-s", "textbook, tuned", "shipped"),
    *("against tuned", "against shipped", "ours over the floor", "ours, MiB", "textbook, MiB", "ratio"),
)


def names(written: str) -> list[str]:
    return written.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configurations", type=names, default=list(CONFIGURATIONS))
    parser.add_argument("--regularizers", type=names, default=["fraternal", "expectation_linear", "none"])
    parser.add_argument("--threads", type=names, default=["1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(measure(Measurement(**json.loads(given.worker))))
        return
    differences = [largest_difference(Regularization(name)) for name in given.regularizers]
    print(f"torch {torch.__version__}, {platform.machine()}, medians of {given.rounds} alternating runs.")
    print(f"In float64 the two ways differ by {max(differences):.0e} in loss and gradients.\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for configuration in given.configurations:
        for regularizer in given.regularizers:
            for threads in given.threads:
                print(row(configuration, regularizer, int(threads), given.rounds), flush=True)


if __name__ == "__main__":
    main()
