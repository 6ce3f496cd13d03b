"""Signing in with a browser: a page that needs no JavaScript, and a cookie that no script can read."""

import re
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from service.access import COOKIE, Gate, address_of, refusal_headers
from service.errors import InvalidToken, TooManyRequests
from service.own_pages import Form, page
from service.tokens import SESSION_LASTS

HOME = "/"
LOCAL_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]{0,2000}")
"""Of this service: browsers take `//` and `/\\` for another host, and read over control characters."""


def _gate(request: Request) -> Gate:
    gate: Gate = request.app.state.gate
    return gate


TheGate = Annotated[Gate, Depends(_gate)]

signing_in = APIRouter(include_in_schema=False)


@signing_in.get("/sign-in")
async def show_sign_in(request: Request, gate: TheGate) -> Response:
    there = local_path(request.query_params.get("next"))
    if await gate.is_open():
        return RedirectResponse(there, HTTPStatus.SEE_OTHER)
    token = await gate.find_by_cookie(request)
    if token is None:
        return _sign_in_page(there)
    return page("signed_in.html", token=token, there=there)


@signing_in.post("/sign-in")
async def sign_in(request: Request, form: Form, gate: TheGate) -> Response:
    there = local_path(form.get("next"))
    if await gate.is_open():
        return RedirectResponse(there, HTTPStatus.SEE_OTHER)
    try:
        cookie = await gate.sign_in(address_of(request), form.get("token", "").strip())
    except (InvalidToken, TooManyRequests) as error:
        again = _sign_in_page(there, f"That did not work: {error}.", error.status)
        again.headers.update(refusal_headers(error))
        return again
    response = RedirectResponse(there, HTTPStatus.SEE_OTHER)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=int(SESSION_LASTS.total_seconds()),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response


@signing_in.post("/sign-out")
async def sign_out(request: Request, gate: TheGate) -> Response:
    await gate.sign_out(request.cookies.get(COOKIE, ""))
    response = RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return response


def local_path(asked: str | None) -> str:
    """Where to go on: a path of this service, or its home where it is none."""
    return asked if asked is not None and LOCAL_PATH.fullmatch(asked) else HOME


def _sign_in_page(there: str, alert: str | None = None, status: int = HTTPStatus.OK) -> Response:
    return page("sign_in.html", status, there=there, alert=alert)
