"""What a sweep's trials get of this machine, and whether it has what they ask for. No torch."""

from typing import Literal

from service.errors import Problem
from service.launcher import Capacity
from trials.shares import Node, matches, room_on
from trials.spec import Resources, SweepSpec

MOST_THREADS = 2
"""What `auto` gives a trial at most; what more would gain has not been measured."""


def placed(request: SweepSpec, capacity: Capacity) -> SweepSpec:
    """The sweep with its resources written out, be it a SweepRequest."""
    resources: Resources | Literal["auto"] = request.resources
    if resources == "auto":
        resources = choose(request.budget.trials, capacity)
    fields = {name: getattr(request, name) for name in SweepSpec.model_fields}
    return SweepSpec.model_construct(request.model_fields_set, **(fields | {"resources": resources}))


def choose(trials: int, capacity: Capacity) -> Resources:
    """What `auto` means: a GPU for each trial where there is one, else one thread for each trial.

    On two cores, two trials of one thread do more together than one of two threads, whatever the model's size
    (benchmarks/RESULTS.md, "A machine full of trials"); threads are worth something only to cores that would
    have no trial.
    """
    if capacity.gpus >= 1:
        return Resources(gpus=1)
    together = sum(node.cpus for node in capacity.nodes) or capacity.cpus
    return Resources(cpus=max(1, min(MOST_THREADS, int(capacity.cpus), int(together) // trials)))


def problems_with(spec: SweepSpec, capacity: Capacity) -> list[Problem]:
    """Why its trials could not run here."""
    too_much = [] if capacity.grows else _too_much(spec.resources, capacity)
    return [*too_much, *_unsupported_precisions(spec, capacity)]


def _too_much(resources: Resources, capacity: Capacity) -> list[Problem]:
    asked = {"cpus": resources.cpus, "gpus": resources.gpus}
    nodes = capacity.nodes or (Node(capacity.cpus, capacity.gpus),)
    if not any(matches(resources.labels, node.labels) for node in nodes):
        selected = ", ".join(f"{name}={value}" for name, value in resources.labels.items())
        words = f"no machine here is labelled {selected}: see `ray list nodes`, or leave labels out"
        return [Problem("/resources/labels", "resources_infeasible", words)]
    there = {
        "cpus": max(node.cpus for node in nodes if matches(resources.labels, node.labels)),
        "gpus": max(node.gpus for node in nodes if matches(resources.labels, node.labels)),
    }
    problems = [
        Problem(
            f"/resources/{kind}",
            "resources_infeasible",
            f"a trial asks for {asked[kind]:g} {kind}, but there are {there[kind]:g}"
            f"{' that torch can use' if kind == 'gpus' else ''}; ask for no more",
        )
        for kind in asked
        if asked[kind] > there[kind]
    ]
    if not problems and not room_on(resources, nodes):
        words = (
            f"a trial asks for {resources.cpus:g} cpus and {resources.gpus:g} gpus, but no machine has both: "
            "ask for fewer cpus"
        )
        problems.append(Problem("/resources/cpus", "resources_infeasible", words))
    return problems


def _unsupported_precisions(spec: SweepSpec, capacity: Capacity) -> list[Problem]:
    """Of CPUs; what a GPU can do its driver has to be asked."""
    if spec.resources.gpus:
        return []
    there = ["float32", *(["bf16"] if capacity.cpus_have_bf16 else [])]
    return [
        Problem(
            pointer,
            "precision_unsupported",
            f"the CPUs here do not compute in {value!r}: choose {' or '.join(there)}"
            + (", or give each trial a GPU with resources.gpus" if capacity.gpus else ""),
        )
        for pointer, value in spec.written("precision")
        if value not in there
    ]
