"""The API that people build on: pages, changes, points, single trials, requests that are carried out once."""

import base64
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, delete

from service.database import open_engine
from service.metrics import Metrics
from service.settings import Settings
from service.sweeps import SweepController
from service.tables import answers, sweeps
from tests.played_service import SPEC, played_service, submit, wait_for
from tests.test_http import assert_problem
from trials.store import unpack


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, database_url: str | None) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data"), database_url=database_url) as client:
        yield client


@pytest.fixture(scope="module")
def waiting(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, database_url: str | None
) -> Iterator[tuple[httpx.Client, Engine]]:
    data_dir = tmp_path_factory.mktemp("idle")
    url = database_url and request.getfixturevalue("server").create_database()
    engine = open_engine(url or Settings(data_dir=data_dir).resolved_database_url)
    with played_service(data_dir, plays=False, database_url=url) as client:
        yield client, engine
    engine.dispose()


@pytest.fixture
def idle(waiting: tuple[httpx.Client, Engine]) -> Iterator[httpx.Client]:
    """A client of a service without sweeps, that takes them and lets them wait."""
    client, engine = waiting
    yield client
    with engine.begin() as connection:
        for table in (answers, sweeps):
            connection.execute(delete(table))


def ids(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [sweep["id"] for sweep in response.json()["sweeps"]]


def pages(client: httpx.Client, path: str, **query: Any) -> Iterator[Any]:
    token: dict[str, str] = {}
    while True:
        response = client.get(path, params={**query, **token})
        assert response.status_code == 200, response.text
        yield response.json()
        if response.json()["next_page_token"] is None:
            return
        token = {"page_token": response.json()["next_page_token"]}


# Lists.


def test_pages_put_together_are_the_whole_list_in_every_order(idle: httpx.Client) -> None:
    for number in range(7):
        submit(idle, name=f"{'ba'[number % 2]}", priority=number % 3 - 1)
    for order in ("created_at", "name", "priority", "state_since"):
        whole = ids(idle.get("/v1/sweeps", params={"order_by": order}))
        assert len(set(whole)) == 7
        for order_by, expected in ((order, whole), (f"-{order}", whole[::-1])):
            for size in (1, 3, 7):
                found = [
                    sweep["id"]
                    for page in pages(idle, "/v1/sweeps", order_by=order_by, page_size=size)
                    for sweep in page["sweeps"]
                ]
                assert found == expected, (order_by, size)


def test_sweeps_that_come_between_two_pages_shift_nothing(idle: httpx.Client) -> None:
    old = [submit(idle) for _ in range(5)]
    seen = []
    for page in pages(idle, "/v1/sweeps", page_size=2):
        seen += [sweep["id"] for sweep in page["sweeps"]]
        submit(idle)
    assert seen == old[::-1]


def test_lists_are_ordered_by_priority_and_then_by_age(idle: httpx.Client) -> None:
    low, first, second = submit(idle, priority=-5), submit(idle), submit(idle)
    high = submit(idle, priority=9)
    assert ids(idle.get("/v1/sweeps", params={"order_by": "-priority"})) == [high, second, first, low]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"label": "team=nlp"}, ["c", "a"]),
        ({"label": ["team=nlp", "who"]}, ["c"]),
        ({"label": "who="}, ["c"]),
        ({"label": "a.b"}, ["b"]),
        ({"name": "B_"}, ["b"]),
        ({"name": "%"}, ["b"]),
        ({"state": ["paused", "queued"]}, ["c", "b", "a"]),
        ({"state": "paused", "label": "team"}, ["a"]),
        ({"state": "running"}, []),
    ],
    ids=str,
)
def test_filters_choose_the_sweeps_that_fit_all_of_them(
    idle: httpx.Client, query: Any, expected: list[str]
) -> None:
    made = {
        "a": submit(idle, name="a", labels={"team": "nlp"}),
        "b": submit(idle, name="κb_%", labels={"a.b": "x", "team": "vision"}),
        "c": submit(idle, name="c", labels={"team": "nlp", "who": ""}),
    }
    idle.post(f"/v1/sweeps/{made['a']}:pause")
    assert ids(idle.get("/v1/sweeps", params=query)) == [made[name] for name in expected]


@pytest.mark.parametrize(
    ("path", "query", "parameter"),
    [
        ("/v1/sweeps", {"page_size": 0}, "page_size"),
        ("/v1/sweeps", {"page_size": 501}, "page_size"),
        ("/v1/sweeps", {"page_size": "many"}, "page_size"),
        ("/v1/sweeps", {"page_token": "nonsense"}, "page_token"),
        ("/v1/sweeps", {"page_token": "W10"}, "page_token"),
        ("/v1/sweeps", {"page_token": "WyJhIiwiXHUwMDAwIiwxXQ"}, "page_token"),
        ("/v1/sweeps", {"page_token": "%00"}, "page_token"),
        ("/v1/sweeps", {"order_by": "colour"}, "order_by"),
        ("/v1/sweeps", {"state": "asleep"}, "state"),
        ("/v1/sweeps", {"label": "=x"}, "label"),
        ("/v1/sweeps", {"label": "a\"b'{},=x"}, "label"),
        ("/v1/sweeps", {"name": "a\x00b"}, "name"),
        ("/v1/sweeps", {"stat": "running"}, "stat"),
        ("/v1/sweeps/{ended}/trials", {"state": "running"}, "state"),
        ("/v1/sweeps/{ended}/trials", {"arm": "/"}, "arm"),
        ("/v1/sweeps/{ended}/trials", {"order_by": "name"}, "order_by"),
    ],
    ids=str,
)
def test_parameter_that_makes_no_sense_is_named(
    client: httpx.Client, ended: str, path: str, query: dict[str, Any], parameter: str
) -> None:
    (error,) = assert_problem(client.get(path.format(ended=ended), params=query), 422)["errors"]
    assert (error["parameter"], error["pointer"]) == (parameter, None)


def test_token_is_of_use_with_its_own_question_only(idle: httpx.Client) -> None:
    for _ in range(3):
        submit(idle, labels={"team": "nlp"})
    token = idle.get("/v1/sweeps", params={"page_size": 1}).json()["next_page_token"]
    for other in ({"order_by": "name"}, {"label": "team=nlp"}, {"state": "queued"}):
        (error,) = assert_problem(idle.get("/v1/sweeps", params={"page_token": token, **other}), 422)[
            "errors"
        ]
        assert error["code"] == "other_page_token"
    assert len(ids(idle.get("/v1/sweeps", params={"page_token": token, "page_size": 2}))) == 2


@pytest.mark.parametrize("far", [2**31, 2**53, -(2**40)])
@pytest.mark.parametrize("order_by", ["created_at", "priority", "name"])
def test_a_token_that_counts_further_than_a_database_does_is_none(
    idle: httpx.Client, order_by: str, far: int
) -> None:
    for _ in range(2):
        submit(idle)
    asked = {"order_by": order_by, "page_size": 1}
    token = idle.get("/v1/sweeps", params=asked).json()["next_page_token"]
    *rest, _ = json.loads(base64.urlsafe_b64decode(token + "=="))
    forged = base64.urlsafe_b64encode(json.dumps([*rest, far]).encode()).decode().rstrip("=")
    response = idle.get("/v1/sweeps", params={**asked, "page_token": forged})
    assert assert_problem(response, 422)["errors"][0]["code"] == "bad_page_token"


@pytest.mark.parametrize("last", ["9" * 10, "9" * 18])
def test_a_cursor_that_counts_further_than_a_database_does_finds_no_sweep(
    idle: httpx.Client, last: str
) -> None:
    for asked in ({"params": {"after": last}}, {"headers": {"last-event-id": last}}):
        assert_problem(idle.get("/v1/sweeps/s404/events", **asked), 404)


def test_trials_are_listed_by_what_is_asked_for(client: httpx.Client, ended: str) -> None:
    path = f"/v1/sweeps/{ended}/trials"
    for order_by, expected in (
        ("number", [0, 1, 2, 3, 4, 5]),
        ("-number", [5, 4, 3, 2, 1, 0]),
        ("best_valid_perplexity", [5, 4, 3, 2, 1, 0]),
        ("-best_valid_perplexity", [0, 1, 2, 3, 4, 5]),
        ("epochs_done", [0, 1, 2, 3, 4, 5]),
    ):
        for size in (1, 4, 6):
            found = [
                trial["number"]
                for page in pages(client, path, order_by=order_by, page_size=size)
                for trial in page["trials"]
            ]
            assert found == expected, (order_by, size)
    arms = client.get(path, params={"arm": "eld", "state": "COMPLETE"}).json()["trials"]
    assert [trial["number"] for trial in arms] == [1, 3, 5]
    assert client.get(path, params={"state": ["FAIL", "PRUNED"]}).json() == {
        "trials": [],
        "next_page_token": None,
    }


def test_trials_without_a_perplexity_come_last_in_either_direction(client: httpx.Client) -> None:
    arms = {"fd": {"regularizer": "fraternal"}, "broken": {"clip": 13}}
    sweep_id = submit(client, arms=arms)
    wait_for(client, sweep_id, "succeeded")
    for order_by, first in (("best_valid_perplexity", 4), ("-best_valid_perplexity", 0)):
        for size in (2, 6):
            found = [
                trial["number"]
                for page in pages(client, f"/v1/sweeps/{sweep_id}/trials", order_by=order_by, page_size=size)
                for trial in page["trials"]
            ]
            assert found[0] == first
            assert found[3:] == [1, 3, 5]


# Changes.


def patch(client: httpx.Client, sweep_id: str, body: Any, if_match: str | None = "*") -> httpx.Response:
    headers = {} if if_match is None else {"if-match": if_match}
    return client.patch(f"/v1/sweeps/{sweep_id}", json=body, headers=headers)


def test_change_says_which_sweep_it_is_of_and_is_refused_once_that_is_another(idle: httpx.Client) -> None:
    sweep_id = submit(idle, name="a", labels={"team": "nlp", "who": "me"})
    looked = idle.get(f"/v1/sweeps/{sweep_id}")
    assert looked.headers["etag"] == f'"{looked.json()["revision"]}"'
    body = {"name": "b", "labels": {"who": None, "new": "x"}, "priority": 7, "max_concurrent": 2}
    response = patch(idle, sweep_id, body, looked.headers["etag"])
    assert response.status_code == 200, response.text
    changed = response.json()
    assert (changed["name"], changed["labels"], changed["priority"]) == ("b", {"team": "nlp", "new": "x"}, 7)
    assert changed["spec"]["resources"]["max_concurrent"] == 2
    assert response.headers["etag"] != looked.headers["etag"]
    assert idle.get(f"/v1/sweeps/{sweep_id}").json() == changed
    for stale in (looked.headers["etag"], f"W/{response.headers['etag']}", '"x", "y"'):
        assert_problem(patch(idle, sweep_id, {"name": "c"}, stale), 412)
    assert patch(idle, sweep_id, {"name": "c"}, f'"x", {response.headers["etag"]}').status_code == 200


def test_change_of_nothing_in_particular_is_refused(idle: httpx.Client) -> None:
    sweep_id = submit(idle)
    assert_problem(patch(idle, sweep_id, {"name": "b"}, None), 428)
    for nonsense in ("3", '"', "'3'", '"a" "b"'):
        (error,) = assert_problem(patch(idle, sweep_id, {"name": "b"}, nonsense), 422)["errors"]
        assert error["parameter"] == "If-Match"
    assert idle.get(f"/v1/sweeps/{sweep_id}").json()["name"] == ""


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"nam": "x"}, "/nam"),
        ({"name": None}, "/name"),
        ({"name": "a\x00"}, "/name"),
        ({"labels": {"a b": "x"}}, "/labels/a b"),
        ({"labels": {"a": 1}}, "/labels/a"),
        ({"priority": 1001}, "/priority"),
        ({"priority": True}, "/priority"),
        ({"max_concurrent": 0}, "/max_concurrent"),
        ({"budget": None}, "/budget"),
        ({"budget": {"trials": 0}}, "/budget/trials"),
        ({"budget": {"trials": None}}, "/budget/trials"),
        ({"budget": {"hours": 1}}, "/budget/hours"),
        ({"budget": {"trials": 1}}, "/points"),
        ([], ""),
    ],
    ids=str,
)
def test_change_to_what_cannot_be_points_there_and_changes_nothing(
    idle: httpx.Client, body: Any, pointer: str
) -> None:
    sweep_id = submit(idle, points=[{"lr": 3}, {"lr": 4}])
    before = idle.get(f"/v1/sweeps/{sweep_id}").json()
    assert pointer in [
        error["pointer"] for error in assert_problem(patch(idle, sweep_id, body), 422)["errors"]
    ]
    assert idle.get(f"/v1/sweeps/{sweep_id}").json() == before


def test_budget_can_be_lowered_to_what_has_begun(client: httpx.Client, running: str) -> None:
    response = patch(client, running, {"budget": {"trials": 1, "wall_s": 1e6}})
    assert response.status_code == 200
    assert response.json()["trials"]["budget"] == 1
    assert response.json()["spec"]["budget"]["wall_s"] == 1e6
    assert patch(client, running, {"budget": {"wall_s": None}}).json()["spec"]["budget"]["wall_s"] is None


def test_budget_of_a_sweep_that_has_ended_is_extended_and_not_changed(
    client: httpx.Client, ended: str
) -> None:
    problem = assert_problem(patch(client, ended, {"budget": {"trials": 20}}), 409)
    assert "its budget cannot change" in problem["detail"]
    assert "extend" in problem["detail"]


def test_one_of_many_changes_of_one_revision_is_carried_out(idle: httpx.Client) -> None:
    sweep_id = submit(idle)
    etag = idle.get(f"/v1/sweeps/{sweep_id}").headers["etag"]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: patch(idle, sweep_id, {"name": f"n{n}"}, etag), range(8)))
    assert Counter(response.status_code for response in found) == {200: 1, 412: 7}
    (won,) = [response for response in found if response.status_code == 200]
    assert idle.get(f"/v1/sweeps/{sweep_id}").json()["name"] == won.json()["name"]


def test_renamed_sweep_is_renamed_on_the_dashboard(client: httpx.Client, running: str) -> None:
    patch(client, running, {"name": "better"})
    studies = client.get("/api/studies").json()["study_summaries"]
    (attributes,) = [study["user_attrs"] for study in studies if study["study_name"] == running]
    assert {"key": "name", "value": "better"} in attributes


def test_sweeps_with_the_highest_priority_run_first(client: httpx.Client, running: str) -> None:
    low, first, high = submit(client, priority=-1), submit(client), submit(client, priority=5)
    raised = submit(client, priority=-9)
    patch(client, raised, {"priority": 6})
    client.post(f"/v1/sweeps/{running}:cancel")
    begun = [wait_for(client, name, "succeeded") for name in (low, first, high, raised)]
    order = sorted(begun, key=lambda sweep: sweep["started_at"])
    assert [sweep["id"] for sweep in order] == [raised, high, first, low]


# Points.


def test_points_are_tried_before_anything_is_sampled(client: httpx.Client) -> None:
    sweep_id = submit(client, points=[{"lr": 3}, {"lr": 4.5}])
    wait_for(client, sweep_id, "succeeded")
    tried = [trial["params"]["lr"] for trial in client.get(f"/v1/sweeps/{sweep_id}/trials").json()["trials"]]
    assert tried[:4] == [3.0, 3.0, 4.5, 4.5]
    points = client.get(f"/v1/sweeps/{sweep_id}/points").json()["points"]
    assert [(point["params"], point["draw"]) for point in points] == [({"lr": 3}, 0), ({"lr": 4.5}, 1)]


def test_point_for_a_sweep_that_has_ended_is_tried_once_it_is_extended(client: httpx.Client) -> None:
    sweep_id = submit(client)
    wait_for(client, sweep_id, "succeeded")
    response = client.post(f"/v1/sweeps/{sweep_id}/points", json={"params": {"lr": 7}})
    assert response.status_code == 201, response.text
    assert response.json()["draw"] is None
    client.post(f"/v1/sweeps/{sweep_id}:extend", json={"trials": 2})
    wait_for(client, sweep_id, "succeeded")
    trials = client.get(f"/v1/sweeps/{sweep_id}/trials").json()["trials"]
    assert [trial["params"]["lr"] for trial in trials[6:]] == [7.0, 7.0]


def test_point_can_be_taken_back_until_it_is_tried(client: httpx.Client, ended: str) -> None:
    path = f"/v1/sweeps/{ended}/points"
    point = client.post(path, json={"params": {"lr": 7}}).json()
    assert client.delete(f"{path}/{point['id']}").status_code == 204
    assert_problem(client.delete(f"{path}/{point['id']}"), 404)
    sweep_id = submit(client, points=[{"lr": 3}])
    wait_for(client, sweep_id, "succeeded")
    (tried,) = client.get(f"/v1/sweeps/{sweep_id}/points").json()["points"]
    assert_problem(client.delete(f"/v1/sweeps/{sweep_id}/points/{tried['id']}"), 409)


@pytest.mark.parametrize(
    ("params", "pointer"),
    [
        ({"lr": 31}, "/params/lr"),
        ({"lr": "7"}, "/params/lr"),
        ({"lr": True}, "/params/lr"),
        ({"kappa/x": 1}, "/params/kappa~1x"),
        ({"lr": None}, "/params/lr"),
        ({"lr": []}, "/params/lr"),
        ([], "/params"),
    ],
    ids=str,
)
def test_point_outside_the_space_is_refused_with_its_place(
    idle: httpx.Client, params: Any, pointer: str
) -> None:
    sweep_id = submit(idle)
    response = idle.post(f"/v1/sweeps/{sweep_id}/points", json={"params": params})
    assert pointer in [error["pointer"] for error in assert_problem(response, 422)["errors"]]
    assert idle.get(f"/v1/sweeps/{sweep_id}/points").json() == {"points": []}


# Single trials.


def test_running_trial_is_stopped_and_an_ended_one_cannot_be(
    client: httpx.Client, running: str, ended: str
) -> None:
    response = client.post(f"/v1/sweeps/{running}/trials/0:stop")
    assert response.status_code == 202, response.text
    assert response.json()["number"] == 0
    problem = assert_problem(client.post(f"/v1/sweeps/{ended}/trials/0:stop"), 409)
    assert "COMPLETE" in problem["detail"]
    assert_problem(client.post(f"/v1/sweeps/{ended}/trials/99:stop"), 404)
    assert_problem(client.post("/v1/sweeps/none/trials/0:stop"), 404)


def test_one_failed_trial_is_tried_again_and_the_others_are_not(client: httpx.Client) -> None:
    sweep_id = submit(client, arms={"fd": {"regularizer": "fraternal"}, "broken": {"clip": 13}})
    wait_for(client, sweep_id, "succeeded")
    path = f"/v1/sweeps/{sweep_id}/trials"
    assert_problem(client.post(f"{path}/0:retry"), 409)
    assert client.post(f"{path}/3:retry").status_code == 202
    wait_for(client, sweep_id, "succeeded")
    attempts = [trial["attempt"] for trial in client.get(path).json()["trials"]]
    assert attempts == [1, 1, 1, 2, 1, 1]


def test_pinned_trial_says_so_until_it_is_unpinned(client: httpx.Client, ended: str) -> None:
    path = f"/v1/sweeps/{ended}/trials/2"
    for verb, pinned in (("pin", True), ("pin", True), ("unpin", False)):
        assert client.post(f"{path}:{verb}").json()["pinned"] is pinned
        assert client.get(path).json()["pinned"] is pinned


def test_checkpoint_of_a_pinned_trial_stays_and_of_the_others_goes(client: httpx.Client) -> None:
    sweep_id = submit(client, retention={"bests_per_arm": 1}, budget={"trials": 4})
    wait_for(client, sweep_id, "succeeded")
    path = f"/v1/sweeps/{sweep_id}/trials"
    assert_problem(client.post(f"{path}/0:pin"), 409)
    assert client.post(f"{path}/2:pin").status_code == 202
    client.post(f"/v1/sweeps/{sweep_id}:extend", json={"trials": 4})
    wait_for(client, sweep_id, "succeeded")
    there = [client.head(f"{path}/{number}/checkpoint").status_code for number in range(8)]
    assert there == [404, 404, 200, 404, 404, 404, 200, 200]


def test_checkpoint_of_any_trial_can_be_fetched(client: httpx.Client, ended: str) -> None:
    best = client.get(f"/v1/sweeps/{ended}/best/checkpoint")
    same = client.get(f"/v1/sweeps/{ended}/trials/5/checkpoint")
    other = client.get(f"/v1/sweeps/{ended}/trials/0/checkpoint")
    assert (same.headers["etag"], same.content) == (best.headers["etag"], best.content)
    trial = client.get(f"/v1/sweeps/{ended}/trials/0").json()
    provenance = json.loads(unpack(other.content, "other")["provenance.json"])
    assert provenance["checkpoint_sha256"] == trial["checkpoint_sha256"]
    assert_problem(client.get(f"/v1/sweeps/{ended}/trials/9/checkpoint"), 404)


# Requests that are carried out once.

KEY = {"idempotency-key": "k-1"}


def count(client: httpx.Client) -> int:
    return len(ids(client.get("/v1/sweeps", params={"page_size": 500})))


def test_request_with_a_key_is_carried_out_once_and_answered_the_same(idle: httpx.Client) -> None:
    first = idle.post("/v1/sweeps", json=SPEC, headers=KEY)
    idle.post(f"/v1/sweeps/{first.json()['id']}:pause")
    again = idle.post("/v1/sweeps", json=SPEC, headers=KEY)
    assert (again.status_code, again.content) == (first.status_code, first.content) == (201, first.content)
    for name in ("location", "etag", "content-type"):
        assert again.headers[name] == first.headers[name]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert count(idle) == 1
    assert idle.post("/v1/sweeps", json=SPEC, headers={"idempotency-key": "k-2"}).status_code == 201
    assert count(idle) == 2


def test_key_of_another_request_is_refused_and_nothing_is_done(idle: httpx.Client) -> None:
    first = idle.post("/v1/sweeps", json=SPEC, headers=KEY).json()["id"]
    for path, body in (
        ("/v1/sweeps", {**SPEC, "name": "other"}),
        ("/v1/sweeps?validate_only=false", SPEC),
        (f"/v1/sweeps/{first}:pause", None),
        (f"/v1/sweeps/{first}:clone", {}),
    ):
        problem = assert_problem(idle.post(path, json=body, headers=KEY), 422)
        assert problem["code"] == "idempotency_key_reused"
    assert count(idle) == 1
    assert idle.get(f"/v1/sweeps/{first}").json()["state"] == "queued"


def test_refused_request_leaves_its_key_free(idle: httpx.Client) -> None:
    assert_problem(idle.post("/v1/sweeps", json={**SPEC, "corpus": {"path": "/no"}}, headers=KEY), 422)
    assert idle.post("/v1/sweeps", json=SPEC, headers=KEY).status_code == 201


def test_verbs_are_carried_out_once_too(client: httpx.Client) -> None:
    sweep_id = submit(client)
    wait_for(client, sweep_id, "succeeded")
    path = f"/v1/sweeps/{sweep_id}"
    first = client.post(f"{path}:extend", json={"trials": 2}, headers={"idempotency-key": f"{sweep_id}-x"})
    assert first.json()["trials"]["budget"] == 8
    wait_for(client, sweep_id, "succeeded")
    again = client.post(f"{path}:extend", json={"trials": 2}, headers={"idempotency-key": f"{sweep_id}-x"})
    assert again.content == first.content
    assert client.get(path).json()["trials"]["budget"] == 8
    for place, body in ((f"{path}/points", {"params": {"lr": 2}}), (f"{path}:clone", {"name": "twin"})):
        key = {"idempotency-key": place}
        told = [client.post(place, json=body, headers=key).content for _ in range(2)]
        assert told[0] == told[1]
    assert len(client.get(f"{path}/points").json()["points"]) == 1
    assert len(ids(client.get("/v1/sweeps", params={"name": "twin"}))) == 1


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
def test_key_that_is_none_is_refused(idle: httpx.Client, key: str) -> None:
    (error,) = assert_problem(idle.post("/v1/sweeps", json=SPEC, headers={"idempotency-key": key}), 422)[
        "errors"
    ]
    assert error["parameter"] == "idempotency-key"
    assert count(idle) == 0


def test_fifty_equal_submissions_at_once_make_one_sweep(idle: httpx.Client) -> None:
    def send(_: int) -> httpx.Response:
        return httpx.post(f"{idle.base_url}/v1/sweeps", json=SPEC, headers=KEY, timeout=60, trust_env=False)

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(send, range(50)))
    statuses = Counter(response.status_code for response in found)
    assert set(statuses) <= {201, 409}
    assert statuses[201] >= 1
    assert len({response.content for response in found if response.status_code == 201}) == 1
    for response in found:
        if response.status_code == 409:
            assert assert_problem(response, 409)["code"] == "request_in_flight"
            assert response.headers["retry-after"] == "1"
    assert count(idle) == 1


def test_request_that_is_under_way_is_told_so_and_its_answer_later(
    idle: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    checked = SweepController.checked

    def slowly(controller: SweepController, request: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return checked(controller, request)

    monkeypatch.setattr(SweepController, "checked", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(idle.post, "/v1/sweeps", json=SPEC, headers=KEY)
        assert entered.wait(20)
        assert_problem(httpx.post(f"{idle.base_url}/v1/sweeps", json=SPEC, headers=KEY, trust_env=False), 409)
        go_on.set()
        assert first.result().status_code == 201
    assert idle.post("/v1/sweeps", json=SPEC, headers=KEY).content == first.result().content


def test_client_that_goes_away_in_the_middle_and_asks_again_makes_one_sweep(
    idle: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, ended = threading.Semaphore(0), Metrics.ended

    def leaving(metrics: Metrics) -> None:
        ended(metrics)
        left.release()

    monkeypatch.setattr(Metrics, "ended", leaving)
    body = json.dumps(SPEC).encode()
    head = (
        f"POST /v1/sweeps HTTP/1.1\r\nhost: {idle.base_url.host}\r\ncontent-type: application/json\r\n"
        f"idempotency-key: gone\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in range(5):
        with socket.create_connection((idle.base_url.host, idle.base_url.port or 80)) as connection:
            connection.sendall(head + body)
    response, requests = None, 5
    while response is None or response.status_code == 409:
        response = idle.post(
            "/v1/sweeps",
            content=body,
            headers={"idempotency-key": "gone", "content-type": "application/json"},
        )
        requests += 1
    assert response.status_code == 201
    for _ in range(requests):
        assert left.acquire(timeout=20)  # the answer may overtake requests of those who went away
    assert count(idle) == 1


# Only a check.


def test_check_alone_queues_nothing_and_says_what_would_be_written(idle: httpx.Client) -> None:
    asked = {**SPEC, "resources": "auto"}
    response = idle.post("/v1/sweeps", params={"validate_only": True}, json=asked)
    assert response.status_code == 200, response.text
    assert count(idle) == 0
    made = idle.post("/v1/sweeps", json=asked).json()
    assert {**response.json(), "forecast": None} == {"valid": True, "spec": made["spec"], "forecast": None}
    bad = {**SPEC, "corpus": {"path": "/no"}, "resources": {"cpus": 99}}
    checked, submitted = (
        idle.post("/v1/sweeps", params={"validate_only": only}, json=bad) for only in (True, False)
    )
    told, told_too = assert_problem(checked, 422), assert_problem(submitted, 422)
    assert {**told, "request_id": None} == {**told_too, "request_id": None}
