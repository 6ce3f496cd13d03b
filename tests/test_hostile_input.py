"""What is sent in bad faith, byte by byte, to a real server: a clear refusal, and nothing else happens.

After each: a status of the 400s, a problem document, the database as it was, and no traceback in the log.
"""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest

from service.bodies import LINGER_S, MAX_BODY_BYTES
from tests.databases import dump
from tests.played_service import SPEC, played_service, submit

PROBLEM = "application/problem+json"
PATIENCE_S = 10


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def client(data_dir: Path) -> Iterator[httpx.Client]:
    """Of a service that takes sweeps and lets them wait: by itself nothing in the database changes."""
    with played_service(data_dir, plays=False) as client:
        yield client


@pytest.fixture(scope="module")
def sweep_id(client: httpx.Client) -> str:
    return submit(client, name="there before")


@pytest.fixture
def nothing_happens(data_dir: Path, sweep_id: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails the test where the database has changed in the end, or something was logged as an error."""
    before = dump(data_dir)
    with caplog.at_level(logging.WARNING):
        yield
    assert dump(data_dir) == before
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert [record for record in caplog.records if record.exc_info] == []


def exchange(client: httpx.Client, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to these very bytes. The server closes, or has said all."""
    with socket.create_connection(
        (client.base_url.host, client.base_url.port or 80), PATIENCE_S
    ) as connection:
        connection.sendall(sent)
        return answer_on(connection)


def address_of(client: httpx.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port or 80


def answer_on(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    parser, response, body = h11.Connection(h11.CLIENT), None, b""
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(connection.recv(65536))
        elif isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            assert response is not None, "the connection was closed without an answer"
            headers = {name.decode(): value.decode() for name, value in response.headers}
            return response.status_code, headers, body


def assert_refused(status: int, headers: Any, body: bytes, expected: int) -> Any:
    assert status == expected, body
    assert headers["content-type"] == PROBLEM
    document = json.loads(body)
    assert document["status"] == expected
    assert document["detail"]
    assert document["request_id"] == headers["x-request-id"]
    return document


# Bytes that no client library would send.

HOST = b"Host: 127.0.0.1\r\n"
JSON = b"Content-Type: application/json\r\n"
RAW: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", 400),
    "no version": (b"GET /v1/sweeps\r\n" + HOST + b"\r\n", 400),
    "a version of nonsense": (b"GET /v1/sweeps HTTP/x\r\n" + HOST + b"\r\n", 400),
    "no method": (b" /v1/sweeps HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a space in the path": (b"GET /v1/sweeps/a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "bytes beyond ASCII in the path": (b"GET /v1/sweeps/\xff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "NUL in the path": (b"GET /v1/sweeps/\x00 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "NUL in a header": (b"GET /v1/sweeps HTTP/1.1\r\n" + HOST + b"X-Request-Id: a\x00b\r\n\r\n", 400),
    "a bare return in a header": (b"GET /nothing HTTP/1.1\r\n" + HOST + b"X: a\r b\r\n\r\n", 400),
    "a header without a colon": (b"GET /v1/sweeps HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n", 400),
    "a space before the colon": (b"GET /v1/sweeps HTTP/1.1\r\n" + HOST + b"X-A : b\r\n\r\n", 400),
    "no host": (b"GET /v1/sweeps HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /v1/sweeps HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "a header of a mebibyte": (b"GET / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 2**20 + b"\r\n\r\n", 400),
    "100,000 headers": (b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 100_000 + b"\r\n", 400),
    "a path of a mebibyte": (b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a negative length": (b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: -1\r\n\r\n", 400),
    "a length that is no number": (
        b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 0x10\r\n\r\n",
        400,
    ),
    "two lengths": (
        b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        400,
    ),
    "a length of a thousand digits": (
        b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n",
        400,
    ),
    "a coding that is not": (
        b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: gzip\r\n\r\n",
        400,
    ),
    "a chunk of nonsense": (
        b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        400,
    ),
    # From here on they are HTTP, and reach the application.
    "an odd host": (b"GET /nothing HTTP/1.1\r\nHost: [\r\n\r\n", 421),
    "a host with a line in it": (b"GET /nothing HTTP/1.1\r\nHost: a%0d%0aX: y\r\n\r\n", 421),
    "an absolute target": (b"GET http://elsewhere/v1/sweeps HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a target without a slash": (b"GET v1/sweeps HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "an asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a tunnel": (b"CONNECT elsewhere:443 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a method that is not": (b"BREW /v1/sweeps HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "a trace": (b"TRACE /v1/sweeps HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "up the tree": (b"GET /../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "up the tree from a sweep": (b"GET /v1/sweeps/../../etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "up the tree, encoded": (b"GET /v1/sweeps/..%2f..%2fetc%2fpasswd HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "up the tree, encoded twice": (b"GET /v1/sweeps/%252e%252e%252f HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "up the tree below the dashboard": (b"POST /static/../../x HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "an id of dots": (b"GET /v1/sweeps/.. HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "NUL in an id": (b"GET /v1/sweeps/s%00 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a newline in an id": (b"POST /v1/sweeps/s%0A:pause HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a line for the answer's headers in an id": (
        b"GET /v1/sweeps/s%0d%0aSet-Cookie:%20a HTTP/1.1\r\n" + HOST + b"\r\n",
        404,
    ),
    "half a surrogate pair in an id": (b"GET /v1/sweeps/%ed%a0%80 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "percent signs that mean nothing": (b"GET /v1/sweeps/%zz%f HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a wildcard": (b"GET /v1/sweeps/% HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "SQL": (b"DELETE /v1/sweeps/s'%20OR%201=1-- HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "an id of 10,000 letters": (b"GET /v1/sweeps/" + b"s" * 10_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a number of 5,000 digits": (
        b"GET /v1/sweeps/s/trials/" + b"9" * 5_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        404,
    ),
    "a number in other digits": (b"GET /v1/sweeps/s/trials/%d9%a1 HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a verb that is not": (b"POST /v1/sweeps/s:fly HTTP/1.1\r\n" + HOST + b"\r\n", 404),
    "a charset that is not": (
        b"POST /v1/sweeps HTTP/1.1\r\n"
        + HOST
        + b"Content-Type: application/json; charset=utf-7\r\nContent-Length: 2\r\n\r\n{}",
        415,
    ),
}


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize(("sent", "status"), RAW.values(), ids=RAW)
def test_bytes_that_mean_no_good_are_refused(client: httpx.Client, sent: bytes, status: int) -> None:
    answer = exchange(client, sent)
    assert_refused(*answer, status)
    assert "set-cookie" not in answer[1]


# Bodies.

DEEP = 100_000


def with_text(text: str) -> bytes:
    return json.dumps({**SPEC, "name": text}).encode()


def with_written(field: str, value: str) -> bytes:
    """A spec whose field has this JSON, whether that is JSON or not."""
    return json.dumps({**SPEC, field: "?"}).replace('"?"', value).encode()


BODIES: dict[str, tuple[bytes, int, str | None]] = {
    "nothing": (b"", 422, ""),
    "no JSON": (b"{'name': 1}", 400, None),
    "two bodies": (b"{}{}", 400, None),
    "a comment": (b'{"name": "a" /* b */}', 400, None),
    "a comma too many": (b'{"name": "a",}', 400, None),
    "half of it": (json.dumps(SPEC).encode()[:-1], 400, None),
    "NUL": (b"\x00", 400, None),
    "levels of arrays": (b"[" * DEEP + b"]" * DEEP, 400, None),
    "levels of objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, 400, None),
    "levels that Python can read": (with_written("space", "[" * 200 + "]" * 200), 400, None),
    "just too many levels": (with_written("space", "[" * 32 + "]" * 32), 400, None),
    "as many levels as there may be": (with_written("space", "[" * 31 + "]" * 31), 422, "/space"),
    "UTF-16": (json.dumps(SPEC).encode("utf-16"), 400, None),
    "UTF-16 without a mark": (json.dumps(SPEC).encode("utf-16-le"), 400, None),
    "UTF-32": (json.dumps(SPEC).encode("utf-32"), 400, None),
    "Latin-1": (with_text("?").replace(b"?", b"\xe4"), 400, None),
    "a surrogate in UTF-8": (with_text("?").replace(b"?", b"\xed\xa0\x80"), 400, None),
    "NUL in UTF-8 in two bytes": (with_text("?").replace(b"?", b"\xc0\x80"), 400, None),
    "a number of 5,000 digits": (with_written("budget", '{"trials": ' + "9" * 5000 + "}"), 400, None),
    "a number of 4,000 digits": (
        with_written("budget", '{"trials": ' + "9" * 4000 + "}"),
        422,
        "/budget/trials",
    ),
    "a number beyond 64 bits": (
        with_written("sampler", '{"seed": 18446744073709551616}'),
        422,
        "/sampler/seed",
    ),
    "a number beyond all numbers": (with_written("baseline", "1e999"), 422, "/baseline"),
    "NaN": (with_written("baseline", "NaN"), 422, "/baseline"),
    "Infinity": (with_written("budget", '{"trials": 1, "wall_s": Infinity}'), 422, "/budget/wall_s"),
    "-Infinity": (with_written("model", '{"embed_p": -Infinity}'), 422, "/model/embed_p"),
    "NaN in a list": (
        with_written("space", '{"lr": {"type": "choice", "values": [1, NaN]}}'),
        422,
        "/space/lr/values/1",
    ),
    "a key twice": (with_written("budget", '{"trials": 1, "trials": 100000}'), 422, "/budget/trials"),
    "a key twice, with a slash": (with_written("labels", '{"a/b": "1", "a/b": "2"}'), 422, "/labels/a~1b"),
    "a field twice": (json.dumps(SPEC)[:-1].encode() + b', "corpus": {"name": "ptb"}}', 422, "/corpus"),
    "half a surrogate pair": (with_text("\ud800"), 422, "/name"),
    "the other half": (with_text("a\udfffb"), 422, "/name"),
    "half a surrogate pair in a label": (with_written("labels", '{"a": "\\udead"}'), 422, "/labels/a"),
    "half a surrogate pair in a key": (with_written("labels", '{"\\udead": "a"}'), 422, "/labels"),
    "half a surrogate pair in a path": (with_written("corpus", '{"path": "\\udead"}'), 422, "/corpus/path"),
    "NUL in a name": (with_text("a\0b"), 422, "/name"),
    "NUL in a label": (with_written("labels", '{"a": "\\u0000"}'), 422, "/labels/a"),
    "NUL in a key": (with_written("labels", '{"\\u0000": "a"}'), 422, "/labels"),
    "NUL in a path": (with_written("corpus", '{"path": "/tmp/\\u0000"}'), 422, "/corpus/path"),
    "a newline in a name": (with_text("a\nb"), 422, "/name"),
    "an escape in a name": (with_text("\x1b[31m"), 422, "/name"),
    "a name of a megabyte": (with_text("a" * 1_000_000), 422, "/name"),
    "up the tree in an arm": (with_written("arms", '{"../../x": {}}'), 422, "/arms/..~1..~1x"),
    "dots as an arm": (with_written("arms", '{"..": {}}'), 422, "/arms/.."),
    "an empty arm": (with_written("arms", '{"": {}}'), 422, "/arms/"),
    "33 arms": (json.dumps({**SPEC, "arms": {f"a{n}": {} for n in range(33)}}).encode(), 422, "/arms"),
    "a file as the corpus": (with_written("corpus", '{"path": "/etc/passwd"}'), 422, "/corpus/path"),
    "a device as the corpus": (with_written("corpus", '{"path": "/dev/zero"}'), 422, "/corpus/path"),
    "somebody's home as the corpus": (with_written("corpus", '{"path": "~root"}'), 422, "/corpus/path"),
    "a URL as the corpus": (with_written("corpus", '{"path": "file:///etc"}'), 422, "/corpus/path"),
    "code for a pickle": (b"\x80\x04\x95\x00", 400, None),
    "YAML": (b"corpus: &a [*a]", 400, None),
    "XML with entities": (b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>', 400, None),
    "a mebibyte of numbers": (b"[" + b"1," * 500_000 + b"1]", 422, ""),
    "a mebibyte of fields": (
        b"{" + b",".join(b'"%d":1' % number for number in range(90_000)) + b"}",
        422,
        "/corpus",
    ),
    "a mebibyte of NaN": (b"[" + b"NaN," * 250_000 + b"1]", 422, "/0"),
    "a long key above many values": (
        b'{"' + b"k" * 300_000 + b'": [' + b"NaN," * 150_000 + b"1]}",
        422,
        f"/{'k' * 300_000}/0",
    ),
}


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize(("body", "status", "pointer"), BODIES.values(), ids=BODIES)
def test_a_body_that_means_no_good_is_refused_where_it_does(
    client: httpx.Client, body: bytes, status: int, pointer: str | None
) -> None:
    response = client.post("/v1/sweeps", content=body, headers={"content-type": "application/json"})
    document = assert_refused(response.status_code, response.headers, response.content, status)
    assert len(document["errors"]) <= 100
    if pointer is not None:
        assert document["errors"][0]["pointer"] == pointer
    assert len(response.content) < 100 * (len(pointer or "") + 1_000)
    assert response.elapsed.total_seconds() < 5


TYPES = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=a",
    "application/xml",
    "",
]


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize(
    "path", ["/v1/sweeps", "/v1/sweeps/ID:extend", "/v1/sweeps/ID:retry-failed", "/v1/sweeps/ID:clone"]
)
def test_a_body_that_is_not_sent_as_json_is_not_looked_at(
    client: httpx.Client, sweep_id: str, path: str, content_type: str
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = client.post(path.replace("ID", sweep_id), content=json.dumps(SPEC), headers=headers)
    assert_refused(response.status_code, response.headers, response.content, 415)


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("verb", ["extend", "retry-failed", "clone"])
@pytest.mark.parametrize(
    "body", [b"[", b"\xff", b'{"a": NaN}', b'{"\\u0000": 1}', b"[" * DEEP, b'{"trials": 1, "trials": 2}']
)
def test_every_verb_that_takes_a_body_is_as_strict(
    client: httpx.Client, sweep_id: str, verb: str, body: bytes
) -> None:
    response = client.post(
        f"/v1/sweeps/{sweep_id}:{verb}", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code in {400, 422}
    assert response.headers["content-type"] == PROBLEM


def test_a_byte_order_mark_is_what_some_editors_write(client: httpx.Client) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(SPEC).encode()
    response = client.post("/v1/sweeps", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 201


# Lengths.


def post_of(length: int, extra: bytes = b"") -> bytes:
    return b"POST /v1/sweeps HTTP/1.1\r\n" + HOST + JSON + extra + b"Content-Length: %d\r\n\r\n" % length


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("method", [b"POST", b"GET", b"DELETE", b"BREW"])
def test_a_length_over_the_limit_is_refused_before_a_byte_of_it_is_there(
    client: httpx.Client, method: bytes
) -> None:
    sent = post_of(MAX_BODY_BYTES + 1).replace(b"POST", method, 1)
    answer = exchange(client, sent)
    assert "at most 1048576 bytes" in assert_refused(*answer, 413)["detail"]
    assert answer[1]["connection"] == "close"


@pytest.mark.usefixtures("nothing_happens")
def test_a_client_that_asks_before_it_sends_too_much_is_not_told_to_go_on(client: httpx.Client) -> None:
    answer = exchange(client, post_of(10**12, b"Expect: 100-continue\r\n"))
    assert_refused(*answer, 413)


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("announced", [True, False])
def test_a_connection_on_which_too_much_comes_is_closed_whatever_the_client_does(
    client: httpx.Client, announced: bool
) -> None:
    """It sends on and on, and reads its answer first; what it would send after that, nobody takes."""
    with socket.create_connection(address_of(client), PATIENCE_S) as connection:
        if announced:
            connection.sendall(post_of(10**12))
        else:
            chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
            connection.sendall(
                b"POST /v1/sweeps HTTP/1.1\r\n"
                + HOST
                + JSON
                + b"Transfer-Encoding: chunked\r\n\r\n"
                + chunk * 20
            )
        assert_refused(*answer_on(connection), 413)
        connection.settimeout(LINGER_S + PATIENCE_S)
        with pytest.raises(ConnectionError):  # noqa: PT012  # a buffer or two may still take something
            while True:
                connection.sendall(b" " * 65536)


@pytest.mark.usefixtures("nothing_happens")
def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing(client: httpx.Client) -> None:
    for _ in range(5):
        with socket.create_connection(address_of(client), PATIENCE_S) as connection:
            connection.sendall(post_of(1000) + b'{"corpus"')
    assert client.get("/healthz").status_code == 200


# Headers that are looked at.


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize(
    "headers",
    [
        {"accept": "application/openmetrics-text; version=x.y.z; escaping=\\"},
        {"accept": "text/plain;version=1.0.0;escaping=allow-utf-8" * 50},
        {"accept": "," * 5000},
        {"accept": "*/*;q=NaN"},
        {"range": "bytes=0-" + "9" * 5000},
        {"if-none-match": '"' * 5000},
        {"accept-encoding": "gzip;" * 5000},
        {"cookie": "a=" + "b" * 10_000},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/metrics", "/v1/sweeps", "/openapi.json", "/healthz"])
def test_headers_that_make_no_sense_do_no_harm(
    client: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    assert client.get(path, headers=headers).status_code == 200
