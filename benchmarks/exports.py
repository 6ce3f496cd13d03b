"""What it takes to export a large sweep, and whether others wait for it.

    .venv/bin/python -m benchmarks.exports --trials 400 --epochs 500

Fills a database with one ended sweep, serves it with `fraternal serve`, and downloads it in every format
while a client looks at a trial again and again. Prints Markdown: seconds to the first byte and the last, the
file's size, how much memory the service took more at most, and the median and 95th percentile of the times to
those answers, in milliseconds, beside those before.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import optuna
import psutil
from rich.console import Console

from benchmarks.api import fill, percentile
from service.running import Signals, running_service
from service.settings import Settings

EVERY_S = 0.01
FILES = [
    {"format": "csv", "table": "trials"},
    {"format": "csv", "table": "epochs"},
    {"format": "parquet", "table": "epochs"},
    {"format": "json"},
    {"format": "optuna"},
]


@contextmanager
def looking(url: str, path: str) -> Iterator[list[float]]:
    """Milliseconds to each answer, while the block runs."""
    took: list[float] = []
    over = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            while not over.is_set():
                began = time.perf_counter()
                client.get(path).raise_for_status()
                took.append((time.perf_counter() - began) * 1000)
                time.sleep(EVERY_S)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


@contextmanager
def watching(process: psutil.Process) -> Iterator[list[int]]:
    """Bytes of memory that a process has, while the block runs."""
    seen = [process.memory_info().rss]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def download(url: str, path: str, query: dict[str, str]) -> tuple[float, float, int]:
    """Seconds to the first byte and to the last, and how many there were."""
    began, size, first = time.perf_counter(), 0, 0.0
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=600) as client,
        client.stream("GET", path, params=query) as response,
    ):
        response.raise_for_status()
        for chunk in response.iter_raw():
            first = first or time.perf_counter() - began
            size += len(chunk)
    return first, time.perf_counter() - began, size


def times(took: list[float]) -> str:
    return f"{statistics.median(took):.1f} | {percentile(sorted(took), 0.95):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=500, help="of a trial")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="fraternal-bench-") as folder, Signals() as signals:
        settings = Settings(data_dir=Path(folder) / "data")
        settings.data_dir.mkdir()
        (sweep_id,) = fill(settings, 1, given.trials, given.epochs)
        with running_service(settings.data_dir, signals, Console(stderr=True)) as client:
            url, path = client.base_url, f"/v1/sweeps/{sweep_id}"
            port = int(url.rpartition(":")[2])
            process = next(
                psutil.Process(found.pid)
                for found in psutil.net_connections("tcp")
                if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid
            )
            with looking(url, f"{path}/trials/7") as before:
                time.sleep(3)
            print("| file | first byte, s | last byte, s | MB | memory, MB more | a look: median, ms | p95 |")
            print("|---|---:|---:|---:|---:|---:|---:|")
            print(f"| none | | | | | {times(before)} |")
            for query in FILES:
                with watching(process) as memory, looking(url, f"{path}/trials/7") as took:
                    first, last, size = download(url, f"{path}/export", query)
                more = (max(memory) - memory[0]) / 1e6
                print(
                    f"| {' '.join(query.values())} | {first:.1f} | {last:.1f} | {size / 1e6:.1f} "
                    f"| {more:.0f} | {times(took)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
