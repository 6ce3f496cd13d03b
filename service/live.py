"""The list of all sweeps as it changes: for the home page, one stream a page that is seen.

A hub takes down how all sweeps stand, and compares that with how they stood half a second before. Whoever
connects, or has fallen far behind, is told to look again; afterwards, of each row that has changed, as it is
by then. So nobody need know what was missed, by whom, and during which life of this service.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic

from anyio import CapacityLimiter, to_thread
from pydantic_core import to_json
from sqlalchemy.exc import SQLAlchemyError

from service.lifecycle import WITH_DRIVER
from service.records import Mark, Records
from service.schemas import SweepView
from service.streams import Hub, frame
from service.views import SweepViews

log = logging.getLogger(__name__)

LOOK = frame("look", b"{}")
"""To who is to look at the whole list."""
LIST = frame("list", b"{}")
"""To who has the list, but for sweeps that have come, or are gone."""
AWAY = frame("away", b"{}")
"""To all, when the database stops answering; once it does again, they are to look."""
KEPT = 500
"""Rows in memory, at least."""
TICK_S = 10.0
"""A sweep that runs is written anew so often, whatever happens: its times go on."""

Row = Callable[[SweepView], str]
Standing = tuple[Mark, int]
"""Of a sweep: whatever of it is shown differs only if this does."""


class LiveList:
    """Reads how all sweeps stand."""

    def __init__(self, records: Records, views: SweepViews) -> None:
        self._records, self._views = records, views

    def standings(self) -> dict[str, Standing]:
        tick = int(monotonic() / TICK_S)
        return {mark.id: (mark, tick if mark.state in WITH_DRIVER else 0) for mark in self._records.marks()}

    def rows(self, sweep_ids: Collection[str], row: Row) -> dict[str, bytes]:
        """Without those that are gone by now, or cannot be shown."""
        rows = {}
        for sweep_id, record in self._records.find_sweeps(sweep_ids).items():
            try:
                written = {"id": sweep_id, "html": row(self._views.sweep(record))}
                rows[sweep_id] = frame("sweep", to_json(written))
            except SQLAlchemyError:
                raise
            except Exception:  # of this one alone: the others are told of all the same
                log.exception("the row of sweep %s cannot be written", sweep_id)
        return rows


@dataclass(frozen=True)
class _Change:
    version: int
    written: bytes


class ListHub(Hub):
    """What is new in the list, with its rows as `row` writes them."""

    def __init__(self, live: LiveList, row: Row, readers: CapacityLimiter) -> None:
        self._live, self._row, self._readers = live, row, readers
        self._standings: Mapping[str, Standing] | None = None
        """As they were found last; None: they have never been."""
        self._version = self._begins = 0
        """Of the list as it was looked at last, and of where `_rows` begins."""
        self._listed = 0
        """When a sweep has come or gone last."""
        self._rows: dict[str, _Change] = {}
        self._failing = False
        super().__init__()

    async def after(self, cursor: int) -> tuple[bytes, int]:
        """What has changed since a version, and which one it is now; all is unknown to version 0."""
        if cursor == self._version:
            return b"", cursor
        if self._failing:
            return AWAY, self._version
        if cursor < self._begins:
            return LOOK, self._version
        rows = [change.written for change in self._rows.values() if change.version > cursor]
        return b"".join([*rows, LIST] if self._listed > cursor else rows), self._version

    def has_news_after(self, cursor: int) -> bool:
        return cursor < self._version

    async def look(self) -> bool:
        try:
            standings, rows = await to_thread.run_sync(self._read, limiter=self._readers)
        except Exception as error:  # the next look may find the database back
            if self._failing or self._standings is None:
                return False
            log.warning("the list of sweeps cannot be read: %s", error)
            self._failing = True
            self._version += 1
            return True
        before = None if self._failing else self._standings
        self._standings, self._failing = standings, False
        listed = before is not None and before.keys() != standings.keys()
        is_news = before is None or listed or bool(rows)
        self._version += is_news
        if before is None:
            self._begins = self._version
        if listed:
            self._listed = self._version
        self._keep(rows)
        return is_news

    def _read(self) -> tuple[Mapping[str, Standing], Mapping[str, bytes]]:
        standings = self._live.standings()
        before = self._standings
        if before is None:
            return standings, {}
        changed = [id for id, standing in standings.items() if before.get(id, standing) != standing]
        return standings, self._live.rows(changed, self._row)

    def _keep(self, rows: Mapping[str, bytes]) -> None:
        for sweep_id, written in rows.items():
            self._rows.pop(sweep_id, None)  # the latest are last
            self._rows[sweep_id] = _Change(self._version, written)
        while len(self._rows) > 2 * KEPT:
            self._begins = max(self._begins, self._rows.pop(next(iter(self._rows))).version)
