"""The hub of the list of sweeps: whoever does as it says has the list as it is, whenever it looked in."""

import asyncio
import json
import time
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pytest
from anyio import CapacityLimiter
from hypothesis import given
from hypothesis import strategies as st

import service.live
import service.streams
from service.live import AWAY, LIST, LOOK, ListHub
from service.streams import frame


class Table:
    """A LiveList of what the test says: sweeps by id, and how they stand."""

    def __init__(self) -> None:
        self.sweeps: dict[str, int] = {}
        self.away = False

    def standings(self) -> dict[str, Any]:
        if self.away:
            raise OSError("the database is away")
        return dict(self.sweeps)

    def rows(self, sweep_ids: Collection[str], row: Any) -> dict[str, bytes]:
        return {sweep_id: frame("sweep", row(sweep_id, self.sweeps[sweep_id])) for sweep_id in sweep_ids}


def written(sweep_id: str, standing: int) -> bytes:
    return json.dumps([sweep_id, standing]).encode()


class Watcher:
    """A page: it has what it was told."""

    def __init__(self, hub: ListHub, table: Table) -> None:
        self._hub, self._table, self._cursor = hub, table, 0
        self.has: dict[str, int] | None = None
        self.knows_it_is_away = False

    async def read(self) -> list[bytes]:
        told, self._cursor = await self._hub.after(self._cursor)
        frames = [each + b"\n\n" for each in told.split(b"\n\n")[:-1]]
        for each in frames:
            self.knows_it_is_away = each == AWAY
            if each in (LOOK, LIST):
                self.has = dict(self._table.sweeps)
            elif each != AWAY and self.has is not None:
                sweep_id, standing = json.loads(each.partition(b"data: ")[2])
                if sweep_id in self.has:
                    self.has[sweep_id] = standing
        return frames


async def hub_of(table: Table) -> ListHub:
    """It looks when it is told to."""
    hub = ListHub(table, written, CapacityLimiter(1))  # type: ignore[arg-type]
    hub.stop()
    return hub


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
        st.tuples(st.just("read"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("away"), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_whoever_does_as_told_has_the_list_as_it_is(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        table = Table()
        hub = await hub_of(table)
        watchers = [Watcher(hub, table) for _ in range(3)]
        for step, which, value in steps:
            if step == "put":
                table.sweeps[f"s{which}"] = value
            elif step == "remove":
                table.sweeps.pop(f"s{which}", None)
            elif step == "away":
                table.away = bool(which)
            elif step == "look":
                await hub.look()
            else:
                await watchers[which].read()
        table.away = False
        await hub.look()
        for watcher in watchers:
            await watcher.read()
            assert watcher.has == table.sweeps
            assert not watcher.knows_it_is_away
            assert not hub.has_news_after(watcher._cursor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.live, "KEPT", 1)
        asyncio.run(run())


def test_who_reads_slowly_is_told_of_each_row_once_and_who_is_far_behind_to_look_again() -> None:
    async def run() -> None:
        table = Table()
        table.sweeps = {f"s{number}": 0 for number in range(9)}
        hub = await hub_of(table)
        slow, gone = Watcher(hub, table), Watcher(hub, table)
        assert await slow.read() == [], "nothing is known before the first look"
        await hub.look()
        assert await slow.read() == await gone.read() == [LOOK]
        for standing in (1, 2, 3):
            table.sweeps["s0"] = standing
            assert await hub.look()
        assert not await hub.look(), "nothing is new"
        assert await slow.read() == [frame("sweep", written("s0", 3))]
        for number in range(1, 9):
            table.sweeps[f"s{number}"] = 1
            await hub.look()
        assert await gone.read() == [LOOK]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.live, "KEPT", 2)
        asyncio.run(run())


def test_a_hub_rests_in_proportion_to_what_its_looks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[float, float]] = []

    class LargeTable(Table):
        def standings(self) -> dict[str, Any]:
            began = time.monotonic()
            time.sleep(0.02)
            looks.append((began, time.monotonic()))
            return {}

    async def run() -> None:
        hub = ListHub(LargeTable(), written, CapacityLimiter(1))  # type: ignore[arg-type]
        while len(looks) < 4:
            await asyncio.sleep(0.01)
        hub.stop()

    monkeypatch.setattr(service.streams, "POLL_S", 0.001)
    asyncio.run(run())
    for (began, ended), (next_began, _) in pairwise(looks):
        assert next_began - ended >= 4 * (ended - began) * 0.99


def test_who_watches_is_told_that_the_database_is_away_and_to_look_when_it_is_back() -> None:
    async def run() -> None:
        table = Table()
        hub = await hub_of(table)
        watcher = Watcher(hub, table)
        await hub.look()
        await watcher.read()
        table.away = True
        assert [await hub.look() for _ in range(3)] == [True, False, False]
        assert (await watcher.read(), await watcher.read()) == ([AWAY], [])
        table.away = False
        assert await hub.look(), "though nothing has changed"
        assert await watcher.read() == [LOOK]

    asyncio.run(run())
