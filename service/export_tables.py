"""The tables of an export, the same in CSV and in Parquet: columns, and a page of rows after another."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from types import NoneType
from typing import Any, get_args

from pydantic_core import to_json

from service.exports import TRIALS_AT_ONCE, Moment, Survey, Table
from service.schemas import EpochView, TrialView, View, flat
from service.tables import epochs
from service.views import reading
from trials.perplexity import finite_perplexity

Kind = type[bool] | type[int] | type[float] | type[str] | type[datetime]
"""What a column holds, besides None."""
Columns = dict[str, Kind]
Page = list[Sequence[Any]]
"""The values of each column, as many of each."""


def columns_of(moment: Moment, table: Table) -> Columns:
    """By name, in their order; those of trials depend on what there is to tell of them."""
    whose: Columns = {"sweep_id": str, "exported_at": datetime, "number": int}
    if table is Table.epochs:
        return {**whose, **_fields(EpochView)}
    others = {name: kind for name, kind in _fields(TrialView).items() if name not in {"params", "failure"}}
    return {**whose, **others, "failure_class": str, "failure_message": str, **_found(moment.survey())}


def pages_of(moment: Moment, table: Table, columns: Columns) -> Iterator[Page]:
    whose = {"sweep_id": moment.record.id, "exported_at": moment.at}
    if table is Table.epochs:
        names = epochs.c.keys()
        with reading(moment.record):
            for rows in moment.pages_of_epochs():
                found: dict[str, Any] = dict(zip(names, zip(*rows, strict=True), strict=True))
                found["valid_perplexity"] = [finite_perplexity(loss) for loss in found["valid_loss"]]
                found |= {name: [value] * len(rows) for name, value in whose.items()}
                yield [found[name] for name in columns]
        return
    trials = moment.trials()
    while page := [{**whose, **_row(*trial)} for trial in islice(trials, TRIALS_AT_ONCE)]:
        yield [[_as(kind, row.get(name)) for row in page] for name, kind in columns.items()]


def _row(trial: TrialView, config: dict[str, Any]) -> dict[str, Any]:
    failure = trial.failure
    return {
        **dict(trial),
        "failure_class": failure and failure.failure_class,
        "failure_message": failure and failure.message,
        **{f"params.{name}": value for name, value in trial.params.items()},
        **{f"config.{name}": value for name, value in flat(config)},
    }


def _as(kind: Kind, value: Any) -> Any:
    """In a column of values of several kinds, what is no text is JSON."""
    if value is None or isinstance(value, kind):
        return value
    return float(value) if kind is float else to_json(value).decode()


def _found(survey: Survey) -> Columns:
    return {
        f"{prefix}.{name}": _narrowest(kinds)
        for prefix, columns in (("params", survey.params), ("config", survey.config))
        for name, kinds in columns.items()
    }


def _narrowest(kinds: set[type]) -> Kind:
    """That all values of a column are of; text where there is none."""
    if len(kinds) == 1 and (kind := next(iter(kinds))) in {bool, int, float}:
        return kind
    return float if kinds == {int, float} else str


def _fields(model: type[View]) -> Columns:
    """Of a model whose values are scalars; others are called text."""
    found: Columns = {}
    for name, field in model.model_fields.items():
        inner = [part for part in get_args(field.annotation) if part is not NoneType] or [field.annotation]
        found[name] = inner[0] if inner[0] in {bool, int, float, datetime} else str
    return found
