"""Who asks, and whether they may.

A service is open to whoever reaches it as long as it listens on loopback and its database has never had a
token. From its first token on, everybody needs one: as `Authorization: Bearer`, or by the cookie of a browser
that has signed in. Revoking the last token opens nothing.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import (
    DatabaseAway,
    InsufficientScope,
    InvalidToken,
    NotSignedIn,
    ServiceError,
)
from service.own_pages import problem_page
from service.problems import refusal
from service.rates import Rates
from service.tokens import Holders, Token, Tokens
from service.tokens import Scope as TokenScope
from service.turns import admits

COOKIE = "fraternal_session"
NEEDED: tuple[tuple[str, str, TokenScope | None], ...] = (
    (r"/healthz|/readyz|/sign-in|/sign-out|/favicon\.ico|/assets/[^/\s]+", r".*", None),
    (r"/v1/(.*/)?(webhooks|tokens)\b.*", r".*", "admin"),
    (r".*", r"GET|HEAD|OPTIONS", "read"),
    (r".*", r".*", "write"),
)
"""Path, method, and the scope that they need; the first line that fits counts. Probes have no token, and the
looks of a page that says what is wrong are no secret."""
PAGES = re.compile(r"GET (/|/cancel|/docs|/dashboard(/.*)?|/v1/sweeps/[^/]+/report)|POST /ask")
"""What a person opens, or sends: without a token, they are led to the sign-in; errors are pages, too."""
AWAY = "who may ask cannot be looked up: the database does not answer"
FRESH_S = 1.0
"""What the tables say is believed for so long: a revoked token is refused after at most that."""


class Gate:
    """Decides about requests, and signs browsers in and out."""

    def __init__(self, tokens: Tokens, rates: Rates, *, always_closed: bool) -> None:
        self._tokens, self._rates, self._always_closed = tokens, rates, always_closed
        self._known = _Known(tokens.holders)

    async def admit(self, request: Request) -> Token | None:
        """The token that a request came with; None where none is needed.

        Raises NotSignedIn, InvalidToken, InsufficientScope, TooManyRequests, DatabaseAway.
        """
        needed = needed_scope(request.method, request.scope["path"])
        if needed is None:
            return None
        if await self.is_open():
            self._rates.count_request(address_of(request))
            return None
        token = await self.find_asker(request) or await self._look_up(request)
        self._rates.count_request(token.id if token else address_of(request))
        if token is None:
            raise NotSignedIn(
                "this service wants to know who asks: send `Authorization: Bearer TOKEN`, or sign in with a "
                "browser at /sign-in; `fraternal token create` makes a token"
            )
        if not token.may(needed):
            raise InsufficientScope(f"this needs a token of scope {needed}; yours has {token.scope}", needed)
        return token

    async def is_open(self) -> bool:
        """Raises DatabaseAway."""
        return not self._always_closed and not (await self._known.recently()).tokens

    async def find_asker(self, request: Request) -> Token | None:
        """By what is known at the moment. Raises InvalidToken where a header is none, DatabaseAway."""
        written = bearer_in(request.headers)
        if written is None:
            return await self.find_by_cookie(request)
        return (await self._known.recently()).find(written)

    async def find_by_cookie(self, request: Request) -> Token | None:
        """Raises DatabaseAway."""
        return (await self._known.recently()).find_by_session(request.cookies.get(COOKIE, ""))

    async def _look_up(self, request: Request) -> Token | None:
        """A token that is not known may be a moment old; a cookie was made here, and is known."""
        written = bearer_in(request.headers)
        return await self.find_holder(address_of(request), written) if written is not None else None

    async def find_holder(self, address: str, written: str) -> Token:
        """Of a token, by what the database says now. Raises InvalidToken, TooManyRequests, DatabaseAway."""
        self._rates.require_few_failures(address)
        token = (await self._known.now()).find(written)
        if token is None:
            self._rates.count_failure(address)
            raise InvalidToken("the token is unknown, expired or revoked; `fraternal token ls` says which")
        return token

    async def still_admits(self, request: Request) -> bool:
        try:
            return await self.is_open() or await self.find_asker(request) is not None
        except DatabaseAway:  # nor can it tell anybody anything
            return True

    async def sign_in(self, address: str, written: str) -> str:
        """What the cookie of a browser is to have. Raises InvalidToken, TooManyRequests, DatabaseAway."""
        token = await self.find_holder(address, written)
        with database_errors():
            cookie = await run_in_threadpool(self._tokens.open_session, token)
        await self._known.now()
        return cookie

    async def sign_out(self, cookie: str) -> None:
        """Raises DatabaseAway."""
        session = (await self._known.now()).find_session(cookie)
        if session is not None:
            with database_errors():
                await run_in_threadpool(self._tokens.close_session, session.id)
            await self._known.now()


class Access:
    """Lets requests through; `request.state.asker` is their token, or None where none is needed, and
    `owner` its id, or empty."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            token = await self._gate.admit(request)
        except ServiceError as error:
            await _refuse(request, error)(scope, receive, send)
            return
        request.state.owner = token.id if token is not None else ""
        request.state.asker = token
        await self._app(scope, receive, self._while_admitted(request, send))

    def _while_admitted(self, request: Request, send: Send) -> Send:
        """Ends a stream of events before it tells more than its asker may know. What else was begun, ends."""
        streams = ended = False

        async def send_while_admitted(message: Message) -> None:
            nonlocal streams, ended
            if message["type"] == "http.response.start":
                sent_as = Headers(raw=message["headers"]).get("content-type", "")
                streams = sent_as.startswith("text/event-stream")
            elif streams and not ended and not await self._gate.still_admits(request):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                ended = True
            if not ended:
                await send(message)

        return send_while_admitted


class _Known:
    """Who may ask, read again once that is older than FRESH_S, or on demand; by one thread at a time."""

    def __init__(self, read: Callable[[], Holders]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._holders = Holders({}, {})
        self._read_at = self._failed_at = -FRESH_S

    async def recently(self) -> Holders:
        return await self._as_of(time.monotonic() - FRESH_S)

    async def now(self) -> Holders:
        return await self._as_of(time.monotonic())

    async def _as_of(self, moment: float) -> Holders:
        if self._read_at < moment:
            await admits.take(self._read_again, moment)
        return self._holders

    def _read_again(self, moment: float) -> None:
        with self._lock:
            if self._read_at >= moment:  # somebody else has, while this one waited
                return
            if self._failed_at >= moment:  # nor need all who waited try in vain, one after another
                raise DatabaseAway(AWAY)
            began = self._failed_at = time.monotonic()
            with database_errors():
                self._holders = self._read()
            self._read_at = began


def needed_scope(method: str, path: str) -> TokenScope | None:
    return next(
        scope
        for paths, methods, scope in NEEDED
        if re.fullmatch(paths, path, re.DOTALL) and re.fullmatch(methods, method)
    )


def bearer_in(headers: Headers) -> str | None:
    """What follows `Bearer`; None without the header. Raises InvalidToken where it is something else."""
    sent = headers.getlist("authorization")
    if not sent:
        return None
    scheme, _, written = sent[0].strip().partition(" ")
    if len(sent) > 1:
        raise InvalidToken("there are several Authorization headers; send one")
    if scheme.lower() != "bearer" or not written.strip():
        raise InvalidToken("the Authorization header is not understood; send `Authorization: Bearer TOKEN`")
    return written.strip()


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else "nowhere"


def opens_a_page(request: Request) -> bool:
    """Whether a person has opened it in a browser, or sent a form of ours."""
    wants_page = "text/html" in request.headers.get("accept", "")
    return wants_page and PAGES.fullmatch(f"{request.method} {request.scope['path']}") is not None


def described(description: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI description with who may call what, and how they are refused, as FastAPI would have it."""
    description["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "Made by `fraternal token create`."}
    }
    refusals = {
        "401": "The service wants a token, and there is none, or one that is not valid.",
        "403": "The token's scope is not enough, or a page of another site has asked.",
        "429": "Too many requests; `Retry-After` says for how long.",
    }
    problem = {"$ref": "#/components/schemas/ProblemDocument"}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            scope = needed_scope(method.upper(), path)
            operation["security"] = [{"token": [scope]}, {}] if scope is not None else []
            if scope is not None:
                for status, words in refusals.items():
                    content = {"application/json": {"schema": dict(problem)}}
                    operation["responses"].setdefault(status, {"description": words, "content": content})
    return description


def _refuse(request: Request, error: ServiceError) -> Response:
    path = request.scope["path"]
    if isinstance(error, NotSignedIn) and opens_a_page(request):
        query = request.url.query
        here = f"{path}?{query}" if query else path
        there = urlencode({"next": here if request.method == "GET" else "/"})
        return RedirectResponse(f"/sign-in?{there}", HTTPStatus.SEE_OTHER)
    refused = refusal(error, path, headers=refusal_headers(error))
    return problem_page(refused) if opens_a_page(request) else refused


def refusal_headers(error: ServiceError) -> dict[str, str]:
    """What a client is told besides the problem: RFC 6750, RFC 9110."""
    if isinstance(error, NotSignedIn):
        return {"www-authenticate": 'Bearer realm="fraternal"'}
    if isinstance(error, InvalidToken):
        return {"www-authenticate": 'Bearer realm="fraternal", error="invalid_token"'}
    if isinstance(error, InsufficientScope):
        said = f'Bearer realm="fraternal", error="insufficient_scope", scope="{error.needed}"'
        return {"www-authenticate": said}
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


@contextmanager
def database_errors() -> Iterator[None]:
    """Raises DatabaseAway."""
    try:
        yield
    except SQLAlchemyError as error:
        raise DatabaseAway(AWAY) from error
