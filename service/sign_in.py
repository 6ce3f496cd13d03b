"""Signing in with a browser: a page that needs no JavaScript, and a cookie that no script can read."""

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from service.access import COOKIE, Gate, address_of, refusal_headers
from service.errors import InvalidToken, TooManyRequests
from service.origins import CONTENT_POLICY, NO_FRAMES
from service.tokens import SESSION_LASTS, Token

HOME = "/dashboard"
LOCAL_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]{0,2000}")
"""Of this service: browsers take `//` and `/\\` for another host, and read over control characters."""
LARGEST_FORM = 10_000
STYLE = """
:root { color-scheme: light dark; font: 100%/1.5 system-ui, sans-serif }
main { max-width: 26rem; margin: 12vh auto; padding: 0 1rem }
label, input, button { display: block; box-sizing: border-box; font: inherit }
input { width: 100%; margin: .25rem 0 .5rem; padding: .5rem }
button { padding: .5rem 1.5rem }
[role=alert] { padding: .5rem .75rem; border: 2px solid #c62828 }
"""
STYLE_SHA256 = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{STYLE_SHA256}'; form-action 'self'; {NO_FRAMES}"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""
SIGN_IN = """<h1>Sign in to fraternal</h1>
{alert}<form method="post" action="/sign-in">
<input type="hidden" name="next" value="{there}">
<label for="token">Token</label>
<input id="token" name="token" type="password" required autofocus autocomplete="current-password"
 autocapitalize="off" spellcheck="false" aria-describedby="{described_by}"{invalid}>
<p id="hint">It begins with <code>frt_</code>. Whoever runs this service makes one with
<code>fraternal token create</code>.</p>
<button type="submit">Sign in</button>
</form>
<p>Signed in already, and here by a link from elsewhere? <a href="{there}">Go on.</a></p>
"""
SIGNED_IN = """<h1>You are signed in</h1>
<p>With the token <strong>{name}</strong>, of scope {scope}. <a href="{there}">Go on.</a></p>
<form method="post" action="/sign-out">
<button type="submit">Sign out</button>
</form>
"""


def _gate(request: Request) -> Gate:
    gate: Gate = request.app.state.gate
    return gate


async def _form(request: Request) -> Mapping[str, str]:
    """Empty where it is larger than any of ours."""
    body = await request.body()
    return dict(parse_qsl(body.decode(errors="replace"))) if len(body) <= LARGEST_FORM else {}


TheGate = Annotated[Gate, Depends(_gate)]
Form = Annotated[Mapping[str, str], Depends(_form)]

signing_in = APIRouter(include_in_schema=False)


@signing_in.get("/sign-in")
async def show_sign_in(request: Request, gate: TheGate) -> Response:
    there = local_path(request.query_params.get("next"))
    if await gate.is_open():
        return RedirectResponse(there, HTTPStatus.SEE_OTHER)
    token = await gate.find_by_cookie(request)
    return _signed_in_page(token, there) if token is not None else _sign_in_page(there)


@signing_in.post("/sign-in")
async def sign_in(request: Request, form: Form, gate: TheGate) -> Response:
    there = local_path(form.get("next"))
    if await gate.is_open():
        return RedirectResponse(there, HTTPStatus.SEE_OTHER)
    try:
        cookie = await gate.sign_in(address_of(request), form.get("token", "").strip())
    except (InvalidToken, TooManyRequests) as error:
        page = _sign_in_page(there, f"That did not work: {error}.", error.status)
        page.headers.update(refusal_headers(error))
        return page
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


def _sign_in_page(there: str, alert: str | None = None, status: int = HTTPStatus.OK) -> HTMLResponse:
    content = SIGN_IN.format(
        there=escape(there),
        alert=f'<p id="alert" role="alert">{escape(alert)}</p>\n' if alert else "",
        described_by="alert hint" if alert else "hint",
        invalid=' aria-invalid="true"' if alert else "",
    )
    return _page("Sign in to fraternal", content, status)


def _signed_in_page(token: Token, there: str) -> HTMLResponse:
    content = SIGNED_IN.format(name=escape(token.name), scope=token.scope, there=escape(there))
    return _page("Signed in to fraternal", content, HTTPStatus.OK)


def _page(title: str, content: str, status: int) -> HTMLResponse:
    headers = {CONTENT_POLICY: POLICY, "cache-control": "no-store"}
    return HTMLResponse(PAGE.format(title=title, style=STYLE, content=content), status, headers)
