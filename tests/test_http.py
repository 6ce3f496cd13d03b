"""The API over real HTTP: what it answers, and that what it refuses leaves no trace."""

import base64
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select, text, update

from service.dashboard import _with_accept_encoding
from service.sweeps import OpenCheckpoint, SweepController
from service.tables import epochs, events, sweeps
from tests import databases
from tests.played_service import HELD, SPEC, played_service, submit, wait_for, wait_for_an_epoch

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def client(data_dir: Path) -> Iterator[httpx.Client]:
    with played_service(data_dir) as client:
        yield client


@pytest.fixture(scope="module")
def idle(data_dir: Path) -> Iterator[httpx.Client]:
    """A client of a service that takes sweeps and lets them wait: any number of them costs nothing."""
    with played_service(data_dir / "idle", plays=False) as client:
        yield client


def sweep_ids(client: httpx.Client) -> list[str]:
    return [sweep["id"] for sweep in client.get("/v1/sweeps").json()["sweeps"]]


def rows(data_dir: Path) -> int:
    """Sweeps in the database: what listing them says, but quickly."""
    with databases.opened(data_dir / "idle") as engine, engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(sweeps)).scalar_one()


def post(client: httpx.Client, body: bytes) -> httpx.Response:
    return client.post("/v1/sweeps", content=body, headers={"content-type": "application/json"})


def assert_problem(response: httpx.Response, status: int) -> Any:
    """RFC 9457, and nothing that JSON does not know."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(response.text, parse_constant=refuse)
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    assert document["type"] == "about:blank" or document["type"].startswith("urn:fraternal:")
    assert "Traceback" not in response.text
    return document


# Sweeps.


def test_a_sweep_is_created_where_its_location_says(idle: httpx.Client) -> None:
    response = idle.post("/v1/sweeps", json={**SPEC, "name": "created"})
    assert response.status_code == 201
    there = idle.get(response.headers["location"]).json()
    assert there["id"] == response.json()["id"]
    assert there["spec"]["name"] == "created"
    assert there["spec"]["training"]["epochs"] == 3


def test_a_preset_is_written_out_and_what_is_given_wins_over_it(idle: httpx.Client) -> None:
    response = idle.post("/v1/sweeps", json={"preset": "quickstart", "training": {"epochs": 2}})
    spec = response.json()["spec"]
    assert (spec["training"]["epochs"], spec["training"]["bptt"]) == (2, 35)
    assert set(spec["arms"]) == {"fd", "eld", "plain"}


def test_the_newest_sweep_is_listed_first(idle: httpx.Client) -> None:
    first, second = submit(idle), submit(idle)
    assert sweep_ids(idle)[:2] == [second, first]


def test_an_ended_sweep_shows_its_trials_and_which_is_best(client: httpx.Client, ended: str) -> None:
    sweep = client.get(f"/v1/sweeps/{ended}").json()
    assert sweep["trials"] == {
        "budget": 6,
        "running": 0,
        "waiting": 0,
        "complete": 6,
        "pruned": 0,
        "failed": 0,
    }
    assert sweep["best"]["number"] == 5
    trials = client.get(f"/v1/sweeps/{ended}/trials").json()["trials"]
    assert [trial["number"] for trial in trials] == list(range(6))
    assert [trial["arm"] for trial in trials] == ["fd", "eld"] * 3
    assert client.get(f"/v1/sweeps/{ended}/best").json() == trials[5]


def test_paired_trials_have_the_same_values_and_the_same_seed(client: httpx.Client, ended: str) -> None:
    trials = client.get(f"/v1/sweeps/{ended}/trials").json()["trials"]
    for fd, eld in zip(trials[::2], trials[1::2], strict=True):
        assert (fd["draw"], fd["seed"], fd["params"]) == (eld["draw"], eld["seed"], eld["params"])


def test_a_trial_shows_its_whole_curve(client: httpx.Client, ended: str) -> None:
    trial = client.get(f"/v1/sweeps/{ended}/trials/2").json()
    assert [epoch["epoch"] for epoch in trial["curve"]] == [1, 2, 3]
    assert [epoch["valid_loss"] for epoch in trial["curve"]] == pytest.approx([5.48, 4.98, 4.48])
    assert trial["config"]["training"]["lr"] == trial["params"]["lr"]


def test_a_sweep_whose_trials_all_fail_has_failed_and_says_how(client: httpx.Client) -> None:
    sweep_id = submit(client, arms={"doomed": {"clip": 13}})
    assert wait_for(client, sweep_id, "succeeded", "failed")["state"] == "failed"
    failure = client.get(f"/v1/sweeps/{sweep_id}/trials/0").json()["failure"]
    assert failure["failure_class"] == "diverged"
    assert_problem(client.get(f"/v1/sweeps/{sweep_id}/best"), 404)
    assert_problem(client.get(f"/v1/sweeps/{sweep_id}/best/checkpoint"), 404)


def test_a_running_sweep_can_be_cancelled_and_an_ended_one_cannot(client: httpx.Client, ended: str) -> None:
    sweep_id = submit(client, name=HELD)
    wait_for_an_epoch(client, sweep_id)
    response = client.post(f"/v1/sweeps/{sweep_id}:cancel")
    assert (response.status_code, response.json()["desired_state"]) == (202, "cancelled")
    wait_for(client, sweep_id, "cancelled")
    assert_problem(client.post(f"/v1/sweeps/{sweep_id}:cancel"), 409)
    assert assert_problem(client.post(f"/v1/sweeps/{ended}:cancel"), 409)["code"] == "illegal_move"


# A sweep's life.


def ask(client: httpx.Client, sweep_id: str, verb: str, body: Any = None) -> httpx.Response:
    return client.post(f"/v1/sweeps/{sweep_id}:{verb}", json=body)


def test_an_illegal_move_names_the_legal_ones(client: httpx.Client, ended: str) -> None:
    for verb in ("pause", "resume", "stop", "cancel"):
        detail = assert_problem(ask(client, ended, verb), 409)["detail"]
        assert f"is succeeded: it cannot {verb}; legal now: extend, retry-failed, delete" in detail
    assert client.get(f"/v1/sweeps/{ended}").json()["legal"] == ["extend", "retry-failed", "delete"]


def test_an_ended_sweep_can_be_extended_and_goes_on_with_its_next_trial(client: httpx.Client) -> None:
    sweep_id = submit(client, budget={"trials": 2})
    wait_for(client, sweep_id, "succeeded")
    assert ask(client, sweep_id, "extend", {"trials": 3}).status_code == 202
    sweep = wait_for(client, sweep_id, "succeeded")
    assert (sweep["trials"]["budget"], sweep["trials"]["complete"], sweep["driver_generation"]) == (5, 5, 2)
    assert sweep["spec"]["budget"]["trials"] == 5


@pytest.mark.parametrize(
    ("body", "pointer", "words"),
    [
        ({}, "", "raises at least one limit"),
        ({"trials": 0}, "", "raises at least one limit"),
        ({"trials": -1}, "/trials", "greater than or equal to 0"),
        ({"trials": 99_999}, "/trials", "at most 100000 trials; this one has 6"),
        ({"wall_s": 60}, "/wall_s", "has no wall_s"),
        ({"target": 60}, "", "all 6 trials of the budget have ended: extend trials"),
        ({"trails": 5}, "/trails", "known here: max_failed, target, trials, wall_s"),
        ({"trials": True}, "/trials", "valid integer"),
        ({"trials": "3"}, "/trials", "valid integer"),
    ],
)
def test_an_extension_that_leads_nowhere_is_refused_and_changes_nothing(
    client: httpx.Client, ended: str, body: dict[str, Any], pointer: str, words: str
) -> None:
    before = client.get(f"/v1/sweeps/{ended}").json()
    (error,) = assert_problem(ask(client, ended, "extend", body), 422)["errors"]
    assert error["pointer"] == pointer
    assert words in error["message"]
    assert client.get(f"/v1/sweeps/{ended}").json() == before


def test_a_limit_that_grows_beyond_all_numbers_is_refused(idle: httpx.Client) -> None:
    sweep_id = submit(idle, budget={"trials": 6, "wall_s": 1e308})
    assert_problem(ask(idle, sweep_id, "extend", {"wall_s": 1.7e308}), 422)


def test_failed_trials_are_tried_again_under_their_own_numbers(client: httpx.Client) -> None:
    arms = {"wild": {"clip": 13}, "tame": {}}
    sweep_id = submit(client, arms=arms, budget={"trials": 4})
    wait_for(client, sweep_id, "succeeded")
    refusal = assert_problem(ask(client, sweep_id, "retry-failed"), 422)
    assert "failures: ['diverged']" in refusal["errors"][0]["message"]
    before = client.get(f"/v1/sweeps/{sweep_id}/trials").json()["trials"]
    assert ask(client, sweep_id, "retry-failed", {"classes": ["diverged"]}).status_code == 202
    assert wait_for(client, sweep_id, "succeeded")["driver_generation"] == 2
    after = client.get(f"/v1/sweeps/{sweep_id}/trials").json()["trials"]
    assert [trial["attempt"] for trial in after] == [2, 1, 2, 1]
    assert [trial["params"] for trial in after] == [trial["params"] for trial in before]
    assert client.get(f"/v1/sweeps/{sweep_id}").json()["dashboard_url"] is not None


def test_a_clone_is_a_new_sweep_with_what_was_changed(client: httpx.Client, ended: str) -> None:
    changes = {"name": "again", "sampler": {"seed": 2}, "budget": {"trials": 1}}
    response = ask(client, ended, "clone", changes)
    assert response.status_code == 201
    clone, origin = response.json(), client.get(f"/v1/sweeps/{ended}").json()
    assert response.headers["location"] == f"/v1/sweeps/{clone['id']}"
    assert clone["id"] != ended
    changed = {"name": "again", "sampler": {"name": "random", "seed": 2}}
    budget = {**origin["spec"]["budget"], "trials": 1}
    assert clone["spec"] == {**origin["spec"], **changed, "budget": budget}
    for wrong, pointer in (
        ({"budget": {"trials": 0}}, "/budget/trials"),
        ({"preset": "quickstart"}, "/preset"),
    ):
        (error,) = assert_problem(ask(client, ended, "clone", wrong), 422)["errors"]
        assert error["pointer"] == pointer
    wait_for(client, clone["id"], "succeeded")


def test_a_queued_sweep_can_be_paused_resumed_and_deleted(idle: httpx.Client) -> None:
    sweep_id = submit(idle)
    for verb, state, wish in (
        ("pause", "paused", "paused"),
        ("resume", "queued", "running"),
        ("pause", "paused", "paused"),
    ):
        answer = ask(idle, sweep_id, verb).json()
        assert (answer["state"], answer["desired_state"]) == (state, wish)
    assert idle.delete(f"/v1/sweeps/{sweep_id}").json()["state"] == "deleting"
    assert_problem(ask(idle, sweep_id, "resume"), 409)


def test_a_deleted_sweep_is_gone_with_all_that_it_had(client: httpx.Client, data_dir: Path) -> None:
    sweep_id = submit(client)
    wait_for(client, sweep_id, "succeeded")
    study = client.get(f"/v1/sweeps/{sweep_id}").json()["dashboard_url"].rpartition("/")[2]
    assert (data_dir / "checkpoints" / sweep_id).is_dir()
    assert client.delete(f"/v1/sweeps/{sweep_id}").status_code == 202
    deadline = time.monotonic() + 20
    while client.get(f"/v1/sweeps/{sweep_id}").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (data_dir / "checkpoints" / sweep_id).exists()
    assert sweep_id not in client.get("/api/studies").text
    assert client.get(f"/api/studies/{study}").status_code == 404
    with databases.opened(data_dir) as engine, engine.connect() as connection:
        for table in (epochs, events):
            assert connection.execute(select(table).where(table.c.sweep_id == sweep_id)).all() == []


NO_JSON = pytest.mark.sqlite_only("PostgreSQL keeps nothing in a column of JSON that is none")


@pytest.mark.parametrize(
    "spec",
    ['{"corpus": 3}', '"a text"', pytest.param("{broken", marks=NO_JSON), "[]", '{"arms": {}}'],
)
def test_a_sweep_whose_spec_is_damaged_hides_no_other_and_can_be_deleted(
    client: httpx.Client, ended: str, data_dir: Path, spec: str
) -> None:
    sweep_id = submit(client, budget={"trials": 1})
    wait_for(client, sweep_id, "succeeded")
    with databases.opened(data_dir) as engine, engine.begin() as connection:
        # Of another revision: what rests is told of as it was before.
        damage = "UPDATE fraternal_sweeps SET spec = :spec, revision = revision + 1 WHERE id = :id"
        connection.execute(text(damage), {"spec": spec, "id": sweep_id})
    assert "cannot be read" in assert_problem(client.get(f"/v1/sweeps/{sweep_id}"), 500)["detail"]
    listed = {sweep["id"]: sweep for sweep in client.get("/v1/sweeps").json()["sweeps"]}
    assert "cannot be read" in listed[sweep_id]["state_reason"]
    assert listed[ended]["state"] == "succeeded"
    assert len(client.get(f"/v1/sweeps/{sweep_id}/trials").json()["trials"]) == 1
    assert client.get(f"/v1/sweeps/{sweep_id}/best/checkpoint").status_code == 200
    assert_problem(ask(client, sweep_id, "extend", {"trials": 1}), 500)
    assert client.delete(f"/v1/sweeps/{sweep_id}").status_code == 202


def test_a_queued_sweep_whose_spec_is_damaged_fails_and_the_next_one_runs(
    client: httpx.Client, data_dir: Path
) -> None:
    damaged = submit(client)
    ask(client, damaged, "pause")
    wait_for(client, damaged, "paused", "succeeded")
    with databases.opened(data_dir) as engine, engine.begin() as connection:
        values = {"spec": {}, "state": "queued"}
        connection.execute(update(sweeps).where(sweeps.c.id == damaged).values(values))
    following = submit(client)
    wait_for(client, following, "succeeded")
    listed = {sweep["id"]: sweep for sweep in client.get("/v1/sweeps").json()["sweeps"]}
    assert listed[damaged]["state"] == "failed"
    assert "cannot be read" in listed[damaged]["state_reason"]


# What is refused.

MALFORMED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"bugdet": {}}, "/bugdet", "known here: arms, baseline, budget"),
    "unknown field of a section": ({"model": {"depth": 3}}, "/model/depth", "known here: embed_p, "),
    "empty range": (
        {"space": {"kappa": {"type": "uniform", "low": 1, "high": 1}}},
        "/space/kappa",
        "low must be",
    ),
    "negative probability": ({"model": {"embed_p": -0.1}}, "/model/embed_p", "greater than or equal to 0"),
    "probability of one": ({"model": {"weight_p": 1}}, "/model/weight_p", "less than 1"),
    "no such directory": (
        {"corpus": {"path": "/no/such"}},
        "/corpus/path",
        "train.txt, valid.txt and test.txt",
    ),
    "no such corpus": ({"corpus": {"name": "brown"}}, "/corpus/name", "'sotu', 'ptb' or 'wikitext2'"),
    "two corpora": ({"corpus": {"name": "ptb", "path": "x"}}, "/corpus", "either a name"),
    "too many GPUs": ({"resources": {"gpus": 1}}, "/resources/gpus", "there are 0"),
    "unknown field of the resources": ({"resources": {"cpu": 1}}, "/resources/cpu", "known here: cpus, "),
    "resources that are a word": ({"resources": "Auto"}, "/resources", "Input should be 'auto'"),
    "a GPU's precision": ({"training": {"precision": "tf32"}}, "/training/precision", "the CPUs here do not"),
    "too many CPUs": ({"resources": {"cpus": 3}}, "/resources/cpus", "there are 2"),
    "no trials": ({"budget": {"trials": 0}}, "/budget/trials", "greater than or equal to 1"),
    "no budget": ({"budget": {}}, "/budget/trials", "required"),
    "unknown kind of range": (
        {"space": {"kappa": {"type": "normal"}}},
        "/space/kappa/type",
        "choice, integer",
    ),
    "unknown parameter": ({"arms": {"fd": {"kapa": 0}}}, "/arms/fd/kapa", "known: alpha"),
    "unknown preset": ({"preset": "papers-search"}, "/preset", "paper-search, quickstart"),
    "baseline that is no arm": ({"baseline": "awd"}, "/baseline", "fd, eld"),
    "an odd name for an arm": ({"arms": {"a/b": {}}}, "/arms/a~1b", "pattern"),
    "multiplier that leads too far": (
        {"space": {"input_p_multiplier": {"type": "uniform", "low": 1, "high": 9}}},
        "/space/input_p_multiplier",
        "less than 1",
    ),
}


@pytest.mark.parametrize(("changes", "pointer", "words"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_spec_is_refused_with_its_place_and_what_would_be_right(
    idle: httpx.Client, changes: dict[str, Any], pointer: str, words: str
) -> None:
    before = sweep_ids(idle)
    document = assert_problem(idle.post("/v1/sweeps", json={**SPEC, **changes}), 422)
    assert [error["pointer"] for error in document["errors"]] == [pointer]
    assert words in document["errors"][0]["message"]
    assert sweep_ids(idle) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": []},
        {"preset": {}},
        {"arms": {"fd": {"embed_p_multiplier": "half"}}},
        {"space": {"embed_p_multiplier": {"type": "choice", "values": ["half", 1]}}},
        {"baseline": True},
        {"space": {"kappa": {"type": "choice", "values": [[]]}}},
    ],
    ids=str,
)
def test_a_value_of_a_senseless_type_is_refused_like_any_other(idle: httpx.Client, changes: Any) -> None:
    assert_problem(idle.post("/v1/sweeps", json={**SPEC, **changes}), 422)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_know_is_refused(idle: httpx.Client, constant: str) -> None:
    body = json.dumps({**SPEC, "training": {"lr": "?"}}).replace('"?"', constant)
    assert assert_problem(post(idle, body.encode()), 422)["errors"][0]["pointer"] == "/training/lr"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"budget": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_json_is_a_bad_request(idle: httpx.Client, body: bytes) -> None:
    assert_problem(post(idle, body), 400)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"sweep"'])
def test_a_body_that_is_no_object_is_pointed_to_as_a_whole(idle: httpx.Client, body: bytes) -> None:
    assert [error["pointer"] for error in assert_problem(post(idle, body), 422)["errors"]] == [""]


def test_a_body_of_another_type_is_refused_as_such(idle: httpx.Client) -> None:
    assert_problem(idle.post("/v1/sweeps", content=json.dumps(SPEC)), 415)


def test_a_body_over_a_mebibyte_is_refused(idle: httpx.Client) -> None:
    padded = json.dumps(SPEC).encode().ljust(1024 * 1024 + 1)
    assert_problem(post(idle, padded), 413)
    assert post(idle, padded[:-1]).status_code == 201


def test_a_large_body_whose_length_is_not_announced_is_refused_too(idle: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 100_000

    response = idle.post("/v1/sweeps", content=pieces(), headers={"content-type": "application/json"})
    assert_problem(response, 413)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    (),
    *[(field,) for field in (*SPEC, "preset", "arms", "pruner", "baseline", "labels", "sampler", "model")],
    ("training", "lr"),
    ("space", "lr"),
    ("space", "lr", "low"),
    ("space", "embed_p_multiplier"),
    ("arms", "fd"),
    ("arms", "fd", "kappa"),
    ("arms", "fd", "weight_p_multiplier"),
    ("corpus", "path"),
    ("corpus", "vocabulary_size"),
]


def with_value(place: tuple[str, ...], value: Any) -> Any:
    if not place:
        return value
    spec = json.loads(json.dumps(SPEC))
    inner = spec
    for part in place[:-1]:
        inner = inner.setdefault(part, {})
    inner[place[-1]] = value
    return spec


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_whatever_is_sent_is_taken_or_refused_and_never_fails_the_service(
    idle: httpx.Client, data_dir: Path, place: tuple[str, ...], value: Any
) -> None:
    before = rows(data_dir)
    response = post(idle, json.dumps(with_value(place, value)).encode())
    if response.status_code != 201:
        assert_problem(response, 422)
    assert rows(data_dir) == before + (response.status_code == 201)


# Paths and methods.


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1/sweeps/",
        "/v1/sweeps/none",
        "/v1/sweeps/%00",
        "/v1/sweeps/none/trials",
        "/v1/sweeps/none/best",
        "/v1/sweeps/none/best/checkpoint",
    ],
)
def test_what_does_not_exist_is_a_problem_too(client: httpx.Client, path: str) -> None:
    assert assert_problem(client.get(path), 404)["instance"] == httpx.URL(path).path


@pytest.mark.parametrize("number", ["6", "-1", "two", "9" * 30])
def test_a_number_that_no_trial_has_is_not_found(client: httpx.Client, ended: str, number: str) -> None:
    assert_problem(client.get(f"/v1/sweeps/{ended}/trials/{number}"), 404)


def test_the_colon_of_a_verb_is_no_part_of_an_id(client: httpx.Client) -> None:
    assert "'none'" in assert_problem(client.post("/v1/sweeps/none:cancel"), 404)["detail"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/sweeps", "GET, POST"),
        ("PUT", "/v1/sweeps/none", "DELETE, GET, PATCH"),
        ("GET", "/v1/sweeps/none:cancel", "POST"),
        ("OPTIONS", "/v1/sweeps/none:cancel", "POST"),
        ("DELETE", "/v1/sweeps/none:cancel", "POST"),
    ],
)
def test_a_method_that_a_path_does_not_have_is_answered_with_those_it_has(
    client: httpx.Client, method: str, path: str, allow: str
) -> None:
    response = client.request(method, path)
    assert_problem(response, 405)
    assert response.headers["allow"] == allow


def test_a_verb_that_there_is_not_is_answered_with_those_there_are(client: httpx.Client) -> None:
    for path in ("/v1/sweeps/none:fly", "/v1/sweeps/none:", "/v1/sweeps/none:cancel:now"):
        detail = assert_problem(client.post(path), 404)["detail"]
        assert ":cancel, :clone, :extend, :pause, :resume, :retry-failed, :stop" in detail
    assert "verb" not in assert_problem(client.post("/v1/nothing:fly"), 404)["detail"]


def test_a_crash_is_answered_without_a_traceback(
    client: httpx.Client, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("service.sweeps.SweepController.get", crash)
    response = client.get(f"/v1/sweeps/{ended}", headers={"connection": "close"})
    assert_problem(response, 500)
    assert "secret" not in response.text
    monkeypatch.undo()
    assert client.get(f"/v1/sweeps/{ended}").status_code == 200


def test_the_service_is_alive_and_ready(client: httpx.Client) -> None:
    assert client.get("/healthz").json()["status"] == "alive"
    ready = client.get("/readyz").json()
    assert (ready["status"], ready["not_ready"]) == ("ready", [])


def test_a_service_that_lacks_something_is_alive_but_not_ready(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.sweeps.SweepController.check_ready", lambda _: ["no database"])
    response = client.get("/readyz")
    assert (response.status_code, response.json()["not_ready"]) == (503, ["no database"])
    assert client.get("/healthz").status_code == 200


def test_the_api_describes_itself_and_its_problems(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    assert description["info"]["title"] == "fraternal"
    create = description["paths"]["/v1/sweeps"]["post"]["responses"]
    assert {"201", "400", "413", "415", "422"} <= set(create)
    assert set(description["paths"]["/v1/sweeps/{sweep_id}:cancel"]["post"]["responses"]) >= {
        "202",
        "404",
        "409",
    }
    assert PROBLEM in create["422"]["content"]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], f"{method} {path} is not described"


# The best checkpoint.


@pytest.fixture(scope="module")
def checkpoint(client: httpx.Client, ended: str) -> httpx.Response:
    response = client.get(f"/v1/sweeps/{ended}/best/checkpoint")
    assert response.status_code == 200
    return response


def path_of(checkpoint: httpx.Response) -> str:
    return str(checkpoint.request.url.path)


def test_a_checkpoint_has_the_digest_that_its_headers_state(checkpoint: httpx.Response) -> None:
    digest = hashlib.sha256(checkpoint.content)
    assert checkpoint.headers["etag"] == f'"{digest.hexdigest()}"'
    assert checkpoint.headers["repr-digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert re.fullmatch(r'attachment; filename="[\w.-]+\.tar"', checkpoint.headers["content-disposition"])


def test_head_says_what_get_would_send(client: httpx.Client, checkpoint: httpx.Response) -> None:
    head = client.head(path_of(checkpoint))
    assert head.content == b""
    for name in ("content-length", "etag", "repr-digest", "accept-ranges", "content-type"):
        assert head.headers[name] == checkpoint.headers[name]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 1_000_000), max_size=4))
def test_ranges_put_together_are_the_whole_file(
    client: httpx.Client, checkpoint: httpx.Response, cuts: set[int]
) -> None:
    size = len(checkpoint.content)
    edges = [0, *sorted(cut for cut in cuts if cut < size), size]
    parts = []
    for start, stop in itertools.pairwise(edges):
        response = client.get(path_of(checkpoint), headers={"range": f"bytes={start}-{stop - 1}"})
        assert response.status_code == 206
        assert response.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        assert response.headers["etag"] == checkpoint.headers["etag"]
        parts.append(response.content)
    assert b"".join(parts) == checkpoint.content


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=-7", -7, None), ("bytes=1000-", 1000, None), ("bytes=5-5", 5, 6), ("bytes=9-99999999", 9, None)],
)
def test_an_open_range_ends_where_the_file_does(
    client: httpx.Client, checkpoint: httpx.Response, asked: str, first: int, last: int | None
) -> None:
    response = client.get(path_of(checkpoint), headers={"range": asked})
    assert (response.status_code, response.content) == (206, checkpoint.content[first:last])


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_a_range_outside_the_file_is_refused_with_the_files_size(
    client: httpx.Client, checkpoint: httpx.Response, asked: str
) -> None:
    response = client.get(path_of(checkpoint), headers={"range": asked})
    assert_problem(response, 416)
    assert response.headers["content-range"] == f"bytes */{len(checkpoint.content)}"


@pytest.mark.parametrize(
    "asked", ["bytes=5-2", "bytes=1-2,4-5", "bytes=-", "lines=1-2", "bytes=" + "9" * 5000 + "-"]
)
def test_a_range_that_is_not_understood_is_ignored(
    client: httpx.Client, checkpoint: httpx.Response, asked: str
) -> None:
    response = client.get(path_of(checkpoint), headers={"range": asked})
    assert (response.status_code, response.content) == (200, checkpoint.content)


def test_a_range_of_another_version_gets_the_whole_of_this_one(
    client: httpx.Client, checkpoint: httpx.Response
) -> None:
    for condition, status in ((checkpoint.headers["etag"], 206), ('"another"', 200)):
        headers = {"range": "bytes=0-9", "if-range": condition}
        assert client.get(path_of(checkpoint), headers=headers).status_code == status


def test_a_checkpoint_that_the_client_has_is_not_sent_again(
    client: httpx.Client, checkpoint: httpx.Response
) -> None:
    for condition, status in (
        (checkpoint.headers["etag"], 304),
        ('"a", W/' + checkpoint.headers["etag"], 304),
        ("*", 304),
        ('"another"', 200),
    ):
        response = client.get(path_of(checkpoint), headers={"if-none-match": condition})
        assert response.status_code == status
        assert response.headers["etag"] == checkpoint.headers["etag"]
        assert bool(response.content) == (status == 200)


def test_the_best_checkpoint_so_far_can_be_fetched_while_the_sweep_runs(
    client: httpx.Client, running: str
) -> None:
    assert client.get(f"/v1/sweeps/{running}").json()["state"] == "running"
    assert client.get(f"/v1/sweeps/{running}/best/checkpoint").status_code == 200


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[BinaryIO]:
    """Every checkpoint file that a request opens, kept alive: only the service itself may close it."""
    files: list[BinaryIO] = []
    original = SweepController.best_checkpoint

    def noted(controller: SweepController, sweep_id: str) -> OpenCheckpoint:
        checkpoint = original(controller, sweep_id)
        files.append(checkpoint.file)
        return checkpoint

    monkeypatch.setattr(SweepController, "best_checkpoint", noted)
    return files


def wait_until_closed(files: list[BinaryIO]) -> None:
    deadline = time.monotonic() + 10
    while not all(file.closed for file in files):
        assert time.monotonic() < deadline, "a checkpoint stayed open"
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "headers", [{}, {"range": "bytes=1-2"}, {"range": "bytes=99999999-"}, {"if-none-match": "*"}], ids=str
)
def test_no_answer_leaves_a_checkpoint_open(
    client: httpx.Client,
    checkpoint: httpx.Response,
    opened: list[BinaryIO],
    method: str,
    headers: dict[str, str],
) -> None:
    client.request(method, path_of(checkpoint), headers=headers)
    assert len(opened) == 1
    wait_until_closed(opened)


def test_a_client_that_goes_away_leaves_no_checkpoint_open(
    client: httpx.Client, checkpoint: httpx.Response, opened: list[BinaryIO]
) -> None:
    with client.stream("GET", path_of(checkpoint)) as response:
        next(response.iter_raw(1))
    assert len(opened) == 1
    wait_until_closed(opened)


# The dashboard.


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/studies/1", "/static/bundle.js", "/api/studies"])
def test_the_dashboard_is_there_whatever_encodings_a_client_takes(client: httpx.Client, path: str) -> None:
    for encoding in ("gzip, br", "identity", ""):
        assert client.get(path, headers={"accept-encoding": encoding}).status_code == 200


def test_a_client_that_does_not_name_its_encodings_takes_what_is_not_encoded() -> None:
    assert _with_accept_encoding([(b"host", b"x")])[-1] == (b"accept-encoding", b"identity")
    assert _with_accept_encoding([(b"accept-encoding", b"br")]) == [(b"accept-encoding", b"br")]


def test_the_dashboard_shows_a_sweep_as_a_study_of_its_id(client: httpx.Client, ended: str) -> None:
    sweep = client.get(f"/v1/sweeps/{ended}").json()
    study_id = int(sweep["dashboard_url"].rpartition("/")[2])
    study = client.get(f"/api/studies/{study_id}").json()
    assert (study["name"], len(study["trials"])) == (ended, 6)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/api/studies/1", "/api/studies", "/dashboard", "/artifacts/1/2"])
def test_nothing_can_be_changed_through_the_dashboard(client: httpx.Client, method: str, path: str) -> None:
    before = client.get("/api/studies").json()
    assert_problem(client.request(method, path), 405)
    assert client.get("/api/studies").json() == before


def test_a_failure_inside_the_dashboard_is_no_failure_of_the_service(client: httpx.Client) -> None:
    assert client.get("/api/studies/1?after=abc").status_code == 500
    assert client.get("/healthz").status_code == 200


# The process.

SCRIPT = """
import asyncio, sys
from pathlib import Path
import httpx
from service.app import create_app
from service.launcher import LocalLauncher
from service.settings import Settings

async def ask(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path in ("/healthz", "/metrics", "/v1/sweeps", "/openapi.json", "/dashboard", "/api/studies"):
            assert (await client.get(path)).status_code == 200
        spec = {"corpus": {"name": "sotu"}, "budget": {"trials": 1}}
        assert (await client.post("/v1/sweeps", json=spec)).status_code == 201

settings = Settings(data_dir=Path(sys.argv[1]))
asyncio.run(ask(create_app(settings, LocalLauncher(settings))))
print(sorted({"torch", "ray"} & set(sys.modules)))
"""


def test_the_web_process_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = {**os.environ, **databases.environment_of(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
