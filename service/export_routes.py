"""A sweep as a file to take elsewhere."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from service.downloads import WHOLE_FILE, send_file
from service.errors import Stopping, TooManyExports
from service.exports import MEDIA_TYPES, Format, Table, make_export
from service.problems import ProblemDocument
from service.routes import NO_SUCH, Controller, SweepId
from service.schemas import SweepExport
from service.streams import Streams
from service.turns import exports as in_turn

FILE = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": SweepExport,
        "description": "The file; as JSON, of the schema shown.",
        "content": {
            name.partition(";")[0]: FILE for form, name in MEDIA_TYPES.items() if form is not Format.json
        },
        "headers": WHOLE_FILE,
    },
    422: {
        "model": ProblemDocument,
        "description": "There is no such format or table, or a table of a format that has both in one file.",
    },
    503: {
        "model": ProblemDocument,
        "description": "The database does not answer, or too many exports are being made or sent; ask again.",
    },
    507: {"model": ProblemDocument, "description": "The disk of the service has no room for the file."},
}

MOST_OPEN = 16
"""Exports that wait, are made or are sent: each has a file on the disk for as long as its client reads."""


async def _one_of_few(request: Request) -> AsyncIterator[None]:
    """Held until the answer has been sent. Raises TooManyExports."""
    held: set[int] = request.app.state.open_exports
    if len(held) >= MOST_OPEN:
        raise TooManyExports(
            f"{len(held)} exports are being made or sent, as many as there may be: ask again"
        )
    held.add(id(request))
    try:
        yield
    finally:
        held.discard(id(request))


exports = APIRouter(prefix="/v1/sweeps", tags=["sweeps"], dependencies=[Depends(_one_of_few)])


@exports.get("/{sweep_id}/export", responses={**NO_SUCH, **RESPONSES}, response_class=Response)
@exports.head("/{sweep_id}/export", include_in_schema=False)
@in_turn
def export_sweep(
    sweep_id: SweepId,
    controller: Controller,
    request: Request,
    format: Annotated[
        Format,
        Query(
            description="`json`: spec, environment and every trial with its curve; `csv` or `parquet`: one "
            "table; `optuna`: a SQLite file for Optuna and its dashboard."
        ),
    ] = Format.json,
    table: Annotated[
        Table | None,
        Query(description="Of `csv` and `parquet`: a row a trial, which is the default, or a row an epoch."),
    ] = None,
) -> Response:
    """A sweep as a file, as it is at this moment, also while it runs. The file says which moment that is."""
    streams: Streams = request.app.state.streams

    def may_go_on() -> None:
        if streams.is_closing:
            raise Stopping("the service is being stopped, and no export is made any more: ask the next one")

    return send_file(make_export(controller, sweep_id, format, table, may_go_on), request.method)
