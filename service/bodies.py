"""What a request may send as its body, decided before anything else looks at it.

A body over the limit is refused before it is read where its length is announced, else at the limit. Of JSON
(RFC 8259) this is taken: UTF-8, no key twice in an object, numbers that are finite, text that every database
can keep, and so many levels.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message as Headers
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import InvalidRequest, Problem
from service.problems import MOST_PROBLEMS, plain_problem, problem_response, refusal, to_pointer

MAX_BODY_BYTES = 1024 * 1024
WITH_BODY = {"POST", "PUT", "PATCH"}
MAX_LEVELS = 32
"""Of arrays and objects in one another; nothing that the API takes has ten."""
TAKEN = {"application/json", "application/merge-patch+json"}
"""The latter is what a PATCH is, and JSON all the same."""
SHORT = 1024
"""Bytes that are checked, at the worst, in less time than it takes to have a thread do it."""
LINGER_S = 1.0
"""A client that is refused in the middle of what it sends may go on so long; its answer would be lost if the
connection were closed on it."""


class BodyGate:
    """Pure ASGI. What comes through is a whole body, and JSON that means the same to everybody."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive)
        except HTTPException as error:
            await _answer(scope, error)(scope, receive, _closing(receive, send))
            return
        if body is None:  # the client is gone
            return
        try:
            if body and scope["method"] in WITH_BODY and is_json(_header(scope, b"content-type")):
                if len(body) <= SHORT:
                    check_json(body)
                else:
                    await run_in_threadpool(check_json, body)  # half a second for the worst of a mebibyte
        except InvalidRequest as error:
            await refusal(error, scope["path"])(scope, receive, send)
        except HTTPException as error:
            await _answer(scope, error)(scope, receive, send)
        else:
            await self._app(scope, _again(body, receive), send)


async def require_json(request: Request) -> None:
    """A dependency of every route. Raises HTTPException where the body that it takes is sent as no JSON."""
    route, sent = request.scope["route"], request.headers.get("content-type", "")
    if not isinstance(route, APIRoute) or route.body_field is None:
        return
    needed = route.body_field.field_info.is_required() or _sends_something(request)
    if needed and sent.partition(";")[0].strip().lower() not in TAKEN:
        raise HTTPException(415, f"send the body as application/json, not {sent or 'without a content type'}")


def _sends_something(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


def is_json(content_type: str) -> bool:
    """Whether FastAPI would read a body of this type as JSON. Raises HTTPException for another charset."""
    if content_type == "application/json":  # nearly always
        return True
    headers = Headers()
    headers["content-type"] = content_type or "application/octet-stream"
    main, sub = headers.get_content_maintype(), headers.get_content_subtype()
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        return False
    charset = headers.get_param("charset", "utf-8")
    if not isinstance(charset, str) or charset.lower() not in {"utf-8", "utf8", "us-ascii"}:
        raise HTTPException(415, f"JSON is sent in UTF-8, not in {charset!r:.40}")
    return True


def check_json(body: bytes) -> None:
    """Raises HTTPException where it is no JSON, and InvalidRequest where it has what is not taken."""
    try:
        # A byte order mark is what some editors write; it is no part of the text.
        value = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_Members)
    except UnicodeDecodeError as error:
        raise HTTPException(
            400, f"the body is not UTF-8: byte {error.start} belongs to no character"
        ) from error
    except json.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise HTTPException(400, f"the body has more than {MAX_LEVELS} levels") from error
    except ValueError as error:  # Python converts no more than so many digits
        raise HTTPException(400, "the body has a number that is too long") from error
    if problems := list(islice(_problems_in(value), MOST_PROBLEMS)):
        raise InvalidRequest(problems)


class _Members(list[tuple[str, Any]]):
    """An object as it is written: a dict would keep one of two values for a key, and hide the other."""


Place = tuple[int | str, ...]


def _problems_in(value: Any) -> Iterator[Problem]:
    """Raises HTTPException below too many levels."""
    waiting: list[tuple[Place, Any]] = [((), value)]
    while waiting:
        place, found = waiting.pop()
        if isinstance(found, list) and len(place) >= MAX_LEVELS:
            raise HTTPException(400, f"the body has more than {MAX_LEVELS} levels")
        if isinstance(found, _Members):
            yield from _problems_of_keys(place, Counter(key for key, _ in found))
            waiting += [((*place, key), below) for key, below in reversed(found)]
        elif isinstance(found, list):
            waiting += [((*place, index), below) for index, below in reversed(list(enumerate(found)))]
        elif isinstance(found, float) and not math.isfinite(found):
            yield Problem(_pointer(place), "finite_number", "a number must be finite")
        elif isinstance(found, str) and (rule := _unkeepable(found)):
            yield Problem(_pointer(place), "plain_text", rule)


def _problems_of_keys(place: Place, keys: Counter[str]) -> Iterator[Problem]:
    for key, times in keys.items():
        if rule := _unkeepable(key):
            yield Problem(_pointer(place), "plain_text", f"in a key: {rule}")
        elif times > 1:
            yield Problem(
                _pointer((*place, key)), "repeated_key", f"an object has a key once; this one {times} times"
            )


def _unkeepable(text: str) -> str | None:
    if "\0" in text:
        return "text must not have a NUL, U+0000"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "text must not have half of a surrogate pair"
    return None


def _pointer(place: Place) -> str:
    return to_pointer(place).encode("utf-8", "replace").decode()


def _has_body(scope: Scope) -> bool:
    return any(name in {b"content-length", b"transfer-encoding"} for name, _ in scope["headers"])


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for found, value in scope["headers"] if found == name), "")


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None where the client goes away. Raises HTTPException over the limit."""
    announced = _header(scope, b"content-length")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise HTTPException(
            413, f"a body may have at most {MAX_BODY_BYTES} bytes; this one has {announced[:20]}"
        )
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body may have at most {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Hands out the body once more, and after it what the client does next."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return left.pop() if left else await receive()

    return receive_again


def _answer(scope: Scope, error: HTTPException) -> Response:
    return problem_response(plain_problem(error.status_code, error.detail, scope["path"]))


def _closing(receive: Receive, send: Send) -> Send:
    """Answers, lets the client finish for a moment, and closes the connection, whatever it still sends."""

    async def drain() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last:
            await send({**message, "more_body": True})
            await drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return send_and_close
