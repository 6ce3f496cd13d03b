"""What a sweep's trials get of a machine, and what it refuses."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from service.launcher import Capacity, capacity_of
from service.resources import placed, problems_with
from tests.fakes import spec
from trials.shares import Node
from trials.spec import Resources, SweepRequest, SweepSpec


def request(trials: int, resources: Any, **changes: Any) -> SweepRequest:
    written = spec(budget={"trials": trials}, **changes).model_dump(mode="json")
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
        (2, capacity_of([Node(2), Node(2)]), Resources(cpus=2)),
        (4, capacity_of([Node(2), Node(2)]), Resources(cpus=1)),
        (1, capacity_of([Node(1), Node(1)]), Resources(cpus=1)),
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


@pytest.mark.parametrize(
    ("model", "space", "cpus"),
    [
        ({"embedding_size": 64, "hidden_size": 64}, {}, 1),
        ({"embedding_size": 64, "hidden_size": 200}, {}, 2),
        ({"embedding_size": 200, "layers": 1}, {}, 2),
        ({"embedding_size": 64}, {"hidden_size": {"type": "choice", "values": [32, 64]}}, 1),
    ],
)
def test_auto_gives_narrow_models_no_second_thread(
    model: dict[str, Any], space: dict[str, Any], cpus: int
) -> None:
    asked = request(1, "auto", model=model, space=space)
    assert placed(asked, Capacity(cpus=2, gpus=0)).resources == Resources(cpus=cpus)


def test_what_was_asked_for_is_not_changed() -> None:
    asked = {"cpus": 3, "gpus": 0.5, "max_concurrent": 7}
    assert placed(request(4, asked), Capacity(cpus=1, gpus=0)).resources == Resources(**asked)


CLUSTER = capacity_of([Node(2), Node(8, 1, (("zone", "a"),)), Node(4, 2, (("zone", "b"),)), Node(0)])


@pytest.mark.parametrize(
    ("asked", "pointers", "words"),
    [
        ({"cpus": 8}, [], ""),
        ({"cpus": 9}, ["/resources/cpus"], "a trial asks for 9 cpus, but there are 8; ask for no more"),
        ({"cpus": 8, "gpus": 1}, [], ""),
        ({"cpus": 4, "gpus": 0.5, "labels": {"zone": "b"}}, [], ""),
        ({"cpus": 5, "labels": {"zone": "b"}}, ["/resources/cpus"], "but there are 4"),
        ({"labels": {"zone": "c"}}, ["/resources/labels"], "no machine here is labelled zone=c"),
        ({"gpus": 1, "labels": {"zone": "!in(a, b)"}}, ["/resources/gpus"], "1 gpus, but there are 0"),
    ],
)
def test_a_trial_has_to_fit_one_machine_of_a_cluster(
    asked: dict[str, Any], pointers: list[str], words: str
) -> None:
    problems = problems_with(spec(resources=asked), CLUSTER)
    assert [problem.pointer for problem in problems] == pointers
    assert all(words in problem.message for problem in problems)


def test_no_machine_has_both_though_each_is_somewhere() -> None:
    (problem,) = problems_with(spec(resources={"cpus": 8, "gpus": 1}), capacity_of([Node(8), Node(4, 1)]))
    assert problem.pointer == "/resources/cpus"
    assert "8 cpus and 1 gpus, but no machine has both" in problem.message


def test_nothing_is_refused_for_what_a_growing_cluster_has_not_yet() -> None:
    assert problems_with(spec(resources={"gpus": 1}), capacity_of([Node(0)], grows=True)) == []
    assert problems_with(spec(resources={"gpus": 1}), capacity_of([Node(0)])) != []


def test_this_machine_has_no_labels() -> None:
    asked = spec(resources={"labels": {"zone": "a"}})
    (problem,) = problems_with(asked, Capacity(cpus=2, gpus=0))
    assert problem.pointer == "/resources/labels"


@pytest.mark.parametrize(
    "labels",
    [
        {"zone": ""},
        {"zone": "in()"},
        {"zone": "in(a,,b)"},
        {"zone": "!!a"},
        {"zone": "a b"},
        {"": "a"},
        {"a/b/c": "d"},
        {"zone": "-a"},
        {"zone": 1},
    ],
)
def test_a_selector_that_ray_would_not_understand_is_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Resources.model_validate({"labels": labels})


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
