"""What a sweep's trials get of this machine, and whether it has what they ask for. No torch."""

import math
from typing import Literal

from service.errors import Problem
from service.launcher import Capacity
from service.packing import share_of_each, trials_together
from trials.plan import plan
from trials.shares import Node, matches, room_on
from trials.spec import Resources, SweepSpec, TrialConfig

MOST_THREADS = 2
"""What `auto` gives a trial at most; what more would gain has not been measured."""
NARROWEST_FOR_THREADS = 128
"""Width of a layer: models of 64 units gain nothing from a second thread, those of 200 a third."""
LOOKED_AT = 32
"""Trials of a sweep by whose sizes it is decided how many share a GPU, or whether a thread more is of use."""


def placed(request: SweepSpec, capacity: Capacity) -> SweepSpec:
    """The sweep with its resources written out, be it a SweepRequest."""
    resources: Resources | Literal["auto"] = request.resources
    if resources == "auto":
        resources = choose(request, capacity)
    return _with(request, resources)


def _with(request: SweepSpec, resources: Resources) -> SweepSpec:
    fields = {name: getattr(request, name) for name in SweepSpec.model_fields}
    return SweepSpec.model_construct(request.model_fields_set, **(fields | {"resources": resources}))


def choose(request: SweepSpec, capacity: Capacity) -> Resources:
    """What `auto` means: where there are GPUs a part of one for each trial, else one thread for each trial.

    As many trials share a GPU as do most together, by what was measured on this machine's; a GPU that was not
    measured is given to one trial.

    On two cores, two trials of one thread do more together than one of two threads, whatever the model's size
    (benchmarks/RESULTS.md, "A machine full of trials"); threads are worth something only to cores that would
    have no trial, and to models that are not narrow.
    """
    trials = request.budget.trials
    if capacity.gpus >= 1:
        if not capacity.packings or capacity.gpu_bytes is None:
            return Resources(gpus=1)
        # Each has a thread that tells the GPU what to do; who would find none beside it gets a larger part.
        most = min(int(capacity.cpus / capacity.gpus), math.ceil(trials / capacity.gpus))
        together = trials_together(_some_configs(request), capacity.packings, capacity.gpu_bytes, most)
        return Resources(gpus=share_of_each(together))
    cpus = sum(node.cpus for node in capacity.nodes) or capacity.cpus
    threads = max(1, min(MOST_THREADS, int(capacity.cpus), int(cpus) // trials))
    if threads > 1:
        widest = max(width for config in _some_configs(request) for _, width in config.model.layer_sizes)
        threads = threads if widest >= NARROWEST_FOR_THREADS else 1
    return Resources(cpus=threads)


def _some_configs(request: SweepSpec) -> list[TrialConfig]:
    """Of its first trials, which do not depend on what they get."""
    return [trial.config for trial in plan(_with(request, Resources()), LOOKED_AT)]


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
