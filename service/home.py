"""The home page: all sweeps, what they have come to, and what may be asked of them.

It is whole without a script. With ours, rows that change are put in as they come (service/live.py).
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http import HTTPStatus
from shlex import quote
from typing import Annotated, Any, get_args
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from markupsafe import Markup
from pydantic import TypeAdapter, model_validator
from pydantic_core import to_json

from service.errors import IllegalMove, SweepNotFound
from service.html import environment
from service.lifecycle import MOVES, State, Verb
from service.live import ListHub, LiveList
from service.own_pages import Form, page
from service.pages import SweepOrder, SweepQuery, read_labels, read_page
from service.records import Stamp
from service.requests import SWEEP_ID
from service.routes import Controller, SweepListQuery
from service.schemas import SweepView
from service.streams import EventStream, Streams, Topic
from service.sweeps import SweepController
from service.tokens import Token
from service.turns import looks
from service.views import CHANGING, MOST_SWEEPS
from trials.rows import Remembered

STEERING: tuple[Verb, ...] = ("pause", "resume", "stop", "cancel")
"""What has a button, in this order."""
STATES: tuple[State, ...] = get_args(State)
ORDERS = {
    "-created_at": "newest first",
    "created_at": "oldest first",
    "-state_since": "changed last",
    "name": "by name",
    "-priority": "by priority",
}
COMES_TO: Mapping[State, str] = {
    "pausing": "is pausing: running trials save where they stand.",
    "paused": "is paused.",
    "queued": "is queued again, and goes on when its turn comes.",
    "running": "goes on.",
    "stopping": "is stopping: running trials come to their ends, and no other begins.",
    "cancelling": "is being cancelled. What its trials have reached is kept.",
}
SAID_COOKIE = "fraternal_said"
"""What a form has come to, until the page that follows has shown it."""
SAID_LASTS_S = 60
SHORT_REASON = 200


class HomeQuery(SweepListQuery):
    """As the API's list takes it. A form sends what is left empty, too."""

    page_size: Annotated[int, Query(ge=1, le=500)] = 50

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_empty(cls, asked: dict[str, Any]) -> dict[str, Any]:
        kept = {name: _filled(value) for name, value in asked.items()}
        return {name: value for name, value in kept.items() if value != ""}


def _filled(value: Any) -> Any:
    if isinstance(value, list):
        return [one for each in value if (one := _filled(each)) != ""]
    return value.strip() if isinstance(value, str) else value


@dataclass(frozen=True)
class Said:
    """What a form has come to, in words."""

    words: str
    refused: bool

    def written(self) -> str:
        return base64.urlsafe_b64encode(to_json([self.words, self.refused])).decode()


_SAID = TypeAdapter(tuple[str, bool])


def _said_before(request: Request) -> Said | None:
    try:
        return Said(*_SAID.validate_json(base64.urlsafe_b64decode(request.cookies.get(SAID_COOKIE, ""))))
    except ValueError:
        return None


def written_row(sweep: SweepView, may_write: bool) -> Markup:
    # mypy cannot know a template's macros
    row: Markup = environment().get_template("sweep.html").module.row(sweep, may_write)  # type: ignore[attr-defined]
    return row


class Rows:
    """Sweeps as the page has them. One at rest is written once: it looks the same until its stamp changes."""

    def __init__(self) -> None:
        self._at_rest: Remembered[tuple[Stamp, bool], Markup] = Remembered(2 * MOST_SWEEPS, lambda _: 0)

    def row(self, sweep: SweepView, *, may_write: bool) -> Markup:
        if sweep.state in CHANGING:
            return written_row(sweep, may_write)
        key = Stamp(sweep.id, sweep.driver_generation, sweep.state, sweep.revision), may_write
        return self._at_rest.find(key) or self._at_rest.keep(key, written_row(sweep, may_write))


async def _asker(request: Request) -> Token | None:
    asker: Token | None = request.state.asker
    return asker


async def _rows(request: Request) -> Rows:
    rows: Rows = request.app.state.rows
    return rows


Asker = Annotated[Token | None, Depends(_asker)]
TheRows = Annotated[Rows, Depends(_rows)]

home = APIRouter(include_in_schema=False)


@home.get("/")
@looks
def show_home(
    controller: Controller,
    query: Annotated[HomeQuery, Query()],
    request: Request,
    asker: Asker,
    rows: TheRows,
) -> Response:
    sweeps, token = controller.sweeps_on(_question(query))
    row = partial(rows.row, may_write=may_write(asker))
    said = _said_before(request)
    response = page(
        "home.html",
        rows=list(map(row, sweeps)),
        query=query,
        filters=filters_in_words(query),
        first=_address(request),
        older=token and _address(request, token),
        states=STATES,
        orders=ORDERS,
        said=said,
        asker=asker,
        may_write=may_write(asker),
        command=first_command(str(request.base_url).rstrip("/"), asker),
    )
    if said is not None:
        response.delete_cookie(SAID_COOKIE)
    return response


@home.get("/live")
async def watch_home(request: Request, asker: Asker, rows: TheRows) -> Response:
    """Rows as they change, for the script of the page."""
    streams: Streams = request.app.state.streams
    live: LiveList = request.app.state.live
    writes = may_write(asker)
    row = partial(rows.row, may_write=writes)
    return EventStream(streams, Topic(f"list, with buttons: {writes}", partial(ListHub, live, row)), after=0)


@home.post("/ask")
def ask(form: Form, controller: Controller, request: Request) -> Response:
    """What a button asks for. A change that comes from elsewhere never comes here (service/origins.py)."""
    back = form.get("back") or request.headers.get("referer", "")
    response = RedirectResponse(_home_at(back), HTTPStatus.SEE_OTHER)
    said = _ask(controller, form.get("sweep", ""), form.get("verb", ""))
    response.set_cookie(
        SAID_COOKIE,
        said.written(),
        max_age=SAID_LASTS_S,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response


@home.get("/cancel")
@looks
def confirm_cancel(controller: Controller, request: Request, sweep: str = "") -> Response:
    """What is asked before a sweep is cancelled, where no script does."""
    back = _home_at(request.headers.get("referer", ""))
    return page("cancel.html", sweep=controller.look(_existing(sweep)), back=back)


def _ask(controller: SweepController, sweep_id: str, verb: str) -> Said:
    known: Verb | None = next((known for known in STEERING if known == verb), None)
    if known is None:
        return Said(f"Nothing was asked: there is no button {verb!r:.40}.", refused=True)
    try:
        sweep = controller.ask(_existing(sweep_id), known)
    except (SweepNotFound, IllegalMove) as error:
        return Said(f"That did not work: {error}.", refused=True)
    return Said(f"“{sweep.name or sweep.id}” {COMES_TO[sweep.state]}", refused=False)


def _existing(sweep_id: str) -> str:
    """An id that a database can be asked for. Raises SweepNotFound."""
    if not SWEEP_ID.fullmatch(sweep_id):
        raise SweepNotFound(f"there is no sweep {sweep_id!r:.80}")
    return sweep_id


def _question(query: HomeQuery) -> SweepQuery:
    asked = read_page(SweepOrder, **query.model_dump())
    return SweepQuery(asked, query.state, read_labels(query.label), query.name)


def _address(request: Request, page_token: str | None = None) -> str:
    """Of another page of what is shown."""
    asked = [(name, value) for name, value in request.query_params.multi_items() if name != "page_token"]
    if page_token is not None:
        asked.append(("page_token", page_token))
    return f"/?{urlencode(asked)}" if asked else "/"


def _home_at(address: str) -> str:
    """The home page as it was seen, with its filters; as it is at first, where the address is another."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "/"
    query = parts.query if parts.path == "/" and parts.query.isascii() and parts.query.isprintable() else ""
    return f"/?{query}" if query else "/"


def filters_in_words(query: HomeQuery) -> str:
    """Which sweeps are shown; empty where all are."""
    labels = [f"labelled {label}" for label in query.label]
    named = [f"named like “{query.name}”"] if query.name else []
    states = [f"that are {' or '.join(query.state)}"] if query.state else []
    return " and ".join([*states, *labels, *named])


def may_write(asker: Token | None) -> bool:
    """Where no token is needed, anybody may."""
    return asker is None or asker.may("write")


def first_command(url: str, asker: Token | None) -> str:
    """For a shell: asks for the sweep that needs nothing but this service."""
    token = ' -H "Authorization: Bearer $FRATERNAL_TOKEN"' if asker is not None else ""
    return (
        f"curl -sS --fail-with-body {quote(f'{url}/v1/sweeps')}{token} \\\n"
        """  -H 'Content-Type: application/json' -d '{"preset": "quickstart"}'"""
    )


# How a row says what it says.


def steps_from(state: State) -> list[Verb]:
    """What of STEERING would change something."""
    return [verb for verb in STEERING if MOVES[verb].states.get(state, state) != state]


def lasted(seconds: float) -> str:
    """42 s, 12 min, 3 h 05, 2 d 4 h."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02}"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def perplexity_in_words(value: float | None) -> str:
    """Two decimals, as tables of the papers have; none where it is too large for a number."""
    return "over 10³⁰⁸" if value is None else f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def label_link(key: str, value: str) -> str:
    return "/?" + urlencode({"label": f"{key}={value}"})


def reason_parts(reason: str) -> tuple[str, str]:
    """What is said at once, and what is there to be unfolded: the whole, where that is more."""
    first = reason.strip().partition("\n")[0]
    whole = reason.strip()
    if len(first) > SHORT_REASON:
        return first[:SHORT_REASON] + "…", whole
    return first, whole if whole != first else ""


def _stamp(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def _clock(at: datetime) -> str:
    return f"{at.day} {at:%b %Y, %H:%M} UTC"


environment().globals["label_link"] = label_link
environment().filters |= {
    "stamp": _stamp,
    "clock": _clock,
    "lasted": lasted,
    "about": lambda seconds: f"~{lasted(seconds)}",
    "perplexity": perplexity_in_words,
    "grouped": lambda count: f"{count:,}",
    "steps": steps_from,
    "reason_parts": reason_parts,
}
