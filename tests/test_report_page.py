"""A sweep's report over HTTP: JSON, Markdown and a page, which a process of its own draws."""

import base64
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import httpx
import psutil
import pytest

import service
from service.accepting import preferred
from service.client import FraternalClient
from service.pictures import draw_all
from service.report_page import write_page
from service.report_routes import FORMS
from service.report_schemas import ReportView
from service.reports import Reports
from tests.played_service import HELD, played_service, submit, wait_for, wait_for_an_epoch
from tests.stories import story

BROWSERS = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
HOSTILE = "<script>alert(1)</script> \"'{{ 7 * 7 }} & ünï"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("service")) as made:
        yield made


@pytest.fixture(scope="module")
def sweep_id(client: httpx.Client) -> str:
    made = submit(client, name=HOSTILE, budget={"trials": 16})
    wait_for(client, made, "succeeded")
    return made


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def ask(client: httpx.Client, sweep_id: str, accept: str) -> httpx.Response:
    return client.get(f"/v1/sweeps/{sweep_id}/report", headers={"accept": accept}, timeout=60)


def test_json_is_what_comes_unless_something_else_is_wished_for(client: httpx.Client, sweep_id: str) -> None:
    response = ask(client, sweep_id, "*/*")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["vary"] == "accept"
    report = ReportView.model_validate(response.json())
    assert [arm.n for arm in report.arms] == [8, 8]
    assert report.name == HOSTILE
    best = client.get(f"/v1/sweeps/{sweep_id}/best").json()
    arm = next(arm for arm in report.arms if arm.arm == best["arm"])
    assert (arm.best, arm.best_trial) == (best["best_valid_perplexity"], best["number"])
    with FraternalClient(str(client.base_url)) as ours:
        assert ours.report(sweep_id) == report
        assert ours.written_report(sweep_id, "text/markdown") == ask(client, sweep_id, "text/markdown").text


def test_markdown_is_for_who_asks_for_it(client: httpx.Client, sweep_id: str) -> None:
    response = ask(client, sweep_id, "text/markdown")
    assert response.headers["content-type"] == "text/markdown; charset=utf-8"
    assert response.text.splitlines()[0].startswith("## \\<script\\>alert(1)")
    assert "| fd | 8 | 8 | 0 | 0 |" in response.text


def test_a_browser_gets_a_page_that_needs_nothing_else(client: httpx.Client, sweep_id: str) -> None:
    response = ask(client, sweep_id, BROWSERS)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(response.text)
    assert [tag for tag, _ in page.tags if tag in {"script", "link", "iframe", "object"}] == []
    sources = [values["src"] or "" for tag, values in page.tags if tag == "img"]
    assert len(sources) >= 4
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert all(values["alt"] for tag, values in page.tags if tag == "img")
    assert not [values for _, values in page.tags if "href" in values]
    report = ask(client, sweep_id, "application/json").json()
    assert report["conclusion"] in page.words.replace("\u00a0", " ")
    assert HOSTILE in page.words, "told as it is, and nothing else"


def test_the_pages_policy_allows_its_style_and_nothing_from_elsewhere(
    client: httpx.Client, sweep_id: str
) -> None:
    response = ask(client, sweep_id, BROWSERS)
    style = re.search(r"<style>(.*?)</style>", response.text, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(sha256(style[1].encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:; ")


def test_the_page_of_a_sweep_that_rests_is_drawn_once(
    client: httpx.Client, sweep_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(client, sweep_id, BROWSERS)
    monkeypatch.setattr("service.reports.sys.executable", "/bin/false")
    assert ask(client, sweep_id, BROWSERS).content == first.content
    extended = client.post(f"/v1/sweeps/{sweep_id}:extend", json={"trials": 2})
    assert extended.status_code == 202
    wait_for(client, sweep_id, "succeeded")
    refused = ask(client, sweep_id, BROWSERS)
    assert refused.status_code == 500, "it has changed since"
    assert "could not be drawn" in refused.text
    monkeypatch.undo()
    assert "18 of 18 trials ended" in Page(ask(client, sweep_id, BROWSERS).text).words


def test_a_sweep_that_runs_is_told_of_as_it_is_now(client: httpx.Client) -> None:
    sweep_id = submit(client, name=HELD)
    wait_for_an_epoch(client, sweep_id)
    first, second = (ask(client, sweep_id, "application/json").json() for _ in range(2))
    assert (first["state"], first["conclusion"]) == ("running", "No trial has ended yet.")
    assert first["as_of"] < second["as_of"]
    assert "has not ended" in first["remarks"][0]
    client.post(f"/v1/sweeps/{sweep_id}:cancel")


@pytest.mark.parametrize("accept", FORMS)
def test_of_a_sweep_that_is_not_there_nothing_is_told(client: httpx.Client, accept: str) -> None:
    response = ask(client, "s0", accept)
    assert response.status_code == 404
    if accept == "text/html":
        assert "there is no sweep" in Page(response.text).words
    else:
        assert response.json()["code"] == "sweep_not_found"


def test_who_asks_for_one_page_at_once_has_it_drawn_once(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_id = submit(client, name="asked for at once")
    wait_for(client, sweep_id, "succeeded")
    drawn = []
    draw = Reports._draw

    async def count(reports: Reports, sweep: str) -> bytes:
        drawn.append(sweep)
        return await draw(reports, sweep)

    monkeypatch.setattr(Reports, "_draw", count)
    with ThreadPoolExecutor(4) as asking:
        pages = list(asking.map(lambda _: ask(client, sweep_id, BROWSERS).content, range(4)))
    assert len(set(pages)) == 1
    assert drawn == [sweep_id]


def test_a_page_is_drawn_by_our_code_in_utf_8_wherever_the_service_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('not ours')")
    monkeypatch.setenv("PYTHONPATH", str(Path(service.__file__).parent.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    monkeypatch.chdir(tmp_path)
    with played_service(tmp_path / "data", plays=False) as client:
        sweep_id = submit(client, name="κ − 1")
        assert "κ − 1" in Page(ask(client, sweep_id, BROWSERS).text).words


def test_the_best_trial_of_the_page_is_the_one_of_its_table() -> None:
    """Not one that was cancelled, or runs still."""
    told = story(trials=12, pruned=0.0)
    better = told.trials[3].model_copy(update={"number": 12, "state": "RUNNING", "best_valid_loss": 1.0})
    more = replace(told, trials=[*told.trials, better])
    best = min(told.trials, key=lambda trial: trial.rank)
    assert f"Trial {best.number} of arm {best.arm}: " in Page(write_page(more, [])).words


def test_a_page_that_is_not_drawn_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with played_service(tmp_path, plays=False) as client:
        sweep_id = submit(client)
        monkeypatch.setattr("service.reports.PATIENCE_S", 0.01)
        response = ask(client, sweep_id, BROWSERS)
        assert (response.status_code, response.headers["content-type"][:9]) == (500, "text/html")
        assert "was not drawn in 0 s; its report as JSON or Markdown has" in response.text
        drawing = [p for p in psutil.Process().children() if "service.report_page" in " ".join(p.cmdline())]
        assert drawing == [], "its process is ended"


def test_a_page_that_cannot_be_drawn_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with played_service(tmp_path, plays=False) as client:
        sweep_id = submit(client)
        broken = tmp_path / "service"
        broken.mkdir()
        (broken / "__init__.py").write_text("raise RuntimeError('no such colour')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        response = ask(client, sweep_id, BROWSERS)
        assert (response.status_code, response.headers["content-type"][:9]) == (500, "text/html")
        assert "could not be drawn: RuntimeError: no such colour." in response.text
        assert "no such colour" in caplog.text
        assert str(tmp_path) not in response.text


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("text/*", "text/markdown"),
        (BROWSERS, "text/html"),
        ("text/markdown, text/html;q=0.9", "text/markdown"),
        ("text/markdown;q=0.4, text/html;q=0.9", "text/html"),
        ("text/html;q=0, */*", "application/json"),
        ("text/html;q=0.1, */*", "application/json"),
        ("text/html;q=0.5;level=1, text/markdown;q=0.6", "text/markdown"),
        ("text/html;q=\u00b2, text/markdown;q=0.9", "text/html"),
        ("text/html;q=7, text/markdown", "text/markdown"),
        ("image/png", "application/json"),
        ("TEXT/HTML; q=x", "text/html"),
    ],
)
def test_the_form_is_the_one_that_is_wished_for_most(accept: str, form: str) -> None:
    assert preferred(accept, FORMS) == form


def test_a_page_of_a_large_sweep_stays_small() -> None:
    told = story(trials=400, epochs=100)
    page = write_page(told, list(draw_all(told)))
    assert len(page) < 2_500_000
