"""`fraternal serve`: uvicorn in this process, and an orderly end."""

import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from service.app import create_app
from service.errors import INTERRUPTED, CommandFailed
from service.launcher import LocalLauncher
from service.logs import log_to_standard_error
from service.protocol import Http
from service.revisions import database_errors
from service.settings import Settings, read_settings

SECONDS_FOR_OPEN_REQUESTS = 5


def server_config(application: ASGIApp, **options: Any) -> uvicorn.Config:
    """How our application is served."""
    return uvicorn.Config(
        application,
        http=Http,
        ws="none",
        log_config=None,  # its lines are among ours
        access_log=False,  # ours says more, and no query
        server_header=False,
        **options,
    )


class _PatientServer(uvicorn.Server):
    """However often it is told to stop, it stops once and completely: drivers may have to be ended."""

    told_by: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.told_by = sig
        self.should_exit = True


def serve_until_stopped(**given: Any) -> None:
    """Serve until SIGINT (exit code 130), SIGTERM or SIGHUP (0). Raises CommandFailed if it cannot start."""
    settings = read_settings(**given)
    os.environ["TZ"] = "UTC"  # Optuna stamps trials with naive local time
    time.tzset()
    with _sole_user_of(settings.data_dir), _listening(settings) as listener:
        log_to_standard_error(settings.log_format, settings.log_level)
        with database_errors():
            application = create_app(settings, LocalLauncher(settings))
        server = _PatientServer(
            server_config(application, timeout_graceful_shutdown=SECONDS_FOR_OPEN_REQUESTS)
        )
        signal.signal(signal.SIGHUP, server.handle_exit)
        listener.listen()
        _announce(settings, listener)
        server.run(sockets=[listener])
    drivers = (
        "the drivers are stopped too" if settings.stop_drivers else "the drivers of running sweeps go on"
    )
    print(f"stopped; {drivers}", flush=True)
    if server.told_by == signal.SIGINT:
        raise SystemExit(INTERRUPTED)


@contextmanager
def _sole_user_of(data_dir: Path) -> Iterator[None]:
    """Hold the data directory. Raises CommandFailed if another service does: both would drive its sweeps."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "service.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise CommandFailed(
                f"{data_dir} is in use by the service with process id {lock.read().strip()}; "
                "use that one, stop it, or name another --data-dir"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            where = f"{settings.host} port {settings.port}"
            raise CommandFailed(
                f"cannot listen on {where}: {error.strerror}; choose another with --port"
            ) from error
        yield listener


def _announce(settings: Settings, listener: socket.socket) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    for name, path in (("API", "/v1/sweeps"), ("docs", "/docs"), ("dashboard", "/dashboard")):
        print(f"{name:<11}{url}{path}", flush=True)
