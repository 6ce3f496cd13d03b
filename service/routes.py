"""The API, one short function a verb: parse, ask the controller, answer."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import RedirectResponse

from service.downloads import RESPONSES, download
from service.health import check_ready
from service.problems import ProblemDocument
from service.schemas import (
    Extension,
    Health,
    Readiness,
    RetryRequest,
    SweepDetail,
    SweepList,
    SweepView,
    TrialDetail,
    TrialList,
    TrialView,
)
from service.sweeps import SweepController
from trials.spec import SweepRequest

SweepId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Identity of a sweep.")]
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
ILLEGAL = _problems({409: "The sweep's state does not allow it; the answer lists what is legal."})


def _controller(request: Request) -> SweepController:
    controller: SweepController = request.app.state.controller
    return controller


Controller = Annotated[SweepController, Depends(_controller)]

sweeps = APIRouter(prefix="/v1/sweeps", tags=["sweeps"])
health = APIRouter(tags=["health"])


@sweeps.post("", status_code=201, responses=BAD_SPEC)
def create_sweep(spec: SweepRequest, controller: Controller, response: Response) -> SweepDetail:
    """Ask for a sweep. It is queued, and runs when its turn comes."""
    sweep = controller.create(spec)
    response.headers["location"] = f"/v1/sweeps/{sweep.id}"
    return sweep


@sweeps.get("")
def list_sweeps(controller: Controller) -> SweepList:
    """All sweeps, the newest first."""
    return SweepList(sweeps=controller.list_sweeps())


@sweeps.post("/{sweep_id}:pause", status_code=202, responses={**NO_SUCH, **ILLEGAL})
def pause_sweep(sweep_id: SweepId, controller: Controller) -> SweepView:
    """Have running trials save their state, and give their resources back; `:resume` goes on from there."""
    return controller.ask(sweep_id, "pause")


@sweeps.post("/{sweep_id}:resume", status_code=202, responses={**NO_SUCH, **ILLEGAL})
def resume_sweep(sweep_id: SweepId, controller: Controller) -> SweepView:
    """Go on after a pause, or take a `:stop` back."""
    return controller.ask(sweep_id, "resume")


@sweeps.post("/{sweep_id}:stop", status_code=202, responses={**NO_SUCH, **ILLEGAL})
def stop_sweep(sweep_id: SweepId, controller: Controller) -> SweepView:
    """Let running trials come to their ends, and begin no other."""
    return controller.ask(sweep_id, "stop")


@sweeps.post("/{sweep_id}:cancel", status_code=202, responses={**NO_SUCH, **ILLEGAL})
def cancel_sweep(sweep_id: SweepId, controller: Controller) -> SweepView:
    """End a sweep now. What its trials have reached is kept."""
    return controller.ask(sweep_id, "cancel")


@sweeps.post("/{sweep_id}:extend", status_code=202, responses={**NO_SUCH, **ILLEGAL, **BAD_SPEC})
def extend_sweep(sweep_id: SweepId, by: Extension, controller: Controller) -> SweepView:
    """Raise a sweep's budget. One that has ended goes on with its next trial."""
    return controller.extend(sweep_id, by)


@sweeps.post("/{sweep_id}:retry-failed", status_code=202, responses={**NO_SUCH, **ILLEGAL, **BAD_SPEC})
def retry_failed(sweep_id: SweepId, controller: Controller, request: RetryRequest | None = None) -> SweepView:
    """Try failed trials again under their own numbers, from their latest checkpoints."""
    return controller.retry_failed(sweep_id, request or RetryRequest())


@sweeps.post("/{sweep_id}:clone", status_code=201, responses={**NO_SUCH, **BAD_SPEC})
def clone_sweep(
    sweep_id: SweepId, controller: Controller, response: Response, changes: dict[str, Any] | None = None
) -> SweepDetail:
    """Ask for a new sweep with this one's spec. What the body has takes the place of what is there."""
    sweep = controller.clone(sweep_id, changes or {})
    response.headers["location"] = f"/v1/sweeps/{sweep.id}"
    return sweep


@sweeps.delete("/{sweep_id}", status_code=202, responses={**NO_SUCH, **ILLEGAL})
def delete_sweep(sweep_id: SweepId, controller: Controller) -> SweepView:
    """Remove a sweep that does not run, with its trials, curves and checkpoints."""
    return controller.ask(sweep_id, "delete")


@sweeps.get("/{sweep_id}", responses=NO_SUCH)
def get_sweep(sweep_id: SweepId, controller: Controller) -> SweepDetail:
    """A sweep: its state, its progress and the spec that it runs."""
    return controller.get(sweep_id)


@sweeps.get("/{sweep_id}/trials", responses=NO_SUCH)
def list_trials(sweep_id: SweepId, controller: Controller) -> TrialList:
    """The sweep's trials so far, by number."""
    return TrialList(trials=controller.trials(sweep_id))


@sweeps.get("/{sweep_id}/trials/{number}", responses=NO_SUCH)
def get_trial(sweep_id: SweepId, number: TrialNumber, controller: Controller) -> TrialDetail:
    """A trial with its whole configuration and its curve, an entry an epoch."""
    return controller.trial(sweep_id, number)


@sweeps.get("/{sweep_id}/best", responses=NO_SUCH)
def get_best(sweep_id: SweepId, controller: Controller) -> TrialView:
    """The trial with the lowest validation perplexity so far that has a checkpoint."""
    return controller.best(sweep_id)


@sweeps.get("/{sweep_id}/best/checkpoint", responses={**NO_SUCH, **RESPONSES}, response_class=Response)
@sweeps.head("/{sweep_id}/best/checkpoint", include_in_schema=False)
def get_best_checkpoint(sweep_id: SweepId, controller: Controller, request: Request) -> Response:
    """The best trial's weights, configuration, vocabulary and metrics as a tar; also while the sweep runs."""
    return download(controller.best_checkpoint(sweep_id), request.method, request.headers, request.url.path)


@health.get("/healthz")
def healthz() -> Health:
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


@health.get("/", include_in_schema=False)
def home() -> RedirectResponse:
    return RedirectResponse("/dashboard")


ROUTERS = (sweeps, health)
