"""A sweep's events over HTTP: as a stream, or a page at a time."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy import RowMapping

from service.accepting import preferred
from service.errors import InvalidCursor, SweepNotFound
from service.event_log import EventLog
from service.events import EventPage, encode_event
from service.lifecycle import TERMINAL_STATES
from service.problems import ProblemDocument
from service.routes import NO_SUCH, SweepId
from service.streams import HEADERS, MEDIA_TYPE, EventStream, Streams
from service.turns import looks

STREAM = """Server-sent events. Each has as its `id` what `Last-Event-ID` takes, as its `event` the kind, and
as its `data` a JSON object as in `EventPage.events`. A sweep that is over ends the stream with `event: end`,
whose `data` is the sweep as `SweepView` has it; one that is deleted, with `event: deleted`. A comment comes
at least every 15 seconds."""
EXAMPLE = """retry: 2000

id: 7
event: trial_started
data: {"id":7,"sweep_id":"s0123456789","at":"2026-01-01T00:00:00Z","kind":"trial_started",\
"detail":{"number":0,"arm":"fd","attempt":1}}

event: end
data: {"id":"s0123456789","state":"succeeded"}

"""
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": EventPage,
        "description": STREAM,
        "content": {MEDIA_TYPE: {"schema": {"description": "Server-sent events."}, "example": EXAMPLE}},
    },
    204: {"description": "The sweep is over, and no event follows the one that was named."},
    422: {
        "model": ProblemDocument,
        "description": "No event of this sweep has the id that was named.",
    },
    503: {
        "model": ProblemDocument,
        "description": "Too many streams are open; or the service stops.",
    },
}
"""Of the stream and the page."""

FORMS = (MEDIA_TYPE, "application/json")

events = APIRouter(prefix="/v1/sweeps", tags=["events"])


@events.get("/{sweep_id}/events", responses={**NO_SUCH, **RESPONSES}, response_class=Response)
@events.head("/{sweep_id}/events", include_in_schema=False)
@looks
def watch_events(
    sweep_id: SweepId,
    request: Request,
    last_event_id: Annotated[
        str | None, Header(description="Id of the last event that the client has; goes before `after`.")
    ] = None,
    after: Annotated[
        str | None,
        Query(description="Id of the event to begin behind, or `newest`; by default all are sent."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of a page.")] = 100,
) -> Response:
    """What happens in a sweep, from its first event on and as it comes, until the sweep is over.

    A client that was cut off names the last event it has, and misses none; one that reads too slowly is cut
    off. With `Accept: application/json` the answer is a page of what there is so far.
    """
    log: EventLog = request.app.state.events
    streams: Streams = request.app.state.streams
    named = last_event_id or after
    cursor = _cursor(log, sweep_id, "Last-Event-ID" if last_event_id else "after", named)
    paged = preferred(", ".join(request.headers.getlist("accept")), FORMS) == "application/json"
    look = log.after(sweep_id, cursor, limit + 1 if paged else 1)
    if look.state is None:
        raise SweepNotFound(f"there is no sweep {sweep_id!r}; GET /v1/sweeps lists them")
    if paged:
        return _page(look.events[:limit], cursor, has_more=len(look.events) > limit)
    if named and not look.events and look.state in TERMINAL_STATES:
        return Response(status_code=204)
    return EventStream(streams, streams.of_sweep(sweep_id), cursor)


def _cursor(log: EventLog, sweep_id: str, name: str, written: str | None) -> int:
    """Raises InvalidCursor."""
    if not written:
        return 0
    newest = log.newest_id(sweep_id)
    if (name, written) == ("after", "newest"):
        return newest
    if not written.isascii() or not written.isdigit() or len(written) > 18:
        raise InvalidCursor(
            f"{name} {written!r} is no id of an event: a whole number, as the `id` of each event gives it; "
            "leave it out to have all of them"
        )
    if int(written) > newest > 0:
        raise InvalidCursor(
            f"{name} {written} is beyond the newest event of sweep {sweep_id}, {newest}: it is another "
            "sweep's, or the database is an older one, restored; leave it out to have all events"
        )
    return int(written)


def _page(rows: list[RowMapping], cursor: int, *, has_more: bool) -> Response:
    written = b",".join(map(encode_event, rows))
    body = b'{"events":[%s],"next_after":%d,"has_more":%s}' % (
        written,
        rows[-1]["id"] if rows else cursor,
        b"true" if has_more else b"false",
    )
    return Response(body, media_type="application/json", headers=HEADERS)
