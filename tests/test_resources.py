"""What a sweep's trials get of a machine, and what it refuses."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from service.launcher import Capacity
from service.resources import placed, problems_with
from tests.fakes import spec
from trials.spec import Resources, SweepRequest, SweepSpec


def request(trials: int, resources: Any) -> SweepRequest:
    written = spec(budget={"trials": trials}).model_dump(mode="json")
    asked: SweepRequest = TypeAdapter(SweepRequest).validate_python({**written, "resources": resources})
    return asked


@pytest.mark.parametrize(
    ("trials", "capacity", "resources"),
    [
        (20, Capacity(cpus=2, gpus=0), Resources(cpus=1)),
        (2, Capacity(cpus=2, gpus=0), Resources(cpus=1)),
        (1, Capacity(cpus=2, gpus=0), Resources(cpus=2)),
        (3, Capacity(cpus=8, gpus=0), Resources(cpus=2)),
        (1, Capacity(cpus=64, gpus=0), Resources(cpus=2)),
        (1, Capacity(cpus=1, gpus=0), Resources(cpus=1)),
        (20, Capacity(cpus=16, gpus=2), Resources(cpus=1, gpus=1)),
    ],
)
def test_auto_gives_a_thread_or_a_gpu_to_each_trial_and_two_threads_where_cores_would_idle(
    trials: int, capacity: Capacity, resources: Resources
) -> None:
    chosen = placed(request(trials, "auto"), capacity)
    assert chosen.resources == resources
    assert type(chosen) is SweepSpec
    assert chosen == spec(budget={"trials": trials}, resources=resources.model_dump())
    assert problems_with(chosen, capacity) == []


def test_what_was_asked_for_is_not_changed() -> None:
    asked = {"cpus": 3, "gpus": 0.5, "max_concurrent": 7}
    assert placed(request(4, asked), Capacity(cpus=1, gpus=0)).resources == Resources(**asked)


@pytest.mark.parametrize(
    ("changes", "bf16", "pointers"),
    [
        ({"training": {"precision": "bf16"}}, False, ["/training/precision"]),
        ({"training": {"precision": "bf16"}}, True, []),
        ({"training": {"precision": "tf32"}}, True, ["/training/precision"]),
        ({"arms": {"a": {"precision": "tf32"}, "b": {}}}, True, ["/arms/a/precision"]),
        (
            {"arms": {"a": {"precision": "tf32"}, "b": {}}, "training": {"precision": "bf16"}},
            False,
            ["/arms/a/precision", "/training/precision"],
        ),
        ({"arms": {"a": {"precision": "float32"}}, "training": {"precision": "bf16"}}, False, []),
        (
            {"space": {"precision": {"type": "choice", "values": ["float32", "bf16"]}}},
            False,
            ["/space/precision"],
        ),
        ({"training": {"precision": "tf32"}, "resources": {"gpus": 1}}, False, []),
    ],
)
def test_a_precision_that_the_cpus_have_not_is_refused_where_it_is_written(
    changes: dict[str, Any], bf16: bool, pointers: list[str]
) -> None:
    problems = problems_with(spec(**changes), Capacity(cpus=2, gpus=1, cpus_have_bf16=bf16))
    assert [problem.pointer for problem in problems] == pointers
    for problem in problems:
        assert "resources.gpus" in problem.message


def test_a_way_out_that_is_none_here_is_not_named() -> None:
    (problem,) = problems_with(spec(training={"precision": "tf32"}), Capacity(cpus=2, gpus=0))
    assert problem.message == "the CPUs here do not compute in 'tf32': choose float32"
