"""What a worker takes to have its corpus: by itself, as the first of a driver, and as any other.

    .venv/bin/python -m benchmarks.corpora sotu '{"path": "…/ptb"}'

Each in a process of its own, medians of five. Prints Markdown: CPU seconds, memory that is the process's own
afterwards, and the most that was resident in between.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from pydantic import TypeAdapter

from trials.corpora import CorpusSpec, load_corpus
from trials.encoded import load_encoded, text_digests

WAYS = ("by itself", "the first", "any other")


def once(corpus: CorpusSpec, way: str, folder: Path) -> tuple[float, float, float]:
    """In this process: CPU seconds, MiB of its own, MiB at most."""
    before, began = psutil.Process().memory_full_info(), time.process_time()
    if way == "by itself":
        loaded = load_corpus(corpus, folder)
    else:
        loaded = load_encoded(corpus, folder, text_digests(corpus, folder), folder / "shared")
    seconds = time.process_time() - began
    gc.collect()
    after = psutil.Process().memory_full_info()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert len(loaded.train)
    return seconds, (after.uss - before.uss) / 2**20, (highest - before.rss) / 2**20


def measured(given: str, way: str, folder: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.corpora", given, "--way", way, "--folder", folder]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(number) for number in json.loads(said)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpora", nargs="+", help="a name, or a corpus as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        (name,) = given.corpora
        corpus = json.loads(name) if name.startswith("{") else {"name": name}
        print(json.dumps(once(TypeAdapter(CorpusSpec).validate_python(corpus), given.way, given.folder)))
        return
    print("| corpus | way | CPU-s | own memory, MiB | at most, MiB |\n|---|---|---|---|---|")
    for corpus in given.corpora:
        rounds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for way in WAYS:
                    rounds[way].append(measured(corpus, way, folder))
        for way, rows in rounds.items():
            seconds, own, highest = (median(column) for column in zip(*rows, strict=True))
            print(f"| {corpus} | {way} | {seconds:.3f} | {own:.0f} | {highest:.0f} |")


if __name__ == "__main__":
    main()
