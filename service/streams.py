"""What is new as server-sent events: one look at the database for all who watch the same thing.

A hub, alive while somebody watches, looks for what is new twice a second. That of a sweep writes each event
out once, and keeps the latest. Every stream has a cursor of its own and reads from there, or from the table
where the hub does not reach back so far: there are no queues, so a slow client costs what lies in its socket.
All of this lives in one event loop; only the database is read in threads.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from anyio import CancelScope, CapacityLimiter, move_on_after, to_thread
from fastapi import HTTPException, Response
from pydantic_core import to_json
from sqlalchemy import RowMapping
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Receive, Scope, Send

from service.event_log import EventLog
from service.events import encode_event
from service.lifecycle import TERMINAL_STATES, State
from service.schemas import SweepView

log = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
HEADERS = {"cache-control": "no-store", "vary": "accept"}
POLL_S = 0.5
REST_PER_LOOK = 4
"""A hub rests so many times as long as its look took, or longer: it keeps a fifth of a core busy at most."""
HEARTBEAT_S = 15.0
"""Without news, so long; then a comment tells the client, and what is in between, that the service lives."""
RETRY_MS = 2000
"""What a browser is asked to wait before it connects again."""
PATIENCE_S = 10.0
"""For a client that takes nothing more; it may come again and goes on where it was."""
KEPT = 2000
"""Events of a sweep in memory, at least."""
PAGE = 500
"""Events read at once from the table."""
WRITE_BYTES = 64 * 1024
WOKEN_AT_ONCE = 2
PAUSE_BETWEEN_WAKES_S = 0.001
"""Other requests have the loop to themselves in between."""
READERS = 4
"""Threads that read the table: requests have theirs."""
ABORT = "fraternal.abort"
"""ASGI extension: drops the connection, whatever is still to be sent."""


class Abortable:
    """Outermost around an application that uvicorn serves: lets it drop a connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if transport is not None:
            scope.setdefault("extensions", {})[ABORT] = transport.abort
        await self._app(scope, receive, send)


def frame(event: str, data: bytes, event_id: int | None = None) -> bytes:
    first = b"" if event_id is None else b"id: %d\n" % event_id
    return b"%sevent: %s\ndata: %s\n\n" % (first, event.encode(), data)


def _event_frame(row: RowMapping) -> tuple[int, bytes]:
    return row["id"], frame(row["kind"], encode_event(row), row["id"])


class _Tail:
    """The latest events of a sweep, written out: all that have an id above `start`."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._ids: list[int] = []
        self._frames: list[bytes] = []

    @property
    def newest(self) -> int:
        return self._ids[-1] if self._ids else self.start

    def add(self, frames: list[tuple[int, bytes]]) -> None:
        for event_id, written in frames:
            self._ids.append(event_id)
            self._frames.append(written)
        if len(self._ids) > 2 * KEPT:
            self.start = self._ids[-KEPT - 1]
            del self._ids[:-KEPT], self._frames[:-KEPT]

    def after(self, cursor: int) -> tuple[bytes, int]:
        """What follows a cursor of at least `start`, about as much as is written at once, and its last id."""
        first = last = bisect_right(self._ids, cursor)
        size = 0
        while last < len(self._ids) and size < WRITE_BYTES:
            size += len(self._frames[last])
            last += 1
        return b"".join(self._frames[first:last]), self._ids[last - 1] if last > first else cursor


class Hub(ABC):
    """Looks for what is new of one thing, for all who watch it; made in the event loop that they are in."""

    def __init__(self) -> None:
        self.watchers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._looking = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._looking.cancel()

    async def wait(self) -> None:
        """Until there may be news, or it is time for a heartbeat."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    @abstractmethod
    async def after(self, cursor: int) -> tuple[bytes, int]:
        """Some of what follows a cursor, and the cursor that is behind it; else nothing, and `cursor`."""

    @abstractmethod
    def has_news_after(self, cursor: int) -> bool: ...

    def end_after(self, cursor: int) -> bytes | None:
        """What is sent last, where nothing else follows a cursor any more; None as long as more may."""
        return None

    @abstractmethod
    async def look(self) -> bool:
        """Whether there is anything new."""

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        woken_at = loop.time()
        while True:
            looked_at = loop.time()
            is_news = await self.look()
            took = loop.time() - looked_at
            if is_news or looked_at - woken_at >= HEARTBEAT_S:
                woken_at = looked_at
                await self._wake()
            rest = max(POLL_S / 5, looked_at + POLL_S - loop.time(), REST_PER_LOOK * took)
            await asyncio.sleep(rest)

    async def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), WOKEN_AT_ONCE):
            for future in waiting[start : start + WOKEN_AT_ONCE]:
                if not future.done():  # its client may have gone
                    future.set_result(None)
            await asyncio.sleep(PAUSE_BETWEEN_WAKES_S)


class _SweepHub(Hub):
    """A sweep's events."""

    def __init__(
        self, sweep_id: str, events: EventLog, describe: Callable[[str], SweepView], readers: CapacityLimiter
    ) -> None:
        self._sweep_id = sweep_id
        self._events = events
        self._describe = describe
        self._readers = readers
        self._tail: _Tail | None = None
        self._end: bytes | None = None
        """What is sent last, to who has all events, once the sweep is over."""
        self._deleted = False
        self._failing = False
        self._pages: dict[int, asyncio.Task[tuple[bytes, int]]] = {}
        super().__init__()

    def stop(self) -> None:
        super().stop()
        for task in self._pages.values():
            task.cancel()

    async def after(self, cursor: int) -> tuple[bytes, int]:
        """Some of the events that follow a cursor, and the last one's id; else nothing, and `cursor`."""
        if self._tail is None or self._deleted:
            return b"", cursor
        return self._tail.after(cursor) if cursor >= self._tail.start else await self._page_after(cursor)

    def end_after(self, cursor: int) -> bytes | None:
        has_all = self._deleted or (self._tail is not None and cursor >= self._tail.newest)
        return self._end if has_all else None

    def has_news_after(self, cursor: int) -> bool:
        behind = self._tail is not None and cursor < self._tail.newest
        return behind or self.end_after(cursor) is not None

    async def look(self) -> bool:
        end_before = self._end
        try:
            state, frames, self._end = await to_thread.run_sync(self._read, limiter=self._readers)
        except Exception as error:  # the streams stay open: the next look may find the database back
            if not self._failing:
                log.warning("the events of sweep %s cannot be read: %s", self._sweep_id, error)
            self._failing = True
            return False
        self._failing = False
        self._deleted = state is None
        if self._tail is None:
            self._tail = _Tail(frames[0][0] - 1 if len(frames) == KEPT else 0)
        self._tail.add(frames)
        return bool(frames) or self._end != end_before

    def _read(self) -> tuple[State | None, list[tuple[int, bytes]], bytes | None]:
        if self._tail is None:
            look = self._events.latest(self._sweep_id, KEPT)
        else:
            look = self._events.after(self._sweep_id, self._tail.newest, PAGE)
        frames = [_event_frame(row) for row in look.events]
        if self._tail is not None and len(frames) == PAGE:  # there may be more
            return look.state, frames, None
        return look.state, frames, self._end_of(look.state, self._end if not frames else None)

    def _end_of(self, state: State | None, said: bytes | None) -> bytes | None:
        """`said` is what was found before, if nothing has happened since."""
        if state is None:
            return frame("deleted", to_json({"id": self._sweep_id}))
        if state not in TERMINAL_STATES:
            return None
        if said is not None:
            return said
        sweep = self._describe(self._sweep_id)
        return frame("end", sweep.model_dump_json().encode()) if sweep.state in TERMINAL_STATES else None

    async def _page_after(self, cursor: int) -> tuple[bytes, int]:
        """From the table, once for all who ask for the same."""
        if cursor not in self._pages:
            self._pages[cursor] = asyncio.create_task(self._read_page(cursor))
            self._pages[cursor].add_done_callback(lambda _: self._pages.pop(cursor, None))
        return await asyncio.shield(self._pages[cursor])

    async def _read_page(self, cursor: int) -> tuple[bytes, int]:
        def read() -> tuple[bytes, int]:
            rows = self._events.after(self._sweep_id, cursor, PAGE).events
            frames = [_event_frame(row) for row in rows]
            return b"".join(written for _, written in frames), frames[-1][0] if frames else cursor

        try:
            return await to_thread.run_sync(read, limiter=self._readers)
        except SQLAlchemyError as error:
            log.warning("the events of sweep %s cannot be read: %s", self._sweep_id, error)
            return b"", cursor


@dataclass(frozen=True)
class Topic:
    """What many may watch."""

    name: str
    build: Callable[[CapacityLimiter], Hub]
    """Makes its hub, which reads in the threads that it is given."""


class Streams:
    """All streams that are open."""

    def __init__(self, events: EventLog, describe: Callable[[str], SweepView], most: int) -> None:
        """`describe` is asked what a sweep has come to; more than `most` streams at once are refused."""
        self._events = events
        self._describe = describe
        self._most = most
        self._hubs: dict[str, Hub] = {}
        self._open: set[CancelScope] = set()
        self._closing = False
        self._readers = CapacityLimiter(READERS)

    @property
    def count(self) -> int:
        return len(self._open)

    @property
    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """End them all, and refuse others: their clients go on with the next service."""
        self._closing = True
        for scope in self._open:
            scope.cancel()

    def of_sweep(self, sweep_id: str) -> Topic:
        return Topic(sweep_id, partial(_SweepHub, sweep_id, self._events, self._describe))

    @contextmanager
    def joined(self, topic: Topic, scope: CancelScope) -> Iterator[Hub]:
        """A topic's hub, for a stream that is ended by its scope. Raises HTTPException with status 503."""
        if self._closing:
            raise HTTPException(503, "the service is being stopped", {"retry-after": "2"})
        if len(self._open) >= self._most:
            words = f"{self._most} streams are open, as many as FRATERNAL_MAX_STREAMS allows: ask again later"
            raise HTTPException(
                503, f"{words}, or for single pages as application/json", {"retry-after": "10"}
            )
        if topic.name not in self._hubs:
            self._hubs[topic.name] = topic.build(self._readers)
        hub = self._hubs[topic.name]
        self._open.add(scope)
        hub.watchers += 1
        try:
            yield hub
        finally:
            self._open.discard(scope)
            hub.watchers -= 1
            if not hub.watchers:
                hub.stop()
                del self._hubs[topic.name]


class EventStream(Response):
    """What follows a cursor, until nothing more can, the client is gone, or the service is stopped."""

    media_type = MEDIA_TYPE
    charset = "utf-8"

    def __init__(self, streams: Streams, topic: Topic, after: int) -> None:
        self._streams = streams
        self._topic = topic
        self._cursor = after
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
        else:
            with CancelScope() as running, self._streams.joined(self._topic, running) as hub:
                await send(start)
                waiting = asyncio.create_task(_cancel_when_gone(receive, running))
                try:
                    await self._send_events(hub, send)
                finally:
                    waiting.cancel()
        await _finish(scope, send)

    async def _send_events(self, hub: Hub, send: Send) -> None:
        # The id is there for who connects again before the first event: it may have begun behind the newest.
        going_on = await _write(send, b"retry: %d\nid: %d\n\n" % (RETRY_MS, self._cursor))
        while going_on:
            written, self._cursor = await hub.after(self._cursor)
            if not written and (end := hub.end_after(self._cursor)) is not None:
                await _write(send, end)
                return
            if not written:
                await hub.wait()
            if written or not hub.has_news_after(self._cursor):
                going_on = await _write(send, written or b": alive\n\n")


async def _write(send: Send, body: bytes) -> bool:
    """False where the client does not take it."""
    with move_on_after(PATIENCE_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})
        return True
    log.info("a client that takes no more of its stream is dropped")
    return False


async def _finish(scope: Scope, send: Send) -> None:
    """End a response in order, or, where that is not taken either, without."""
    with move_on_after(1.0):
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    await drop(scope)


async def drop(scope: Scope) -> bool:
    """Drop a connection, whatever is still to be sent. False where what serves it cannot."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is None:
        return False
    abort()
    await asyncio.sleep(0)  # in which uvicorn is told
    return True


async def _cancel_when_gone(receive: Receive, running: CancelScope) -> None:
    with suppress(HTTPException):  # a body that is too large
        while (await receive())["type"] != "http.disconnect":
            pass
    running.cancel()
