"""The append-only table of events, and the deliveries to webhooks that are written with it.

Whoever writes an event holds the write lock of its sweep's row (service.records). So within a sweep, ids are
in the order of the commits: who has read up to one of them has missed none below it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Engine,
    Insert,
    Integer,
    RowMapping,
    Select,
    String,
    Table,
    Text,
    bindparam,
    cast,
    func,
    insert,
    select,
    true,
)
from sqlalchemy.dialects import postgresql, sqlite

from service.database import naive, now
from service.events import EventKind, encode_event, encode_message, without_surrogates
from service.lifecycle import State
from service.tables import deliveries, events, sweeps, webhooks

INSERT: Mapping[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
# Statements are built once: that takes longer than SQLite does to run them.
_WRITE = {
    dialect: made(events).on_conflict_do_nothing(index_elements=["sweep_id", "once"]).returning(events.c.id)
    for dialect, made in INSERT.items()
}
_MESSAGE = ("message_id", "body", "created_at")


def write_event(connection: Connection, sweep_id: str, kind: EventKind | str, detail: dict[str, Any]) -> None:
    """Write an event and, in the same transaction, what is to be sent of it to whom.

    The sweep's row must be locked. What happens once in a sweep, an epoch of an attempt say, is told of once,
    however often a transaction that was not answered is done again.
    """
    storable = {
        name: None if _is_no_number(value) else without_surrogates(value) for name, value in detail.items()
    }
    values = {"sweep_id": sweep_id, "at": naive(now()), "kind": kind, "detail": storable}
    written = connection.execute(_WRITE[connection.dialect.name], {**values, "once": _once(kind, detail)})
    event_id = written.scalar_one_or_none()
    if event_id is not None:
        _queue_deliveries(connection, {**values, "id": event_id})


def _is_no_number(value: Any) -> bool:
    """PostgreSQL takes none of these as JSON."""
    return isinstance(value, float) and not math.isfinite(value)


def _once(kind: str, detail: Mapping[str, Any]) -> str | None:
    """What an event is the only one of in its sweep; None for what may happen again in the same words."""
    if not {"number", "attempt"} <= detail.keys():
        return None
    return ":".join(
        str(part) for part in (kind, detail["number"], detail["attempt"], detail.get("epoch", ""))
    )


def _queue_deliveries(connection: Connection, row: dict[str, Any]) -> None:
    """Each webhook that wants an event has it written down: none can miss it, however late it commits."""
    message = {
        "message_id": f"{row['sweep_id']}-{row['id']}",  # SQLite may use an id again once a sweep is deleted
        "body": encode_message(row["kind"], row["at"], encode_event(row)),
        "created_at": row["at"],
    }
    connection.execute(_deliver(row["kind"]), {**message, "of_sweep": row["sweep_id"]})


@lru_cache(maxsize=64)
def _deliver(kind: str) -> Insert:
    """To whoever wants events of a kind."""
    named = cast(webhooks.c.kinds, Text).contains(f'"{kind}"', autoescape=True)
    of_sweep = webhooks.c.sweep_id == bindparam("of_sweep")
    message = [bindparam(name, type_=deliveries.c[name].type) for name in _MESSAGE]
    wanting = (
        select(webhooks.c.id, *message)
        .where(webhooks.c.kinds.is_(None) | named, webhooks.c.sweep_id.is_(None) | of_sweep)
        .where(webhooks.c.disabled_at.is_(None))
        .with_for_update(read=True, key_share=True)  # one that is being deleted is waited for, and left out
    )
    return insert(deliveries).from_select(["webhook_id", *_MESSAGE], wanting)


@dataclass(frozen=True)
class Look:
    """What one statement saw: a sweep's state, and events that were committed with it or before."""

    state: State | None
    """None: there is no such sweep."""
    events: list[RowMapping]
    """In the order of their ids."""


def _with_state(query: Select[Any]) -> Select[Any]:
    of_sweep = bindparam("sweep_id", type_=String)
    some = query.where(events.c.sweep_id == of_sweep).limit(bindparam("limit", type_=Integer)).subquery()
    return (
        select(sweeps.c.state.label("state"), some)
        .select_from(sweeps.outerjoin(some, true()))
        .where(sweeps.c.id == of_sweep)
        .order_by(some.c.id)
    )


_AFTER = _with_state(
    select(events).where(events.c.id > bindparam("event_id", type_=BigInteger)).order_by(events.c.id)
)
_LATEST = _with_state(select(events).order_by(events.c.id.desc()))


class EventLog:
    """Reads the table. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def after(self, sweep_id: str, event_id: int, limit: int) -> Look:
        """The first `limit` events that follow one."""
        return self._look(_AFTER, sweep_id=sweep_id, event_id=event_id, limit=limit)

    def latest(self, sweep_id: str, limit: int) -> Look:
        """The last `limit` events."""
        return self._look(_LATEST, sweep_id=sweep_id, limit=limit)

    def newest_id(self, sweep_id: str) -> int:
        """0 where a sweep has no events, or is not there."""
        query = select(func.max(events.c.id)).where(events.c.sweep_id == sweep_id)
        with self._engine.connect() as connection:
            return connection.execute(query).scalar_one() or 0

    def ends_told(self, sweep_id: str) -> set[tuple[int, int | None]]:
        """Trials whose ends are told of, as (number, attempt); without an attempt by earlier versions."""
        with self._engine.connect() as connection:
            return find_ends_told(connection, sweep_id)

    def _look(self, statement: Select[Any], **values: str | int) -> Look:
        with self._engine.connect() as connection:
            rows = connection.execute(statement, values).mappings().all()
        return Look(rows[0]["state"] if rows else None, [row for row in rows if row["id"] is not None])


def find_sweep(connection: Connection, sweep_id: str) -> bool:
    return connection.execute(select(sweeps.c.id).where(sweeps.c.id == sweep_id)).first() is not None


def find_ends_told(connection: Connection, sweep_id: str) -> set[tuple[int, int | None]]:
    told = (events.c.sweep_id == sweep_id) & (events.c.kind == "trial_finished")
    details = connection.execute(select(events.c.detail).where(told)).scalars()
    return {(detail["number"], detail.get("attempt")) for detail in details if isinstance(detail, dict)}
