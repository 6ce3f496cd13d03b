"""A page of the sweeps' table."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, Connection, Integer, case, cast, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from service.pages import Key, SweepQuery
from service.tables import sweeps

STAMP = (sweeps.c.id, sweeps.c.generation, sweeps.c.state, sweeps.c.revision)
_MARKS = select(*STAMP, sweeps.c.writes)


def page_of_sweeps(connection: Connection, asked: SweepQuery) -> tuple[Sequence[Any], str | None]:
    """Which sweeps are on a page, without what they ask for, and the token of the next one."""
    page = asked.page
    key = ORDERS[page.order_by]
    query = (
        select(*STAMP, sweeps.c.position, key.label("key")).where(*_conditions(asked)).limit(page.size + 1)
    )
    if page.descending:
        query = query.order_by(key.desc(), sweeps.c.position.desc())
    else:
        query = query.order_by(key, sweeps.c.position)
    if page.after is not None:
        before, position = _as_stored(page.order_by, page.after[0]), page.after[1]
        beyond = key < before if page.descending else key > before
        further = sweeps.c.position < position if page.descending else sweeps.c.position > position
        query = query.where(beyond | ((key == before) & further))
    rows = connection.execute(query).all()
    shown = rows[: page.size]
    if len(rows) <= page.size:
        return shown, None
    last = shown[-1].key
    at = last.isoformat() if isinstance(last, datetime) else last
    return shown, page.token_after((at, shown[-1].position))


def marks_of_sweeps(connection: Connection) -> Sequence[Any]:
    """Of every sweep its stamp, and how much its drivers have written."""
    return connection.execute(_MARKS).all()


class _holds_json(FunctionElement[bool]):
    """Whether a JSON column holds any: on SQLite it may be damaged, and to look into that fails the query."""

    inherit_cache = True
    type = Boolean()


@compiles(_holds_json)
def _surely(_element: Any, _compiler: Any, **_options: Any) -> str:
    return "true"


@compiles(_holds_json, "sqlite")
def _asked(element: Any, compiler: Any, **options: Any) -> str:
    return f"json_valid({compiler.process(element.clauses, **options)})"


class _is_whole(FunctionElement[bool]):
    """Whether a text is a whole number: PostgreSQL fails the query over one that is none, SQLite reads 0."""

    inherit_cache = True
    type = Boolean()


@compiles(_is_whole)
def _matched(element: Any, compiler: Any, **options: Any) -> str:
    return f"({compiler.process(element.clauses, **options)}) ~ '^-?[0-9]{{1,9}}$'"


@compiles(_is_whole, "sqlite")
def _either_way(_element: Any, _compiler: Any, **_options: Any) -> str:
    return "true"


def _of_spec(*path: str) -> ColumnElement[Any]:
    return case((_holds_json(sweeps.c.spec), sweeps.c.spec[path].as_string()))


_PRIORITY = _of_spec("priority")
RESOURCES = _of_spec("resources")
"""As JSON."""
ORDERS: Mapping[str, ColumnElement[Any]] = {
    "created_at": sweeps.c.position,
    "state_since": sweeps.c.state_since,
    "name": func.coalesce(_of_spec("name"), ""),
    "priority": func.coalesce(case((_is_whole(_PRIORITY), cast(_PRIORITY, Integer))), 0),
}


def _as_stored(order_by: str, key: Key) -> Any:
    return datetime.fromisoformat(str(key)) if order_by == "state_since" else key


def _conditions(asked: SweepQuery) -> Iterator[ColumnElement[bool]]:
    if asked.states:
        yield sweeps.c.state.in_(asked.states)
    if asked.name is not None:
        yield func.coalesce(_of_spec("name"), "").icontains(asked.name, autoescape=True)
    for name, value in asked.labels:
        label = _of_spec("labels", name)
        yield label.is_not(None) if value is None else label == value
