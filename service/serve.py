"""`fraternal serve`: uvicorn in this process, and an orderly end."""

import fcntl
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from service.app import create_app
from service.database import bare_engine, open_engine
from service.errors import INTERRUPTED, CommandFailed
from service.launcher import LocalLauncher
from service.logs import log_to_standard_error
from service.protocol import Http
from service.revisions import check_schema, database_errors, is_missing
from service.settings import USUAL_SECRETS_DIR, Settings, is_closed_off_from_secrets, read_settings
from service.streams import Abortable
from service.tokens import Tokens, has_valid_token

SECONDS_FOR_OPEN_REQUESTS = 5
FILES_BESIDE_STREAMS = 1024


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


class Closable(Protocol):
    def close(self) -> None: ...


class _PatientServer(uvicorn.Server):
    """However often it is told to stop, it stops once and completely: drivers may have to be ended."""

    told_by: int | None = None

    def __init__(self, config: uvicorn.Config, *closed_first: Closable) -> None:
        super().__init__(config)
        self._closed_first = closed_first

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.told_by = sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Streams do not end by themselves, and a forecast's probe not in time: it would wait in vain."""
        for each in self._closed_first:
            each.close()
        await super().shutdown(sockets)


def serve_until_stopped(**given: Any) -> None:
    """Serve until SIGINT (exit code 130), SIGTERM or SIGHUP (0). Raises CommandFailed if it cannot start."""
    settings = read_settings(**given)
    if settings.admin_token is None:
        _require_token_off_loopback(settings)
    os.environ["TZ"] = "UTC"  # Optuna stamps trials with naive local time
    time.tzset()
    _allow_files(settings.max_streams + FILES_BESIDE_STREAMS)
    with _sole_user_of(settings.data_dir), _listening(settings) as listener:
        log_to_standard_error(settings.log_format, settings.log_level)
        with database_errors():
            application = create_app(settings, LocalLauncher(settings))
            if settings.admin_token is not None:
                keep_given_token(settings)
                _require_token_off_loopback(settings)  # it may have been revoked
        server = _PatientServer(
            server_config(Abortable(application), timeout_graceful_shutdown=SECONDS_FOR_OPEN_REQUESTS),
            application.state.streams,
            application.state.forecasts,
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


def _require_token_off_loopback(settings: Settings) -> None:
    """Raises CommandFailed, before anything is made, where others could ask and need not say who."""
    url = settings.resolved_database_url
    if settings.on_loopback:
        return
    with database_errors():
        check_schema(url)
        if is_missing(url) or not _has_valid_token(url):
            closed = f"; {USUAL_SECRETS_DIR} is a folder that the user of id {os.geteuid()} cannot enter"
            raise CommandFailed(
                f"host {settings.host!r} is not loopback, other machines can reach it, and there is no valid "
                f"token: make one with `fraternal token create --name NAME --scope admin --data-dir "
                f"{settings.data_dir}`, give one as FRATERNAL_ADMIN_TOKEN, or listen on "
                f"127.0.0.1 and come through an SSH tunnel{closed if is_closed_off_from_secrets() else ''}"
            )


def keep_given_token(settings: Settings) -> None:
    """Raises CommandFailed where it cannot be."""
    assert settings.admin_token is not None
    with closing(Tokens(open_engine(settings.resolved_database_url))) as tokens:
        tokens.keep_given(settings.admin_token.get_secret_value())


def _has_valid_token(url: str) -> bool:
    return has_valid_token(bare_engine(url))


def _allow_files(wished: int) -> None:
    """Each connection is an open file, of which a process may have few by default: as many as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wished if hard == resource.RLIM_INFINITY else min(wished, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


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
    # Named in full: asyncio switches Nagle's algorithm off only for what says that it is TCP, and with it an
    # answer of two parts waits 40 ms for the client's delayed acknowledgement.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
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
    for name, path in (("API", "/v1/sweeps"), ("home", "/"), ("docs", "/docs"), ("dashboard", "/dashboard")):
        print(f"{name:<11}{url}{path}", flush=True)
    if not settings.on_loopback:
        print("access     by token; nothing is encrypted here: put a proxy with TLS in front", flush=True)
