"""Two sweeps or trials side by side: what differs, and nothing else."""

import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from service.cli import app
from service.comparison import compare, compare_curves, differences
from service.comparison_schemas import SideBySide
from service.comparison_tables import MOST_EPOCHS, to_rich
from service.examples import _CURVE
from service.schemas import EpochView
from tests.played_service import played_service, submit, wait_for

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "~", "a/b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b/c", "d~e"]), inner),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture(scope="module")
def twin(client: httpx.Client, ended: str) -> str:
    """As `ended`, but for its name."""
    sweep_id = submit(client, name="twin")
    wait_for(client, sweep_id, "succeeded")
    return sweep_id


@pytest.fixture(scope="module")
def other(client: httpx.Client) -> str:
    """With an arm less and one more, another seed, and an epoch fewer."""
    arms: dict[str, Any] = {"fd": {"regularizer": "fraternal"}, "plain": {"regularizer": "none"}}
    sweep_id = submit(
        client, name="other", arms=arms, sampler={"seed": 7}, training={"epochs": 2}, budget={"trials": 4}
    )
    wait_for(client, sweep_id, "succeeded")
    return sweep_id


def compared(client: httpx.Client, a: str, b: str) -> SideBySide:
    answer = client.get("/v1/compare", params={"a": a, "b": b})
    assert answer.status_code == 200, answer.text
    return SideBySide.model_validate_json(answer.content)


def applied(value: Any, found: Any) -> Any:
    """b, made of a by what differs: pointers are followed, and absent members removed or added."""
    if found.pointer == "":
        return found.b
    *above, last = [step.replace("~1", "/").replace("~0", "~") for step in found.pointer.split("/")[1:]]
    place = value
    for step in above:
        place = place[int(step) if isinstance(place, list) else step]
    if isinstance(place, list):
        if found.absent == "a":
            place.append(found.b)
        elif found.absent == "b":
            place.pop()
        else:
            place[int(last)] = found.b
    elif found.absent == "b":
        del place[last]
    else:
        place[last] = found.b
    return value


@given(JSON, JSON)
def test_differences_are_all_that_makes_one_of_the_other(a: Any, b: Any) -> None:
    found = list(differences(a, b))
    assert list(differences(a, a)) == []
    made = json.loads(json.dumps(a))
    removed = [each for each in found if each.absent == "b"]
    for each in [*(each for each in found if each.absent != "b"), *reversed(removed)]:
        made = applied(made, each)
    assert json.dumps(made, sort_keys=True) == json.dumps(b, sort_keys=True)


def test_what_is_absent_is_told_from_what_is_null() -> None:
    found = list(differences({"x": None, "same": 1}, {"y": [1, 2], "same": 1.0}))
    assert [(each.pointer, each.a, each.b, each.absent) for each in found] == [
        ("/x", None, None, "b"),
        ("/y", None, [1, 2], "a"),
    ]
    (changed,) = differences({"y": [1, True]}, {"y": [1, 1]})
    assert (changed.pointer, changed.a, changed.b, changed.absent) == ("/y/1", True, 1, None)


def test_a_sweep_and_its_twin_differ_in_their_names_alone(
    client: httpx.Client, ended: str, twin: str
) -> None:
    found = compared(client, ended, twin)
    assert [(each.pointer, each.a, each.b) for each in found.spec] == [("/name", "ended", "twin")]
    assert found.config == found.environment == []
    assert found.pairs is not None
    assert found.pairs.model_dump() == {"count": 6, "same_params": 6, "same_loss": 6, "same_checkpoint": 6}
    assert found.curves is not None
    assert (found.curves.identical, found.curves.parts_at) == (True, None)
    assert [row.difference for row in found.curves.epochs] == [0, 0, 0]
    assert {arm.difference for arm in found.arms} == {0}
    assert found.a.trial is not None
    assert found.a.trial.number == 5, "its best one"


def test_sweeps_that_differ_are_told_apart(client: httpx.Client, ended: str, other: str) -> None:
    found = compared(client, ended, other)
    differing = {each.pointer: (each.a, each.b, each.absent) for each in found.spec}
    assert differing["/sampler/seed"] == (0, 7, None)
    assert differing["/arms/eld"] == ({"regularizer": "expectation_linear"}, None, "b")
    assert differing["/arms/plain"] == (None, {"regularizer": "none"}, "a")
    assert differing["/training/epochs"] == (3, 2, None)
    assert {arm.arm: (arm.a is None, arm.b is None) for arm in found.arms} == {
        "fd": (False, False),
        "eld": (False, True),
        "plain": (True, False),
    }
    (fd,) = (arm for arm in found.arms if arm.arm == "fd")
    assert fd.a is not None
    assert fd.b is not None
    assert fd.difference == fd.b.best - fd.a.best  # type: ignore[operator]  # either has a best
    assert found.pairs is not None
    assert (found.pairs.count, found.pairs.same_params) == (4, 0)


def test_trials_of_two_sweeps_are_compared_by_what_they_train_with(
    client: httpx.Client, ended: str, other: str
) -> None:
    found = compared(client, f"{ended}:0", f"{other}:2")
    assert (found.a.trial.number, found.b.trial.number) == (0, 2)  # type: ignore[union-attr]  # both are there
    assert {"/seed", "/training/lr", "/training/epochs"} <= {each.pointer for each in found.config}
    assert "/sampler/seed" in {each.pointer for each in found.spec}
    assert (found.arms, found.pairs) == ([], None)
    assert found.curves is not None
    assert found.curves.parts_at == 1
    assert [(row.epoch, row.b is None) for row in found.curves.epochs] == [(1, False), (2, False), (3, True)]
    assert found.curves.epochs[2].difference is None
    same = compared(client, f"{ended}:1", f"{ended}:1")
    assert same.curves is not None
    assert (same.spec, same.config, same.environment, same.curves.identical) == ([], [], [], True)


def test_of_an_arm_it_says_what_the_report_says(client: httpx.Client) -> None:
    arms: dict[str, Any] = {"wild": {"clip": 13}, "tame": {}}
    sweep_id = submit(client, arms=arms, budget={"trials": 12})
    wait_for(client, sweep_id, "succeeded")
    report = client.get(f"/v1/sweeps/{sweep_id}/report").json()["arms"]
    for told, row in zip(compared(client, sweep_id, sweep_id).arms, report, strict=True):
        assert told.a is not None
        expected = {name: row[name] for name in ("n", "complete", "pruned", "failed", "best")}
        found = told.a.model_dump()
        mean = found.pop("top5_mean")
        assert (told.arm, found) == (row["arm"], expected)
        assert (mean and pytest.approx(mean)) == (row["top5"] and row["top5"]["perplexity"])
        assert (mean is None) == (row["arm"] == "wild")


def epochs(*losses: float) -> list[EpochView]:
    return [_CURVE[0].model_copy(update={"epoch": n, "valid_loss": loss}) for n, loss in enumerate(losses, 1)]


def test_curves_part_where_anything_measured_first_differs_in_the_last_bit() -> None:
    one = epochs(6.0, 5.5, 5.0)
    slower = [epoch.model_copy(update={"seconds": 99.0, "tokens_per_s": 1.0, "attempt": 2}) for epoch in one]
    assert compare_curves(one, slower).identical
    assert compare_curves(one, epochs(6.0, 5.5 + 2**-50, 5.0)).parts_at == 2
    hidden = [*one[:2], one[2].model_copy(update={"gradient_norm": 0.5})]
    assert compare_curves(one, hidden).parts_at == 3, "the perplexities are the same, the training was not"
    assert compare_curves(one, one[:2]).parts_at == 3
    assert compare_curves([], []).identical


@pytest.mark.parametrize(
    ("a", "b", "status", "code"),
    [
        ("{ended}", "{ended}:1", 422, "bad_parameter"),
        ("none", "{ended}", 404, "sweep_not_found"),
        ("{ended}:0", "{ended}:6", 404, "trial_not_found"),
        ("{ended}:0", "{ended}:999999999", 404, "trial_not_found"),
        ("{ended}:0", "{ended}:x", 422, "invalid_request"),
        ("../etc", "{ended}", 422, "invalid_request"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    client: httpx.Client, ended: str, a: str, b: str, status: int, code: str
) -> None:
    query = {"a": a.format(ended=ended), "b": b.format(ended=ended)}
    answer = client.get("/v1/compare", params=query)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_a_sweep_that_has_not_begun_can_be_compared(client: httpx.Client, tmp_path: Any) -> None:
    with played_service(tmp_path, plays=False) as idle:
        found = compared(idle, submit(idle), submit(idle, name="later"))
    assert (found.a.trial, found.curves, found.config) == (None, None, [])
    assert [each.pointer for each in found.spec] == ["/name"]


def printed(found: SideBySide) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(to_rich(found), soft_wrap=True)
    return console.export_text()


def test_lists_and_the_home_page_are_answered_while_two_comparisons_take_long(
    client: httpx.Client, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparing, go_on = threading.Event(), threading.Event()

    def compare_slowly(*sides: Any, **named: Any) -> SideBySide:
        comparing.set()
        assert go_on.wait(20)
        return compare(*sides, **named)

    monkeypatch.setattr("service.comparison_routes.compare", compare_slowly)
    asking = [threading.Thread(target=compared, args=(client, ended, ended)) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        assert comparing.wait(20)
        for _ in range(3):
            for path in ("/v1/sweeps", "/"):
                assert client.get(path, timeout=10).status_code == 200
    finally:
        go_on.set()
        for thread in asking:
            thread.join()


def test_the_command_prints_tables_or_json(client: httpx.Client, ended: str, other: str) -> None:
    url = ["--url", str(client.base_url).rstrip("/")]
    done = CliRunner().invoke(app, ["compare", ended, other, *url])
    assert done.exit_code == 0, done.stderr
    for words in ("/sampler/seed", "(absent)", "eld", "the curves part at epoch 1", "same number: 4"):
        assert words in done.stdout, done.stdout
    done = CliRunner().invoke(app, ["compare", f"{ended}:0", f"{ended}:0", "--json", *url])
    assert SideBySide.model_validate_json(done.stdout) == compared(client, f"{ended}:0", f"{ended}:0")
    wrong = CliRunner().invoke(app, ["compare", ended, f"{ended}:0", *url])
    assert (wrong.exit_code, "SWEEP:NUMBER" in wrong.stderr) == (1, True)


def test_of_long_curves_the_epoch_in_which_they_part_is_printed(
    client: httpx.Client, ended: str, twin: str
) -> None:
    curve = epochs(*[6 - n / 200 for n in range(200)])
    changed = [*curve[:122], *(epoch.model_copy(update={"valid_loss": 4.0}) for epoch in curve[122:])]
    found = compared(client, ended, twin).model_copy(update={"curves": compare_curves(curve, changed)})
    lines = [line.split()[0] for line in printed(found).splitlines() if line.strip()[:1].isdigit()]
    assert len(lines) == MOST_EPOCHS + 1
    assert {"1", "123", "200"} <= set(lines)
    assert "the curves part at epoch 123" in printed(found)
