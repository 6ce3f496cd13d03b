"""A comparison on a terminal."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.comparison_schemas import ArmResult, Compared, CurveComparison, Difference, SideBySide

MOST_EPOCHS = 15
ABSENT = "(absent)"
NONE = "–"


def to_rich(found: SideBySide) -> RenderableType:
    return Group(*_parts(found))


def _parts(found: SideBySide) -> Iterable[RenderableType]:
    yield Text(f"a: {_named(found.a)}")
    yield Text(f"b: {_named(found.b)}")
    yield from _differences("spec", found.spec)
    yield from _differences("config of the trials", found.config)
    yield from _differences("environment", found.environment)
    if found.arms:
        rows = [[row.arm, *_of_arm(row.a), *_of_arm(row.b), _signed(row.difference)] for row in found.arms]
        yield _table("arms", ["arm", "a: n", "best", "top-5", "b: n", "best", "top-5", "b − a"], rows)
    if found.pairs is not None:
        pairs = found.pairs
        yield Text(
            f"trials of the same number: {pairs.count}; with the same values {pairs.same_params}, "
            f"the same loss {pairs.same_loss}, the same checkpoint {pairs.same_checkpoint}"
        )
    if found.curves is not None:
        rows = [
            [str(row.epoch), _number(row.a), _number(row.b), _signed(row.difference)]
            for row in _some(found.curves)
        ]
        yield _table("validation perplexity by epoch", ["epoch", "a", "b", "b − a"], rows)
        yield Text(_verdict(found.curves))


def _named(side: Compared) -> str:
    name = f" {side.name!r}" if side.name else ""
    sweep = f"sweep {side.sweep_id}{name}, {side.state}"
    if side.trial is None:
        return f"{sweep}; no trial has finished an epoch"
    trial = side.trial
    return f"{sweep}; trial {trial.number} of arm {trial.arm}: {_number(trial.best_valid_perplexity)}"


def _differences(title: str, found: Sequence[Difference]) -> Iterable[RenderableType]:
    if not found:
        yield Text(f"{title}: the same")
        return
    rows = [[each.pointer, *(_value(each, side) for side in ("a", "b"))] for each in found]
    yield _table(title, ["at", "a", "b"], rows, numbers=False)


def _table(title: str, columns: list[str], rows: list[list[str]], numbers: bool = True) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and place else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _of_arm(result: ArmResult | None) -> list[str]:
    if result is None:
        return [ABSENT, NONE, NONE]
    return [str(result.n), _number(result.best), _number(result.top5_mean)]


def _some(curves: CurveComparison) -> list[Any]:
    """Evenly chosen, with the first, the last, and the one in which they part."""
    count = len(curves.epochs)
    chosen = {round(place * (count - 1) / (MOST_EPOCHS - 1)) for place in range(MOST_EPOCHS)}
    return [
        row
        for place, row in enumerate(curves.epochs)
        if count <= MOST_EPOCHS or place in chosen or row.epoch == curves.parts_at
    ]


def _verdict(curves: CurveComparison) -> str:
    if curves.identical:
        return "the curves are the same, bit for bit"
    return f"the curves part at epoch {curves.parts_at}"


def _value(found: Difference, side: str) -> str:
    return ABSENT if found.absent == side else to_json(getattr(found, side)).decode()


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.2f}".replace("-", "−")
