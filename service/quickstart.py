"""`fraternal quickstart`, which `make sweep` runs: from nothing to a checked model; then all is stopped."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from service.archives import verification_in
from service.client import ClientError, FraternalClient
from service.errors import INTERRUPTED, CommandFailed
from service.lifecycle import TERMINAL_STATES
from service.progress import duration, follow
from service.report_texts import to_rich
from service.running import SLICE_S, Interrupted, Signals, command, print_addresses, running_service
from service.schemas import SweepDetail

SECONDS_TO_CANCEL = 15.0


def run_quickstart(spec: dict[str, Any], data_dir: Path) -> int:
    """Returns the exit code: 0, 1 if the sweep did not succeed, 130 after a signal. Raises CommandFailed."""
    console, started = Console(highlight=False), time.monotonic()
    try:
        with (
            Signals() as signals,
            running_service(data_dir, signals, console) as client,
            _sweep(client, spec) as sweep,
        ):
            print_addresses(client, sweep.id, console)
            succeeded = _follow_and_report(client, sweep, signals, console)
            if succeeded:
                _fetch_and_check(client, sweep, data_dir, signals, console)
    except Interrupted:
        console.print("interrupted: the sweep is cancelled, and everything that was started is stopped")
        return INTERRUPTED
    console.print(f"everything that was started is stopped; {duration(time.monotonic() - started)} in all")
    return 0 if succeeded else 1


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


def _follow_and_report(
    client: FraternalClient, sweep: SweepDetail, signals: Signals, console: Console
) -> bool:
    """Whether the sweep succeeded."""
    ended = follow(client, sweep.id, console, signals.pause, until_paused=True)
    console.print(
        f"sweep {sweep.id} {ended.state}" + (f": {ended.state_reason}" if ended.state_reason else "")
    )
    console.print(to_rich(client.report(sweep.id)), soft_wrap=True)
    if ended.state == "paused":  # something is wrong, and once this command is over nobody would resume it
        client.cancel(sweep.id)
        _wait_for_the_end(client, sweep.id)
    return ended.state == "succeeded"


def _fetch_and_check(
    client: FraternalClient, sweep: SweepDetail, data_dir: Path, signals: Signals, console: Console
) -> None:
    """Fetch the best checkpoint and evaluate it in a fresh process, which has the file and nothing else."""
    path = data_dir / f"best-{sweep.id}.tar"
    best, digest = client.best(sweep.id), client.fetch(sweep.id, path)
    console.print(
        f"best checkpoint: trial {best.number}, {best.arm}: {path} (sha256 {digest})\n"
        f"evaluated again by the service: {verification_in(path)}",
        soft_wrap=True,
    )
    checking = subprocess.Popen(
        command("evaluate", str(path), "--check", "--data-dir", str(data_dir)),
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
