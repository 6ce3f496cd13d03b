"""The API, one short function a verb: parse, ask the controller, answer."""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.convertors import Convertor, register_url_convertor

from service.downloads import RESPONSES, download
from service.errors import BadParameter, RevisionRequired
from service.forecast_schemas import Validation
from service.forecasts import Forecasts
from service.health import check_ready
from service.idempotency import Answer, Idempotency, KeyedRequest
from service.lifecycle import State
from service.pages import (
    SweepOrder,
    SweepQuery,
    TrialOrder,
    TrialQuery,
    page_of_trials,
    read_labels,
    read_page,
)
from service.problems import ProblemDocument
from service.schemas import (
    Changes,
    Extension,
    Health,
    PointList,
    PointRequest,
    PointView,
    Readiness,
    RetryRequest,
    SweepDetail,
    SweepList,
    SweepView,
    TrialDetail,
    TrialList,
    TrialState,
    TrialView,
    View,
)
from service.sweeps import SweepController, Write
from service.turns import looks, submits
from trials.spec import Name, SweepRequest, Text

SweepId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Identity of a sweep.")]
PointId = Annotated[int, Path(ge=1, lt=2**31, description="Identity of a point.")]
TrialNumber = Annotated[int, Path(ge=0, lt=2**31, description="0-based number within the sweep.")]

Responses = dict[int | str, dict[str, Any]]


def _problems(descriptions: Mapping[int, str]) -> Responses:
    return {status: {"model": ProblemDocument, "description": text} for status, text in descriptions.items()}


NO_SUCH = _problems({404: "There is no such sweep, or nothing of that name in it."})
BAD_SPEC = _problems(
    {
        400: "The body is not JSON.",
        413: "The body is too large.",
        415: "The body is not sent as application/json.",
        422: "The sweep cannot run as it is asked for; each error points into the body.",
    }
)
ILLEGAL = _problems({409: "Its state does not allow it; the answer says what is legal."})
KEYED = _problems(
    {
        409: "Its state does not allow it, or the request with this Idempotency-Key is under way still.",
        422: "What is asked for cannot be, or the Idempotency-Key came with another request before.",
    }
)
CHECKED: Responses = {
    200: {"model": Validation, "description": "Only its check was asked for."},
    **_problems(
        {503: "The database is away, the service stops, or too many others wait for forecasts; ask again."}
    ),
}
VERB: Responses = {**NO_SUCH, **KEYED, **_problems({415: "A body, if there is one, is application/json."})}
BAD_QUERY = _problems({422: "A parameter of the query makes no sense; each error names it."})
CONDITIONAL = _problems(
    {
        412: "The sweep has changed since: its ETag is none of those in If-Match.",
        428: "If-Match is missing.",
    }
)


async def _controller(request: Request) -> SweepController:
    controller: SweepController = request.app.state.controller
    return controller


Controller = Annotated[SweepController, Depends(_controller)]
Act = Callable[[Write | None], View]
Headers = Callable[[Any], dict[str, str]]


class Once:
    """Carries a request out, and only once where it has an Idempotency-Key."""

    def __init__(self, idempotency: Idempotency, keyed: KeyedRequest | None) -> None:
        self._idempotency, self._keyed = idempotency, keyed

    def __call__(self, act: Act, status: int = 202, headers: Headers = lambda view: {}) -> Response:
        def answer(view: View) -> Answer:
            return Answer(status, headers(view), view.model_dump_json())

        if self._keyed is None:
            return _respond(answer(act(None)))
        return _respond(self._idempotency.once(self._keyed, act, answer))


def _respond(answer: Answer) -> Response:
    replayed = {"idempotency-replayed": "true"} if answer.replayed else {}
    headers = {**answer.headers, **replayed}
    return Response(answer.body, answer.status, headers, media_type="application/json")


async def _once(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            pattern=r"^[!-~]{1,255}$",
            description="Of your making, one for each request: one that you heard nothing of may be sent "
            "again with the same key, for a day. It is carried out once; its answer is told again, with "
            "`Idempotency-Replayed: true`.",
        ),
    ] = None,
) -> Once:
    idempotency: Idempotency = request.app.state.idempotency
    if idempotency_key is None:
        return Once(idempotency, None)
    asked = f"{request.method} {request.url.path}?{request.url.query}\n".encode() + await request.body()
    owner: str = getattr(request.state, "owner", "")
    return Once(idempotency, KeyedRequest(owner, idempotency_key, hashlib.sha256(asked).hexdigest()))


Carrying = Annotated[Once, Depends(_once)]


def _etag(view: SweepView) -> dict[str, str]:
    return {"etag": f'"{view.revision}"'}


def _place(view: SweepView) -> dict[str, str]:
    return {"location": f"/v1/sweeps/{view.id}", **_etag(view)}


def _revisions(
    if_match: Annotated[
        str | None,
        Header(description="The ETag that the sweep had when you looked; `*`: whatever it is."),
    ] = None,
) -> Callable[[int], bool]:
    """Whether a revision is one of those that a client would have changed."""
    if if_match is None:
        raise RevisionRequired("send If-Match with the sweep's ETag, or * to change it whatever it is by now")
    if if_match.strip() == "*":
        return lambda revision: True
    if not re.fullmatch(r'\s*(W/)?"[!#-~]*"(\s*,\s*(W/)?"[!#-~]*")*\s*', if_match):
        raise BadParameter("If-Match", "no_entity_tag", f'{if_match!r:.80} is no entity tag: one is "3"')
    strong = re.findall(r'(?<!W/)"([!#-~]*)"', if_match)
    return lambda revision: str(revision) in strong


class _Id(Convertor[str]):
    """An id has no colon: what follows one is a verb, whatever else may be asked of the path."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("id", _Id())

sweeps = APIRouter(prefix="/v1/sweeps", tags=["sweeps"])
trials = APIRouter(prefix="/v1/sweeps/{sweep_id}", tags=["trials"])
health = APIRouter(tags=["health"])


class ListQuery(BaseModel):
    """What every list takes."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    page_size: Annotated[int, Field(ge=1, le=500)] = 100
    """Entries at once, at most."""
    page_token: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,1000}$")] | None = None
    """`next_page_token` of the page before."""


class SweepListQuery(ListQuery):
    state: list[State] = []
    """Repeatable: sweeps of any of these states."""
    label: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(=[^\x00-\x1f\x7f]*)?$")]] = []
    """`key=value`, or `key` for any value; repeatable: sweeps that have all of them."""
    name: Text | None = None
    """A part of the name, in whatever case."""
    order_by: str = "-created_at"
    """created_at, name, priority or state_since; with `-` before it, the largest first."""


class TrialListQuery(ListQuery):
    state: list[TrialState] = []
    """Repeatable: trials of any of these states."""
    arm: list[Name] = []
    """Repeatable: trials of any of these arms."""
    order_by: str = "number"
    """number, best_valid_perplexity or epochs_done; with `-` before it, the largest first."""


@sweeps.post(
    "",
    status_code=201,
    response_model=SweepDetail,
    responses={**CHECKED, **BAD_SPEC, **KEYED},
)
async def create_sweep(
    spec: SweepRequest,
    controller: Controller,
    once: Carrying,
    request: Request,
    validate_only: Annotated[
        bool, Query(description="Make every check that a submission makes, and queue nothing.")
    ] = False,
    forecast: Annotated[
        bool,
        Query(
            description="With `validate_only`: also tell how long it will take, and how much, from a "
            "measurement of some 20 seconds, which is remembered for an hour; false leaves that out."
        ),
    ] = True,
) -> Response:
    """Ask for a sweep. It is queued, and runs when its turn comes."""
    if not validate_only:
        return await submits.take(once, partial(controller.create, spec), 201, _place)
    checked = await submits.take(controller.checked, spec)
    forecasts: Forecasts = request.app.state.forecasts
    foreseen = await forecasts.forecast(checked, request.is_disconnected) if forecast else None
    return _respond(Answer(200, {}, Validation(spec=checked, forecast=foreseen).model_dump_json()))


@sweeps.get("", response_model=SweepList, responses=BAD_QUERY)
@looks
def list_sweeps(controller: Controller, query: Annotated[SweepListQuery, Query()]) -> Response:
    """Sweeps, the newest first unless another order is asked for, a page at a time."""
    page = read_page(SweepOrder, **query.model_dump())
    asked = SweepQuery(page, query.state, read_labels(query.label), query.name)
    found, token = controller.list_sweeps(asked)
    body = b'{"next_page_token":%s,"sweeps":[%s]}' % (to_json(token), b",".join(found))
    return Response(body, media_type="application/json")


@sweeps.post("/{sweep_id}:pause", status_code=202, response_model=SweepView, responses=VERB)
def pause_sweep(sweep_id: SweepId, controller: Controller, once: Carrying) -> Response:
    """Have running trials save their state, and give their resources back; `:resume` goes on from there."""
    return once(partial(controller.ask, sweep_id, "pause"), headers=_etag)


@sweeps.post("/{sweep_id}:resume", status_code=202, response_model=SweepView, responses=VERB)
def resume_sweep(sweep_id: SweepId, controller: Controller, once: Carrying) -> Response:
    """Go on after a pause, or take a `:stop` back."""
    return once(partial(controller.ask, sweep_id, "resume"), headers=_etag)


@sweeps.post("/{sweep_id}:stop", status_code=202, response_model=SweepView, responses=VERB)
def stop_sweep(sweep_id: SweepId, controller: Controller, once: Carrying) -> Response:
    """Let running trials come to their ends, and begin no other."""
    return once(partial(controller.ask, sweep_id, "stop"), headers=_etag)


@sweeps.post("/{sweep_id}:cancel", status_code=202, response_model=SweepView, responses=VERB)
def cancel_sweep(sweep_id: SweepId, controller: Controller, once: Carrying) -> Response:
    """End a sweep now. What its trials have reached is kept."""
    return once(partial(controller.ask, sweep_id, "cancel"), headers=_etag)


@sweeps.post(
    "/{sweep_id}:extend", status_code=202, response_model=SweepView, responses={**VERB, **BAD_SPEC, **KEYED}
)
def extend_sweep(sweep_id: SweepId, by: Extension, controller: Controller, once: Carrying) -> Response:
    """Raise a sweep's budget. One that has ended goes on with its next trial."""
    return once(partial(controller.extend, sweep_id, by), headers=_etag)


@sweeps.post(
    "/{sweep_id}:retry-failed",
    status_code=202,
    response_model=SweepView,
    responses={**VERB, **BAD_SPEC, **KEYED},
)
def retry_failed(
    sweep_id: SweepId, controller: Controller, once: Carrying, request: RetryRequest | None = None
) -> Response:
    """Try failed trials again under their own numbers, from their latest checkpoints."""
    return once(partial(controller.retry_failed, sweep_id, request or RetryRequest()), headers=_etag)


@sweeps.post(
    "/{sweep_id}:clone",
    status_code=201,
    response_model=SweepDetail,
    responses={**NO_SUCH, **BAD_SPEC, **KEYED},
)
def clone_sweep(
    sweep_id: SweepId, controller: Controller, once: Carrying, changes: dict[str, Any] | None = None
) -> Response:
    """Ask for a new sweep with this one's spec. What the body has takes the place of what is there."""
    return once(partial(controller.clone, sweep_id, changes or {}), 201, _place)


@sweeps.patch("/{sweep_id:id}", responses={**NO_SUCH, **ILLEGAL, **BAD_SPEC, **CONDITIONAL})
def change_sweep(
    sweep_id: SweepId,
    changes: Changes,
    controller: Controller,
    is_wanted: Annotated[Callable[[int], bool], Depends(_revisions)],
    response: Response,
) -> SweepDetail:
    """Change a sweep's name, labels, priority, number of trials at once, or budget."""
    sweep = controller.change(sweep_id, is_wanted, changes)
    response.headers.update(_etag(sweep))
    return sweep


@sweeps.delete("/{sweep_id:id}", status_code=202, response_model=SweepView, responses=VERB)
def delete_sweep(sweep_id: SweepId, controller: Controller, once: Carrying) -> Response:
    """Remove a sweep that does not run, with its trials, curves and checkpoints."""
    return once(partial(controller.ask, sweep_id, "delete"), headers=_etag)


@sweeps.get("/{sweep_id:id}", responses=NO_SUCH)
@looks
def get_sweep(sweep_id: SweepId, controller: Controller, response: Response) -> SweepDetail:
    """A sweep: its state, its progress and the spec that it runs."""
    sweep = controller.get(sweep_id)
    response.headers.update(_etag(sweep))
    return sweep


@trials.get("/trials", responses={**NO_SUCH, **BAD_QUERY})
@looks
def list_trials(
    sweep_id: SweepId, controller: Controller, query: Annotated[TrialListQuery, Query()]
) -> TrialList:
    """The sweep's trials so far, by number unless another order is asked for, a page at a time."""
    page = read_page(TrialOrder, **query.model_dump())
    found, token = page_of_trials(controller.trials(sweep_id), TrialQuery(page, query.state, query.arm))
    return TrialList(trials=found, next_page_token=token)


@trials.get("/trials/{number}", responses=NO_SUCH)
@looks
def get_trial(sweep_id: SweepId, number: TrialNumber, controller: Controller) -> TrialDetail:
    """A trial with its whole configuration and its curve, an entry an epoch."""
    return controller.trial(sweep_id, number)


@trials.post("/trials/{number}:stop", status_code=202, response_model=TrialView, responses=VERB)
def stop_trial(sweep_id: SweepId, number: TrialNumber, controller: Controller, once: Carrying) -> Response:
    """End a trial now: it counts with its best epoch so far, and the next one takes its place."""
    return once(partial(controller.stop_trial, sweep_id, number))


@trials.post("/trials/{number}:retry", status_code=202, response_model=SweepView, responses=VERB)
def retry_trial(sweep_id: SweepId, number: TrialNumber, controller: Controller, once: Carrying) -> Response:
    """Try a failed trial again under its own number, in a sweep that rests."""
    return once(partial(controller.retry_trial, sweep_id, number), headers=_etag)


@trials.post("/trials/{number}:pin", status_code=202, response_model=TrialView, responses=VERB)
def pin_trial(sweep_id: SweepId, number: TrialNumber, controller: Controller, once: Carrying) -> Response:
    """Keep a trial's best checkpoint, whatever the sweep's `retention` would remove."""
    return once(partial(controller.pin_trial, sweep_id, number, True))


@trials.post("/trials/{number}:unpin", status_code=202, response_model=TrialView, responses=VERB)
def unpin_trial(sweep_id: SweepId, number: TrialNumber, controller: Controller, once: Carrying) -> Response:
    """Leave a trial's best checkpoint to the sweep's `retention` again."""
    return once(partial(controller.pin_trial, sweep_id, number, False))


@trials.post("/points", status_code=201, response_model=PointView, responses={**NO_SUCH, **BAD_SPEC, **KEYED})
def add_point(sweep_id: SweepId, point: PointRequest, controller: Controller, once: Carrying) -> Response:
    """Have these values tried as the next draw that has not begun, in every arm that does not fix them.

    A sweep whose draws have all begun tries them once its budget is extended.
    """

    def place(made: PointView) -> dict[str, str]:
        return {"location": f"/v1/sweeps/{sweep_id}/points/{made.id}"}

    return once(partial(controller.add_point, sweep_id, point.params), 201, place)


@trials.get("/points", responses=NO_SUCH)
@looks
def list_points(sweep_id: SweepId, controller: Controller) -> PointList:
    """Points in the order in which they are tried; those that were, too."""
    return PointList(points=controller.points(sweep_id))


@trials.get("/points/{point_id}", responses=NO_SUCH)
@looks
def get_point(sweep_id: SweepId, point_id: PointId, controller: Controller) -> PointView:
    """A point, and the draw that it is tried as."""
    return controller.point(sweep_id, point_id)


@trials.delete("/points/{point_id}", status_code=204, responses={**NO_SUCH, **ILLEGAL})
def remove_point(sweep_id: SweepId, point_id: PointId, controller: Controller) -> None:
    """Take back a point that is not tried yet."""
    controller.records.remove_point(sweep_id, point_id)


@trials.get("/best", responses=NO_SUCH)
@looks
def get_best(sweep_id: SweepId, controller: Controller) -> TrialView:
    """The trial with the lowest validation perplexity so far that has a checkpoint."""
    return controller.best(sweep_id)


@trials.get("/best/checkpoint", responses={**NO_SUCH, **RESPONSES}, response_class=Response)
@trials.head("/best/checkpoint", include_in_schema=False)
def get_best_checkpoint(sweep_id: SweepId, controller: Controller, request: Request) -> Response:
    """The best trial's weights, configuration, vocabulary and metrics as a tar; also while the sweep runs."""
    return download(controller.best_checkpoint(sweep_id), request.method, request.headers, request.url.path)


@trials.get("/trials/{number}/checkpoint", responses={**NO_SUCH, **RESPONSES}, response_class=Response)
@trials.head("/trials/{number}/checkpoint", include_in_schema=False)
def get_trial_checkpoint(
    sweep_id: SweepId, number: TrialNumber, controller: Controller, request: Request
) -> Response:
    """A trial's best weights, configuration, vocabulary and metrics as a tar; also while it runs."""
    checkpoint = controller.trial_checkpoint(sweep_id, number)
    return download(checkpoint, request.method, request.headers, request.url.path)


@health.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health(status="alive")


@health.get(
    "/readyz",
    responses={503: {"model": Readiness, "description": "Something that the service needs is missing."}},
)
def readyz(controller: Controller, request: Request, response: Response) -> Readiness:
    """The service can take and run sweeps: its database, its disk and its reconciler are well."""
    found = check_ready(controller, request.app.state.reconciler)
    response.status_code = 503 if found.not_ready else 200
    return found


@health.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            }
        }
    },
)
def metrics(request: Request) -> Response:
    """What Prometheus scrapes: the queue, trials, failures, epochs, drivers, the disk, and these requests."""
    body, content_type = request.app.state.metrics.written(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


ROUTERS = (sweeps, trials, health)
