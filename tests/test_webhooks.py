"""Webhooks: signed messages to a real receiver that fails, hangs, redirects; and where none is sent to."""

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, update
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

import service.sending
import service.webhooks
from service.database import migrate, naive, now, open_engine
from service.errors import InvalidWebhook, WebhookNotFound
from service.event_log import write_event
from service.records import Records, SweepJournal
from service.sending import Message, Undeliverable, is_public, send
from service.tables import deliveries, webhooks
from service.webhook_schemas import NewWebhook, WebhookRequest
from service.webhooks import MOST_WEBHOOKS, TRIED_FOR, Deliverer, Webhooks, _pause_s
from tests.fakes import epoch_fields, spec
from tests.played_service import SPEC, played_service, submit, wait_for

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver:
    """Notes every message and answers as it is told: a status, or something that is done with the request."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], str]] = []
        self.answers: list[int | Callable[[BaseHTTPRequestHandler], Any]] = []
        """One each; then 204."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                answer = receiver.answers.pop(0) if receiver.answers else 204
                if callable(answer):
                    with suppress(OSError):
                        answer(self)
                    return
                self.send_response(answer)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?for=me"

    def kinds(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=[0.05])
    thread.start()
    yield receiver
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


@pytest.fixture
def records(url: str) -> Iterator[Records]:
    engine = open_engine(url)
    migrate(engine)
    yield Records(engine)
    engine.dispose()


@pytest.fixture
def known(records: Records) -> Webhooks:
    """Of a service that sends to private addresses, as the receiver's is."""
    return Webhooks(records.engine, to_private=True)


@pytest.fixture
def journal(records: Records) -> SweepJournal:
    """Of the driver of sweep s1."""
    records.claim(records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
    return SweepJournal(records, "s1", 1)


def created(known: Webhooks, url: str, **changes: Any) -> NewWebhook:
    return known.create(WebhookRequest.model_validate({"url": url, **changes}))


def deliver_all(known: Webhooks, webhook_id: str) -> None:
    while (delivery := known.find_next(webhook_id)) is not None and known.deliver(delivery):
        pass


def make_due(known: Webhooks) -> None:
    with known._engine.begin() as connection:
        connection.execute(update(webhooks).values(due_at=None))


# What is sent.


def test_a_message_is_the_event_signed_as_standard_webhooks_have_it(
    known: Webhooks, records: Records, journal: SweepJournal, receiver: Receiver
) -> None:
    webhook = created(known, receiver.url)
    journal.record_epoch(0, 1, epoch_fields(0, 1))
    deliver_all(known, webhook.id)
    ((headers, body),) = receiver.got
    message = Verifier(webhook.secret).verify(body, headers)
    (row,) = [event for event in records.list_events("s1") if event["kind"] == "epoch_finished"]
    assert (message["type"], message["data"]["id"], message["data"]["detail"]) == (
        "epoch_finished",
        row["id"],
        row["detail"],
    )
    assert (headers["content-type"], headers["webhook-id"]) == ("application/json", f"s1-{row['id']}")
    with pytest.raises(WebhookVerificationError):
        Verifier(SECRET).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(webhook.secret).verify(body.replace("s1", "s2"), headers)


def test_a_webhook_is_sent_what_it_wants_and_nothing_else(
    known: Webhooks, records: Records, journal: SweepJournal, receiver: Receiver
) -> None:
    some = created(known, receiver.url, kinds=["epoch_finished", "sweep_succeeded"])
    other = created(known, receiver.url, kinds=["trial_lost"])
    records.add_sweep("s2", spec())
    second = created(known, receiver.url, sweep_id="s2")
    journal.record_event("trial_started", number=0, arm="fd", attempt=1)
    journal.record_epoch(0, 1, epoch_fields(0, 1))
    records.ask("s2", "pause")
    records.finish("s1", 1, "succeed")
    for webhook, kinds in (
        (some, ["epoch_finished", "sweep_succeeded"]),
        (other, []),
        (second, ["pause_requested"]),
    ):
        receiver.got.clear()
        deliver_all(known, webhook.id)
        assert receiver.kinds() == kinds


def test_what_is_rolled_back_is_sent_to_nobody(
    known: Webhooks, records: Records, journal: SweepJournal, receiver: Receiver
) -> None:
    webhook = created(known, receiver.url)
    with pytest.raises(ZeroDivisionError), records.engine.begin() as connection:  # noqa: PT012
        write_event(connection, "s1", "extended", {})
        _ = 1 / 0
    assert known.get(webhook.id).pending == 0


def test_an_event_that_is_written_while_a_webhook_is_deleted_is_written_all_the_same(
    known: Webhooks, records: Records, journal: SweepJournal, receiver: Receiver
) -> None:
    webhook = created(known, receiver.url)
    with records.engine.begin() as connection:
        connection.execute(webhooks.delete().where(webhooks.c.id == webhook.id))
        writing = threading.Thread(target=journal.record_event, args=["trial_lost"], kwargs={"number": 1})
        writing.start()
        time.sleep(0.3)
    writing.join()
    assert records.list_events("s1")[-1]["kind"] == "trial_lost"
    with records.engine.connect() as connection:
        assert connection.execute(select(deliveries)).all() == []


def test_the_request_to_delete_a_sweep_is_sent_though_the_sweep_is_gone(
    known: Webhooks, records: Records, receiver: Receiver
) -> None:
    records.add_sweep("s1", spec())
    webhook = created(known, receiver.url, sweep_id="s1")
    records.ask("s1", "delete")
    records.remove_sweep("s1")
    known.tidy()
    deliver_all(known, webhook.id)
    assert receiver.kinds() == ["delete_requested"]
    known.tidy()
    with pytest.raises(WebhookNotFound):
        known.get(webhook.id)


# Receivers as they are.


def hang(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(1.5)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """An answer that never ends, each of whose bytes comes in time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(100):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def flood(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(10_000):
        handler.wfile.write(b"x" * 10_000)


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 2")
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (500, "it answered 500"),
        (404, "it answered 404"),
        (302, "it answered 302: redirects are not followed"),
        (hang, "no answer within 0.5 s"),
        (drip, "no answer within 0.5 s"),
        (cut, "Server disconnected"),
    ],
)
def test_a_message_that_is_not_taken_comes_again_before_any_other(
    known: Webhooks,
    journal: SweepJournal,
    receiver: Receiver,
    answer: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service.webhooks, "_pause_s", lambda attempts: 60.0)  # no delay of ours is as long
    webhook = created(known, receiver.url)
    receiver.answers = [answer, answer]
    journal.record_event("trial_lost", number=1, message="")
    journal.record_event("trial_paused", number=1, attempt=1)
    for attempts in (1, 2):
        assert known.due() == [webhook.id]
        with monkeypatch.context() as impatient:
            if "no answer" in words:
                impatient.setattr(service.sending, "TIMEOUT_S", 0.5)
            deliver_all(known, webhook.id)
        failing = known.get(webhook.id)
        assert (failing.state, failing.attempts, failing.pending) == ("failing", attempts, 2)
        assert words in (failing.failure or "")
        assert failing.next_attempt_at is not None
        assert known.due() == []
        make_due(known)
    deliver_all(known, webhook.id)
    assert receiver.kinds() == ["trial_lost"] * 3 + ["trial_paused"]
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 2
    well = known.get(webhook.id)
    assert (well.state, well.failure, well.pending, well.next_attempt_at) == ("active", None, 0, None)


def test_an_answer_is_not_read_beyond_its_beginning(known: Webhooks, receiver: Receiver) -> None:
    webhook = created(known, receiver.url)
    receiver.answers = [flood]
    began = time.monotonic()
    assert known.test(webhook.id).delivered
    assert time.monotonic() - began < 2


def test_what_is_in_vain_for_a_day_is_dropped_and_said(
    known: Webhooks, journal: SweepJournal, receiver: Receiver
) -> None:
    webhook = created(known, receiver.url)
    journal.record_event("trial_lost", number=1, message="")
    with known._engine.begin() as connection:
        long_ago = naive(now()) - TRIED_FOR
        connection.execute(update(deliveries).values(created_at=long_ago))
    journal.record_event("trial_lost", number=2, message="")
    receiver.answers = [503]
    deliver_all(known, webhook.id)
    failing = known.get(webhook.id)
    assert (failing.state, failing.dropped, failing.pending) == ("failing", 1, 1)


def test_a_receiver_that_is_gone_is_sent_nothing_more_until_a_test_of_it_succeeds(
    known: Webhooks, journal: SweepJournal, receiver: Receiver
) -> None:
    webhook = created(known, receiver.url)
    receiver.answers = [410, 500]
    journal.record_event("trial_lost", number=1, message="")
    deliver_all(known, webhook.id)
    journal.record_event("trial_lost", number=2, message="")
    gone = known.get(webhook.id)
    assert (gone.state, gone.dropped, gone.pending, known.due()) == ("disabled", 1, 0, [])
    assert not known.test(webhook.id).delivered
    assert known.get(webhook.id).state == "disabled"
    assert known.test(webhook.id).delivered
    journal.record_event("trial_lost", number=3, message="")
    assert (known.get(webhook.id).state, known.due()) == ("active", [webhook.id])


def test_pauses_double_up_to_an_hour_and_are_never_all_the_same() -> None:
    for attempts in range(40):
        pauses = {_pause_s(attempts) for _ in range(20)}
        assert len(pauses) > 1
        expected = min(2.0**attempts, 3600.0)
        assert all(0.79 * expected < pause < 1.21 * expected for pause in pauses)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def delivering(known: Webhooks, acts: Callable[[], bool] = lambda: True) -> Iterator[Deliverer]:
    deliverer = Deliverer(known, acts)
    deliverer.start()
    try:
        yield deliverer
    finally:
        deliverer.stop()
        for thread in deliverer._sending.values():  # what a service would leave to its process's end
            thread.join()


def test_a_slow_receiver_delays_no_other(known: Webhooks, journal: SweepJournal, receiver: Receiver) -> None:
    slow, quick = created(known, receiver.url.replace("me", "slow")), created(known, receiver.url)
    started = threading.Event()

    def dawdle(handler: BaseHTTPRequestHandler) -> None:
        if "slow" in handler.path:
            started.set()
            time.sleep(3)

    receiver.answers = [dawdle]
    journal.record_event("trial_lost", number=0, message="")
    with delivering(known):
        wait_until(lambda: known.get(quick.id).pending == 0 or started.is_set())
        for number in range(20):
            journal.record_event("trial_lost", number=number, message="")
        began = time.monotonic()
        wait_until(lambda: 0 in {known.get(slow.id).pending, known.get(quick.id).pending})
        assert time.monotonic() - began < 2.5


def test_who_does_not_hold_the_lease_sends_nothing(
    known: Webhooks, journal: SweepJournal, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.webhooks, "PERIOD_S", 0.02)
    created(known, receiver.url)
    journal.record_event("trial_lost", number=1, message="")
    leads = False
    with delivering(known, lambda: leads):
        time.sleep(0.3)
        assert receiver.got == []
        leads = True
        wait_until(lambda: bool(receiver.got))


def test_a_service_that_stops_does_not_wait_for_a_slow_receiver(
    known: Webhooks, journal: SweepJournal, receiver: Receiver
) -> None:
    created(known, receiver.url)
    receiver.answers = [lambda _: time.sleep(6)]
    journal.record_event("trial_lost", number=1, message="")
    with delivering(known) as deliverer:
        wait_until(lambda: bool(receiver.got))
        began = time.monotonic()
        deliverer.stop()
        assert time.monotonic() - began < 3


# Where nothing is sent.

PRIVATE = [
    "127.0.0.1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "239.1.1.1",
    "255.255.255.255",
    "192.0.2.1",
    "240.0.0.1",
    "::",
    "::1",
    "fe80::1",
    "fc00::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "2002:7f00:1::",
    "2002:a00:1::1",
]
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_no_public_one(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_one(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_address_is_as_public_as_what_it_is_written_into(address: ipaddress.IPv4Address) -> None:
    for written in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(ipaddress.ip_address(written)) == is_public(address)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("http://127.0.0.1/", "no public address"),
        ("http://127.1/", "no public address"),
        ("http://2130706433/", "no public address"),
        ("http://0x7f.0.0.1/", "no public address"),
        ("http://localhost:8123/", "no public address"),
        ("http://[::1]/", "no public address"),
        ("http://[::ffff:127.0.0.1]/", "no public address"),
        ("https://169.254.169.254/latest", "FRATERNAL_WEBHOOKS_TO_PRIVATE=true"),
        ("http://no-such-host.invalid/", "cannot be resolved"),
        ("ftp://example.org/", "http:// or https://"),
        ("file:///etc/passwd", "http:// or https://"),
        ("example.org", "http:// or https://"),
        ("http://", "http:// or https://"),
        ("http://me:secret@1.1.1.1/", "no user, no password"),
        ("http://1.1.1.1/#a", "no #"),
        ("http://[::1/", "is no URL"),
        ("http://1.1.1.1:99999/", "is no URL"),
    ],
)
def test_a_url_that_nothing_may_be_sent_to_is_refused_and_written_down_nowhere(
    records: Records, written: str, words: str
) -> None:
    known = Webhooks(records.engine, to_private=False)
    with pytest.raises(InvalidWebhook, match=words.replace("(", ".").replace("//", ".*")) as caught:
        created(known, written)
    assert caught.value.problems[0].pointer == "/url"
    assert known.list_webhooks() == []


def test_an_address_is_looked_at_again_with_every_message(
    records: Records, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may lead to a public address when the webhook is made, and elsewhere afterwards."""
    known = Webhooks(records.engine, to_private=False)
    port = receiver.server.server_port
    answers = ["1.1.1.1", "127.0.0.1"]

    def resolve(host: str, port: int, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    monkeypatch.setattr(service.sending.socket, "getaddrinfo", resolve)
    webhook = created(known, f"http://rebound.example:{port}/")
    result = known.test(webhook.id)
    assert (result.delivered, result.status) == (False, None)
    assert "127.0.0.1, which is no public address" in (result.error or "")
    assert receiver.got == []


def test_the_connection_goes_to_the_address_that_was_checked_and_the_host_stays(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at the name: what another one would say does not matter."""
    looked = []

    def resolve(host: str, port: int, **_: Any) -> Any:
        looked.append(host)
        assert len(looked) == 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.2.3.4", port))]

    connected = []

    def connect(address: tuple[str, int], *_: Any, **__: Any) -> socket.socket:
        connected.append(address)
        connection = socket.socket()
        connection.connect(("127.0.0.1", receiver.server.server_port))
        return connection

    monkeypatch.setattr(service.sending.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(service.sending.socket, "create_connection", connect)
    assert send("http://named.example:81/x", SECRET, Message("m1", "{}"), to_private=False) == 204
    assert connected == [("1.2.3.4", 81)]
    assert receiver.got[0][0]["host"] == "named.example:81"


def test_nobody_who_listens_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Undeliverable, match="refused"):
        send(f"http://127.0.0.1:{port}/", SECRET, Message("m1", "{}"), to_private=True)


# Over HTTP.


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data"), webhooks_to_private=True) as client:
        yield client


def test_a_played_sweep_is_told_of_in_order_to_its_end(client: httpx.Client, receiver: Receiver) -> None:
    webhook = client.post(
        "/v1/webhooks", json={"url": receiver.url, "kinds": ["trial_finished", "sweep_succeeded"]}
    )
    assert webhook.status_code == 201
    there = client.get(webhook.headers["location"]).json()
    wait_for(client, submit(client), "succeeded")
    wait_until(lambda: len(receiver.got) == 7)
    assert receiver.kinds() == ["trial_finished"] * 6 + ["sweep_succeeded"]
    assert [json.loads(body)["data"]["detail"]["number"] for _, body in receiver.got[:-1]] == list(range(6))
    for headers, body in receiver.got:
        Verifier(webhook.json()["secret"]).verify(body, headers)
    assert client.delete(f"/v1/webhooks/{there['id']}").status_code == 204
    assert client.get(webhook.headers["location"]).status_code == 404


def test_a_secret_is_told_once(client: httpx.Client, receiver: Receiver) -> None:
    secret = client.post("/v1/webhooks", json={"url": receiver.url}).json()["secret"]
    assert secret.startswith("whsec_")
    assert "secret" not in client.get("/v1/webhooks").text


def test_a_webhook_that_is_asked_for_twice_with_one_key_is_made_once(
    client: httpx.Client, receiver: Receiver
) -> None:
    before = len(client.get("/v1/webhooks").json()["webhooks"])
    key = {"idempotency-key": "made-once"}
    first, second = (client.post("/v1/webhooks", json={"url": receiver.url}, headers=key) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert len(client.get("/v1/webhooks").json()["webhooks"]) == before + 1


def test_a_test_says_what_the_receiver_says(client: httpx.Client, receiver: Receiver) -> None:
    webhook = client.post("/v1/webhooks", json={"url": receiver.url}).json()
    taken = client.post(f"/v1/webhooks/{webhook['id']}:test").json()
    assert (taken["delivered"], taken["status"], taken["error"]) == (True, 204, None)
    assert taken["ms"] > 0
    ((headers, body),) = receiver.got
    assert Verifier(webhook["secret"]).verify(body, headers)["type"] == "ping"
    receiver.answers = [503]
    refused = client.post(f"/v1/webhooks/{webhook['id']}:test").json()
    assert (refused["delivered"], refused["status"], refused["error"]) == (False, 503, "it answered 503")


@pytest.mark.parametrize(
    ("body", "pointer", "words"),
    [
        ({}, "/url", "required"),
        ({"url": ""}, "/url", "at least 1 character"),
        ({"url": "ftp://1.1.1.1"}, "/url", "http://"),
        ({"url": "http://1.1.1.1", "kinds": []}, "/kinds", "at least 1 item"),
        ({"url": "http://1.1.1.1", "kinds": ["epoch"]}, "/kinds/0", "epoch_finished"),
        ({"url": "http://1.1.1.1", "sweep_id": "s404"}, "/sweep_id", "there is no sweep 's404'"),
        ({"url": "http://1.1.1.1", "secret": "x"}, "/secret", "known here: kinds, sweep_id, url"),
    ],
)
def test_a_webhook_that_makes_no_sense_is_refused(
    client: httpx.Client, body: dict[str, Any], pointer: str, words: str
) -> None:
    response = client.post("/v1/webhooks", json=body)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert (error["pointer"], words in error["message"]) == (pointer, True), error


def test_an_unknown_webhook_is_not_found(client: httpx.Client) -> None:
    for response in (
        client.get("/v1/webhooks/w404"),
        client.delete("/v1/webhooks/w404"),
        client.post("/v1/webhooks/w404:test"),
    ):
        assert (response.status_code, response.json()["code"]) == (404, "webhook_not_found")


def test_there_are_at_most_a_hundred(known: Webhooks) -> None:
    for _ in range(MOST_WEBHOOKS):
        created(known, "http://1.1.1.1/")
    with pytest.raises(InvalidWebhook, match="delete one"):
        created(known, "http://1.1.1.1/")


def test_a_service_by_default_sends_to_no_private_address(tmp_path: Path, receiver: Receiver) -> None:
    with played_service(tmp_path, plays=False) as client:
        response = client.post("/v1/webhooks", json={"url": receiver.url})
        assert (response.status_code, response.json()["code"]) == (422, "invalid_webhook")
        assert client.post("/v1/sweeps", json=SPEC).status_code == 201
