"""The web application put together: routes, the dashboard, one form of error, and the reconciler's life."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import event_routes, routes, webhook_routes
from service.access import Access, Gate, described
from service.dashboard import dashboard_routes
from service.docs import docs
from service.errors import InvalidSpec, Problem, ServiceError
from service.event_log import EventLog
from service.idempotency import Idempotency
from service.launcher import Launcher, owner_of
from service.origins import OwnOrigin, SecurityHeaders, secure
from service.problems import (
    MEDIA_TYPE,
    Schema,
    plain_problem,
    problem_response,
    problems_in,
    refusal,
)
from service.rates import Rates
from service.reconciler import Reconciler
from service.retention import collect_orphans
from service.settings import Settings
from service.sign_in import signing_in
from service.streams import Streams
from service.studies import open_closing_storage
from service.sweeps import build_controller
from service.tokens import Tokens
from service.version import own_version
from service.webhooks import Deliverer, Webhooks

ROUTERS = (*routes.ROUTERS, event_routes.events, webhook_routes.webhooks)
MAX_BODY_BYTES = 1024 * 1024
ALL_ROUTERS = (*ROUTERS, docs, signing_in)

DESCRIPTION = """Searches hyperparameters of regularized LSTM language models.

Ask for a sweep with `POST /v1/sweeps`, follow it at `GET /v1/sweeps/{sweep_id}` or on the
[dashboard](/dashboard), and fetch its best checkpoint. Losses are in nats per token, times in UTC. Every
error is an `application/problem+json` document whose `errors` point into the request's body."""


def create_app(settings: Settings, launcher: Launcher) -> FastAPI:
    """The service over the database and the store that `settings` name. It runs sweeps while it is up."""
    controller = build_controller(settings, launcher)
    records, storage, store = controller.records, controller.storage, controller.store
    ours = settings.store_url is None and store.is_owned_by(owner_of(settings))
    collect = partial(collect_orphans, records, storage, store, store_is_ours=ours)
    closing = partial(open_closing_storage, settings.resolved_database_url)
    reconciler = Reconciler(records, storage, store, launcher, settings.running_sweeps, collect, closing)

    webhooks = Webhooks(records.engine, to_private=settings.webhooks_to_private)
    deliverer = Deliverer(webhooks, lambda: reconciler.holds_lease)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reconciler.start()
        deliverer.start()
        try:
            yield
        finally:
            await run_in_threadpool(deliverer.stop)
            await run_in_threadpool(reconciler.stop, stop_drivers=settings.stop_drivers)

    app = FastAPI(
        title="fraternal",
        version=own_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.controller = controller
    app.state.events = EventLog(records.engine)
    app.state.webhooks = webhooks
    app.state.streams = Streams(app.state.events, controller.look, settings.max_streams)
    app.state.idempotency = Idempotency(records.engine)
    for router in ALL_ROUTERS:
        app.include_router(router)
    app.router.routes.extend(dashboard_routes(controller.storage))
    _answer_errors_as_problems(app)
    _let_in_who_may(app, settings, Tokens(records.engine))
    return app


def _let_in_who_may(app: FastAPI, settings: Settings, tokens: Tokens) -> None:
    """What is added last is asked first."""
    app.state.gate = Gate(tokens, Rates(settings.rate_limit), always_closed=not settings.on_loopback)
    any_host = not settings.on_loopback and not settings.allowed_hosts
    app.add_middleware(Access, gate=app.state.gate)
    app.add_middleware(OwnOrigin, allowed_hosts=settings.allowed_hosts, any_host=any_host)
    app.add_middleware(SecurityHeaders)


def _answer_errors_as_problems(app: FastAPI) -> None:
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_crash)
    describe = app.openapi
    app.add_middleware(_BodyLimit)
    app.openapi = cache(lambda: described(_with_problem_media_type(describe())))  # type: ignore[method-assign]


class _BodyLimit:
    """Refuses a body over the limit before any of it is parsed, whether its length is announced or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, f"a body may have at most {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, receive_within_limit, send)


def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return refusal(error, request.url.path, error.problems if isinstance(error, InvalidSpec) else [])


def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if any(found["loc"][0] == "path" for found in errors):
        return problem_response(
            plain_problem(404, f"nothing can have the path {request.url.path}", request.url.path)
        )
    if any(found["loc"][0] != "body" for found in errors):
        problems = [_parameter_problem(found) for found in errors if found["loc"][0] != "body"]
        return refusal(InvalidSpec(problems), request.url.path, problems)
    if errors[0]["type"] == "json_invalid":
        detail = f"the body is not JSON: {errors[0]['ctx']['error']} at character {errors[0]['loc'][1]}"
        return problem_response(plain_problem(400, detail, request.url.path))
    below_body = [{**found, "loc": found["loc"][1:]} for found in errors]
    problems = problems_in(below_body, error.body, _body_schema(request.scope["endpoint"]))
    return refusal(InvalidSpec(problems), request.url.path, problems)


def _parameter_problem(found: dict[str, Any]) -> Problem:
    """Of the query or the headers."""
    name = str(found["loc"][1])
    if found["type"] == "extra_forbidden":
        return Problem("", found["type"], f"{name}: there is no such parameter here", name)
    message = str(found["msg"]).removeprefix("Value error, ")
    return Problem("", found["type"], f"{name}: {message}; got {found['input']!r:.80}", name)


def _on_http_error(request: Request, error: Exception) -> Response:
    """What Starlette and FastAPI say by themselves, in better words where theirs say little."""
    assert isinstance(error, HTTPException)
    path, headers, detail = request.url.path, dict(error.headers or {}), error.detail
    if error.status_code == 404:
        detail = f"nothing has the path {path}; see /docs"
    elif error.status_code == 405 and detail == HTTPStatus(405).phrase:
        headers = {"allow": ", ".join(sorted(_methods_at(request)))}
        detail = f"{path} is for {headers['allow']}, not for {request.method}"
    elif error.status_code == 400:
        detail = "the body cannot be read as JSON: it is not UTF-8, too deep, or has a number too long"
    return problem_response(plain_problem(error.status_code, detail, path), headers)


def _methods_at(request: Request) -> set[str]:
    """Every method that a route has for the request's path; Starlette names those of the first one."""
    routes = [route for router in ALL_ROUTERS for route in router.routes if isinstance(route, Route)]
    at_path = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return {method for route in at_path for method in route.methods or ()}


def _on_crash(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    response = problem_response(plain_problem(500, "the service failed; its log says why", request.url.path))
    secure(response.headers)  # it is sent from outside of all middleware
    return response


@cache
def _body_schema(endpoint: Callable[..., Any]) -> Schema:
    """Of what a route takes: the model among its parameters."""
    hints = [hint for kind in get_type_hints(endpoint).values() for hint in get_args(kind) or (kind,)]
    models = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, BaseModel)]
    return models[0].model_json_schema()


def _with_problem_media_type(description: dict[str, Any]) -> dict[str, Any]:
    """FastAPI files every documented body under application/json; our errors are sent as problem+json."""
    for operations in description["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                content = response.get("content", {})
                if (
                    content.get("application/json", {})
                    .get("schema", {})
                    .get("$ref", "")
                    .endswith("/ProblemDocument")
                ):
                    content[MEDIA_TYPE] = content.pop("application/json")
    return description
