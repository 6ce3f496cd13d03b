"""Training steps and validation, ours beside the textbook way: time, memory, and the matrix products alone.

    make bench
    .venv/bin/python -m benchmarks.step --configurations ptb --regularizers fraternal --threads 1,2 --rounds 5
    .venv/bin/python -m benchmarks.step --configurations ptb,wt2 --validation

Each way has a process of its own, which stays; they take a few steps in turn, in an order that changes with
the round, and medians are shown, with the range of the ratio. Ratios are of CPU-seconds, of steps alone, no
validation, on random text of the configuration's vocabulary in windows of 70 steps. The textbook way, and
fastai, are always float32. `shipped` is glibc's allocator as it is; everything else runs with that of a
sweep's workers. The floor is the matrix products of the same shapes and nothing else. fastai, for the plain
model, where it is installed (benchmarks/fastai-requirements.txt). A precision that this machine has not is
left out.

Validation is of 16,800 tokens: ours exactly as in one column, the textbook's in ten columns, of which all but
the first begin in the dark, in windows of 70 steps with whole logits.

The peak memory of a step, or of a validation, beyond what was resident before it, is that of a process of its
own. In Markdown.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from benchmarks.peer import fastai_step, is_installed
from benchmarks.plain import PlainStep, largest_difference
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig, Precision
from models.precision import UnsupportedPrecision, require_precision
from regularizers.config import Regularization
from service.launcher import DRIVER_ENVIRONMENT
from trials.evaluation import evaluate
from trials.spec import TrainingConfig
from trials.training import Training, _UnderWay

BPTT = 70
VALIDATED = 16_800
"""Tokens; a multiple of each configuration's in a step."""
COLUMNS = 10
"""Of the textbook's validation, as in the released code."""


@dataclass(frozen=True)
class Configuration:
    model: AWDLSTMConfig
    vocabulary_size: int
    batch_size: int
    steps: int
    """Measured at once."""


CONFIGURATIONS = {
    "small": Configuration(AWDLSTMConfig(64, 64, 1), 10_000, 20, 10),
    "medium": Configuration(AWDLSTMConfig(200, 200, 1), 10_000, 20, 5),
    "ptb": Configuration(AWDLSTMConfig(), 10_000, 20, 1),
    "wt2": Configuration(AWDLSTMConfig(), 33_278, 40, 1),
}


@dataclass(frozen=True)
class Way:
    """What a worker takes steps by."""

    name: str
    configuration: str
    regularizer: str
    eld_stop_gradient: bool = True
    threads: int = 1
    allocator: str = "tuned"
    precision: Precision = "float32"
    recompute: bool = False


class Spent(NamedTuple):
    """For one token."""

    cpu_s: float
    wall_s: float


# In a worker.


def work(way: Way) -> None:
    """Answer each line on stdin, in JSON: seconds a token, or the bytes of a step's peak."""
    torch.set_num_threads(way.threads)
    configuration = CONFIGURATIONS[way.configuration]
    if way.name.endswith("validation"):
        configuration = replace(configuration, steps=VALIDATED // (BPTT * configuration.batch_size))
    take = BUILDERS[way.name](way, configuration)
    for line in sys.stdin:
        if line.strip() == "memory":
            before = _resident("VmRSS")
            take(1)
            answer: Any = _resident("VmHWM") - before
        else:
            began = Spent(time.process_time(), time.perf_counter())
            take(configuration.steps)
            tokens = configuration.steps * BPTT * configuration.batch_size
            answer = (
                (time.process_time() - began.cpu_s) / tokens,
                (time.perf_counter() - began.wall_s) / tokens,
            )
        print(json.dumps(answer), flush=True)


def _resident(name: str) -> int:
    with open("/proc/self/status") as status:
        found = re.search(name + r":\s+(\d+)", status.read())
    assert found is not None
    return int(found[1]) * 1024


def _columns(configuration: Configuration) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """(B, T + 1), one for each step."""
    shape = (configuration.batch_size, configuration.steps * BPTT + 1)
    return np.random.default_rng(1).integers(0, configuration.vocabulary_size, shape, dtype=np.int32)


def _windows(configuration: Configuration) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step."""
    columns_TB = torch.from_numpy(_columns(configuration).astype(np.int64)).t().contiguous()
    starts = range(0, configuration.steps * BPTT, BPTT)
    return [(columns_TB[at : at + BPTT], columns_TB[at + 1 : at + BPTT + 1]) for at in starts]


def _regularization(way: Way) -> Regularization:
    return Regularization(way.regularizer, eld_stop_gradient=way.eld_stop_gradient)


def _ours(way: Way, configuration: Configuration) -> Callable[[int], Any]:
    text = _columns(configuration).flatten()
    config = TrainingConfig(
        batch_size=configuration.batch_size,
        bptt=BPTT,
        windows="fixed",
        averaging="none",
        precision=way.precision,
        recompute=way.recompute,
    )
    size = configuration.vocabulary_size
    training = Training(configuration.model, config, _regularization(way), size, text, text[:2], 1)

    def take(steps: int) -> None:
        under_way = _UnderWay(training.model.zero_state(configuration.batch_size))
        training._take_steps(under_way, [BPTT] * steps, [False] * steps, 0, config.lr, float("inf"))

    return take


def _textbook(way: Way, configuration: Configuration) -> Callable[[int], Any]:
    generator, model = torch.Generator().manual_seed(1), _model(configuration)
    step = PlainStep(model, _regularization(way), 30.0, 0.25, 1.2e-6).step
    windows = _windows(configuration)

    def take(steps: int) -> None:
        state = model.zero_state(configuration.batch_size)
        for inputs_TB, targets_TB in windows[:steps]:
            state = step(inputs_TB, targets_TB, state, generator)

    return take


def _fastai(way: Way, configuration: Configuration) -> Callable[[int], Any]:
    step = fastai_step(configuration.model, configuration.vocabulary_size)
    windows = _windows(configuration)

    def take(steps: int) -> None:
        for inputs_TB, targets_TB in windows[:steps]:
            step(inputs_TB, targets_TB)

    return take


def _floor(way: Way, configuration: Configuration) -> Callable[[int], Any]:
    """Forward, and both gradients, of each product; a pass without gradient has the first of the three."""
    regularization = _regularization(way)
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
    dtype = torch.bfloat16 if way.precision == "bf16" else torch.float32
    matrices = [
        (torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.empty(m, n, dtype=dtype), often)
        for m, k, n, often in shapes
    ]

    def take(steps: int) -> None:
        for _ in range(steps):
            for one, other, out, often in matrices:
                for _ in range(often):
                    torch.mm(one, other, out=out)

    return take


def _validation(way: Way, configuration: Configuration) -> Callable[[int], Any]:
    model, text = _model(configuration), _columns(configuration).flatten()[: VALIDATED + 1]
    return lambda _steps: evaluate(model, text)


def _textbook_validation(way: Way, configuration: Configuration) -> Callable[[int], Any]:
    step = PlainStep(_model(configuration), _regularization(way), 30.0, 0.25, 1.2e-6)
    text = _columns(configuration).flatten()[:VALIDATED].astype(np.int64)
    columns_TB = torch.from_numpy(text).view(COLUMNS, -1).t().contiguous()
    windows = list(zip(columns_TB[:-1].split(BPTT), columns_TB[1:].split(BPTT), strict=True))

    @torch.no_grad()
    def take(_steps: int) -> None:
        state, total = step.model.zero_state(COLUMNS), 0.0
        for inputs_TB, targets_TB in windows:
            loss, state = step.loss(inputs_TB, targets_TB, state, None, None)
            total += loss.item() * targets_TB.numel()

    return take


def _model(configuration: Configuration) -> AWDLSTM:
    generator = torch.Generator().manual_seed(1)
    return AWDLSTM(configuration.model, configuration.vocabulary_size, generator)


BUILDERS: dict[str, Callable[[Way, Configuration], Callable[[int], Any]]] = {
    "ours": _ours,
    "textbook": _textbook,
    "fastai": _fastai,
    "floor": _floor,
    "validation": _validation,
    "textbook validation": _textbook_validation,
}


# In the parent.


class Worker:
    """A process that takes steps when asked."""

    def __init__(self, way: Way) -> None:
        self._way = way
        tuned = {name: value for name, value in DRIVER_ENVIRONMENT.items() if name.startswith("MALLOC_")}
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
            **(tuned if way.allocator == "tuned" else {}),
            "OMP_NUM_THREADS": str(way.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step", "--worker", json.dumps(asdict(way))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take_steps(self) -> Spent:
        self.begin("time")
        return self.spent()

    def peak(self) -> float:
        """MiB of its first step: a second one has its memory already."""
        self.begin("memory")
        return float(self._answer()) / 2**20

    def begin(self, what: str) -> None:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)

    def spent(self) -> Spent:
        """Of what was begun."""
        return Spent(*self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(
                f"{self._way} ended with exit code {self._process.wait()}: see what it said above"
            )
        return json.loads(line)

    def end(self) -> None:
        self._process.communicate()


@contextmanager
def workers(ways: list[Way]) -> Iterator[dict[Way, Worker]]:
    with ExitStack() as stack:
        started = {}
        for way in ways:
            started[way] = Worker(way)
            stack.callback(started[way].end)
        yield started


def times_of(ways: list[Way], rounds: int) -> dict[Way, list[Spent]]:
    found: dict[Way, list[Spent]] = {way: [] for way in ways}
    with workers(ways) as each:
        for worker in each.values():
            worker.take_steps()  # what is allocated and built once
        for number in range(rounds):
            for way in ways[:: 1 if number % 2 == 0 else -1]:
                found[way].append(each[way].take_steps())
    return found


def peak_of(way: Way, rounds: int) -> float:
    """MiB, of processes of their own."""
    peaks = []
    for _ in range(rounds):
        with workers([way]) as each:
            peaks.append(each[way].peak())
    return median(peaks)


def tokens_per_cpu_s(found: list[Spent]) -> str:
    return f"{1 / median(each.cpu_s for each in found):,.0f}"


def tokens_per_s(found: list[Spent]) -> str:
    return f"{1 / median(each.wall_s for each in found):,.0f}"


def row(ours: Way, rounds: int) -> str:
    textbook = replace(ours, name="textbook", precision="float32")
    shipped, floor = replace(textbook, allocator="shipped"), replace(ours, name="floor")
    recomputing = replace(ours, recompute=True)
    ways = [ours, textbook, shipped, floor, recomputing]
    compared = [textbook]
    if ours.regularizer == "expectation_linear" and ours.eld_stop_gradient:
        compared.append(replace(textbook, eld_stop_gradient=False))  # as the released code does it
        ways.append(compared[-1])
    fastai = replace(textbook, name="fastai")
    if ours.regularizer == "none" and is_installed():
        ways.append(fastai)
    times = times_of(ways, rounds)
    peaks = [peak_of(way, min(rounds, 3)) for way in (ours, recomputing, textbook)]
    cells = [
        ours.configuration,
        ours.regularizer + ("" if ours.eld_stop_gradient else ", gradient flowing"),
        ours.precision,
        str(ours.threads),
        *(tokens_per_cpu_s(times[way]) for way in (ours, textbook, shipped)),
        " / ".join(tokens_per_s(times[way]) for way in (ours, textbook)),
        "; with gradient there ".join(_ratio(times[other], times[ours]) for other in compared),
        _ratio(times[shipped], times[ours]),
        _ratio(times[fastai], times[ours]) if fastai in times else "–",
        _ratio(times[ours], times[floor]),
        " / ".join(f"{peak:,.0f}" for peak in peaks),
        " / ".join(f"{peak / peaks[-1]:.2f}" for peak in peaks[:2]),
        _ratio(times[recomputing], times[ours]),
    ]
    return f"| {' | '.join(cells)} |"


def validation_row(configuration: str, threads: int, rounds: int) -> str:
    ours = Way("validation", configuration, "none", threads=threads)
    ways = [ours, replace(ours, name="textbook validation")]
    times, peaks = times_of(ways, rounds), [peak_of(way, min(rounds, 3)) for way in ways]
    cells = [
        configuration,
        str(threads),
        *(tokens_per_cpu_s(times[way]) for way in ways),
        _ratio(times[ways[1]], times[ours]),
        " / ".join(f"{peak:,.0f}" for peak in peaks),
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(one: list[Spent], other: list[Spent]) -> str:
    """Of CPU time."""
    each = [a.cpu_s / b.cpu_s for a, b in zip(one, other, strict=True)]
    return f"{median(each):.2f} ({min(each):.2f}–{max(each):.2f})"


HEAD = (
    *("configuration", "regularizer", "precision", "threads"),
    *("ours, tokens/CPU-s", "textbook, tuned", "shipped", "tokens/s: ours / textbook, tuned"),
    *("against tuned", "against shipped", "against fastai", "over the floor"),
    *("MiB: ours / recomputing / textbook", "of the textbook's", "recomputing by ours"),
)


VALIDATION_HEAD = (
    *("configuration", "threads", "ours, tokens/CPU-s", "textbook", "against the textbook"),
    "MiB: ours / textbook",
)


def print_heading(rounds: int, note: str, columns: tuple[str, ...]) -> None:
    print(f"torch {torch.__version__}, {processor()}, medians of {rounds} alternating runs.\n{note}")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def names(written: str) -> list[str]:
    return written.split(",")


def require_known(asked: list[str], known: Iterable[str]) -> None:
    for name in asked:
        if name not in known:
            raise SystemExit(f"{name!r} is none of {', '.join(known)}")


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        found = re.search(r"^model name\s*: (.*)$", lines.read(), re.MULTILINE)
    capabilities = torch.cpu.get_capabilities()
    has = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)]
    return f"{found[1] if found else platform.machine()} ({', '.join(has)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configurations", type=names, default=list(CONFIGURATIONS))
    parser.add_argument(
        "--regularizers",
        type=names,
        default=["fraternal", "expectation_linear", "expectation_linear+gradient", "none"],
    )
    parser.add_argument("--precisions", type=names, default=["float32"])
    parser.add_argument("--threads", type=names, default=["1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--validation", action="store_true", help="of validation, not of steps")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(Way(**json.loads(given.worker)))
        return
    require_known(given.configurations, CONFIGURATIONS)
    if given.validation:
        print_heading(given.rounds, "", VALIDATION_HEAD)
        for configuration in given.configurations:
            for threads in given.threads:
                print(validation_row(configuration, int(threads), given.rounds), flush=True)
        return
    require_known(given.precisions, get_args(Precision))
    precisions = []
    for precision in given.precisions:
        try:
            require_precision(precision, torch.device("cpu"))
            precisions.append(precision)
        except UnsupportedPrecision as error:
            print(f"Left out here: {error}")
    if not precisions:
        return
    regularizers = [(name.split("+")[0], "+" not in name) for name in given.regularizers]
    differences = [
        largest_difference(Regularization(name, eld_stop_gradient=stop)) for name, stop in regularizers
    ]
    differ = f"In float64 and on a small model the two ways differ by {max(differences):.0e} at most.\n"
    print_heading(given.rounds, differ, HEAD)
    for configuration in given.configurations:
        for regularizer, stop in regularizers:
            for precision in precisions:
                for threads in given.threads:
                    ours = Way("ours", configuration, regularizer, stop, int(threads), precision=precision)
                    print(row(ours, given.rounds), flush=True)


if __name__ == "__main__":
    main()
