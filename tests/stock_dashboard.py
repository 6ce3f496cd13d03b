"""optuna-dashboard as anybody installs and starts it, on a file."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.service_process import wait_until

PROGRAM = [sys.executable, "-c", "from optuna_dashboard._cli import main; main()"]


@contextmanager
def stock_dashboard(path: Path) -> Iterator[httpx.Client]:
    """A client of it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--server", "wsgiref"]
    process = subprocess.Popen([*PROGRAM, f"sqlite:///{path}", *where], stderr=subprocess.DEVNULL)
    headers = {"accept-encoding": "gzip"}  # without one it answers 500
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, headers=headers) as client:
            wait_until(lambda: _answers(client), "the dashboard answers")
            yield client
    finally:
        process.terminate()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/api/meta").is_success
    except httpx.TransportError:
        return False
