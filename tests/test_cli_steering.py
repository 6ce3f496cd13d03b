"""`fraternal set`, `point`, `trial`, lists that choose: what they do, and what they say where they cannot."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from service.cli import app
from tests.played_service import SPEC, played_service, submit, wait_for


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture(autouse=True)
def _at_the_service(http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRATERNAL_URL", str(http.base_url).rstrip("/"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ended(http: httpx.Client) -> str:
    sweep_id = submit(http)
    wait_for(http, sweep_id, "succeeded")
    return sweep_id


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str) -> Any:
    return json.loads(said(*arguments, "--json"))


def test_sweep_is_given_another_name_labels_and_place(http: httpx.Client, ended: str) -> None:
    said("set", ended, "--name", "a", "--label", "team=nlp", "--label", "who=me", "--priority", "3")
    sweep = as_json("set", ended, "--label", "who-", "--max-concurrent", "2")
    assert (sweep["name"], sweep["labels"], sweep["priority"]) == ("a", {"team": "nlp"}, 3)
    assert sweep["spec"]["resources"]["max_concurrent"] == 2
    assert as_json("set", ended, "--max-concurrent", "0")["spec"]["resources"]["max_concurrent"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["set", "SWEEP"], 2, "say what is to change"),
        (["set", "SWEEP", "--label", "team"], 1, "neither KEY=VALUE"),
        (["set", "SWEEP", "--trials", "3"], 1, "its budget cannot change"),
        (["set", "SWEEP", "--priority", "5000"], 1, "/priority"),
        (["point", "add", "SWEEP", "lr"], 2, "no NAME=VALUE"),
        (["point", "add", "SWEEP", "lr=99"], 1, "/params/lr: lr = 99: the range is from 1.0 to 30.0"),
        (["point", "add", "SWEEP", "colour=1"], 1, "'colour' is not sampled in this sweep: lr"),
        (["point", "rm", "SWEEP", "999"], 1, "has no point 999"),
        (["trial", "stop", "SWEEP", "0"], 1, "has ended already"),
        (["trial", "retry", "SWEEP", "0"], 1, "has not failed"),
        (["trial", "pin", "SWEEP", "99"], 1, "has no trial 99"),
        (["trial", "ls", "SWEEP", "--state", "done"], 1, "state: Input should be 'RUNNING'"),
        (["ls", "--order-by", "colour"], 1, "order_by: 'colour' is no order"),
        (["ls", "--state", "asleep"], 1, "state: Input should be 'queued'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_words_without_a_traceback(
    ended: str, arguments: list[str], code: int, words: str
) -> None:
    result = run(*(ended if argument == "SWEEP" else argument for argument in arguments))
    assert result.exit_code == code
    assert " ".join(words.split()) in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_points_are_added_listed_and_taken_back(ended: str) -> None:
    point = as_json("point", "add", ended, "lr=3.5")
    assert (point["params"], point["draw"]) == ({"lr": 3.5}, None)
    assert "lr=3.5" in said("point", "ls", ended)
    assert as_json("point", "ls", ended) == [point]
    said("point", "rm", ended, str(point["id"]))
    assert as_json("point", "ls", ended) == []


def test_trials_are_listed_and_pinned(ended: str) -> None:
    listed = as_json("trial", "ls", ended, "--arm", "eld", "--order-by", "best_valid_perplexity")
    assert [trial["number"] for trial in listed] == [5, 3, 1]
    assert said("trial", "pin", ended, "5") == "trial 5 is COMPLETE, pinned\n"
    assert "COMPLETE (pinned)" in said("trial", "ls", ended)
    assert said("trial", "pin", ended, "5", "--off") == "trial 5 is COMPLETE\n"


def test_failed_trial_is_tried_again(http: httpx.Client) -> None:
    sweep_id = submit(http, arms={"fd": {"regularizer": "fraternal"}, "broken": {"clip": 13}})
    wait_for(http, sweep_id, "succeeded")
    said("trial", "retry", sweep_id, "1")
    wait_for(http, sweep_id, "succeeded")
    attempts = {trial["number"]: trial["attempt"] for trial in as_json("trial", "ls", sweep_id)}
    assert (attempts[1], attempts[3]) == (2, 1)


def test_sweeps_are_listed_by_state_label_and_name(http: httpx.Client) -> None:
    mine = submit(http, name="mine", labels={"team": "steering"})
    wait_for(http, mine, "succeeded")
    assert [sweep["id"] for sweep in as_json("ls", "--label", "team=steering", "--state", "succeeded")] == [
        mine
    ]
    assert [sweep["id"] for sweep in as_json("ls", "--name", "MIN", "--label", "team")] == [mine]
    assert as_json("ls", "--label", "team=steering", "--state", "running") == []


def test_dry_run_checks_and_queues_nothing(http: httpx.Client) -> None:
    Path("spec.json").write_text(json.dumps({**SPEC, "name": "dry"}))
    spec = json.loads(said("submit", "spec.json", "--dry-run"))
    assert (spec["name"], spec["training"]["epochs"]) == ("dry", 3)
    assert as_json("ls", "--name", "dry") == []
    assert run("submit", "spec.json", "--dry-run", "--set", "corpus.name=none").exit_code == 1


@pytest.mark.parametrize("verb", ["extend", "pause", "clone", "delete"])
def test_every_verb_speaks_json_too(http: httpx.Client, ended: str, verb: str) -> None:
    more = {"extend": ["--trials", "1"], "delete": ["--yes"]}.get(verb, [])
    if verb == "pause":
        assert run(verb, ended, "--json").exit_code == 1
        return
    assert as_json(verb, ended, *more)["id"] == ended or verb == "clone"


def test_shells_can_complete_commands() -> None:
    result = CliRunner().invoke(
        app,
        [],
        env={"_FRATERNAL_COMPLETE": "complete_bash", "COMP_WORDS": "fraternal tri", "COMP_CWORD": "1"},
        prog_name="fraternal",
    )
    assert "trial" in result.output.split()
