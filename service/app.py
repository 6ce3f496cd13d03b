"""The web application put together: routes, the dashboard, one form of error, and the reconciler's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from service.bodies import BodyGate, require_json
from service.dashboard import dashboard_routes
from service.description import CONTACT, LICENSE, SERVERS, TAGS, completed, operation_id
from service.launcher import Launcher, owner_of
from service.metrics import Metrics
from service.reconciler import Reconciler
from service.refusals import answer_errors_as_problems
from service.requests import EveryRequest
from service.retention import collect_orphans
from service.routes import ROUTERS
from service.settings import Settings
from service.sweeps import build_controller
from service.version import own_version

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
    reconciler = Reconciler(records, storage, store, launcher, settings.running_sweeps, collect)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reconciler.start()
        try:
            yield
        finally:
            await run_in_threadpool(reconciler.stop, stop_drivers=settings.stop_drivers)

    metrics = Metrics(records.engine, reconciler, settings.data_dir)
    app = _Application(
        title="fraternal",
        version=own_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        dependencies=[Depends(require_json)],
        generate_unique_id_function=operation_id,
        servers=SERVERS,
        contact=CONTACT,
        license_info=LICENSE,
        openapi_tags=TAGS,
    )
    app.state.controller = controller
    app.state.reconciler = reconciler
    app.state.metrics = metrics
    for router in ROUTERS:
        app.include_router(router)
    app.router.routes.extend(dashboard_routes(controller.storage))
    app.add_middleware(BodyGate)
    answer_errors_as_problems(app)
    return app


class _Application(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        """What is added as middleware lies within Starlette's own, which answers what nobody foresaw."""
        return EveryRequest(super().build_middleware_stack(), self.state.metrics)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema
