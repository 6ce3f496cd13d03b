"""Who may do what over real HTTP: tokens, browsers that sign in, hosts and origins, rates, and headers."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from starlette.types import ASGIApp, Receive, Scope, Send
from typer.testing import CliRunner

from service.access import COOKIE, FRESH_S, Access, Gate, needed_scope
from service.bodies import MAX_BODY_BYTES
from service.cli import app
from service.client import ClientError, FraternalClient, read_token
from service.database import migrate, open_engine
from service.errors import CommandFailed, TooManyRequests
from service.rates import Rates
from service.settings import Settings, read_settings
from service.sign_in import local_path
from service.tokens import SCOPES, Tokens
from tests.databases import database_of, environment_of, out_of_reach
from tests.played_service import SPEC, played_service
from tests.test_http import assert_problem

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
addresses = count(1)


def elsewhere() -> dict[str, str]:
    """An address of its own, so that what fails here does not count elsewhere."""
    return {"x-forwarded-for": f"2001:db8::{next(addresses):x}"}


def tokens_of(data_dir: Path) -> Tokens:
    engine = open_engine(database_of(data_dir))
    migrate(engine)
    return Tokens(engine)


def bearer(written: str) -> dict[str, str]:
    return {"authorization": f"Bearer {written}"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("closed")


@pytest.fixture(scope="module")
def kept(data_dir: Path) -> Iterator[Tokens]:
    with closing(tokens_of(data_dir)) as tokens:
        yield tokens


@pytest.fixture(scope="module")
def written(kept: Tokens) -> dict[str, str]:
    """A token of each scope."""
    return {scope: kept.create(scope, scope, None)[1] for scope in SCOPES}


@pytest.fixture(scope="module")
def closed(data_dir: Path, written: dict[str, str]) -> Iterator[httpx.Client]:
    """A client without a token of a service that asks for one."""
    with played_service(data_dir, plays=False) as client:
        yield client


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that has never had a token."""
    with played_service(
        tmp_path_factory.mktemp("open"), plays=False, allowed_hosts="Fraternal.example"
    ) as client:
        yield client


@contextmanager
def browser(client: httpx.Client) -> Iterator[httpx.Client]:
    """As a browser asks: it keeps cookies, has an address of its own, and says which page it is on."""
    headers = {**BROWSER, **elsewhere(), "origin": str(client.base_url).rstrip("/")}
    with httpx.Client(base_url=client.base_url, headers=headers, trust_env=False) as browser:
        yield browser


# Who needs a token, and for what.


def test_a_service_that_never_had_a_token_is_open(opened: httpx.Client) -> None:
    assert opened.get("/v1/sweeps").status_code == 200
    assert opened.post("/v1/sweeps", json=SPEC).status_code == 201
    assert opened.get("/v1/sweeps", headers=bearer("frt_of_another-service")).status_code == 200


def test_from_its_first_token_on_a_service_asks_everybody_for_one(tmp_path: Path) -> None:
    with played_service(tmp_path, plays=False) as client, closing(tokens_of(tmp_path)) as kept:
        assert client.get("/v1/sweeps").status_code == 200
        token, written = kept.create("first", "read", None)
        wait_until_refused(client, {})
        assert client.get("/v1/sweeps", headers=bearer(written)).status_code == 200
        kept.revoke(token.id)
        wait_until_refused(client, bearer(written))
        assert_problem(client.get("/v1/sweeps"), 401)


def wait_until_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    deadline = time.monotonic() + 5
    while client.get("/v1/sweeps", headers={**headers, **elsewhere()}).status_code != 401:
        assert time.monotonic() < deadline, "answered for 5 s more"
        time.sleep(0.05)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/sweeps",
        "/v1/sweeps/none",
        "/v1/sweeps/none/best/checkpoint",
        "/v1/none",
        "/openapi.json",
        "/docs",
        "/dashboard",
        "/api/studies",
        "/static/bundle.js",
        "/csv/1",
        "/artifacts/1/2",
        "/metrics",
        "//",
        "/%0a",
    ],
)
def test_nothing_is_answered_without_a_token(closed: httpx.Client, method: str, path: str) -> None:
    response = closed.request(method, path)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, 'Bearer realm="fraternal"')
    if method != "HEAD":
        assert assert_problem(response, 401)["code"] == "not_signed_in"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_need_no_token(closed: httpx.Client, path: str) -> None:
    expected = 200 if path == "/healthz" else 503  # nothing looks after the queue of this service
    assert closed.get(path).status_code == expected
    by_another_name = {"host": "10.0.0.7:8123", **bearer("frt_nobodys_x")}
    assert closed.get(path, headers=by_another_name).status_code == expected


@pytest.mark.parametrize(
    ("scope", "method", "path", "status"),
    [
        ("read", "GET", "/v1/sweeps", 200),
        ("read", "GET", "/dashboard", 200),
        ("read", "GET", "/docs", 200),
        ("read", "POST", "/v1/sweeps", 403),
        ("read", "DELETE", "/v1/sweeps/none", 403),
        ("read", "PATCH", "/v1/sweeps/none", 403),
        ("read", "GET", "/v1/webhooks", 403),
        ("write", "GET", "/v1/sweeps", 200),
        ("write", "POST", "/v1/sweeps", 201),
        ("write", "POST", "/v1/sweeps/none:cancel", 404),
        ("write", "GET", "/v1/webhooks", 403),
        ("write", "POST", "/v1/webhooks", 403),
        ("write", "DELETE", "/v1/webhooks/none", 403),
        ("write", "GET", "/v1/tokens", 403),
        ("admin", "GET", "/v1/sweeps", 200),
        ("admin", "POST", "/v1/sweeps", 201),
        ("admin", "GET", "/v1/tokens", 404),
    ],
)
def test_a_token_may_do_what_its_scope_says(
    closed: httpx.Client, written: dict[str, str], scope: str, method: str, path: str, status: int
) -> None:
    body = SPEC if method == "POST" else None
    response = closed.request(method, path, json=body, headers=bearer(written[scope]))
    assert response.status_code == status, response.text
    if status == 403:
        document = assert_problem(response, 403)
        needed = "admin" if "sweeps" not in path else "write"
        assert (document["code"], f"scope {needed}; yours has {scope}" in document["detail"]) == (
            "insufficient_scope",
            True,
        )
        assert f'error="insufficient_scope", scope="{needed}"' in response.headers["www-authenticate"]


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/healthz", None),
        ("POST", "/sign-in", None),
        ("GET", "/healthz/", "read"),
        ("GET", "/v1/healthz", "read"),
        ("GET", "/healthz\n", "read"),
        ("BREW", "/v1/sweeps", "write"),
        ("get", "/v1/sweeps", "write"),
        ("GET", "/v1/webhooks/w1", "admin"),
        ("GET", "/v1/webhooks:test", "admin"),
        ("GET", "/v1/webhooks\n", "admin"),
        ("GET", "/v1/sweeps/s1/webhooks", "admin"),
        ("GET", "/v1/webhookshop", "read"),
        ("POST", "/\nv1", "write"),
        ("GET", "", "read"),
    ],
)
def test_whatever_is_asked_needs_the_scope_of_the_first_line_that_fits(
    method: str, path: str, scope: str | None
) -> None:
    assert needed_scope(method, path) == scope


@pytest.mark.parametrize(
    "sent",
    [
        [b""],
        [b"Bearer"],
        [b"Basic YWRtaW46YWRtaW4="],
        [b"frt_of_nobody"],
        [b"Bearer frt_of_nobody"],
        [b"Bearer frt_of_nobody more"],
        [b"Bearer " + b"x" * 30_000],
        ["Bearer frt_ä_ö".encode()],
        ["Bearer frt_ä_ö".encode("latin-1")],
        [b"Bearer \xff\xfe"],
        [b"Bearer frt_of_nobody", b"Bearer frt_of_nobody"],
        ["good", "good"],
        ["good", b"Basic eDp4"],
        [b"Basic eDp4", "good"],
    ],
    ids=lambda sent: repr(sent)[:40],
)
def test_what_is_no_token_is_refused_as_such_and_never_fails_the_service(
    closed: httpx.Client, written: dict[str, str], sent: Sequence[Any]
) -> None:
    good = f"Bearer {written['admin']}".encode()
    headers = [(b"authorization", good if one == "good" else one) for one in sent]
    address = [(name.encode(), value.encode()) for name, value in elsewhere().items()]
    response = closed.get("/v1/sweeps", headers=headers + address)
    assert assert_problem(response, 401)["code"] == "invalid_token"
    assert 'error="invalid_token"' in response.headers["www-authenticate"]
    for one in (b"nobody", b"YWRtaW46YWRtaW4=", written["admin"].encode()):
        assert one not in response.content


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_the_word_bearer_may_be_written_in_any_way(
    closed: httpx.Client, written: dict[str, str], scheme: str
) -> None:
    headers = {"authorization": f"{scheme} {written['read']}"}
    assert closed.get("/v1/sweeps", headers=headers).status_code == 200


def test_a_wrong_secret_and_an_unknown_id_are_answered_alike(
    closed: httpx.Client, written: dict[str, str]
) -> None:
    wrong = [written["read"][:-3] + "abc", "frt_0123456789ab_" + written["read"].split("_", 2)[2]]
    answers = [closed.get("/v1/sweeps", headers={**bearer(one), **elsewhere()}) for one in wrong]
    assert [answer.status_code for answer in answers] == [401, 401]
    told = [{**answer.json(), "request_id": None} for answer in answers]
    assert told[0] == told[1]


def test_a_token_is_known_as_soon_as_it_is_made(closed: httpx.Client, kept: Tokens) -> None:
    for _ in range(3):
        _, new = kept.create("new", "read", None)
        assert closed.get("/v1/sweeps", headers=bearer(new)).status_code == 200


def test_a_token_that_expires_while_the_service_runs_is_refused(closed: httpx.Client, kept: Tokens) -> None:
    _, short = kept.create("short", "read", timedelta(seconds=1))
    assert closed.get("/v1/sweeps", headers=bearer(short)).status_code == 200
    time.sleep(1)
    assert_problem(closed.get("/v1/sweeps", headers={**bearer(short), **elsewhere()}), 401)


def test_a_service_that_others_can_reach_is_never_open(tmp_path: Path) -> None:
    with played_service(tmp_path, plays=False, host="0.0.0.0") as client:
        assert_problem(client.get("/v1/sweeps"), 401)
        assert client.get("/v1/sweeps", headers={"host": "gpu7.example"}).status_code == 401


# Inside the application.


class Echo:
    """An application that says whose request it was, in as many pieces as are asked for."""

    def __init__(self, media_type: str, between: Callable[[], None] = lambda: None, pieces: int = 1) -> None:
        self._media_type, self._between, self._pieces = media_type, between, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", self._media_type.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(self._pieces):
            piece = f"{number} for {scope['state']['owner']!r}\n".encode()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._between()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def asked(application: ASGIApp, headers: dict[str, str]) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/v1/events", headers=headers)

    return asyncio.run(ask())


def gate_of(kept: Tokens) -> Gate:
    return Gate(kept, Rates("off"), always_closed=False)


def test_the_application_is_told_whose_request_it_is(tmp_path: Path) -> None:
    with closing(tokens_of(tmp_path)) as kept:
        assert asked(Access(Echo("text/plain"), gate_of(kept)), {}).text == "0 for ''\n"
        token, written = kept.create("ci", "read", None)
        said = asked(Access(Echo("text/plain"), gate_of(kept)), bearer(written)).text
        assert said == f"0 for '{token.id}'\n"


@pytest.mark.parametrize(
    ("media_type", "pieces"), [("text/event-stream; charset=utf-8", 1), ("application/x-tar", 3)]
)
def test_a_stream_of_events_ends_with_its_token_and_a_download_does_not(
    tmp_path: Path, media_type: str, pieces: int
) -> None:
    with closing(tokens_of(tmp_path)) as kept:
        token, written = kept.create("ci", "read", None)

        def revoke() -> None:
            if kept.holders().find(written) is not None:
                kept.revoke(token.id)
                time.sleep(FRESH_S)

        response = asked(Access(Echo(media_type, revoke, 3), gate_of(kept)), bearer(written))
    assert (response.status_code, len(response.text.splitlines())) == (200, pieces)


def test_who_may_ask_is_not_looked_up_for_every_request(tmp_path: Path) -> None:
    with closing(tokens_of(tmp_path)) as kept:
        _, written = kept.create("ci", "read", None)
        statements: list[str] = []
        event.listen(kept._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
        application = Access(Echo("text/event-stream", pieces=50), gate_of(kept))
        for _ in range(50):
            assert asked(application, bearer(written)).status_code == 200
    assert len(statements) <= 4, "tokens and sessions, and once more if it took longer than FRESH_S"


def test_a_database_that_is_away_is_said_to_be_and_asked_again_once_a_second(tmp_path: Path) -> None:
    with ExitStack() as away, closing(Tokens(open_engine(database_of(tmp_path / "away")))) as kept:
        away.enter_context(out_of_reach(tmp_path / "away"))
        tries: list[Any] = []
        event.listen(kept._engine, "do_connect", lambda *given: tries.append(given))
        application = Access(Echo("text/plain"), gate_of(kept))
        for _ in range(20):
            response = asked(application, bearer("frt_a_b"))
            assert assert_problem(response, 503)["code"] == "database_away"
            assert response.headers["retry-after"] == "1"
        assert len(tries) <= 2
        away.close()
        migrate(kept._engine)
        time.sleep(FRESH_S)
        assert asked(application, {}).status_code == 200


# Pages of other sites.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8123", 200),
        ("LOCALHOST:8123", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8123", 200),
        ("fraternal.localhost", 200),
        ("fraternal.example", 200),
        ("FRATERNAL.example:443", 200),
        ("rebound.example", 421),
        ("localhost.example", 421),
        ("127.0.0.1.example", 421),
        ("example@localhost", 421),
        ("192.0.2.1", 421),
        ("", 421),
        ("::1", 421),
        ("[", 421),
    ],
)
def test_a_name_that_somebody_lets_point_here_is_refused(
    opened: httpx.Client, host: str, status: int
) -> None:
    response = opened.get("/v1/sweeps", headers={"host": host})
    assert response.status_code == status
    if status == 421:
        assert assert_problem(response, 421)["code"] == "unknown_host"


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({}, False),
        ({"origin": "OWN"}, False),
        ({"origin": "https://fraternal.example"}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"origin": "https://evil.example"}, True),
        ({"origin": "http://localhost:1"}, True),
        ({"origin": "null"}, True),
        ({"origin": ""}, True),
        ({"origin": "OWN.evil.example"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
        ({"origin": "https://evil.example", "sec-fetch-site": "same-origin"}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH", "PUT"])
def test_a_page_of_another_site_cannot_change_anything(
    opened: httpx.Client, method: str, headers: dict[str, str], refused: bool
) -> None:
    own = str(opened.base_url).rstrip("/")
    sent = {name: value.replace("OWN", own) for name, value in headers.items()}
    response = opened.request(method, "/v1/sweeps/none:cancel", headers=sent)
    assert (response.status_code == 403) == refused, response.text
    if refused:
        assert assert_problem(response, 403)["code"] == "foreign_origin"
    assert opened.get("/v1/sweeps", headers=sent).status_code == 200


# Headers that browsers heed.

EVERYWHERE = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/sweeps", {}, 200),
        ("GET", "/none", {}, 404),
        ("DELETE", "/v1/sweeps", {}, 405),
        ("POST", "/v1/sweeps", {}, 415),
        ("POST", "/v1/sweeps", {"origin": "null"}, 403),
        ("GET", "/v1/sweeps", {"host": "evil.example"}, 421),
        ("GET", "/", {}, 200),
        ("GET", "/assets/none.css", {}, 404),
        ("GET", "/docs", {}, 200),
        ("GET", "/dashboard", {}, 200),
        ("GET", "/static/bundle.js", {}, 200),
        ("GET", "/api/studies", {}, 200),
        ("GET", "/api/studies/1?after=abc", {}, 500),
        ("GET", "/healthz", {}, 200),
        ("HEAD", "/dashboard", {}, 200),
        ("GET", "/sign-in", {}, 303),
    ],
)
def test_every_answer_has_the_headers_that_protect_browsers(
    opened: httpx.Client, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    response = opened.request(method, path, headers=headers)
    assert response.status_code == status
    assert {name: response.headers[name] for name in EVERYWHERE} == EVERYWHERE
    policies = response.headers.get_list("content-security-policy")
    assert "frame-ancestors 'none'" in " ".join(policies)
    assert any("default-src 'none'" in policy or "default-src 'self'" in policy for policy in policies)


def test_the_dashboard_keeps_its_own_content_policy(opened: httpx.Client) -> None:
    first, second = opened.get("/dashboard").headers.get_list("content-security-policy")
    assert "script-src 'self' 'unsafe-eval'" in first, "its plots need that"
    assert second == "frame-ancestors 'none'; base-uri 'none'"


def test_a_crash_has_the_headers_too(opened: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("service.sweeps.SweepController.list_sweeps", crash)
    response = opened.get("/v1/sweeps", headers={"connection": "close"})
    assert response.status_code == 500
    assert {name: response.headers[name] for name in EVERYWHERE} == EVERYWHERE


def test_the_docs_need_no_network_and_nothing_that_their_content_policy_refuses(opened: httpx.Client) -> None:
    page = opened.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert re.findall(r"<script(?![^>]* src=)", page.text) == []
    assert re.findall(r"\son\w+=|<style|style=|https?://", page.text) == []
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(linked) == 4
    for path in linked:
        assert opened.get(path).status_code == 200, path
    script = opened.get("/docs/swagger-ui-bundle.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert 'PACKAGE_VERSION:"5.' in script.text.replace(" ", ""), "the one that reads OpenAPI 3.1"
    assert opened.get("/openapi.json").json()["openapi"].startswith("3.1")


@pytest.mark.parametrize(
    "path", ["/docs/", "/docs/none.js", "/docs/..%2fcore.py", "/docs/%2e%2e/core.py", "/redoc"]
)
def test_the_docs_have_no_other_files(opened: httpx.Client, path: str) -> None:
    assert_problem(opened.get(path), 404)


# Rates.


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    data_dir = tmp_path_factory.mktemp("busy")
    with played_service(data_dir, plays=False, rate_limit="5/hour;3/minute") as client:
        yield client


def test_who_asks_too_often_is_told_for_how_long_to_wait(busy: httpx.Client) -> None:
    here, there = elsewhere(), elsewhere()
    answers = [busy.get("/v1/sweeps", headers=here) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert assert_problem(answers[3], 429)["code"] == "too_many_requests"
    assert 1 <= int(answers[3].headers["retry-after"]) <= 60
    assert busy.get("/v1/sweeps", headers=there).status_code == 200, "others are not held up"
    for _ in range(10):
        assert busy.get("/healthz", headers=here).status_code == 200, "nor are probes"


def test_each_token_has_a_limit_of_its_own_wherever_it_is_used(tmp_path: Path) -> None:
    with closing(tokens_of(tmp_path)) as kept:
        one, other = (kept.create(name, "read", None)[1] for name in ("one", "other"))
    with played_service(tmp_path, plays=False, rate_limit="3/hour") as client:
        answers = [client.get("/v1/sweeps", headers={**bearer(one), **elsewhere()}) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert client.get("/v1/sweeps", headers=bearer(other)).status_code == 200


def test_the_default_limit_is_above_what_twenty_busy_clients_and_500_streams_ask_for(tmp_path: Path) -> None:
    rates = Rates(Settings(data_dir=tmp_path).rate_limit)
    for _ in range(500 + 20 * 20):
        rates.count_request("127.0.0.1")


def test_who_tries_tokens_out_is_held_up_and_who_has_one_is_not(
    closed: httpx.Client, written: dict[str, str]
) -> None:
    here = elsewhere()
    answers = [
        closed.get("/v1/sweeps", headers={**here, **bearer(f"frt_a_{number}")}) for number in range(12)
    ]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert closed.get("/v1/sweeps", headers={**here, **bearer(written["read"])}).status_code == 200
    assert closed.get("/v1/sweeps", headers={**elsewhere(), **bearer("frt_a_b")}).status_code == 401


def test_a_limit_of_failures_moves_with_time() -> None:
    rates = Rates("off")
    for _ in range(10):
        rates.require_few_failures("here")
        rates.count_failure("here")
    with pytest.raises(TooManyRequests, match="from here: the limit is 10 per 1 minute") as refusal:
        rates.require_few_failures("here")
    assert 50 <= refusal.value.retry_after_s <= 60
    rates.require_few_failures("there")


def test_without_a_limit_nobody_is_held_up() -> None:
    rates = Rates("off")
    for _ in range(5000):
        rates.count_request("here")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ray_address": "head"}, "'head' is no address of a Ray cluster's head: one is ray-head:6379"),
        ({"ray_address": "ray://head:10001"}, "is no address of a Ray cluster's head"),
        ({"ray_address": "head:0"}, "is no address of a Ray cluster's head"),
        ({"rate_limit": "fast"}, "'fast' is no rate limit; one is 1000/second"),
        ({"rate_limit": "0/second"}, "is no rate limit"),
        ({"rate_limit": ""}, "is no rate limit"),
        ({"store_url": "sftp://me:xyzzy-secret@host/x"}, "store_url: a password in it would be seen"),
        ({"allowed_hosts": "a b,c/d"}, "'c/d' is no name of a host"),
        ({"allowed_hosts": "https://fraternal.example"}, "is no name of a host"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(given: dict[str, str], words: str) -> None:
    with pytest.raises(CommandFailed, match=re.escape(words)) as refusal:
        read_settings(None, **given)
    assert "xyzzy" not in str(refusal.value)


def test_names_of_hosts_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRATERNAL_ALLOWED_HOSTS", " One.example, two.example:8443 ,,[fd00::1]")
    assert Settings().allowed_hosts == ("one.example", "two.example", "fd00::1")
    monkeypatch.setenv("FRATERNAL_ALLOWED_HOSTS", "")
    assert Settings().allowed_hosts == ()


# Signing in with a browser.


@pytest.mark.parametrize("path", ["/", "/docs", "/dashboard", "/dashboard/studies/1?tab=a&b=c"])
def test_a_person_without_a_token_is_led_to_the_sign_in_and_back(
    closed: httpx.Client, written: dict[str, str], path: str
) -> None:
    with browser(closed) as person:
        led = person.get(path)
        assert led.status_code == 303
        page = person.get(led.headers["location"])
        assert page.status_code == 200
        there = re.search(r'name="next" value="([^"]*)"', page.text)
        assert there is not None
        form = {"token": f" {written['read']}\n", "next": there[1].replace("&amp;", "&")}
        signed_in = person.post("/sign-in", data=form)
        assert (signed_in.status_code, signed_in.headers["location"]) == (303, path)
        assert person.get(path).status_code == 200
        assert person.get("/api/studies").status_code == 200, "the dashboard's own requests"


def test_a_report_that_is_not_there_is_said_to_be_not_there_in_a_page(opened: httpx.Client) -> None:
    said = opened.get("/v1/sweeps/none/report", headers=BROWSER)
    assert (said.status_code, said.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert_problem(opened.get("/v1/sweeps/none/report"), 404)


@pytest.mark.parametrize("path", ["/v1/sweeps", "/api/studies", "/openapi.json"])
def test_what_no_person_opens_is_refused_and_leads_nowhere(closed: httpx.Client, path: str) -> None:
    with browser(closed) as person:
        assert_problem(person.get(path), 401)
    assert_problem(closed.get("/dashboard"), 401)


def test_the_sign_in_works_without_scripts_and_with_a_screen_reader(closed: httpx.Client) -> None:
    with browser(closed) as person:
        page = person.get("/sign-in")
    assert "<script" not in page.text
    assert re.findall(r"https?://", page.text) == []
    assert '<html lang="en">' in page.text
    assert '<label for="token">' in page.text
    assert re.search(r'<input id="token" name="token" type="password" required autofocus', page.text)
    assert page.headers["cache-control"] == "no-store"
    assert csp_of(page).startswith("default-src 'none'; style-src 'self'; script-src 'self';")
    for path in re.findall(r'(?:href|src)="(/assets/[^"]+)"', page.text):
        assert closed.get(path).status_code == 200, "its looks need no token"


def csp_of(response: httpx.Response) -> str:
    return str(response.headers["content-security-policy"])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_script_and_no_other_site_gets_the_cookie(
    closed: httpx.Client, written: dict[str, str], scheme: str
) -> None:
    with browser(closed) as person:
        headers = {"x-forwarded-proto": scheme}
        response = person.post("/sign-in", data={"token": written["read"]}, headers=headers)
    assert response.headers["location"] == "/"
    parts = {part.strip().lower() for part in response.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/", "max-age=43200"} <= parts
    assert ("secure" in parts) == (scheme == "https")
    assert written["read"] not in response.headers["set-cookie"]


def test_a_browser_may_do_what_its_token_may(closed: httpx.Client, written: dict[str, str]) -> None:
    for scope, status in (("read", 403), ("write", 201)):
        with browser(closed) as person:
            person.post("/sign-in", data={"token": written[scope]})
            assert person.post("/v1/sweeps", json=SPEC).status_code == status
            foreign = person.post("/v1/sweeps", json=SPEC, headers={"origin": "https://evil.example"})
            assert assert_problem(foreign, 403)["code"] == "foreign_origin"


def test_a_wrong_token_is_said_to_be_wrong_and_not_shown(closed: httpx.Client) -> None:
    with browser(closed) as person:
        for wrong in (
            "frt_abc_secret",
            "",
            "<script>",
            "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        ):
            page = person.post("/sign-in", data={"token": wrong, "next": "/docs"})
            assert page.status_code == 401
            assert '<p id="alert" role="alert">' in page.text
            assert 'aria-describedby="alert hint" aria-invalid="true"' in page.text
            assert 'name="next" value="/docs"' in page.text
            assert "secret" not in page.text
            assert "<script" not in page.text
            assert COOKIE not in person.cookies


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"&" * 20_000, b"token", b"token=a" * 10_000, b"=%"])
def test_a_form_that_makes_no_sense_is_a_wrong_token(closed: httpx.Client, content: bytes) -> None:
    with browser(closed) as person:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        assert person.post("/sign-in", content=content, headers=headers).status_code == 401


def test_a_form_over_a_mebibyte_is_refused(closed: httpx.Client) -> None:
    with browser(closed) as person:
        assert_problem(person.post("/sign-in", content=b"a" * (MAX_BODY_BYTES + 1)), 413)


def test_who_tries_tokens_out_in_the_form_is_held_up(closed: httpx.Client, written: dict[str, str]) -> None:
    with browser(closed) as person:
        answers = [person.post("/sign-in", data={"token": f"frt_a_{number}"}) for number in range(10)]
        assert {answer.status_code for answer in answers} == {401}
        page = person.post("/sign-in", data={"token": written["read"]})
        assert (page.status_code, "retry-after" in page.headers) == (429, True)
        assert 'role="alert"' in page.text


def test_signing_out_ends_the_session_and_not_only_the_cookie(
    closed: httpx.Client, written: dict[str, str]
) -> None:
    with browser(closed) as person:
        person.post("/sign-in", data={"token": written["read"]})
        cookie = person.cookies[COOKIE]
        page = person.get("/sign-in?next=/docs")
        assert "You are signed in" in page.text
        assert 'action="/sign-out"' in page.text
        assert person.post("/sign-out").headers["location"] == "/sign-in"
        assert COOKIE not in person.cookies
        assert person.get("/dashboard", headers={"cookie": f"{COOKIE}={cookie}"}).status_code == 303
        assert person.post("/sign-out").status_code == 303, "once more does no harm"


def test_a_session_ends_when_its_token_is_revoked(closed: httpx.Client, kept: Tokens) -> None:
    token, written = kept.create("browser", "read", None)
    with browser(closed) as person:
        person.post("/sign-in", data={"token": written})
        assert person.get("/dashboard").status_code == 200
        kept.revoke(token.id)
        deadline = time.monotonic() + 5
        while person.get("/dashboard").status_code != 303:
            assert time.monotonic() < deadline, "answered for 5 s more"
            time.sleep(0.05)


def test_a_session_is_no_token_and_a_token_no_session(closed: httpx.Client, written: dict[str, str]) -> None:
    with browser(closed) as person:
        person.post("/sign-in", data={"token": written["admin"]})
        cookie = person.cookies[COOKIE]
    assert_problem(closed.get("/v1/sweeps", headers={**bearer(cookie), **elsewhere()}), 401)
    for wrong in (written["admin"], cookie[:-1], cookie + "x", "", "frs_", "ä"):
        headers = {"cookie": f"{COOKIE}={wrong}".encode("latin-1")}
        assert closed.get("/v1/sweeps", headers=headers).status_code == 401, wrong


def test_a_wrong_header_is_not_made_good_by_a_cookie(closed: httpx.Client, written: dict[str, str]) -> None:
    with browser(closed) as person:
        person.post("/sign-in", data={"token": written["read"]})
        assert_problem(person.get("/v1/sweeps", headers=bearer("frt_a_b")), 401)


def test_a_service_that_is_open_needs_no_sign_in(opened: httpx.Client) -> None:
    for response in (opened.get("/sign-in?next=/docs"), opened.post("/sign-in", data={"next": "/docs"})):
        assert (response.status_code, response.headers["location"]) == (303, "/docs")


@pytest.mark.parametrize(
    ("asked", "there"),
    [
        ("/docs", "/docs"),
        ("/dashboard/studies/1?a=b#c", "/dashboard/studies/1?a=b#c"),
        (None, "/"),
        ("", "/"),
        ("docs", "/"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/\t/evil.example", "/"),
        ("/ok\r\nset-cookie: a=b", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/" + "x" * 3000, "/"),
    ],
)
def test_the_sign_in_leads_to_paths_of_this_service_only(asked: str | None, there: str) -> None:
    assert local_path(asked) == there


# The description, the client, the command line.


def test_the_description_says_who_may_call_what(opened: httpx.Client) -> None:
    description = opened.get("/openapi.json").json()
    assert description["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    paths = description["paths"]
    assert paths["/v1/sweeps"]["get"]["security"] == [{"token": ["read"]}, {}]
    assert paths["/v1/sweeps"]["post"]["security"] == [{"token": ["write"]}, {}]
    assert paths["/healthz"]["get"]["security"] == []
    assert {"401", "403", "429"} <= set(paths["/v1/sweeps"]["post"]["responses"])


def test_the_client_sends_its_token(closed: httpx.Client, written: dict[str, str]) -> None:
    with FraternalClient(str(closed.base_url), token=written["read"]) as client:
        client.list_sweeps()
        with pytest.raises(ClientError, match="this needs a token of scope write"):
            client.create(SPEC)
    with (
        FraternalClient(str(closed.base_url)) as client,
        pytest.raises(ClientError, match="fraternal token create"),
    ):
        client.list_sweeps()


@pytest.mark.parametrize("token", ["frt_a b", "frt_ä", "frt_a\nb", "", "frt_\x00"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ClientError, match="a single word that begins with frt_") as refusal:
        FraternalClient("http://localhost:1", token=token)
    assert not token or token not in str(refusal.value)


def test_no_error_of_the_client_shows_its_token_whatever_the_service_says(tmp_path: Path) -> None:
    secret = "frt_abc_xyzzy"

    def repeat(request: httpx.Request) -> httpx.Response:
        said = request.headers["authorization"]
        return httpx.Response(400, json={"title": said, "detail": said, "code": "x", "errors": []})

    with FraternalClient("http://localhost:1", token=secret) as client:
        client._http = httpx.Client(
            transport=httpx.MockTransport(repeat), headers=client._http.headers, base_url="http://localhost"
        )
        for ask in (client.list_sweeps, lambda: client.fetch("s1", tmp_path / "best.tar")):
            with pytest.raises(ClientError, match="Bearer TOKEN"):
                ask()
        assert "xyzzy" not in repr(client) + repr(client._http.headers)


def test_no_error_of_the_client_shows_a_password_of_its_url() -> None:
    with FraternalClient("http://me:xyzzy@localhost:1/") as client:
        assert client.base_url == "http://localhost:1"
        with pytest.raises(ClientError, match="no service at http://localhost:1;"):
            client.list_sweeps()
        client._http = httpx.Client(
            transport=httpx.MockTransport(lambda _: httpx.Response(502)),
            base_url="http://me:xyzzy@localhost:1",
        )
        with pytest.raises(ClientError, match="http://localhost:1/v1/sweeps answered 502"):
            client.list_sweeps()


def test_a_clients_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("frt_of_file\n")
    environment = {"FRATERNAL_TOKEN": " frt_of_environment "}
    assert read_token(file, environment) == "frt_of_file"
    assert read_token(None, environment) == "frt_of_environment"
    assert read_token(None, {"FRATERNAL_TOKEN": ""}) is None
    assert read_token(None, {}) is None
    for content, words in ((b"", "it is empty"), (b"\xff\xfe\xfd", "it is no text")):
        file.write_bytes(content)
        with pytest.raises(ClientError, match=words):
            read_token(file, environment)


COMMANDS = [
    ["submit", "spec.json"],
    ["ls"],
    ["watch", "SWEEP"],
    ["report", "SWEEP"],
    ["plot", "SWEEP"],
    ["fetch", "SWEEP"],
    ["pause", "SWEEP"],
    ["resume", "SWEEP"],
    ["stop", "SWEEP"],
    ["cancel", "SWEEP"],
    ["extend", "SWEEP", "--trials", "1"],
    ["retry-failed", "SWEEP"],
    ["clone", "SWEEP"],
    ["delete", "SWEEP", "--yes"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_client_command_takes_a_token(
    closed: httpx.Client,
    written: dict[str, str],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep is unknown: what is refused then is not the token."""
    monkeypatch.chdir(tmp_path)
    Path("spec.json").write_text('{"budget": {"trials": 0}}')
    Path("token").write_text(f"{written['write']}\n")
    asking = [*command, "--url", str(closed.base_url)]
    refused = CliRunner().invoke(app, asking)
    assert (refused.exit_code, "`fraternal token create` makes" in refused.stderr) == (1, True)
    for given, environment in (
        (["--token-file", "token"], {}),
        ([], {"FRATERNAL_TOKEN_FILE": "token"}),
        ([], {"FRATERNAL_TOKEN": written["write"]}),
    ):
        done = CliRunner().invoke(app, [*asking, *given], env=environment)
        assert "token create" not in done.output
        assert written["write"] not in done.output
        assert done.exit_code == (0 if command == ["ls"] else 1)


def test_a_service_off_loopback_starts_with_a_token_and_says_so(tmp_path: Path) -> None:
    with closing(tokens_of(tmp_path)) as kept:
        _, written = kept.create("first", "read", None)
    serve = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    environment = {**os.environ, **environment_of(tmp_path)}
    process = subprocess.Popen(
        [*serve, "--host", "0.0.0.0"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(5)]
        assert said[4].startswith("access     by token; nothing is encrypted here")
        address = said[0].split()[-1].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(address, trust_env=False).status_code == 401
        assert httpx.get(address, headers=bearer(written), trust_env=False).status_code == 200
    finally:
        process.kill()
        process.communicate()
