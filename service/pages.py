"""Lists a page at a time: which rows, in what order, and where the next page begins.

A token says after which row that is, not how many were before it: rows that come in between shift nothing.
"""

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, Field, FiniteFloat, TypeAdapter
from pydantic_core import to_json

from service.errors import BadParameter
from service.lifecycle import State
from service.schemas import TrialState, TrialView
from trials.spec import Text

SweepOrder = Literal["created_at", "name", "priority", "state_since"]
TrialOrder = Literal["number", "best_valid_perplexity", "epochs_done"]

_Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""As far as a column counts; PostgreSQL fails a query that goes further."""
_COUNTED: TypeAdapter[Any] = TypeAdapter(tuple[str, _Number, _Number])
_KINDS: dict[str, TypeAdapter[Any]] = {
    "created_at": _COUNTED,
    "name": TypeAdapter(tuple[str, Text, _Number]),
    "priority": _COUNTED,
    "state_since": TypeAdapter(
        tuple[str, Annotated[str, AfterValidator(lambda at: datetime.fromisoformat(at) and at)], _Number]
    ),
    "number": _COUNTED,
    "best_valid_perplexity": TypeAdapter(tuple[str, FiniteFloat | None, _Number]),
    "epochs_done": _COUNTED,
}
"""What a token may say of a row, by what the list is ordered by: it may come from anybody."""

Key = str | float | None
Position = tuple[Key, int]
"""Of a row in an order: what it is ordered by, and what tells it from its equals."""


@dataclass(frozen=True)
class Page:
    """Which part of a list."""

    order_by: str
    descending: bool
    size: int
    after: Position | None
    query_digest: str
    """Of what was asked: a token is of use with the same question only."""

    def token_after(self, position: Position) -> str:
        written = to_json([self.query_digest, *position])
        return base64.urlsafe_b64encode(written).decode().rstrip("=")


@dataclass(frozen=True)
class SweepQuery:
    """Which sweeps."""

    page: Page
    states: Sequence[State] = ()
    """Of any of these; of all states if none is named."""
    labels: Sequence[tuple[str, str | None]] = ()
    """With all of these; a label without a value may have any."""
    name: str | None = None
    """Part of the name, in whatever case."""


@dataclass(frozen=True)
class TrialQuery:
    """Which trials of a sweep."""

    page: Page
    states: Sequence[TrialState] = ()
    arms: Sequence[str] = ()


def read_page(orders: Any, order_by: str, page_size: int, page_token: str | None, **asked: Any) -> Page:
    """`orders` is the Literal of what the list may be ordered by. Raises BadParameter."""
    name = order_by.removeprefix("-")
    if name not in get_args(orders):
        known = ", ".join(f"{known}, -{known}" for known in get_args(orders))
        raise BadParameter("order_by", "unknown_order", f"{order_by!r} is no order; known: {known}")
    digest = hashlib.sha256(to_json([order_by, asked])).hexdigest()[:12]
    after = None if page_token is None else _position_in(page_token, name, digest)
    return Page(name, order_by.startswith("-"), page_size, after, digest)


def _position_in(token: str, order: str, digest: str) -> Position:
    kind: TypeAdapter[Any] = TypeAdapter(tuple[str, Key, int])
    try:
        of, *_ = kind.validate_json(written := _decoded(token), strict=True)
        if of == digest:
            _, key, number = _KINDS[order].validate_json(written)
            return key, number
    except ValueError as error:
        words = "it is no next_page_token of this service: leave it out to begin with the first page"
        raise BadParameter("page_token", "bad_page_token", words) from error
    words = "it is of another question: repeat the filters and the order that it came with"
    raise BadParameter("page_token", "other_page_token", words)


def _decoded(token: str) -> bytes:
    return base64.b64decode(token + "=" * (-len(token) % 4), altchars="-_", validate=True)


def read_labels(asked: Sequence[str]) -> list[tuple[str, str | None]]:
    """`key=value` or `key` alone."""
    parted = [label.partition("=") for label in asked]
    return [(key, value if sign else None) for key, sign, value in parted]


def page_of_trials(trials: Sequence[TrialView], asked: TrialQuery) -> tuple[list[TrialView], str | None]:
    """A page, and the token of the next one. What has no perplexity comes last in either direction."""
    page = asked.page

    def place(trial: TrialView) -> tuple[float, int]:
        value = getattr(trial, page.order_by)
        return (math.inf if value is None else -value if page.descending else value), trial.number

    wanted = [
        trial
        for trial in trials
        if (not asked.states or trial.state in asked.states) and (not asked.arms or trial.arm in asked.arms)
    ]
    left = sorted(wanted, key=place)
    if page.after is not None:
        key, number = page.after
        before = (math.inf if key is None else cast(float, key), number)
        left = [trial for trial in left if place(trial) > before]
    shown = left[: page.size]
    if len(left) <= page.size:
        return shown, None
    value, last = place(shown[-1])
    return shown, page.token_after((None if math.isinf(value) else value, last))
