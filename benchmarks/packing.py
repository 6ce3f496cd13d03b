"""A machine full of trials: one trial of all its threads, or one trial a thread?

    .venv/bin/python -m benchmarks.packing --rounds 5

Tokens a second of wall-clock time: of N trials of one thread that train at once, together, and of one trial
of N threads, in turn, N the number of cores; and of one trial of one thread with the other cores idle.
Fraternal Dropout on random text; steps alone. The rule of `"resources": "auto"` follows it. Prints Markdown.
"""

import argparse
import os
from statistics import median

import torch

from benchmarks.step import CONFIGURATIONS, Way, Worker, names, processor, require_known, workers
from models.config import Precision


def tokens_per_s(each: list[Worker]) -> float:
    """Of all of them at once, by the time of the last one."""
    for worker in each:
        worker.begin("time")
    return len(each) / max(worker.spent().wall_s for worker in each)


def row(configuration: str, precision: Precision, threads: int, rounds: int) -> str:
    narrow = Way("ours", configuration, "fraternal", precision=precision)
    wide = Way("ours", configuration, "fraternal", precision=precision, threads=threads)
    found: dict[str, list[float]] = {"many": [], "one": [], "alone": []}
    with workers([wide]) as of_many_threads, workers([narrow]) as first:
        several = [*first.values(), *(Worker(narrow) for _ in range(threads - 1))]
        groups = {"many": several, "one": list(of_many_threads.values()), "alone": several[:1]}
        for group in groups.values():
            tokens_per_s(group)
        for number in range(rounds):
            for name in list(groups)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(tokens_per_s(groups[name]))
        for worker in several[1:]:
            worker.end()
    ratios = [many / one for many, one in zip(found["many"], found["one"], strict=True)]
    gains = [one / alone for one, alone in zip(found["one"], found["alone"], strict=True)]
    cells = [configuration, precision, *(f"{median(found[name]):,.0f}" for name in found)]
    cells += [f"{median(each):.2f} ({min(each):.2f}–{max(each):.2f})" for each in (ratios, gains)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configurations", type=names, default=["small", "medium", "ptb"])
    parser.add_argument("--precisions", type=names, default=["float32"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    require_known(given.configurations, CONFIGURATIONS)
    threads = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {processor()}, {threads} cores, medians of {given.rounds} rounds.\n")
    print(
        f"| configuration | precision | {threads} trials of 1 thread, tokens/s | 1 of {threads} | 1 of 1 ",
        end="",
    )
    print(f"| {threads} of 1 by 1 of {threads} | 1 of {threads} by 1 of 1 |\n|{'---|' * 7}", flush=True)
    for configuration in given.configurations:
        for precision in given.precisions:
            print(row(configuration, precision, threads, given.rounds), flush=True)


if __name__ == "__main__":
    main()
