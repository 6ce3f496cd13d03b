"""What surrounds every request: its id, and what is logged and measured of it."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from fastapi import Header, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import OperationalError

from service.app import create_app
from service.logs import JsonLines, TextLines, _with_request
from service.settings import Settings
from tests.fakes import MemoryLauncher
from tests.played_service import SPEC, played_service

MADE = re.compile(r"[0-9a-f]{32}")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a service that takes sweeps and lets them wait."""
    with played_service(tmp_path_factory.mktemp("data"), plays=False) as client:
        yield client


def crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("service.sweeps.SweepController.get", fail)


# Ids.


@pytest.mark.parametrize("given", ["a", "0af7651916cd43dd8448eb211c80319c", "job:7/step=2@host+1", "x" * 128])
def test_a_clients_request_id_is_taken_over(client: httpx.Client, given: str) -> None:
    response = client.get("/v1/sweeps/none", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given
    assert response.json()["request_id"] == given


@pytest.mark.parametrize(
    "given",
    [b"", b"x" * 129, b"two words", b"a\tb", b'a"b', "ünïcode".encode(), b"<script>", b"%0d%0aX: y"],
)
def test_a_request_id_that_is_no_token_is_replaced(client: httpx.Client, given: bytes) -> None:
    response = client.get("/healthz", headers=[(b"x-request-id", given)])
    assert MADE.fullmatch(response.headers["x-request-id"])


def test_of_two_request_ids_neither_is_taken(client: httpx.Client) -> None:
    response = client.get("/healthz", headers=[("x-request-id", "one"), ("x-request-id", "two")])
    assert MADE.fullmatch(response.headers["x-request-id"])


def test_every_answer_has_an_id_of_its_own_and_a_problem_names_it(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        client.get("/healthz"),
        client.get("/nothing"),
        client.put("/healthz"),
        client.get("/dashboard"),
        client.delete("/dashboard"),
        client.post("/v1/sweeps", json={}),
        client.post("/v1/sweeps", content=b"{", headers={"content-type": "application/json"}),
        client.post("/v1/sweeps", content=b" " * 2_000_000),
        client.get("/openapi.json"),
    ]
    crash(monkeypatch)
    answers.append(client.get("/v1/sweeps/none"))
    assert answers[-1].status_code == 500
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == len(ids)
    problems = [answer for answer in answers if answer.status_code >= 400]
    assert len(problems) == 7
    assert all(answer.json()["request_id"] == answer.headers["x-request-id"] for answer in problems)


# The log.


class Lines(logging.Handler):
    """What `fraternal serve` would write."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(_with_request)
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(self.format(record))

    def of_request(self, request_id: str) -> Any:
        """Its line, which comes when its answer is out."""
        deadline = time.monotonic() + 10
        while not (
            found := [line for line in self.of("service.requests") if line["request_id"] == request_id]
        ):
            assert time.monotonic() < deadline, self.written
            time.sleep(0.01)
        (line,) = found
        return line

    def of(self, logger: str) -> list[Any]:
        return [line for line in self._parsed() if line["logger"] == logger]

    def _parsed(self) -> list[Any]:
        return [json.loads(line) for line in self.written]


def _is_of(line: Any, request_id: str) -> bool:
    return line["logger"] == "service.requests" and line["request_id"] == request_id


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(JsonLines()), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


def test_a_request_is_a_line_with_its_route_status_and_sweep(client: httpx.Client, lines: Lines) -> None:
    sweep_id = client.post("/v1/sweeps", json=SPEC).json()["id"]
    response = client.get(f"/v1/sweeps/{sweep_id}/trials/7", headers={"x-request-id": "mine"})
    assert response.status_code == 404
    line = lines.of_request("mine")
    assert line["level"] == "INFO"
    assert line["timestamp"].endswith("Z")
    assert (line["request_id"], line["sweep_id"]) == ("mine", sweep_id)
    assert (line["method"], line["status"]) == ("GET", 404)
    assert line["route"] == "/v1/sweeps/{sweep_id}/trials/{number}"
    assert 0 < line["ms"] < 60_000


def test_a_probe_is_a_line_where_not_all_is_well_or_for_who_debugs(
    client: httpx.Client, lines: Lines
) -> None:
    """It comes every few seconds, for ever."""
    assert client.get("/healthz", headers={"x-request-id": "well"}).status_code == 200
    assert client.get("/readyz", headers={"x-request-id": "ill"}).status_code == 503
    assert lines.of_request("ill")["level"] == "INFO"
    client.get("/v1/sweeps", headers={"x-request-id": "after"})
    lines.of_request("after")
    assert [line["path"] for line in lines.of("service.requests")] == ["/readyz", "/v1/sweeps"]
    logging.getLogger().setLevel(logging.DEBUG)
    client.get("/healthz", headers={"x-request-id": "seen"})
    assert lines.of_request("seen")["level"] == "DEBUG"


def test_what_is_logged_in_a_request_has_its_id_and_its_sweep(
    client: httpx.Client, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(*_: Any) -> None:
        logging.getLogger("deep").warning("in a thread")
        raise RuntimeError

    monkeypatch.setattr("service.sweeps.SweepController.get", say)
    client.get("/v1/sweeps/s1", headers={"x-request-id": "mine"})
    (line,) = lines.of("deep")
    assert (line["request_id"], line["sweep_id"]) == ("mine", "s1")
    logging.getLogger("deep").warning("after it")
    assert "request_id" not in lines.of("deep")[1]


def test_neither_query_nor_headers_are_logged(client: httpx.Client, lines: Lines) -> None:
    headers = {"authorization": "Bearer hush", "cookie": "hush", "x-api-key": "hush"}
    for path in ("/v1/sweeps/none", "/nothing"):
        client.get(f"{path}?token=hush#hush", headers={**headers, "x-request-id": path})
        lines.of_request(path)
    lines.written = [line for line in lines.written if "httpx" not in line]
    assert not any("hush" in line for line in lines.written)


@pytest.mark.parametrize(
    "path", ["/a%0Ab", "/a%0D%0AINFO%20forged", "/v1/sweeps/s%0A1", "/%E2%80%A8", "/%1b[31m"]
)
def test_nobody_writes_a_second_line_into_the_log(client: httpx.Client, lines: Lines, path: str) -> None:
    text = Lines(TextLines("%(levelname)s %(message)s"))
    logging.getLogger("service.requests").addHandler(text)
    client.get(path, headers={"x-request-id": "forger"})
    line = lines.of_request("forger")
    logging.getLogger("service.requests").removeHandler(text)
    assert "sweep_id" not in line
    assert all(len(written.splitlines()) == 1 for written in [*lines.written, *text.written])
    assert not any("\x1b" in written for written in text.written)


def test_a_traceback_for_people_is_indented_so_that_no_line_of_it_is_a_record() -> None:
    text = Lines(TextLines("%(levelname)s %(message)s"))
    logger = logging.getLogger("evil")
    logger.addHandler(text)
    try:
        raise ValueError("it ended\nINFO all is well")
    except ValueError:
        logger.exception("it failed\nINFO forged")
    logger.removeHandler(text)
    first, *others = text.written[0].split("\n")
    assert first == r"ERROR it failed\nINFO forged"
    assert others[-1] == "  INFO all is well"
    assert all(line.startswith("  ") for line in others)


# Bad news of the database.


def test_a_database_that_is_away_is_no_fault_of_the_client_and_says_when_to_come_again(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    def away(*_: Any) -> None:
        raise OperationalError("SELECT secret", {}, Exception("server closed the connection"))

    monkeypatch.setattr("service.records.Records.get_sweep", away)
    response = client.get("/v1/sweeps/s1")
    assert (response.status_code, response.json()["code"]) == (503, "database_away")
    assert response.headers["retry-after"] == "5"
    assert "secret" not in response.text
    assert "server closed the connection" in lines.of("service.refusals")[0]["traceback"]


# What is wrong with parameters.


def test_errors_of_query_and_headers_are_named_as_such_beside_those_of_the_body(tmp_path: Path) -> None:
    class Asked(BaseModel):
        model_config = ConfigDict(extra="forbid")
        state: Literal["queued", "running"] = "queued"
        page_size: Annotated[int, Field(ge=1, le=500)] = 50

    class Body(BaseModel):
        trials: int

    app = create_app(Settings(data_dir=tmp_path), MemoryLauncher())

    @app.post("/v1/things")
    def things(
        asked: Annotated[Asked, Query()], body: Body, if_match: Annotated[str, Header(pattern="^W?")]
    ) -> None: ...

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            query = "page_size=none&stat=x&state=odd"
            return await client.post(f"/v1/things?{query}", json={"trials": "many"})

    response = asyncio.run(ask())
    assert response.status_code == 422
    errors = response.json()["errors"]
    assert {(error["parameter"], error["pointer"]) for error in errors} == {
        ("page_size", None),
        ("stat", None),
        ("state", None),
        ("if-match", None),
        (None, "/trials"),
    }
    said = {error["parameter"] or error["pointer"]: error["message"] for error in errors}
    assert said["stat"] == "unknown field 'stat'; known here: page_size, state"
    assert 'got "none"' in said["page_size"]
    assert said["if-match"] == "'if-match' is required here"
