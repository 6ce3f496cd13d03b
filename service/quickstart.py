"""`fraternal quickstart`, which `make sweep` runs: from nothing to a checked model, and then all is stopped.

It runs the service as a process of its own and talks to it over HTTP, as any client does. A signal never
breaks into the middle of something: it is noted, and looked for in every pause, so that whatever was started
is known and gets stopped.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from rich.console import Console

from service.client import ClientError, FraternalClient
from service.errors import INTERRUPTED, CommandFailed
from service.launcher import marked_processes
from service.progress import duration, follow
from service.report import build_report, to_rich
from service.schemas import TERMINAL_STATES, SweepDetail

USUAL_PORT = 8123
SLICE_S = 0.1
"""A noted signal is acted on after at most so long."""
SECONDS_TO_START = 60.0
SECONDS_TO_CANCEL = 15.0
SECONDS_TO_STOP = 30.0
MARK = "FRATERNAL_QUICKSTART"
"""Environment variable that everything started here inherits, drivers and their workers too."""


class Interrupted(Exception):
    """A signal asked for an early end."""


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP, however often they come."""

    def __init__(self) -> None:
        self._noted = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def pause(self, seconds: float) -> None:
        """Raises Interrupted as soon as a signal has come."""
        until = time.monotonic() + seconds
        while not self._noted and (left := until - time.monotonic()) > 0:
            time.sleep(min(SLICE_S, left))
        if self._noted:
            raise Interrupted


def run_quickstart(spec: dict[str, Any], data_dir: Path) -> int:
    """Returns the exit code: 0, 1 if the sweep did not succeed, 130 after a signal. Raises CommandFailed."""
    console, signals = Console(highlight=False), Signals()
    started = time.monotonic()
    try:
        with _service(data_dir, signals, console) as client, _sweep(client, spec) as sweep:
            _print_addresses(client, sweep, console)
            succeeded = _follow_and_report(client, sweep, signals, console)
            if succeeded:
                _fetch_and_check(client, sweep, data_dir, signals, console)
    except Interrupted:
        console.print("interrupted: the sweep is cancelled, and everything that was started is stopped")
        return INTERRUPTED
    console.print(f"everything that was started is stopped; {duration(time.monotonic() - started)} in all")
    return 0 if succeeded else 1


@contextmanager
def _service(data_dir: Path, signals: Signals, console: Console) -> Iterator[FraternalClient]:
    """A service that is ready. In the end neither it nor anything it started is left."""
    data_dir.mkdir(parents=True, exist_ok=True)
    token, port, log = secrets.token_hex(8), _free_port(), data_dir / "service.log"
    console.print(f"starting a service on port {port}; it keeps its things in {data_dir} and logs to {log}")
    with log.open("ab") as output:
        position = output.tell()
        process = subprocess.Popen(
            _command("serve", "--port", str(port), "--data-dir", str(data_dir), "--stop-drivers"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: token},
            start_new_session=True,  # the terminal's signals are for us: we stop it, in order
        )
    try:
        with FraternalClient(f"http://127.0.0.1:{port}") as client:
            _wait_until_ready(client, process, signals, log, position)
            yield client
    finally:
        _stop(process, token)


def _wait_until_ready(
    client: FraternalClient, process: subprocess.Popen[bytes], signals: Signals, log: Path, position: int
) -> None:
    """Raises CommandFailed with what the service said, if it ends or does not get ready."""
    until = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < until:
        with suppress(ClientError):
            client.check_ready()
            return
        signals.pause(SLICE_S)
    signals.pause(0)  # Ctrl-C reaches a service that has not left our process group yet
    said = log.read_bytes()[position:].decode(errors="replace").strip()
    raise CommandFailed(f"the service did not start: {said[-2000:] or f'see {log}'}")


def _stop(process: subprocess.Popen[bytes], token: str) -> None:
    """Ask the service to stop; what is still there afterwards, its own children included, is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_STOP)
    while left := marked_processes(MARK, token):
        for survivor in left:
            with suppress(psutil.NoSuchProcess):
                survivor.kill()
        psutil.wait_procs(left, timeout=1)
    process.wait()


@contextmanager
def _sweep(client: FraternalClient, spec: dict[str, Any]) -> Iterator[SweepDetail]:
    """A sweep that is cancelled if the block does not see its end."""
    sweep = client.create(spec)
    try:
        yield sweep
    except BaseException:
        with suppress(ClientError):
            client.cancel(sweep.id)
            _wait_for_the_end(client, sweep.id)
        raise


def _wait_for_the_end(client: FraternalClient, sweep_id: str) -> None:
    until = time.monotonic() + SECONDS_TO_CANCEL
    while client.get(sweep_id).state not in TERMINAL_STATES and time.monotonic() < until:
        time.sleep(SLICE_S)


def _print_addresses(client: FraternalClient, sweep: SweepDetail, console: Console) -> None:
    console.print(f"sweep      {client.base_url}/v1/sweeps/{sweep.id}", soft_wrap=True)
    console.print(f"dashboard  {client.base_url}/dashboard", soft_wrap=True)


def _follow_and_report(
    client: FraternalClient, sweep: SweepDetail, signals: Signals, console: Console
) -> bool:
    """Whether the sweep succeeded."""
    ended = follow(client, sweep.id, console, signals.pause)
    console.print(
        f"sweep {sweep.id} {ended.state}" + (f": {ended.state_reason}" if ended.state_reason else "")
    )
    console.print(to_rich(build_report(sweep.spec, client.trials(sweep.id))), soft_wrap=True)
    return ended.state == "succeeded"


def _fetch_and_check(
    client: FraternalClient, sweep: SweepDetail, data_dir: Path, signals: Signals, console: Console
) -> None:
    """Fetch the best checkpoint and evaluate it in a fresh process, which has the file and nothing else."""
    path = data_dir / f"best-{sweep.id}.tar"
    best, digest = client.best(sweep.id), client.fetch(sweep.id, path)
    console.print(
        f"best checkpoint: trial {best.number}, {best.arm}: {path} (sha256 {digest})", soft_wrap=True
    )
    checking = subprocess.Popen(
        _command("evaluate", str(path), "--check", "--data-dir", str(data_dir)),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while checking.poll() is None:
            signals.pause(SLICE_S)
    finally:
        checking.kill()
        checking.wait()
    if checking.returncode != 0:
        raise CommandFailed("the fetched checkpoint does not give the perplexity that training recorded")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", *arguments]


def _free_port() -> int:
    """The usual port, or another one where that is taken."""
    for port in (USUAL_PORT, 0):
        with socket.socket() as candidate, suppress(OSError):
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(("127.0.0.1", port))
            return int(candidate.getsockname()[1])
    raise CommandFailed("no port is free on 127.0.0.1")
