"""The web application put together: routes, the dashboard, one form of error, and the reconciler's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from service import routers
from service.access import Access, Gate, described
from service.bodies import BodyGate, require_json
from service.dashboard import dashboard_routes
from service.description import CONTACT, LICENSE, SERVERS, TAGS, completed, operation_id
from service.event_log import EventLog
from service.forecasts import Forecasts
from service.home import Rows
from service.idempotency import Idempotency
from service.launcher import Launcher, owner_of
from service.live import LiveList
from service.metrics import Metrics
from service.origins import OwnOrigin, SecurityHeaders
from service.rates import Rates
from service.reconciler import Reconciler
from service.refusals import answer_errors_as_problems
from service.reports import Reports
from service.requests import EveryRequest
from service.retention import collect_orphans
from service.settings import Settings
from service.streams import Streams
from service.studies import open_closing_storage
from service.sweeps import build_controller
from service.tokens import Tokens
from service.turns import LOOKS_AT_ONCE_OVER_A_NETWORK, looks
from service.webhooks import Deliverer, Webhooks
from trials.version import own_version

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
        if records.engine.dialect.name != "sqlite":
            looks.allow(LOOKS_AT_ONCE_OVER_A_NETWORK)
        reconciler.start()
        deliverer.start()
        try:
            yield
        finally:
            await run_in_threadpool(deliverer.stop)
            await run_in_threadpool(reconciler.stop, stop_drivers=settings.stop_drivers)

    app = _Application(
        title="fraternal",
        version=own_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(require_json)],
        generate_unique_id_function=operation_id,
        servers=SERVERS,
        contact=CONTACT,
        license_info=LICENSE,
        openapi_tags=TAGS,
    )
    app.state.controller = controller
    app.state.reconciler = reconciler
    app.state.metrics = Metrics(records.engine, reconciler, settings.data_dir)
    app.state.reports = Reports(controller, settings)
    app.state.forecasts = Forecasts(controller)
    app.state.events = EventLog(records.engine)
    app.state.webhooks = webhooks
    app.state.streams = Streams(app.state.events, controller.look, settings.max_streams)
    app.state.live = LiveList(records, controller.views)
    app.state.rows = Rows()
    app.state.open_exports = set()
    app.state.idempotency = Idempotency(records.engine)
    for router in routers.ALL:
        app.include_router(router)
    app.router.routes.extend(dashboard_routes(controller.storage))
    app.add_middleware(BodyGate)
    answer_errors_as_problems(app)
    _let_in_who_may(app, settings, Tokens(records.engine))
    return app


def _let_in_who_may(app: FastAPI, settings: Settings, tokens: Tokens) -> None:
    """What is added last is asked first."""
    app.state.gate = Gate(tokens, Rates(settings.rate_limit), always_closed=not settings.on_loopback)
    any_host = not settings.on_loopback and not settings.allowed_hosts
    app.add_middleware(Access, gate=app.state.gate)
    app.add_middleware(OwnOrigin, allowed_hosts=settings.allowed_hosts, any_host=any_host)
    app.add_middleware(SecurityHeaders)


class _Application(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        """What is added as middleware lies within Starlette's own, which answers what nobody foresaw."""
        return EveryRequest(super().build_middleware_stack(), self.state.metrics)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = completed(described(super().openapi()))
        return self.openapi_schema
