"""What a client's changes make of a sweep's spec and of its budget; pure."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from service.errors import InvalidSpec, Problem
from service.problems import problems_in
from service.schemas import Changes, Extension
from trials.spec import MOST_TRIALS, Budget, SweepSpec

Model = TypeVar("Model", bound=BaseModel)


def changed(spec: SweepSpec, changes: Changes) -> SweepSpec:
    """Raises InvalidSpec."""
    given = changes.model_dump(exclude_unset=True)
    written = spec.model_dump(mode="json")
    labels = {**written["labels"], **given.pop("labels", {})}
    budget = {**written["budget"], **given.pop("budget", {})}
    resources = dict(written["resources"])
    if "max_concurrent" in given:
        resources["max_concurrent"] = given.pop("max_concurrent")
    body = {
        **written,
        **given,
        "labels": {name: text for name, text in labels.items() if text is not None},
        "budget": budget,
        "resources": resources,
    }
    return _validated(SweepSpec, {**body, "preset": None}).model_copy(update={"preset": spec.preset})


def extended(budget: Budget, by: Extension) -> Budget:
    """Raises InvalidSpec."""
    problems = [
        Problem(f"/{name}", "no_such_limit", f"the budget of this sweep has no {name}: leave it out")
        for name in ("wall_s", "max_failed")
        if getattr(by, name) and getattr(budget, name) is None
    ]
    if not by.model_dump(exclude_defaults=True):
        words = "an extension raises at least one limit: trials, wall_s, max_failed or target"
        problems.append(Problem("", "nothing_asked", words))
    if by.trials + budget.trials > MOST_TRIALS:
        words = f"a sweep has at most {MOST_TRIALS} trials; this one has {budget.trials}"
        problems.append(Problem("/trials", "too_many_trials", words))
    if problems:
        raise InvalidSpec(problems)
    larger = {
        "trials": budget.trials + by.trials,
        "wall_s": None if budget.wall_s is None else budget.wall_s + by.wall_s,
        "max_failed": None if budget.max_failed is None else budget.max_failed + by.max_failed,
        "target": budget.target if by.target is None else by.target,
    }
    return _validated(Budget, larger)


def _validated(model: type[Model], body: dict[str, Any]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise InvalidSpec(problems_in(error.errors(), body, model.model_json_schema())) from error
