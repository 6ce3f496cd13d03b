"""The home page over real HTTP: what it shows and to whom, its forms without a script, and its stream."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from service.access import AWAY
from service.database import open_engine
from service.errors import DatabaseAway
from service.home import SAID_COOKIE, lasted, perplexity_in_words, reason_parts
from service.lifecycle import MOVES, State, legal_requests
from service.tables import sweeps
from tests.databases import database_of
from tests.played_service import played_service, submit, wait_for
from tests.test_access import bearer, browser, tokens_of

PERSON = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOSTILE = [
    "<script>alert(1)</script>",
    "\" onfocus=alert(1) autofocus x='",
    "</li></ul></main>{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp; &#60;",
    "\u202etxt.exe \u2066 \u05e9\u05dc\u05d5\u05dd",
    "W" * 200,
    "",
]


class Page(HTMLParser):
    """Elements as (tag, attributes, text), in order; text is that up to the next tag."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(response.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.elements:
            tag, attributes, text = self.elements[-1]
            self.elements[-1] = tag, attributes, text + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes, _ in self.elements if found == tag]

    def rows(self) -> list[str | None]:
        return [attributes["id"] for attributes in self.all("li") if "data-state" in attributes]

    def verbs(self) -> list[str]:
        return [str(button["id"]).rpartition("-")[2] for button in self.all("button") if "id" in button]

    def words(self) -> str:
        return " ".join(" ".join(text for _, _, text in self.elements).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("played")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with played_service(folder) as client:
        client.headers.update(PERSON)
        yield client


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """A service whose sweeps stay as they are put."""
    folder = tmp_path_factory.mktemp("still")
    with played_service(folder, plays=False) as client:
        client.headers.update(PERSON)
        yield client, folder


def put(folder: Path, sweep_id: str, **values: Any) -> None:
    engine = open_engine(database_of(folder))
    with engine.begin() as connection:
        connection.execute(update(sweeps).where(sweeps.c.id == sweep_id).values(values))
    engine.dispose()


def said(client: httpx.Client, response: httpx.Response) -> str:
    """What the page says that a form leads to."""
    assert response.status_code == 303, response.text
    shown = client.get(response.headers["location"])
    found = re.search(r'<p class="(done|refused)">(.*?)</p>', shown.text)
    assert found is not None, shown.text
    assert f"{SAID_COOKIE}=" in shown.headers["set-cookie"], "it is said once"
    return f"{found[1]}: {found[2]}"


# What it shows.


def test_a_row_says_what_the_api_says_of_a_sweep_and_leads_to_its_parts(
    client: httpx.Client, ended: str
) -> None:
    sweep = client.get(f"/v1/sweeps/{ended}").json()
    shown = Page(client.get("/", params={"name": "ended"}))
    words = shown.words()
    assert shown.rows() == [ended]
    at = datetime.fromisoformat(sweep["state_since"])
    assert f"Succeeded {at.day} {at:%b %Y, %H:%M} UTC {ended}" in words
    best = sweep["best"]
    for told in (
        "6 of 6 trials",
        f"Best perplexity {best['best_valid_perplexity']:.2f} {best['arm']}, trial {best['number']}"
        ", verified",
        f"Epochs {sweep['epochs_done']}",
        "Left –",
    ):
        assert told in words
    bar = shown.all("progress")[0]
    assert (bar["value"], bar["max"], bar["aria-label"]) == ("6", "6", "Trials that have ended")
    links = {str(link["href"]) for link in shown.all("a")}
    assert sweep["dashboard_url"] in links
    assert {f"/v1/sweeps/{ended}/report", f"/v1/sweeps/{ended}/best/checkpoint"} <= links
    for part in ("best/checkpoint", "report"):
        answer = client.get(f"/v1/sweeps/{ended}/{part}", headers={"accept": "*/*"})
        assert answer.status_code == 200, part
    assert shown.verbs() == []


def test_a_sweep_without_an_epoch_has_no_links_to_what_it_has_not(
    still: tuple[httpx.Client, Path],
) -> None:
    client, _ = still
    sweep_id = submit(client, name="just asked for")
    shown = Page(client.get("/", params={"name": "just asked for"}))
    assert shown.rows() == [sweep_id]
    assert not [link for link in shown.all("a") if sweep_id in str(link["href"])]


@pytest.mark.parametrize("state", get_args(State))
def test_there_is_a_button_for_each_legal_request_that_changes_something(
    still: tuple[httpx.Client, Path], state: State
) -> None:
    client, folder = still
    sweep_id = submit(client, name=f"once {state}")
    put(folder, sweep_id, state=state, revision=2)
    shown = Page(client.get("/", params={"name": f"once {state}"})).verbs()
    legal = [verb for verb in ("pause", "resume", "stop", "cancel") if verb in legal_requests(state)]
    assert shown == [verb for verb in legal if MOVES[verb].states[state] != state]  # type: ignore[index]


@pytest.mark.parametrize("text", HOSTILE)
def test_names_labels_and_reasons_are_text_whatever_they_are(
    still: tuple[httpx.Client, Path], text: str
) -> None:
    client, folder = still
    sweep_id = submit(client, name=text, labels={"hostile": text, "n": str(HOSTILE.index(text))})
    put(folder, sweep_id, state_reason=f"{text}\n{text}", revision=2)
    response = client.get("/", params={"label": f"n={HOSTILE.index(text)}"})
    shown = Page(response)
    assert shown.rows() == [sweep_id]
    told = [found.strip() for tag, _, found in shown.elements if tag == "bdi"]
    assert told[:2] == [text or sweep_id, f"hostile={text}"]
    assert [str(script["src"]).startswith("/assets/home-") for script in shown.all("script")] == [True]
    assert not [name for _, attributes, _ in shown.elements for name in attributes if name.startswith("on")]
    link = next(link for link in shown.all("a") if link.get("class") == "label")
    assert Page(client.get(str(link["href"]))).rows()[:1] == [sweep_id], "a label leads to those that have it"


def test_what_is_looked_for_may_be_hostile_too(client: httpx.Client, ended: str) -> None:
    for text in HOSTILE[:5]:
        shown = Page(client.get("/", params={"name": text}))
        field = next(field for field in shown.all("input") if field.get("name") == "name")
        assert field["value"] == text.strip()
        assert len(shown.all("script")) == 1


def test_filters_choose_as_those_of_the_api_do_and_what_is_left_empty_counts_as_left_out(
    client: httpx.Client, ended: str
) -> None:
    other = submit(client, name="another", labels={"team": "nlp"})
    wait_for(client, other, "succeeded")
    for asked, expected in (
        ("", [other, ended]),
        ("name=&label=&state=&order_by=-created_at", [other, ended]),
        ("name=+ANOTHER+&state=", [other]),
        ("label=team%3Dnlp&state=succeeded&state=failed", [other]),
        ("state=queued&state=running", []),
        ("order_by=created_at", [ended, other]),
    ):
        shown = Page(client.get(f"/?{asked}"))
        assert shown.rows() == expected, asked
        filtered = "Only sweeps" in shown.words()
        assert filtered == (asked not in {"", "order_by=created_at"} and "label=&" not in asked)


def test_pages_follow_one_another_and_lead_back_to_the_first(tmp_path: Path) -> None:
    with played_service(tmp_path, plays=False) as client:
        ids = [submit(client, name=f"one & {number}") for number in range(5)]
        found, path = [], "/?name=one+%26&page_size=2"
        for _ in range(3):
            shown = Page(client.get(path, headers=PERSON))
            found += shown.rows()
            links = {str(link.get("rel")): str(link["href"]) for link in shown.all("a")}
            path = links.get("next", "none")
        assert (found, path) == (ids[::-1], "none")
        assert "First page" in shown.words()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the command needs curl: install it")
@pytest.mark.parametrize("closed", [False, True])
def test_where_there_is_no_sweep_the_command_that_asks_for_one_works_as_printed(
    tmp_path: Path, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played_service(tmp_path, plays=False) as client, closing(tokens_of(tmp_path)) as kept:
        headers = dict(PERSON)
        if closed:
            _, written = kept.create("one", "write", None)
            headers |= bearer(written)
            monkeypatch.setenv("FRATERNAL_TOKEN", written)
        shown = Page(client.get("/", headers=headers))
        command = next(text for tag, with_id, text in shown.elements if with_id.get("id") == "command")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert Page(client.get("/", headers=headers)).rows() == [json.loads(done.stdout)["id"]]


# The forms, without a script.


def test_a_button_leads_back_to_the_page_as_it_was_which_says_what_happened(
    still: tuple[httpx.Client, Path],
) -> None:
    client, _ = still
    sweep_id = submit(client, name="<to be> paused", labels={"a": "b"})
    seen_at = {"referer": f"{client.base_url}/?label=a%3Db&order_by=name"}
    response = client.post("/ask", data={"sweep": sweep_id, "verb": "pause"}, headers=seen_at)
    assert response.headers["location"] == "/?label=a%3Db&order_by=name"
    assert said(client, response) == "done: “&lt;to be&gt; paused” is paused."
    assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "paused"
    assert "is paused." not in client.get("/").text
    for verb, words in (("resume", "is queued again, and goes on when its turn comes."), ("cancel", "")):
        assert words in said(client, client.post("/ask", data={"sweep": sweep_id, "verb": verb}))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"verb": "stop"}, "legal now: pause, cancel"),
        ({"verb": "delete"}, "there is no button &#39;delete&#39;"),
        ({"verb": "succeed"}, "there is no button"),
        ({}, "there is no button"),
        ({"verb": "pause", "sweep": "s\0"}, "there is no sweep"),
        ({"verb": "pause", "sweep": "none"}, "there is no sweep &#39;none&#39;"),
        ({"verb": "pause", "sweep": "<script>" * 100}, "there is no sweep"),
    ],
    ids=str,
)
def test_a_refusal_is_said_in_its_words_and_changes_nothing(
    still: tuple[httpx.Client, Path], form: dict[str, str], words: str
) -> None:
    client, _ = still
    sweep_id = submit(client)
    told = said(client, client.post("/ask", data={"sweep": sweep_id, **form}))
    assert told.startswith("refused: ")
    assert words in told
    assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "queued"


def test_before_a_sweep_is_cancelled_a_page_asks_and_leads_back(still: tuple[httpx.Client, Path]) -> None:
    client, _ = still
    sweep_id = submit(client, name="<i>mine</i>")
    seen_at = {"referer": f"{client.base_url}/?state=queued"}
    shown = Page(client.get("/cancel", params={"sweep": sweep_id}, headers=seen_at))
    assert "Cancel <i>mine</i>?" in shown.words()
    fields = {str(field["name"]): str(field["value"]) for field in shown.all("input")}
    assert [link["href"] for link in shown.all("a")] == ["/?state=queued"]
    assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "queued"
    response = client.post("/ask", data=fields)
    assert response.headers["location"] == "/?state=queued"
    assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "cancelling"


@pytest.mark.parametrize(
    ("back", "there"),
    [
        ("", "/"),
        ("https://evil.example/?name=a", "/?name=a"),
        ("//evil.example", "/"),
        ("http://[", "/"),
        ("/?a=b\r\nset-cookie: x=y", "/?a=bset-cookie:%20x=y"),  # as urlsplit reads it
        ("javascript:alert(1)", "/"),
        ("/docs?a=b", "/"),
    ],
)
def test_a_form_leads_to_the_home_page_and_nowhere_else(
    still: tuple[httpx.Client, Path], back: str, there: str
) -> None:
    response = still[0].post("/ask", data={"back": back})
    assert response.headers["location"] == there


def test_a_page_of_another_site_cannot_press_a_button(still: tuple[httpx.Client, Path]) -> None:
    client, _ = still
    sweep_id = submit(client)
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        response = client.post("/ask", data={"sweep": sweep_id, "verb": "pause"}, headers=headers)
        assert response.status_code == 403
    assert client.get(f"/v1/sweeps/{sweep_id}").json()["state"] == "queued"


@pytest.mark.parametrize("cookie", ["", "x", "eyJh", "WzFd", "W10=", "W251bGwsIG51bGxd", "é"])
def test_a_message_that_makes_no_sense_is_none(client: httpx.Client, cookie: str) -> None:
    shown = client.get("/", headers={"cookie": f"{SAID_COOKIE}={cookie}".encode()})
    assert shown.status_code == 200
    assert 'class="done"' not in shown.text
    assert 'class="refused"' not in shown.text


# Who sees what.


@contextmanager
def closed_service(folder: Path) -> Iterator[tuple[httpx.Client, dict[str, str]]]:
    with closing(tokens_of(folder)) as kept:
        written = {scope: kept.create(f"<{scope}>", scope, None)[1] for scope in ("read", "write")}  # type: ignore[arg-type]
        with played_service(folder, plays=False) as client:
            yield client, written


def test_buttons_are_for_those_who_may_press_them(tmp_path: Path) -> None:
    with closed_service(tmp_path) as (client, written):
        sweep_id = submit_with(client, written["write"])
        for scope, verbs, status in (("read", [], 403), ("write", ["pause", "cancel"], 303)):
            with browser(client) as person:
                person.post("/sign-in", data={"token": written[scope]})
                shown = Page(person.get("/"))
                assert (shown.rows(), shown.verbs()) == ([sweep_id], verbs)
                assert f"<{scope}>, may {'look' if scope == 'read' else 'steer'}" in shown.words()
                assert "/sign-out" in {form["action"] for form in shown.all("form")}
                pressed = person.post("/ask", data={"sweep": sweep_id, "verb": "pause"})
                assert pressed.status_code == status
                if status == 403:
                    assert "this needs a token of scope write" in Page(pressed).words().lower()


def submit_with(client: httpx.Client, written: str) -> str:
    client.headers.update(bearer(written))
    sweep_id = submit(client)
    del client.headers["authorization"]
    return sweep_id


def test_who_is_not_signed_in_is_led_to_the_sign_in_and_back(tmp_path: Path) -> None:
    with closed_service(tmp_path) as (client, _), browser(client) as person:
        led = person.get("/?state=running&name=a+b")
        there = re.search(r'name="next" value="([^"]*)"', person.get(led.headers["location"]).text)
        assert there is not None
        assert there[1].replace("&amp;", "&") == "/?state=running&name=a+b"
        pressed = person.post("/ask", data={"verb": "pause"})
        assert (pressed.status_code, pressed.headers["location"]) == (303, "/sign-in?next=%2F")
        assert client.get("/live").status_code == 401


# What goes wrong.


def test_a_query_that_makes_no_sense_is_a_page_that_says_so(client: httpx.Client) -> None:
    for query, words in (
        ("state=done", "state: Input should be 'queued', 'running'"),
        ("order_by=size", "order_by: 'size' is no order; known: created_at, -created_at"),
        ("page_size=1000", "page_size: Input should be less than or equal to 500"),
        ("page_token=abc", "page_token: it is no next_page_token of this service"),
        ("nmae=x", "nmae: unknown field 'nmae'; known here: label, name, order_by"),
    ):
        response = client.get(f"/?{query}")
        assert (response.status_code, response.headers["content-type"]) == (422, "text/html; charset=utf-8")
        assert words in Page(response).words()
        assert client.get(f"/?{query}", headers={"accept": "*/*"}).json()["status"] == 422


def test_a_database_that_is_away_is_a_page_that_says_so(
    still: tuple[httpx.Client, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise OperationalError("select", {}, Exception("away"))

    def cannot_tell(*_: Any) -> None:
        raise DatabaseAway(AWAY)

    client, _ = still
    form = {"sweep": submit(client), "verb": "pause"}
    for place, fails, ask in (
        ("service.records.Records.page", away, lambda: client.get("/")),
        ("service.records.Records.ask", away, lambda: client.post("/ask", data=form)),
        ("service.access.Gate.admit", cannot_tell, lambda: client.get("/")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, fails)
            response = ask()
        assert response.status_code == 503, place
        assert "The database does not answer" in Page(response).words()
        assert response.headers["content-type"].startswith("text/html")
        assert "retry-after" in response.headers


# Its files.


def test_pages_need_nothing_but_files_of_ours_which_browsers_keep(client: httpx.Client, ended: str) -> None:
    page = client.get("/")
    assert page.headers["cache-control"] == "no-store"
    assert "'unsafe-inline'" not in page.headers["content-security-policy"]
    assert re.findall(r"<script(?![^>]* src=)|\sstyle=|<style|\son\w+=|https?://", page.text) == []
    addresses = sorted(set(re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.text)))
    assert len(addresses) == 3
    for address in addresses:
        file = client.get(address)
        assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert not re.findall(rb"https?://(?!www.w3.org/2000/svg)", file.content)
        again = client.get(address, headers={"if-none-match": file.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/assets/home.js").status_code == 404
    assert client.get("/assets/..%2fhome.html").status_code == 404


# Its stream.

Told = tuple[str, Any]


def told_by(response: httpx.Response) -> Iterator[Told]:
    event = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


def test_who_connects_is_told_to_look_and_then_of_each_row_that_changes(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.streams.POLL_S", 0.02)
    with played_service(tmp_path, plays=False, database_url=url) as client:
        first = submit(client, name="first")
        with client.stream("GET", "/live") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            told = told_by(response)
            assert next(told) == ("look", {})
            client.post(f"/v1/sweeps/{first}:pause")
            kind, row = next(told)
            assert (kind, row["id"]) == ("sweep", first)
            assert f'<li id="{first}" class="sweep paused"' in row["html"]
            assert row["html"] in client.get("/", headers=PERSON).text, "it is the page's row"
            second = submit(client, name="second")
            assert next(told) == ("list", {})
            client.post(f"/v1/sweeps/{first}:cancel")
            assert next(told)[1]["id"] == first
            renamed = {"if-match": "*", "content-type": "application/json"}
            client.patch(f"/v1/sweeps/{second}", json={"name": "<other>"}, headers=renamed)
            assert "&lt;other&gt;" in next(told)[1]["html"]


def test_rows_in_the_stream_have_buttons_for_those_who_may_press_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.streams.POLL_S", 0.02)
    with closed_service(tmp_path) as (client, written):
        sweep_id = submit_with(client, written["write"])
        reader, writer = bearer(written["read"]), bearer(written["write"])
        with (
            client.stream("GET", "/live", headers=reader) as to_reader,
            client.stream("GET", "/live", headers=writer) as to_writer,
        ):
            rows = told_by(to_reader), told_by(to_writer)
            assert [next(each)[0] for each in rows] == ["look", "look"]
            client.post(f"/v1/sweeps/{sweep_id}:pause", headers=writer)
            assert [next(each)[1]["html"].count("<button") for each in rows] == [0, 2]


def test_the_stream_counts_as_one_of_those_that_may_be_open(tmp_path: Path) -> None:
    with played_service(tmp_path, plays=False, max_streams=1) as client:
        with client.stream("GET", "/live") as response:
            assert response.status_code == 200
            refused = client.get("/live")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")


# Words.


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.5, "1 min"),
        (3599, "1 h 00"),
        (3 * 3600 + 305, "3 h 05"),
        (47 * 3600 + 59 * 60, "47 h 59"),
        (52 * 3600, "2 d 4 h"),
    ],
)
def test_a_time_is_said_in_two_units_at_most(seconds: float, words: str) -> None:
    assert lasted(seconds) == words


def test_a_perplexity_has_two_decimals_or_says_that_it_is_too_large() -> None:
    values = (58.301, 1234.5, 3e7, None)
    assert [perplexity_in_words(value) for value in values] == ["58.30", "1,234.50", "3.00e+07", "over 10³⁰⁸"]


def test_a_long_reason_is_folded_and_whole_within() -> None:
    assert reason_parts("the disk is full") == ("the disk is full", "")
    assert reason_parts("three failed\nTraceback …\n") == ("three failed", "three failed\nTraceback …")
    first, whole = reason_parts("x" * 300)
    assert (len(first), whole) == (201, "x" * 300)
