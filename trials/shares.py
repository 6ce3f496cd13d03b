"""Who gets how much of the machines that several sweeps share. Pure: neither ray nor a database.

Every driver computes this by itself, from the same rows and the same machines, and so all agree.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from trials.spec import Resources

Labels = tuple[tuple[str, str], ...]
_Free = tuple[float, tuple[float, ...], Labels]
"""Of a node: CPUs, what is left of each GPU in rising order, labels."""


@dataclass(frozen=True)
class Node:
    """A machine for trials, and all that it has for them."""

    cpus: float
    gpus: float = 0.0
    labels: Labels = ()
    """Ray's own and those that whoever started the node gave it, in the order of their names."""


@dataclass(frozen=True)
class Claim:
    """What a running sweep could use."""

    sweep_id: str
    priority: int
    position: int
    """Of those alike, the earlier sweep comes first."""
    resources: Resources
    """What each of its trials takes; with `max_concurrent`."""
    wants: int | None
    """Trials that it could run at once; None where its driver has not said so yet."""

    @property
    def most(self) -> float:
        """Trials that it could make use of."""
        limits = (self.wants, self.resources.max_concurrent)
        return min((limit for limit in limits if limit is not None), default=math.inf)


def as_ray_reads(selector: Mapping[str, str]) -> dict[str, str]:
    """Without spaces: Ray 2.60 accepts `in(a, b)`, and then looks for ` b`."""
    return {name: wanted.replace(" ", "") for name, wanted in selector.items()}


def matches(selector: Mapping[str, str], labels: Labels) -> bool:
    """Whether a node with these labels is one of those selected, as Ray's label selectors say it."""
    there = dict(labels)
    return all(_accepts(wanted, there.get(name)) for name, wanted in selector.items())


def _accepts(wanted: str, value: str | None) -> bool:
    """`h100`, `!h100`, `in(a100, h100)` or `!in(a100, h100)`; a node without the label has none of them."""
    positive = wanted.removeprefix("!")
    several = re.fullmatch(r"in\((.*)\)", positive)
    values = [part.strip() for part in several[1].split(",")] if several else [positive]
    return (value in values) == (positive == wanted)


def room_on(resources: Resources, nodes: Sequence[Node]) -> int:
    """How many trials of this kind all these nodes have room for."""
    return sum(
        resources.room(node.cpus, node.gpus) for node in nodes if matches(resources.labels, node.labels)
    )


def shares(nodes: Sequence[Node], claims: Sequence[Claim]) -> dict[str, int]:
    """How many trials each sweep may run at once, by its id.

    Who has the higher priority takes all that it can use; among equals each takes one after another, the
    earlier sweep first.
    """
    free: Counter[_Free] = Counter((node.cpus, (1.0,) * int(node.gpus), node.labels) for node in nodes)
    given = {claim.sweep_id: 0 for claim in claims}
    ranked = sorted(claims, key=lambda claim: (-claim.priority, claim.position))
    for _, equals in groupby(ranked, key=lambda claim: claim.priority):
        waiting = list(equals)
        while waiting:
            waiting = [claim for claim in waiting if _serve(claim, free, given)]
    return given


class Division:
    """Machines as they were divided once, and what each sweep was given."""

    def __init__(self, nodes: Sequence[Node], claims: Sequence[Claim]) -> None:
        self.given = shares(nodes, claims)
        self._nodes = Counter(nodes)
        self._asked = self._as_it_matters(claims)

    def holds_for(self, nodes: Sequence[Node], claims: Sequence[Claim]) -> bool:
        """Whether to divide these would come to the same, as far as that is seen without dividing."""
        return Counter(nodes) == self._nodes and self._as_it_matters(claims) == self._asked

    def _as_it_matters(self, claims: Sequence[Claim]) -> dict[str, tuple[object, ...]]:
        """By sweep. Who was given less than it could use found no room for one more, and would have found
        none whatever it asked for beyond: so a trial that ends changes nothing until few are left."""
        return {
            claim.sweep_id: (
                claim.priority,
                claim.position,
                claim.resources,
                min(claim.most, self.given.get(claim.sweep_id, 0) + 1),
            )
            for claim in claims
        }


def _serve(claim: Claim, free: Counter[_Free], given: dict[str, int]) -> bool:
    """Give a sweep one trial more, if it can use one and there is room."""
    if given[claim.sweep_id] >= claim.most:
        return False
    place = min(_places(claim.resources, free), default=None)
    if place is None:
        return False
    _, before, after = place
    free[before] -= 1
    if not free[before]:
        del free[before]
    free[after] += 1
    given[claim.sweep_id] += 1
    return True


def _places(resources: Resources, free: Counter[_Free]) -> Iterator[tuple[tuple[float, float], _Free, _Free]]:
    """Nodes with room, as they are and as they would be: first those of which the least would be left, of
    GPUs before CPUs, so that trials that take a whole GPU still find one."""
    for node in free:
        cpus, gpus, labels = node
        if cpus < resources.cpus or not matches(resources.labels, labels):
            continue
        cpus_left = _less(cpus, resources.cpus)
        if not resources.gpus:
            yield (sum(gpus), cpus_left), node, (cpus_left, gpus, labels)
            continue
        taken = next((part for part in gpus if part >= resources.gpus), None)
        if taken is not None:
            left = list(gpus)
            left.remove(taken)
            left = sorted([*left, _less(taken, resources.gpus)])
            yield (sum(left), cpus_left), node, (cpus_left, tuple(left), labels)


def _less(there: float, taken: float) -> float:
    """Rounded as Ray counts: to a ten-thousandth."""
    return round(there - taken, 4)
