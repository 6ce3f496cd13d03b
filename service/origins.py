"""What keeps pages of other sites from using a browser that can reach us.

A form of theirs that is sent here (CSRF) has an Origin that is not ours; a name of theirs that they let point
here (DNS rebinding) is a Host that is not ours. And headers that tell browsers what our own pages may do.
"""

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ForeignOrigin, ServiceError, UnknownHost
from service.hosts import hostname, is_loopback
from service.problems import refusal
from service.requests import PROBES

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITE = frozenset({"same-origin", "none"})
"""Of Sec-Fetch-Site: a page of ours, or the person at the browser."""
CONTENT_POLICY = "content-security-policy"
NO_FRAMES = "frame-ancestors 'none'; base-uri 'none'"
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # no-referrer would make the Origin of our own forms "null"
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "private, no-cache",
    CONTENT_POLICY: f"default-src 'none'; form-action 'none'; {NO_FRAMES}",
}
"""Where an answer does not say otherwise."""


class OwnOrigin:
    """Refuses hosts that are not ours, and changes that a page of another site asks for."""

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str], *, any_host: bool) -> None:
        self._app = app
        self._allowed = frozenset(allowed_hosts)
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            try:
                self._check(scope["method"], Headers(scope=scope))
            except ServiceError as error:
                await refusal(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        """Raises UnknownHost, ForeignOrigin."""
        host = headers.get("host", "")
        if not (self._any_host or self._is_ours(host)):
            raise UnknownHost(
                f"this service is not known as {host!r}: ask for it as localhost, or let whoever runs it add "
                "the name to FRATERNAL_ALLOWED_HOSTS"
            )
        if method not in SAFE_METHODS:
            self._check_origin(host, headers)

    def _check_origin(self, host: str, headers: Headers) -> None:
        for origin in headers.getlist("origin"):
            netloc = origin.partition("://")[2]
            if _bare(netloc) != _bare(host) and hostname(netloc) not in self._allowed:
                raise ForeignOrigin(f"a page of {origin!r} may not change anything at {host!r}")
        if "origin" not in headers and headers.get("sec-fetch-site", "none") not in OWN_SITE:
            raise ForeignOrigin(f"a page of another site may not change anything at {host!r}")

    def _is_ours(self, host: str) -> bool:
        name = hostname(host)
        return name in self._allowed or is_loopback(name)


class SecurityHeaders:
    """Adds what is missing of them to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                secure(MutableHeaders(scope=message))
            await send(message)

        await self._app(scope, receive, send_with_headers)


def secure(headers: MutableHeaders) -> None:
    if "frame-ancestors" not in headers.get(CONTENT_POLICY, "frame-ancestors"):
        headers.append(CONTENT_POLICY, NO_FRAMES)  # the dashboard's own: a browser keeps to both
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)


def _bare(netloc: str) -> str:
    """Without the port that nobody writes."""
    return netloc.lower().removesuffix(":80").removesuffix(":443")
