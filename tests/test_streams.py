"""A sweep's events as a stream, over real HTTP: whole and in order, whatever becomes of its two ends."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import service.streams
from service.accepting import preferred
from service.client import ApiError, FraternalClient, ServiceUnreachable
from service.database import open_engine
from service.event_log import write_event
from service.event_routes import FORMS
from service.events import OtherEvent, read_event
from service.records import Records, SweepJournal
from tests.databases import database_of
from tests.fakes import spec
from tests.played_service import HELD, played_service, submit, wait_for, wait_for_an_epoch
from tests.service_process import ServiceProcess

Event = dict[str, Any]


def parse(stream: bytes) -> list[Event]:
    """The whole frames of a stream that have data; `end` and `deleted` as an event of that kind."""
    found = []
    for frame in stream.decode(errors="ignore").split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in frame.splitlines() if not line.startswith(":"))
        if "data" in fields:
            said = json.loads(fields["data"])
            told = {"kind": fields["event"], "said": said} if "id" not in fields else said
            assert told["kind"] == fields["event"]
            assert str(told.get("id")) == fields.get("id", "None")
            found.append(told)
    return found


def path(sweep_id: str) -> str:
    return f"/v1/sweeps/{sweep_id}/events"


def read_all(client: httpx.Client, sweep_id: str, **headers: str) -> list[Event]:
    response = client.get(path(sweep_id), headers=headers)
    assert response.status_code == 200, response.text
    return parse(response.content)


def table(client: httpx.Client, sweep_id: str) -> list[Event]:
    """All events, by pages."""
    found: list[Event] = []
    while True:
        after = found[-1]["id"] if found else 0
        response = client.get(
            path(sweep_id), params={"after": after, "limit": 1000}, headers={"accept": "application/json"}
        )
        page = response.json()
        found += page["events"]
        assert page["next_after"] == (found[-1]["id"] if found else after)
        if not page["has_more"]:
            return found


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture
def held(client: httpx.Client) -> Iterator[str]:
    """A sweep that runs until it is cancelled; others wait behind it."""
    sweep_id = submit(client, name=HELD)
    wait_for_an_epoch(client, sweep_id)
    yield sweep_id
    if client.post(f"/v1/sweeps/{sweep_id}:cancel").status_code == 202:
        wait_for(client, sweep_id, "cancelled")


class Played:
    """A sweep whose driver is the test, in a service that lets all others wait."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.client = client
        self.engine = open_engine(url)
        self.records = Records(self.engine)
        self.sweep_id = submit(client)
        self.records.claim(self.records.get_sweep(self.sweep_id), fruitless=0, epochs_done=0)
        self.journal = SweepJournal(self.records, self.sweep_id, 1)

    def tell(self, count: int) -> None:
        for number in range(count):
            self.journal.record_event("trial_lost", number=number, message="killed")

    def tell_at_once(self, count: int) -> None:
        """Long ones, in one transaction."""
        with self.engine.begin() as connection:
            for number in range(count):
                detail = {"number": number, "message": "x" * 4_000}
                write_event(connection, self.sweep_id, "trial_lost", detail)

    def end(self) -> None:
        self.records.finish(self.sweep_id, 1, "succeed")


@contextmanager
def played(folder: Path, url: str | None = None, **given: Any) -> Iterator[Played]:
    own = database_of(folder)
    with played_service(folder, plays=False, database_url=url or own, **given) as client:
        sweep = Played(client, url or own)
        yield sweep
        sweep.engine.dispose()


def wait_for_room(sweep: Played) -> None:
    """Until there is room for another stream: the service hears in its own time that one is gone."""
    deadline = time.monotonic() + 20
    while True:
        with sweep.client.stream("GET", path(sweep.sweep_id)) as response:
            if response.status_code == 200:
                return
        assert time.monotonic() < deadline, "they hold their places still"
        time.sleep(0.05)


# Whole and in order.


def test_a_sweep_that_is_over_is_told_from_the_first_event_to_its_end(
    client: httpx.Client, ended: str
) -> None:
    response = client.get(path(ended))
    assert response.headers["content-type"].startswith("text/event-stream")
    *told, end = parse(response.content)
    assert told == table(client, ended)
    assert [event["kind"] for event in (told[0], told[-1])] == ["sweep_submitted", "sweep_succeeded"]
    assert sum(event["kind"] == "epoch_finished" for event in told) == 18
    assert (end["kind"], end["said"]["id"], end["said"]["state"]) == ("end", ended, "succeeded")
    assert not [event for event in told if isinstance(read_event(json.dumps(event)), OtherEvent)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 3_000), max_size=5))
def test_what_a_client_gets_over_any_number_of_connections_is_the_table(
    client: httpx.Client, ended: str, cuts: list[int]
) -> None:
    """It is cut off after any number of bytes, and names the last event that came whole."""
    told: list[Event] = []
    for cut in [*cuts, 10**9]:
        headers = {"last-event-id": str(told[-1]["id"])} if told else {}
        with client.stream("GET", path(ended), headers=headers) as response:
            if response.status_code == 204:
                break
            received = b""
            for chunk in response.iter_raw(256):
                received += chunk
                if len(received) >= cut:
                    break
        told += [event for event in parse(received[:cut]) if event["kind"] != "end"]
    assert told == table(client, ended)


@pytest.mark.parametrize("kept", [5, 2000])
def test_a_client_that_comes_and_goes_while_much_happens_misses_nothing(
    tmp_path: Path, url: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it finds what it missed in memory or in the table."""
    monkeypatch.setattr(service.streams, "KEPT", kept)
    monkeypatch.setattr(service.streams, "PAGE", 7)
    monkeypatch.setattr(service.streams, "POLL_S", 0.05)
    with played(tmp_path, url) as sweep:
        writer = threading.Thread(target=lambda: (sweep.tell(150), sweep.end()))
        writer.start()
        told: list[Event] = []
        received = b"not yet"
        while received:  # until there is an answer without content
            headers = {"last-event-id": str(told[-1]["id"])} if told else {}
            with sweep.client.stream("GET", path(sweep.sweep_id), headers=headers) as response:
                received = b""
                for chunk in response.iter_raw():
                    received += chunk
                    if len(received) > 700 + 13 * len(told):
                        break
            told += [event for event in parse(received) if event["kind"] != "end"]
        writer.join()
        assert told == table(sweep.client, sweep.sweep_id)
        assert len(told) == 2 + 150 + 1


def test_many_at_once_all_get_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.streams, "POLL_S", 0.05)
    with played(tmp_path) as sweep:
        told: list[list[Event]] = []
        readers = [
            threading.Thread(target=lambda: told.append(read_all(sweep.client, sweep.sweep_id)))
            for _ in range(8)
        ]
        for reader in readers:
            reader.start()
        sweep.tell(40)
        sweep.end()
        for reader in readers:
            reader.join()
        assert [each[:-1] for each in told] == [table(sweep.client, sweep.sweep_id)] * 8


# From where.


def test_who_has_all_of_a_sweep_that_is_over_is_told_to_stop_asking(client: httpx.Client, ended: str) -> None:
    newest = table(client, ended)[-1]["id"]
    for how in ({"headers": {"last-event-id": str(newest)}}, {"params": {"after": newest}}):
        response = client.get(path(ended), **how)  # type: ignore[arg-type]
        assert (response.status_code, response.content) == (204, b"")
    *rest, end = read_all(client, ended, **{"last-event-id": str(newest - 1)})
    assert ([event["id"] for event in rest], end["kind"]) == ([newest], "end")


def test_the_header_of_a_second_connection_goes_before_the_address(client: httpx.Client, ended: str) -> None:
    """A browser asks for the same address again, and adds the header."""
    ids = [event["id"] for event in table(client, ended)]
    response = client.get(path(ended), params={"after": ids[2]}, headers={"last-event-id": str(ids[7])})
    assert [event.get("id") for event in parse(response.content)] == [*ids[8:], None]


def test_an_extended_sweep_goes_on_behind_what_was_its_end(client: httpx.Client) -> None:
    sweep_id = submit(client, budget={"trials": 1})
    wait_for(client, sweep_id, "succeeded")
    newest = table(client, sweep_id)[-1]["id"]
    client.post(f"/v1/sweeps/{sweep_id}:extend", json={"trials": 1})
    *told, end = read_all(client, sweep_id, **{"last-event-id": str(newest)})
    assert told[0]["kind"] == "extended"
    assert (told[-1]["kind"], end["kind"]) == ("sweep_succeeded", "end")


def test_a_stream_from_the_newest_event_on_says_where_that_is(client: httpx.Client, held: str) -> None:
    newest = table(client, held)[-1]["id"]
    with client.stream("GET", path(held), params={"after": "newest"}) as response:
        assert next(response.iter_raw()) == b"retry: 2000\nid: %d\n\n" % newest


@pytest.mark.parametrize("name", ["last-event-id", "after"])
@pytest.mark.parametrize("written", ["x", "-1", "1.5", "9" * 30, "²", "newest event"])
def test_what_is_no_id_is_refused_with_the_rule(
    client: httpx.Client, ended: str, name: str, written: str
) -> None:
    if name == "after":
        response = client.get(path(ended), params={name: written})
    else:
        response = client.get(path(ended), headers={name: written.encode()})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_cursor")
    assert "a whole number" in response.json()["detail"]


def test_an_id_beyond_the_newest_event_is_refused(client: httpx.Client, ended: str) -> None:
    response = client.get(path(ended), headers={"last-event-id": "99999999"})
    assert (response.status_code, "beyond the newest event" in response.json()["detail"]) == (422, True)


@pytest.mark.parametrize("limit", ["0", "1001", "x"])
def test_a_page_of_no_size_is_refused(client: httpx.Client, ended: str, limit: str) -> None:
    response = client.get(path(ended), params={"limit": limit}, headers={"accept": "application/json"})
    assert (response.status_code, "limit" in response.json()["detail"]) == (422, True)


def test_an_unknown_sweep_has_no_events(client: httpx.Client) -> None:
    for headers in ({}, {"accept": "application/json"}, {"last-event-id": "7"}):
        assert client.get(path("s404"), headers=headers).json()["code"] == "sweep_not_found"


def test_head_opens_no_stream(client: httpx.Client, held: str) -> None:
    head = client.head(path(held))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")
    assert client.head(path("s404")).status_code == 404


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        ("", False),
        ("*/*", False),
        ("text/event-stream", False),
        ("application/json", True),
        ("application/json, text/plain, */*", True),
        ("application/json, text/event-stream", False),
        ("application/json;q=0.5, text/event-stream;q=0.4", True),
        ("Application/JSON; q=x", True),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
    ],
)
def test_a_page_is_for_who_asks_for_json_by_name(accept: str, page: bool) -> None:
    assert (preferred(accept, FORMS) == "application/json") is page


# The end, and what is in between.


def test_a_client_hears_of_the_service_though_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.streams, "HEARTBEAT_S", 0.3)
    with (
        played(tmp_path) as sweep,
        sweep.client.stream("GET", path(sweep.sweep_id), params={"after": "newest"}) as response,
    ):
        chunks = response.iter_raw()
        assert [next(chunks) for _ in range(3)][1:] == [b": alive\n\n"] * 2


def test_a_deleted_sweep_ends_its_streams_with_a_word(client: httpx.Client, held: str) -> None:
    sweep_id = submit(client)
    with client.stream("GET", path(sweep_id)) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert client.delete(f"/v1/sweeps/{sweep_id}").status_code == 202
        *_, last = parse(b"".join(chunks))
    assert (last["kind"], last["said"]) == ("deleted", {"id": sweep_id})
    assert client.get(path(sweep_id), headers={"last-event-id": "1"}).status_code == 404


def test_one_stream_too_many_is_asked_to_come_later_and_pages_are_there_still(tmp_path: Path) -> None:
    with played(tmp_path, max_streams=2) as sweep:
        first, second = (sweep.client.stream("GET", path(sweep.sweep_id)) for _ in range(2))
        with first, second:
            refused = sweep.client.get(path(sweep.sweep_id))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert "FRATERNAL_MAX_STREAMS" in refused.json()["detail"]
            assert len(table(sweep.client, sweep.sweep_id)) == 2
        wait_for_room(sweep)


def raw_stream(client: httpx.Client, sweep_id: str, after: int = 0) -> socket.socket:
    """A connection with a stream of which nobody reads, and little room on the way."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    connection.connect(("127.0.0.1", client.base_url.port))
    head = f"GET {path(sweep_id)} HTTP/1.1\r\nhost: localhost\r\nconnection: close"
    request = f"{head}\r\nlast-event-id: {after}\r\n\r\n"
    connection.sendall(request.encode())
    connection.settimeout(20)
    return connection


def body_of(received: bytes) -> bytes:
    """Without HTTP's head and its marks of chunks, the last of which may be cut."""
    _, _, rest = received.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if not size:
            break
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def test_a_client_that_does_not_read_is_dropped_and_goes_on_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.streams, "PATIENCE_S", 0.5)
    monkeypatch.setattr(service.streams, "POLL_S", 0.05)
    with played(tmp_path, max_streams=1) as sweep, closing(raw_stream(sweep.client, sweep.sweep_id)) as slow:
        sweep.tell_at_once(2_000)
        wait_for_room(sweep)
        sweep.end()
        received = b""
        while chunk := slow.recv(2**20):
            received += chunk
        told = parse(body_of(received))
        assert 0 < len(told) < 2_000
        *rest, end = read_all(sweep.client, sweep.sweep_id, **{"last-event-id": str(told[-1]["id"])})
        assert told + rest == table(sweep.client, sweep.sweep_id)
        assert end["kind"] == "end"


def test_a_slow_client_does_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.streams, "POLL_S", 0.05)
    with played(tmp_path) as sweep, closing(raw_stream(sweep.client, sweep.sweep_id)):
        sweep.tell_at_once(1_500)
        sweep.end()
        began = time.monotonic()
        assert len(read_all(sweep.client, sweep.sweep_id)) == 1_500 + 4
        assert time.monotonic() - began < service.streams.PATIENCE_S


def test_a_database_that_is_away_ends_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.streams, "POLL_S", 0.05)
    with played(tmp_path) as sweep:
        original = service.streams._SweepHub._read
        with sweep.client.stream("GET", path(sweep.sweep_id)) as response:
            chunks = response.iter_raw()
            next(chunks)
            monkeypatch.setattr(service.streams._SweepHub, "_read", lambda _: 1 / 0)
            time.sleep(0.2)
            sweep.tell(1)
            sweep.end()
            monkeypatch.setattr(service.streams._SweepHub, "_read", original)
            told = parse(b"".join(chunks))
        assert [event["kind"] for event in told][-3:] == ["trial_lost", "sweep_succeeded", "end"]


# The client, and the service's restart.


def test_the_client_has_events_as_values_whole_or_by_pages(client: httpx.Client, ended: str) -> None:
    with FraternalClient(str(client.base_url)) as api:
        told = list(api.events(ended))
        assert told == list(api.events_so_far(ended))
        assert [event.id for event in told] == [event["id"] for event in table(client, ended)]
        finished = [event.detail for event in told if event.kind == "trial_finished"]
        assert [(end.number, end.state, end.arm) for end in finished[:2]] == [  # type: ignore[union-attr]
            (0, "COMPLETE", "fd"),
            (1, "COMPLETE", "eld"),
        ]
        assert list(api.events(ended, told[-1].id)) == []
        assert list(api.events(ended, "newest")) == []
        with pytest.raises(ApiError, match="s404"):
            next(api.events("s404"))


def test_the_client_says_at_once_that_there_is_no_service() -> None:
    with FraternalClient("http://127.0.0.1:9") as api, pytest.raises(ServiceUnreachable):
        next(api.events("s1"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_goes_on_without_a_gap_when_the_service_is_started_again(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Its end, if it is asked for, waits for nobody, and leaves no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = ServiceProcess(tmp_path, port=port)
    service.start()
    records = Records(open_engine(database_of(tmp_path)))
    try:
        records.add_sweep("s1", spec())
        records.claim(records.get_sweep("s1"), fruitless=0, epochs_done=0)
        journal, told = SweepJournal(records, "s1", 1), []
        with FraternalClient(service.url) as api:
            reader = threading.Thread(target=lambda: told.extend(api.events("s1")))
            reader.start()
            with httpx.Client(base_url=service.url) as http:
                stuck = [raw_stream(http, "s1") for _ in range(3)]
            for number in range(100):
                journal.record_event("trial_lost", number=number, message="x" * 4000)
            while len(told) < 102:
                time.sleep(0.05)
            began = time.monotonic()
            service._end(how)
            assert time.monotonic() - began < 4
            journal.record_event("trial_lost", number=100, message="while it was away")
            service.start()
            records.finish("s1", 1, "succeed")
            reader.join(timeout=30)
            assert [event.id for event in told] == [row["id"] for row in records.list_events("s1")]
            for connection in stuck:
                connection.close()
        assert "Traceback" not in service._log()
        assert "ERROR" not in service._log()
    finally:
        records.engine.dispose()
        service.stop()
        service.close()
