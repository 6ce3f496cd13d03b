"""What many watchers of one sweep cost the API's other calls.

    .venv/bin/python -m benchmarks.events --clients 500 --seconds 20

A service of its own; a sweep whose events come at a steady pace, from here in place of a driver; in turn,
twice, nobody watches, and so many clients of another process have a stream each. Two calls are made, one
after the other over one connection, as fast as they are answered, with a pause as long as the answer took.
Prints Markdown: milliseconds until an answer, the second of the two by the first, and of how many events the
watchers together have missed any.
"""

import argparse
import asyncio
import multiprocessing
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np
import psutil
from rich.console import Console

from service.client import FraternalClient
from service.database import open_engine
from service.errors import INTERRUPTED
from service.records import Records, SweepJournal
from service.running import Interrupted, Signals, running_service
from trials.spec import SweepSpec

SWEEP = "s0000000001"
CALLS = {"GET /v1/sweeps/{id}": f"/v1/sweeps/{SWEEP}", "GET /healthz": "/healthz"}
SECONDS_TO_CONNECT = 60


class Telling(threading.Thread):
    """Writes events at a steady pace, as a driver would."""

    def __init__(self, data_dir: Path, per_second: float) -> None:
        super().__init__(daemon=True)
        self.records = Records(open_engine(f"sqlite:///{data_dir / 'fraternal.db'}"))
        spec = SweepSpec.model_validate({"corpus": {"name": "sotu"}, "budget": {"trials": 1000}})
        self.records.claim(self.records.add_sweep(SWEEP, spec), fruitless=0, epochs_done=0)
        self._per_second = per_second
        self._over = threading.Event()

    def run(self) -> None:
        journal, number = SweepJournal(self.records, SWEEP, 1), 0
        while not self._over.wait(1 / self._per_second):
            number += 1
            detail = {"number": number // 50, "attempt": 1, "epoch": number % 50 + 1, "is_best": True}
            losses = {"train_loss": 4.3217, "valid_loss": 4.4321, "valid_perplexity": 84.11}
            journal.record_event("epoch_finished", **detail, **losses)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self.records.engine.dispose()


class Watcher(asyncio.Protocol):
    """Keeps what comes, and does as little as it can: it has no core of its own."""

    def __init__(self) -> None:
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        request = f"GET /v1/sweeps/{SWEEP}/events?after=newest HTTP/1.1\r\nHost: localhost\r\n\r\n"
        transport.write(request.encode())

    def data_received(self, data: bytes) -> None:
        self.received += data


async def watch(port: int, count: int, parent: Connection) -> None:
    """Have so many streams, until a word comes; then tell the ids that each of them has seen."""
    loop = asyncio.get_running_loop()
    connections = [await loop.create_connection(Watcher, "127.0.0.1", port) for _ in range(count)]
    while not all(b"id: " in watcher.received for _, watcher in connections):
        await asyncio.sleep(0.1)
    parent.send("all are there")
    await asyncio.to_thread(parent.recv)
    for transport, _ in connections:
        transport.close()
    parent.send(
        [list(map(int, re.findall(rb"\nid: (\d+)\n", watcher.received))) for _, watcher in connections]
    )


def watching(port: int, count: int, parent: Connection) -> None:
    asyncio.run(watch(port, count, parent))


@contextmanager
def watchers(port: int, count: int, seen: list[list[int]]) -> Iterator[None]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=watching, args=[port, count, there])
    process.start()
    assert here.poll(SECONDS_TO_CONNECT), "the watchers do not come to their places"
    here.recv()
    yield
    here.send("go")
    seen += here.recv()
    process.join()


def cpu_seconds(data_dir: Path) -> float:
    """Of the service, so far."""
    times = psutil.Process(int((data_dir / "service.lock").read_text())).cpu_times()
    return float(times.user + times.system)


def measure(url: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each answer, by call."""
    taken: dict[str, list[float]] = {name: [] for name in CALLS}
    with httpx.Client(base_url=url, trust_env=False) as client:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, path in CALLS.items():
                began = time.perf_counter()
                client.get(path).raise_for_status()
                took = time.perf_counter() - began
                taken[name].append(took * 1000)
                time.sleep(took)
    return taken


def run(clients: int, seconds: float, per_second: float, console: Console) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Signals() as signals,
        running_service(Path(folder), signals, console) as client,
    ):
        print_table(client, Path(folder), clients, seconds, per_second)


def print_table(
    client: FraternalClient, data_dir: Path, clients: int, seconds: float, per_second: float
) -> None:
    telling = Telling(data_dir, per_second)
    telling.start()
    port = httpx.URL(client.base_url).port
    assert port is not None
    alone: dict[str, list[float]] = {name: [] for name in CALLS}
    watched: dict[str, list[float]] = {name: [] for name in CALLS}
    seen: list[list[int]] = []
    for _ in range(2):
        for name, taken in measure(client.base_url, seconds).items():
            alone[name] += taken
        with watchers(port, clients, seen):
            before = cpu_seconds(data_dir)
            time.sleep(seconds / 4)
            busy = (cpu_seconds(data_dir) - before) / (seconds / 4)
            for name, taken in measure(client.base_url, seconds).items():
                watched[name] += taken
    telling.stop()
    print(f"| milliseconds | | alone | {clients} watchers | times |\n|---|---|---|---|---|")
    for name in CALLS:
        for of in (50, 95):
            first, second = (float(np.percentile(taken[name], of)) for taken in (alone, watched))
            print(f"| `{name}` | p{of} | {first:.2f} | {second:.2f} | {second / first:.2f} |")
    gaps = sum(ids != list(range(ids[0], ids[-1] + 1)) for ids in seen)
    events = sum(len(ids) - 1 for ids in seen)
    print(f"\n{events:,} events came to {len(seen)} streams, {per_second:g} a second; with a gap: {gaps}")
    print(f"with nothing to do but the streams, the service takes {busy:.0%} of a core")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--per-second", type=float, default=5)
    given = parser.parse_args()
    try:
        run(given.clients, given.seconds, given.per_second, Console(stderr=True))
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
