"""Training steps on a GPU: single steps and CUDA graphs, beside the textbook way; and a whole epoch of each.

    make bench-gpu
    .venv/bin/python -m benchmarks.gpu --configurations ptb --precisions tf32,bf16 --rounds 5

All ways have the same work, random text in windows of 70 steps, and take a few steps in turn, in an order
that changes with the round; wall-clock medians, with the range of the ratio. Where ours is in bf16 the
textbook way, which has none, is in TF32. "Of the roofline" is the operations of a step's products, by how
many the card did a second in one large product of the way's precision, measured at the beginning.

Memory is what torch's allocator has reserved at most while a way takes its first steps, beyond what was there
before, with nothing else on the card. An epoch is of the Penn Treebank's size, 929,589 words and a validation
of 73,760, with windows of random lengths: the first one, in which every length is recorded, and the second;
"beside" is what CUDA takes meanwhile that torch's allocator does not know of, its graphs most of all.

In Markdown; then what the sizes of pieces would bring that are as measured on CPUs: rows of logits at once in
a step, columns and words at once in validation. And where the time of a step goes, by the kernels that take
most of it.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, cast, get_args

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import regularizers.head
from benchmarks.plain import PlainStep
from benchmarks.step import BPTT, CONFIGURATIONS, Configuration, names, require_known
from models.awd_lstm import AWDLSTM
from models.config import Precision
from models.pieces import EVALUATION_WINDOW, FEWEST_ROWS, MOST_COLUMNS
from models.precision import tf32_products
from regularizers.config import Regularization
from trials.evaluation import evaluate
from trials.gpus import driver_version
from trials.spec import TrainingConfig, TrialConfig
from trials.steps import operations
from trials.training import Training, _UnderWay

STEPS = 10
"""Taken at once."""
TRAIN_WORDS, VALID_WORDS = 929_589, 73_760
WAYS = ("textbook", "single", "graphs")

Take = Callable[[], None]


@dataclass(frozen=True)
class Case:
    configuration: str
    regularizer: str
    precision: Precision

    @property
    def of(self) -> Configuration:
        return CONFIGURATIONS[self.configuration]

    @property
    def words(self) -> int:
        """That one Take predicts."""
        return STEPS * BPTT * self.of.batch_size


def text_of(words: int, vocabulary_size: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.random.default_rng(1).integers(0, vocabulary_size, words, dtype=np.int32)


def training_of(case: Case, way: str, words: int, valid: int, **changes: Any) -> Training:
    config = TrainingConfig(
        batch_size=case.of.batch_size,
        bptt=BPTT,
        averaging="none",
        lr=1.0,
        precision=case.precision,
        cuda_graphs=way == "graphs",
    )
    size = case.of.vocabulary_size
    return Training(
        case.of.model,
        replace(config, **changes),
        Regularization(case.regularizer),
        *(size, text_of(words, size), text_of(valid, size), 1, "cuda"),
    )


def ours(case: Case, way: str) -> Take:
    training = training_of(case, way, case.words + case.of.batch_size, 2, windows="fixed")

    def take() -> None:
        under_way = _UnderWay(training.model.zero_state(case.of.batch_size))
        training._take_steps(under_way, [BPTT] * STEPS, [False] * STEPS, 0, 1.0, float("inf"))

    return take


def textbook(case: Case) -> Take:
    generator = torch.Generator().manual_seed(1)
    model = AWDLSTM(case.of.model, case.of.vocabulary_size, generator).to("cuda")
    step = PlainStep(model, Regularization(case.regularizer), 1.0, 0.25, 1.2e-6).step
    text = text_of(case.words + case.of.batch_size, case.of.vocabulary_size).astype(np.int64)
    columns_TB = torch.from_numpy(text).view(case.of.batch_size, -1).t().contiguous().to("cuda")
    drawing = torch.Generator("cuda").manual_seed(1)

    def take() -> None:
        state = model.zero_state(case.of.batch_size)
        with tf32_products(precision_of(case, "textbook") == "tf32"):
            for at in range(0, STEPS * BPTT, BPTT):
                inputs_TB, targets_TB = columns_TB[at : at + BPTT], columns_TB[at + 1 : at + BPTT + 1]
                state = step(inputs_TB, targets_TB, state, drawing)

    return take


def built(case: Case, way: str) -> Take:
    return textbook(case) if way == "textbook" else ours(case, way)


def seconds(take: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    take()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_mib(case: Case, way: str) -> float:
    emptied()
    take = built(case, way)
    emptied()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    take()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_reserved() - before) / 2**20


def emptied() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def products_per_s(precision: Precision, size: int = 8192) -> float:
    """Operations a second of one large product, on random numbers."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    one, other = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    with tf32_products(precision == "tf32"):
        taken = [seconds(lambda: torch.mm(one, other)) for _ in range(12)]
    return 2 * size**3 / median(taken[2:])


def precision_of(case: Case, way: str) -> Precision:
    return "tf32" if way == "textbook" and case.precision == "bf16" else case.precision


def row(case: Case, rounds: int, roofs: dict[Precision, float]) -> dict[str, Any]:
    peaks = {way: peak_mib(case, way) for way in WAYS}
    emptied()
    takes = {way: built(case, way) for way in WAYS}
    for take in takes.values():
        take()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[:: 1 if number % 2 == 0 else -1]:
            found[way].append(seconds(takes[way]))
    config = TrainingConfig(batch_size=case.of.batch_size, bptt=BPTT, precision=case.precision)
    of_a_step = operations(
        TrialConfig(case.of.model, config, Regularization(case.regularizer)), case.of.vocabulary_size
    )
    return {
        "case": case,
        "ms": {way: 1000 * median(found[way]) / STEPS for way in WAYS},
        "words_per_s": {way: case.words / median(found[way]) for way in WAYS},
        "times": {way: [a / b for a, b in zip(found["textbook"], found[way], strict=True)] for way in WAYS},
        "of_the_roofline": {
            way: of_a_step * STEPS / median(found[way]) / roofs[precision_of(case, way)] for way in WAYS
        },
        "mib": peaks,
    }


HEAD = (
    *("configuration", "regularizer", "precision", "way", "ms a step", "tokens/s"),
    *("against the textbook", "of the roofline", "MiB", "of the textbook's"),
)


def written(found: dict[str, Any]) -> str:
    case, lines = found["case"], []
    for way in WAYS:
        times, mib = found["times"][way], found["mib"]
        cells = [
            *(case.configuration, case.regularizer, case.precision, way),
            f"{found['ms'][way]:.2f}",
            f"{found['words_per_s'][way]:,.0f}",
            f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})",
            f"{found['of_the_roofline'][way]:.1%}",
            f"{mib[way]:,.0f}",
            f"{mib[way] / mib['textbook']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def beside_mib() -> float:
    """What the card has given away beside what torch's allocator has."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved()) / 2**20


def epochs(case: Case, way: str) -> str:
    emptied()
    beside = beside_mib()
    torch.cuda.reset_peak_memory_stats()
    training = training_of(case, way, TRAIN_WORDS, VALID_WORDS, epochs=2)
    results = list(training.epochs())
    reserved = torch.cuda.max_memory_reserved() / 2**20
    cells = [case.configuration, case.regularizer, case.precision, way]
    for result in results:
        cells += [f"{result.seconds:.2f}", f"{result.tokens_per_s:,.0f}"]
    cells += [
        f"{results[-1].seconds - results[-1].tokens / results[-1].tokens_per_s:.2f}",
        f"{reserved:,.0f}",
        f"{beside_mib() - beside:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def by_rows(case: Case, rounds: int) -> Iterator[str]:
    """Of logits; no fewer are taken than the last layer is wide."""
    for rows in (FEWEST_ROWS, 512, 1024, 4096):
        regularizers.head.FEWEST_ROWS = rows
        emptied()
        take = built(case, "graphs")
        take()
        ms = 1000 * median(seconds(take) for _ in range(rounds)) / STEPS
        yield f"| {case.precision} | {rows:,} | {ms:.2f} |"
    regularizers.head.FEWEST_ROWS = FEWEST_ROWS


def by_columns(case: Case) -> Iterator[str]:
    training = training_of(case, "single", case.words, 2)
    valid = text_of(VALID_WORDS, case.of.vocabulary_size)
    for columns in (MOST_COLUMNS, 32, 64):
        for window in (EVALUATION_WINDOW, 1024, 4096):
            evaluate(training.model, valid[:5000], window, columns)
            took = seconds(partial(evaluate, training.model, valid, window, columns))
            yield f"| {columns} | {window:,} | {took:.3f} |"


def kernels(case: Case, way: str, most: int = 12) -> str:
    emptied()
    take = built(case, way)
    take()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        take()
        torch.cuda.synchronize()
    table: str = profiled.key_averages().table(  # type: ignore[no-untyped-call]  # torch's
        sort_by="self_device_time_total", row_limit=most, max_name_column_width=70
    )
    return f"\n{case}, {way}\n{table}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configurations", type=names, default=["small", "ptb", "wt2"])
    parser.add_argument("--regularizers", type=names, default=["fraternal", "expectation_linear", "none"])
    parser.add_argument("--precisions", type=names, default=list(get_args(Precision)))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    require_known(given.configurations, CONFIGURATIONS)
    require_known(given.precisions, get_args(Precision))
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: `fraternal gpus` says why")
    cases = [
        Case(configuration, regularizer, cast("Precision", precision))
        for configuration in given.configurations
        for regularizer in given.regularizers
        for precision in given.precisions
    ]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, driver {driver_version()}, "
        f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']}, medians of {given.rounds}."
    )
    needed = {precision_of(case, way) for case in cases for way in WAYS}
    roofs = {precision: products_per_s(precision) for precision in sorted(needed)}
    print("; ".join(f"{precision}: {roof / 1e12:,.0f} TFLOP/s" for precision, roof in roofs.items()), "\n")
    textbook(cases[0])()  # what cuBLAS keeps from the first step on is nobody's
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for case in cases:
        print(written(row(case, given.rounds, roofs)), flush=True)
    columns = "first epoch, s | tokens/s | second epoch, s | tokens/s | validation, s | MiB | beside"
    print(f"\n| configuration | regularizer | precision | way | {columns} |\n|{'---|' * 11}", flush=True)
    of_epochs = [case for case in cases if case.configuration == "ptb" and case.regularizer == "fraternal"]
    for case in of_epochs:
        for way in WAYS[1:]:
            print(epochs(case, way), flush=True)
    print("\n| precision | rows of logits at once | ms a step |\n|---|---|---|")
    for case in of_epochs:
        for line in by_rows(case, given.rounds):
            print(line, flush=True)
    print("\n| columns | words at once | validation, s |\n|---|---|---|")
    for case in of_epochs[:1]:
        for line in by_columns(case):
            print(line, flush=True)
    for case in of_epochs[-1:]:
        for way in WAYS[1:]:
            print(kernels(case, way), flush=True)


if __name__ == "__main__":
    main()
