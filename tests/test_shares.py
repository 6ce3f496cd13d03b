"""How machines are shared among sweeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.shares import Claim, Division, Node, matches, room_on, shares
from trials.spec import Resources

H100, SPOT = ("ray.io/accelerator-type", "H100"), ("market", "spot")


@pytest.mark.parametrize(
    ("nodes", "resources", "room"),
    [
        ([Node(4)], Resources(), 4),
        ([Node(4)], Resources(cpus=1.5), 2),
        ([Node(16, 2)], Resources(gpus=1), 2),
        ([Node(16, 2)], Resources(gpus=0.25), 8),
        ([Node(16, 2)], Resources(gpus=0.6), 2),
        ([Node(3, 2)], Resources(gpus=0.25), 3),
        ([Node(1)], Resources(cpus=2), 0),
        ([Node(1), Node(1)], Resources(cpus=2), 0),
        ([Node(3), Node(3)], Resources(cpus=2), 2),
        ([Node(4, labels=(SPOT,)), Node(2)], Resources(labels={"market": "!spot"}), 2),
        ([], Resources(), 0),
    ],
)
def test_there_is_room_for_whole_trials_each_on_one_machine_and_one_gpu(
    nodes: Sequence[Node], resources: Resources, room: int
) -> None:
    assert room_on(resources, nodes) == room
    assert shares(nodes, [claim("s1", resources=resources)]) == {"s1": room}


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [
        ("spot", [SPOT]),
        ("!spot", [("market", "reserved"), None]),
        ("in(spot, reserved)", [SPOT, ("market", "reserved")]),
        ("in(reserved)", [("market", "reserved")]),
        ("!in(spot,reserved)", [None]),
    ],
)
def test_a_label_is_selected_as_ray_selects_it(wanted: str, accepted: list[tuple[str, str] | None]) -> None:
    for label in (SPOT, ("market", "reserved"), None):
        labels = (H100,) if label is None else (H100, label)
        assert matches({"market": wanted, H100[0]: H100[1]}, labels) == (label in accepted)
        assert not matches({"market": wanted, "zone": "a"}, labels)


def claim(
    sweep_id: str,
    priority: int = 0,
    wants: int | None = None,
    resources: Resources = Resources(),  # noqa: B008  # it is frozen
) -> Claim:
    return Claim(sweep_id, priority, int(sweep_id[1:]), resources, wants)


def test_who_has_the_higher_priority_takes_all_that_it_can_use() -> None:
    nodes = [Node(2), Node(3)]
    assert shares(nodes, [claim("s1"), claim("s2", 5)]) == {"s1": 0, "s2": 5}
    assert shares(nodes, [claim("s1"), claim("s2", 5, wants=2)]) == {"s1": 3, "s2": 2}
    limited = claim("s2", 5, resources=Resources(max_concurrent=1))
    assert shares(nodes, [claim("s1"), limited]) == {"s1": 4, "s2": 1}


def test_equals_share_alike_and_the_earlier_one_has_what_is_left_over() -> None:
    assert shares([Node(5)], [claim("s2"), claim("s1")]) == {"s1": 3, "s2": 2}
    assert shares([Node(6)], [claim("s1", wants=1), claim("s2"), claim("s3")]) == {"s1": 1, "s2": 3, "s3": 2}
    assert shares([Node(1)], [claim("s1"), claim("s2")]) == {"s1": 1, "s2": 0}


def test_trials_of_a_share_of_a_gpu_leave_whole_gpus_to_others() -> None:
    part, whole = Resources(gpus=0.5), Resources(gpus=1)
    nodes = [Node(8, 1), Node(8, 2)]
    found = shares(nodes, [claim("s1", 1, 2, part), claim("s2", 0, None, whole)])
    assert found == {"s1": 2, "s2": 2}


def test_what_needs_no_gpu_runs_where_there_is_none() -> None:
    found = shares([Node(2, 2), Node(2)], [claim("s1", 1, 2), claim("s2", 0, None, Resources(gpus=1))])
    assert found == {"s1": 2, "s2": 2}


KINDS = st.builds(
    Resources,
    cpus=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    gpus=st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0]),
    labels=st.sampled_from([{}, {"market": "spot"}, {"market": "!spot"}]),
)
NODES = st.lists(
    st.builds(
        Node, st.integers(0, 8).map(float), st.integers(0, 3).map(float), st.sampled_from([(), (SPOT,)])
    ),
    max_size=5,
)
CLAIMS = st.lists(st.tuples(KINDS, st.integers(-1, 1), st.none() | st.integers(0, 9)), max_size=4).map(
    lambda rows: [claim(f"s{i}", priority, wants, kind) for i, (kind, priority, wants) in enumerate(rows)]
)


@given(NODES, CLAIMS)
def test_all_that_is_shared_is_there_and_nobody_waits_for_what_is_free(
    nodes: list[Node], claims: list[Claim]
) -> None:
    found = shares(nodes, claims)
    assert found.keys() == {claim.sweep_id for claim in claims}
    assert found == shares(nodes[::-1], claims[::-1])  # whoever computes it
    cpus = sum(found[claim.sweep_id] * claim.resources.cpus for claim in claims)
    gpus = sum(found[claim.sweep_id] * claim.resources.gpus for claim in claims)
    assert cpus <= sum(node.cpus for node in nodes) + 1e-9
    assert gpus <= sum(node.gpus for node in nodes) + 1e-9
    for one in claims:
        assert found[one.sweep_id] <= one.most
        assert found[one.sweep_id] <= room_on(one.resources, nodes)
    alone = {one.sweep_id: shares(nodes, [one])[one.sweep_id] for one in claims}
    assert all(found[one.sweep_id] == alone[one.sweep_id] for one in claims if len(claims) == 1)
    if claims:
        first = max(claims, key=lambda claim: (claim.priority, -claim.position))
        assert found[first.sweep_id] >= min(1, alone[first.sweep_id])


@given(NODES, NODES, CLAIMS, CLAIMS)
def test_a_division_holds_only_for_what_would_be_divided_alike(
    nodes: list[Node], other_nodes: list[Node], claims: list[Claim], other_claims: list[Claim]
) -> None:
    division = Division(nodes, claims)
    assert division.given == shares(nodes, claims)
    for asked in [(nodes, claims), (nodes, other_claims), (other_nodes, claims), (other_nodes, other_claims)]:
        assert not division.holds_for(*asked) or shares(*asked) == division.given
    assert division.holds_for(nodes[::-1], claims[::-1])


@given(NODES, CLAIMS, st.data())
def test_a_division_holds_only_for_wishes_that_are_met_alike(
    nodes: list[Node], claims: list[Claim], data: st.DataObject
) -> None:
    """One sweep wants another number: the division notices it where that matters, and nowhere else."""
    division = Division(nodes, claims)
    for position, one in enumerate(claims):
        other = replace(one, wants=data.draw(st.none() | st.integers(0, 9)))
        changed = [*claims[:position], other, *claims[position + 1 :]]
        alike = shares(nodes, changed) == division.given
        assert not division.holds_for(nodes, changed) or alike
        if min(one.most, other.most) > division.given[one.sweep_id]:
            assert division.holds_for(nodes, changed)


@pytest.mark.parametrize(
    "change",
    [
        {"wants": 3},
        {"priority": 1},
        {"position": 0},
        {"resources": Resources(cpus=2)},
        {"resources": Resources(max_concurrent=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_division_does_not_hold_for_a_sweep_that_asks_for_something_else(change: dict[str, Any]) -> None:
    nodes, claims = [Node(2), Node(3)], [claim("s1"), claim("s2", wants=2)]
    assert not Division(nodes, claims).holds_for(nodes, [claims[0], replace(claims[1], **change)])
    assert not Division(nodes, claims).holds_for([*nodes, Node(1)], claims)
    assert not Division(nodes, claims).holds_for(nodes[:1], claims)
    assert not Division(nodes, claims).holds_for(nodes, claims[:1])
    assert not Division(nodes, claims).holds_for(nodes, [*claims, claim("s3", -1)])
