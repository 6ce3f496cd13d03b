"""What surrounds every request, one that fails too: an id, a line in the log, and its measurements."""

import logging
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol
from uuid import uuid4

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

HEADER = "X-Request-Id"
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""What is taken over from a client: it goes into headers, answers and logs as it is."""
PROBES = frozenset({"/healthz", "/readyz"})
"""For whoever looks after the process, by whatever name it knows it; they tell nothing of sweeps."""
SWEEP_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
UNMATCHED = "unmatched"
"""In place of the route's template, for paths that nothing has: as many as clients think of."""


class Observer(Protocol):
    """Counts and times requests."""

    def began(self) -> None: ...

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """The answer has begun: a stream's end says nothing about how quick the service is."""

    def ended(self) -> None: ...


@dataclass(frozen=True)
class _InProgress:
    id: str
    scope: Scope


_current: ContextVar[_InProgress | None] = ContextVar("request in progress", default=None)


def current_request_id() -> str | None:
    """None outside of requests."""
    request = _current.get()
    return request.id if request else None


def current_fields() -> Mapping[str, str]:
    """What a line of the log says about the request in which it is written."""
    request = _current.get()
    if request is None:
        return {}
    sweep_id = request.scope.get("path_params", {}).get("sweep_id")
    about = {"sweep_id": sweep_id} if isinstance(sweep_id, str) and SWEEP_ID.fullmatch(sweep_id) else {}
    return {"request_id": request.id, **about}


class EveryRequest:
    """Pure ASGI, and outermost: what fails below has an id, a line and a place in the measurements, too."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _InProgress(_given_id(scope) or uuid4().hex, scope)
        before = _current.set(request)
        began = time.perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                seconds = time.perf_counter() - began
                self._observer.answered(scope["method"], route_of(scope), message["status"], seconds)
                headers = [*message.get("headers", []), (HEADER.lower().encode(), request.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        self._observer.began()
        try:
            await self._app(scope, receive, send_with_id)
            _log_access(scope, status, time.perf_counter() - began)
        except BaseException:  # the server logs it next, and is to find the id: it is not taken back
            _log_access(scope, status, time.perf_counter() - began)
            raise
        else:
            _current.reset(before)
        finally:
            self._observer.ended()


def route_of(scope: Scope) -> str:
    """The template of the route that a request has come to: there are only so many."""
    route = scope.get("route") or _find_plain_route(scope)
    template = getattr(route, "path_format", None)
    return template if isinstance(template, str) else UNMATCHED


def _find_plain_route(scope: Scope) -> Route | None:
    """FastAPI notes its own routes only, not the dashboard's, or that of the API's description."""
    if "endpoint" not in scope:
        return None
    routes = [route for route in scope["app"].routes if isinstance(route, Route)]
    return next((route for route in routes if route.matches(scope)[0] != Match.NONE), None)


def _given_id(scope: Scope) -> str | None:
    given = [value for name, value in scope["headers"] if name == HEADER.lower().encode()]
    text = given[0].decode("latin-1") if len(given) == 1 else ""
    return text if SANE_ID.fullmatch(text) else None


def _log_access(scope: Scope, status: int | None, seconds: float) -> None:
    """Neither query nor headers: they may have secrets. The path is as it was sent, hence plain ASCII."""
    path = scope.get("raw_path", scope["path"].encode("ascii", "backslashreplace")).decode("ascii", "replace")
    fields = {
        "method": scope["method"],
        "route": route_of(scope),
        "path": path[:200],
        "status": status,
        "ms": round(seconds * 1000, 1),
        "client": (scope.get("client") or ("",))[0],
    }
    is_well = scope["path"] in PROBES and status == HTTPStatus.OK  # as it is every few seconds, for ever
    level = logging.DEBUG if is_well else logging.INFO
    log.log(level, "%(method)s %(path)s %(status)s in %(ms)s ms", fields, extra=fields)
