"""Following a sweep and being told of it, from the command line: `watch`, `events` and `webhook`."""

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from service.cli import app
from service.client import FraternalClient
from service.database import open_engine
from service.progress import follow
from service.records import Records, SweepJournal
from tests.databases import database_of
from tests.fakes import epoch_fields, spec
from tests.played_service import played_service, submit, wait_for
from tests.service_process import ServiceProcess
from tests.test_streams import Played, played


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data"), webhooks_to_private=True) as client:
        yield client


@pytest.fixture(scope="module")
def url(http: httpx.Client) -> str:
    return str(http.base_url).rstrip("/")


@pytest.fixture(scope="module")
def ended(http: httpx.Client) -> str:
    sweep_id = submit(http, name="ended")
    wait_for(http, sweep_id, "succeeded")
    return sweep_id


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class Counting(FraternalClient):
    """Notes when it looks at a sweep."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.looks: list[float] = []

    def get(self, sweep_id: str) -> Any:
        self.looks.append(time.monotonic())
        return super().get(sweep_id)


class Following(threading.Thread):
    """A watcher of a sweep, and when it has seen its end."""

    def __init__(self, client: FraternalClient, sweep_id: str) -> None:
        super().__init__(daemon=True)
        self.client, self.sweep_id = client, sweep_id
        self.console = Console(record=True, file=io.StringIO(), width=200)
        self.state: str | None = None
        self.ended_at = 0.0

    def run(self) -> None:
        self.state = follow(self.client, self.sweep_id, self.console).state
        self.ended_at = time.monotonic()


# watch


def test_a_watcher_looks_when_something_happens_and_hardly_otherwise(tmp_path: Path) -> None:
    with played(tmp_path) as sweep, Counting(str(sweep.client.base_url)) as client:
        watcher = Following(client, sweep.sweep_id)
        watcher.start()
        time.sleep(5)
        assert len(client.looks) <= 3, "nothing has happened"
        ended_at = time.monotonic()
        sweep.end()
        watcher.join(timeout=20)
        assert watcher.state == "succeeded"
        assert watcher.ended_at - ended_at < 2.5
        gaps = [after - before for before, after in zip(client.looks, client.looks[1:], strict=False)]
        assert min(gaps) > 0.9, "at most one look a second"


def test_a_watcher_of_a_service_without_streams_asks_every_second(tmp_path: Path) -> None:
    with played(tmp_path, max_streams=0) as sweep, Counting(str(sweep.client.base_url)) as client:
        watcher = Following(client, sweep.sweep_id)
        watcher.start()
        time.sleep(4)
        sweep.end()
        watcher.join(timeout=20)
        assert watcher.state == "succeeded"
        assert len(client.looks) >= 3


def test_a_watcher_goes_on_when_the_service_is_killed_and_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = ServiceProcess(tmp_path, port=port)
    service.start()
    records = Records(open_engine(database_of(tmp_path)))
    try:
        records.claim(records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
        journal = SweepJournal(records, "s1", 1)
        with FraternalClient(service.url) as client:
            watcher = Following(client, "s1")
            watcher.start()
            journal.record_epoch(0, 1, epoch_fields(0, 1))
            time.sleep(1.5)
            service.kill()
            journal.record_epoch(0, 2, epoch_fields(0, 2))
            service.start()
            ended_at = time.monotonic()
            records.finish("s1", 1, "succeed")
            watcher.join(timeout=30)
        assert watcher.state == "succeeded"
        assert watcher.ended_at - ended_at < 5
    finally:
        records.engine.dispose()
        service.stop()
        service.close()


# events


def test_events_are_printed_for_people_and_for_programs(url: str, http: httpx.Client, ended: str) -> None:
    told = http.get(
        f"/v1/sweeps/{ended}/events", params={"limit": 1000}, headers={"accept": "application/json"}
    ).json()["events"]
    for more in ([], ["--follow"]):
        lines = run("events", ended, "--json", "--url", url, *more).stdout.splitlines()
        assert [json.loads(line)["id"] for line in lines] == [event["id"] for event in told]
        shown = run("events", ended, "--url", url, *more).stdout.splitlines()
        assert len(shown) == len(told)
        assert "trial_started     number 0, arm fd, attempt 1" in "\n".join(shown)
    after = str(told[-3]["id"])
    assert len(run("events", ended, "--after", after, "--url", url).stdout.splitlines()) == 2


def test_events_are_followed_to_the_end_of_a_sweep(tmp_path: Path) -> None:
    def work(sweep: Played) -> None:
        time.sleep(0.5)
        sweep.tell(3)
        sweep.end()

    with played(tmp_path) as sweep:
        working = threading.Thread(target=work, args=[sweep])
        working.start()
        result = run("events", sweep.sweep_id, "-f", "--json", "--url", str(sweep.client.base_url))
        working.join()
    kinds = [json.loads(line)["kind"] for line in result.stdout.splitlines()]
    assert (result.exit_code, kinds[-4:]) == (0, ["trial_lost"] * 3 + ["sweep_succeeded"])


@pytest.mark.parametrize("more", [[], ["--follow"]])
def test_events_of_an_unknown_sweep_are_an_error_in_words(url: str, more: list[str]) -> None:
    result = run("events", "s404", "--url", url, *more)
    assert (result.exit_code, "no sweep 's404'" in result.stderr) == (1, True)


# webhook


def test_a_webhook_is_created_listed_tried_and_removed(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        to = f"http://127.0.0.1:{nobody.getsockname()[1]}/hook"
    made = run("webhook", "create", to, "--kind", "sweep_failed", "--json", "--url", url)
    created = json.loads(made.stdout)
    assert (created["kinds"], created["secret"][:6]) == (["sweep_failed"], "whsec_")
    listed = json.loads(run("webhook", "ls", "--json", "--url", url).stdout)
    assert [(found["id"], found["url"]) for found in listed] == [(created["id"], to)]
    assert created["id"] in run("webhook", "ls", "--url", url).stdout
    tried = run("webhook", "test", created["id"], "--url", url)
    assert (tried.exit_code, "refused" in tried.stdout) == (1, True)
    tried = run("webhook", "test", created["id"], "--json", "--url", url)
    assert (tried.exit_code, json.loads(tried.stdout)["delivered"]) == (1, False)
    assert run("webhook", "rm", created["id"], "--url", url).exit_code == 0
    again = run("webhook", "rm", created["id"], "--url", url)
    assert (again.exit_code, "no webhook" in again.stderr) == (1, True)


def test_a_webhook_that_is_refused_is_explained(url: str) -> None:
    result = run("webhook", "create", "http://1.1.1.1/", "--kind", "epoch", "--url", url)
    assert (result.exit_code, "/kinds/0: Input should be 'sweep_submitted'" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    "command",
    [["events", "s1"], ["events", "s1", "-f"], ["webhook", "ls"], ["webhook", "create", "http://x"]],
    ids=" ".join,
)
def test_without_a_service_a_command_says_how_to_start_one(command: list[str]) -> None:
    result = run(*command, "--url", "http://127.0.0.1:9")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "start one with `fraternal serve`" in result.stderr


@pytest.mark.parametrize(
    "command", [["events"], *(["webhook", verb] for verb in ("create", "ls", "test", "rm"))]
)
def test_every_command_explains_itself_with_an_example(command: list[str]) -> None:
    assert f"fraternal {' '.join(command)}" in " ".join(run(*command, "-h").stdout.split())
