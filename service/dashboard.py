"""optuna-dashboard behind us, for looking only.

It has absolute URLs and no read-only mode: whoever reaches it may delete a study. So only GET and HEAD pass.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

from a2wsgi import WSGIMiddleware
from optuna.storages import BaseStorage
from optuna_dashboard import wsgi
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

PREFIXES = ("/dashboard", "/static", "/api", "/csv", "/artifacts", "/favicon.ico")
"""Where the dashboard's page looks for its parts."""


class ReadOnlyDashboard:
    """An ASGI application; answers anything but GET and HEAD with 405."""

    def __init__(self, storage: BaseStorage) -> None:
        # a2wsgi has ASGI types of its own.
        self._app = cast(ASGIApp, WSGIMiddleware(_logging(wsgi(storage))))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in {"GET", "HEAD"}:
            detail = f"the dashboard is for looking only, not for {scope['method']}; the API is under /v1"
            raise HTTPException(405, detail, {"allow": "GET, HEAD"})
        await self._app({**scope, "headers": _with_accept_encoding(scope["headers"])}, receive, send)


class _ErrorLog:
    """What a WSGI application writes of its own errors, as records of our log."""

    def write(self, text: str) -> None:
        if text.strip():
            log.error("%s", text.rstrip())

    def flush(self) -> None: ...


def _logging(app: Callable[..., Any]) -> Any:
    def logged(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer: Iterable[bytes] = app({**environ, "wsgi.errors": _ErrorLog()}, start_response)
        return answer

    return logged


def dashboard_routes(storage: BaseStorage) -> list[BaseRoute]:
    """One route for each prefix, the path left whole."""
    dashboard = ReadOnlyDashboard(storage)
    return [Route(f"{prefix}{{rest:path}}", dashboard, include_in_schema=False) for prefix in PREFIXES]


def _with_accept_encoding(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """optuna-dashboard 0.21 answers 500 where the header is missing."""
    missing = all(name != b"accept-encoding" for name, _ in headers)
    return [*headers, (b"accept-encoding", b"identity")] if missing else headers
