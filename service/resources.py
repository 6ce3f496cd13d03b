"""What a sweep's trials get of this machine, and whether it has what they ask for. No torch."""

from typing import Literal

from service.errors import Problem
from service.launcher import Capacity
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
    return Resources(cpus=max(1, min(MOST_THREADS, int(capacity.cpus) // trials)))


def problems_with(spec: SweepSpec, capacity: Capacity) -> list[Problem]:
    """Why its trials could not run here."""
    return [*_too_much(spec.resources, capacity), *_unsupported_precisions(spec, capacity)]


def _too_much(resources: Resources, capacity: Capacity) -> list[Problem]:
    asked = {"cpus": resources.cpus, "gpus": resources.gpus}
    there = {"cpus": capacity.cpus, "gpus": capacity.gpus}
    return [
        Problem(
            f"/resources/{kind}",
            "resources_infeasible",
            f"a trial asks for {asked[kind]:g} {kind}, but there are {there[kind]:g}"
            f"{' that torch can use' if kind == 'gpus' else ''}; ask for no more",
        )
        for kind in asked
        if asked[kind] > there[kind]
    ]


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
