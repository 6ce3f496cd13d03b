"""A service of one's own for the length of a command: started, found ready, and gone in the end.

It is a process of its own, asked over HTTP as any client does. A signal never breaks into the middle of
something: it is noted, and looked for in every pause, so that whatever was started is known and gets stopped.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console

from service.client import ClientError, FraternalClient, ServiceUnreachable
from service.database import open_engine
from service.errors import CommandFailed
from service.launcher import end_marked_processes
from service.settings import SECRETS_DIR, own_database_url
from service.tokens import Tokens

ANNOUNCED = re.compile(r"^API +(http://\S+)/v1/sweeps$", re.MULTILINE)
"""What a service prints once it listens."""
SLICE_S = 0.1
"""A noted signal is acted on after at most so long."""
SECONDS_TO_START = 60.0
LONGEST_COMMAND = timedelta(days=90)
"""What is left of a command that was killed is not valid for ever."""
SECONDS_TO_STOP = 30.0
MARK = "FRATERNAL_STARTED_BY"
"""Environment variable that everything started here inherits, drivers and their workers too."""


class Interrupted(Exception):
    """A signal asked for an early end."""


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP, however often they come, until its block ends; then ignores more."""

    def __init__(self) -> None:
        self._noted = False
        self._before = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Who was asked to end is ending: another signal must not take its exit code away.
            signal.signal(number, signal.SIG_IGN if self._noted else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def pause(self, seconds: float) -> None:
        """Raises Interrupted as soon as a signal has come."""
        until = time.monotonic() + seconds
        while not self._noted and (left := until - time.monotonic()) > 0:
            time.sleep(min(SLICE_S, left))
        if self._noted:
            raise Interrupted


@contextmanager
def running_service(data_dir: Path, signals: Signals, console: Console) -> Iterator[FraternalClient]:
    """A service of our own that is ready. In the end neither it nor anything it started is left.

    What the environment says of another service, its database say, is not for this one.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    mark, log = secrets.token_hex(8), data_dir / "service.log"
    console.print(f"starting a service; it keeps its things in {data_dir} and logs to {log}", soft_wrap=True)
    with log.open("ab") as output:
        position = output.tell()
        process = subprocess.Popen(
            command("serve", "--port", "0", "--data-dir", str(data_dir), "--stop-drivers"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_without_settings(os.environ), SECRETS_DIR: "", MARK: mark},
            start_new_session=True,  # the terminal's signals are for us: we stop it, in order
        )
    try:
        address = _address_once_ready(process, signals, log, position)
        with _token_if_asked_for(data_dir) as token, FraternalClient(address, token=token) as client:
            yield client
    except ServiceUnreachable as error:
        raise CommandFailed(
            f"the service of this command does not answer any more ({error}): see {log}; "
            "given once more, the command starts another one, which has what this one kept"
        ) from error
    finally:
        _stop(process, mark)


@contextmanager
def _token_if_asked_for(data_dir: Path) -> Iterator[str | None]:
    """A token for as long as it takes, where the service over this directory asks for one.

    Elsewhere there is none: with the first one, it would begin to ask.
    """
    with closing(Tokens(open_engine(own_database_url(data_dir)))) as tokens:
        if not tokens.list_tokens():
            yield None
            return
        token, written = tokens.create("for one command", "write", LONGEST_COMMAND)
        try:
            yield written
        finally:
            tokens.remove(token.id)


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("FRATERNAL_")}


def _address_once_ready(process: subprocess.Popen[bytes], signals: Signals, log: Path, position: int) -> str:
    """Where it says that it listens: on a port that was chosen for it, another service might.

    Raises CommandFailed with what the service said, if it ends or does not get ready.
    """
    until = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < until:
        if announced := ANNOUNCED.search(_said(log, position)):
            with FraternalClient(announced[1]) as client, suppress(ClientError):
                client.check_ready()
                return str(announced[1])
        signals.pause(SLICE_S)
    signals.pause(0)  # Ctrl-C reaches a service that has not left our process group yet
    said = _said(log, position)
    raise CommandFailed(f"the service did not start: {said[-2000:] or f'see {log}'}")


def _said(log: Path, position: int) -> str:
    return log.read_bytes()[position:].decode(errors="replace").strip()


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask the service to stop; what is still there afterwards, its own children included, is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_STOP)
    end_marked_processes(MARK, mark)
    process.wait()


def print_addresses(client: FraternalClient, sweep_id: str, console: Console) -> None:
    console.print(f"sweep      {client.base_url}/v1/sweeps/{sweep_id}", soft_wrap=True)
    console.print(f"home       {client.base_url}/", soft_wrap=True)
    console.print(f"dashboard  {client.base_url}/dashboard", soft_wrap=True)


def command(*arguments: str) -> list[str]:
    """The command line of `fraternal`, in this environment."""
    return [sys.executable, "-m", "service.cli", *arguments]
