"""One message to one receiver: to an address that was looked at first, signed, within some seconds.

A webhook's URL is a client's, and what is behind it can change with every look: so a name is resolved here,
its addresses are checked, and the connection goes to exactly these. TLS and the Host header have the name.
"""

import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import certifi
import httpcore
import httpx
from standardwebhooks import Webhook as Signer

from service.database import now
from trials.version import own_version

TIMEOUT_S = 10.0
"""For all of it, but for the time that a name server takes."""
MOST_READ_BYTES = 4096
"""Of an answer, so that a connection ends in order; nobody looks at them."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Undeliverable(Exception):
    """Nothing was sent, or nothing was answered; the message says why."""


class RefusedAddress(Undeliverable):
    """The receiver is where this service sends nothing."""


@dataclass(frozen=True)
class Message:
    id: str
    """The same for every attempt: who gets it twice can tell."""
    body: str


def parse_url(written: str) -> httpx.URL:
    """Raises RefusedAddress unless it is what a webhook may be at."""
    try:
        url = httpx.URL(written)
    except httpx.InvalidURL as error:
        raise RefusedAddress(f"{written!r:.100} is no URL: {error}") from error
    if url.port is not None and not 0 < url.port < 65_536:
        raise RefusedAddress(f"{written!r:.100} is no URL: there is no port {url.port}")
    if url.scheme not in {"http", "https"} or not url.host:
        raise RefusedAddress(f"{written!r:.100} does not begin with http:// or https:// and a host")
    if url.userinfo or url.fragment:
        raise RefusedAddress("a webhook's URL has no user, no password and no #; use its query or path")
    return url


def is_public(address: Address) -> bool:
    """Whether anybody on the Internet would mean the same host by it."""
    embedded = _embedded(address)
    if embedded is not None:
        return is_public(embedded)
    special = address.is_multicast or address.is_reserved or getattr(address, "is_site_local", False)
    return address.is_global and not special


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def resolve(host: str, port: int, *, to_private: bool) -> list[str]:
    """The addresses of a host, all of them public unless private ones are allowed.

    Raises Undeliverable, RefusedAddress.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Undeliverable(f"the name {host!r} cannot be resolved: {error}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if not to_private and not is_public(ipaddress.ip_address(address.partition("%")[0])):
            raise RefusedAddress(
                f"{host} is {address}, which is no public address: this service sends nothing there unless "
                "FRATERNAL_WEBHOOKS_TO_PRIVATE=true is set"
            )
    return addresses


def send(url: str, secret: str, message: Message, *, to_private: bool) -> int:
    """POST a message; returns the status of the answer. Raises Undeliverable."""
    until = time.monotonic() + TIMEOUT_S
    at = now()
    headers: dict[bytes | str, bytes | str] = {
        "content-type": "application/json",
        "user-agent": f"fraternal/{own_version()}",
        "webhook-id": message.id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": Signer(secret).sign(message.id, at, message.body),
    }
    backend = _CheckedBackend(until, to_private=to_private)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=_tls(), network_backend=backend) as pool,
            pool.stream("POST", url, headers=headers, content=message.body.encode()) as response,
        ):
            left = MOST_READ_BYTES
            for chunk in response.iter_stream():
                left -= len(chunk)
                if left <= 0:
                    break
            return response.status
    except httpcore.TimeoutException as error:
        raise Undeliverable(f"no answer within {TIMEOUT_S:g} s") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise Undeliverable(f"{error or type(error).__name__}") from error


@cache
def _tls() -> ssl.SSLContext:
    """Trusts what the machine trusts, and what browsers do."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


class _CheckedBackend(httpcore.SyncBackend):
    """Connects to addresses that were checked, and to no others."""

    def __init__(self, until: float, *, to_private: bool) -> None:
        self._until = until
        self._to_private = to_private

    def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.NetworkStream:
        last: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in resolve(host, port, to_private=self._to_private):
            try:
                stream = super().connect_tcp(address, port, _left(self._until), socket_options=[])
                return _Timed(stream, self._until)
            except httpcore.ConnectError as error:
                last = error
        raise last


class _Timed(httpcore.NetworkStream):
    """A stream that is over at a time, however busily it drips."""

    def __init__(self, stream: httpcore.NetworkStream, until: float) -> None:
        self._stream = stream
        self._until = until

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._until))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._until))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, _left(self._until)), self._until)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout
    return left
