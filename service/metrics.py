"""What Prometheus is told: counted in the database at the moment of asking, and measured of the requests.

Each application has a registry of its own. No label has text of a client's.
"""

import json
import math
import platform
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

from optuna.storages._rdb.models import StudyModel, TrialModel, TrialUserAttributeModel
from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine, and_, func, select
from sqlalchemy.exc import SQLAlchemyError

from service.lifecycle import WITH_DRIVER, State
from service.reconciler import Reconciler
from service.schemas import TrialState
from service.tables import epochs, sweeps, totals
from trials.spec import FailureClass
from trials.version import own_version

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
"""A client may send any word as the method: all others are one."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
UNKNOWN = "unknown"
"""Class of failures that the database has in words that are none of ours."""

_TRIALS = (
    select(TrialModel.state, sweeps.c.state, TrialUserAttributeModel.value_json, func.count())
    .select_from(sweeps)
    .join(StudyModel, StudyModel.study_name == sweeps.c.study)
    .join(TrialModel, TrialModel.study_id == StudyModel.study_id)
    .outerjoin(
        TrialUserAttributeModel,
        and_(
            TrialUserAttributeModel.trial_id == TrialModel.trial_id,
            TrialUserAttributeModel.key == "failure_class",
        ),
    )
    .group_by(TrialModel.state, sweeps.c.state, TrialUserAttributeModel.value_json)
)


class Metrics:
    """The registry, and service.requests.Observer."""

    def __init__(self, engine: Engine, reconciler: Reconciler, data_dir: Path) -> None:
        self._registry = CollectorRegistry()
        self._as_text = _Shared(self._write_as_text)
        self._as_openmetrics = _Shared(self._write_as_openmetrics)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(_Service(engine, reconciler, data_dir))
        self._in_progress = Gauge(
            "fraternal_http_requests_in_progress",
            "Requests that are being answered, streams among them.",
            registry=self._registry,
        )
        self._seconds = Histogram(
            "fraternal_http_request_duration_seconds",
            "From a request's arrival until its answer begins.",
            ["method", "route", "status"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )

    def began(self) -> None:
        self._in_progress.inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        known = method if method in METHODS else "other"
        self._seconds.labels(known, route, f"{status // 100}xx").observe(seconds)

    def ended(self) -> None:
        self._in_progress.dec()

    def written(self, accept: str) -> tuple[bytes, str]:
        """All of it, and its content type: OpenMetrics where that is asked for, as Prometheus does."""
        if "application/openmetrics-text" in accept:
            return self._as_openmetrics(), openmetrics.CONTENT_TYPE_LATEST
        return self._as_text(), CONTENT_TYPE_PLAIN_0_0_4

    def _write_as_text(self) -> bytes:
        return generate_latest(self._registry)

    def _write_as_openmetrics(self) -> bytes:
        written: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
        return written


class _Shared:
    """Made for all who ask at once: whoever waits takes what was begun after he had asked."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._making = threading.Lock()
        self._began, self._made = -math.inf, b""

    def __call__(self) -> bytes:
        asked = time.monotonic()
        with self._making:
            if self._began <= asked:
                began = time.monotonic()
                self._began, self._made = began, self._make()
            return self._made


class _Service(Collector):
    """Asked anew for every scrape: some queries that count, however many sweeps and trials there are."""

    def __init__(self, engine: Engine, reconciler: Reconciler, data_dir: Path) -> None:
        self._engine = engine
        self._reconciler = reconciler
        self._data_dir = data_dir

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily(
            "fraternal_build",
            "What runs.",
            value={"version": own_version(), "python": platform.python_version()},
        )
        disk = shutil.disk_usage(self._data_dir)
        yield _gauge("fraternal_disk_free_bytes", "Room left on the disk of the data directory.", disk.free)
        yield _gauge("fraternal_disk_size_bytes", "Size of the disk of the data directory.", disk.total)
        yield _gauge(
            "fraternal_controller_lease_held",
            "1 where this service starts and ends drivers; of several at one database, one does.",
            self._reconciler.holds_lease,
        )
        looked_at = self._reconciler.looked_at
        yield _gauge(
            "fraternal_reconciler_look_timestamp_seconds",
            "When the reconciler last looked at the sweeps; 0 before it has.",
            looked_at.timestamp() if looked_at else 0,
        )
        try:
            with self._engine.connect() as connection:
                counted = list(_counted(connection))
        except SQLAlchemyError:
            counted = []
        yield _gauge("fraternal_database_up", "1 where the database answers.", bool(counted))
        yield from counted


def _counted(connection: Connection) -> Iterator[Metric]:
    of_state: Counter[str] = Counter(dict.fromkeys(get_args(State), 0))
    by_state = select(sweeps.c.state, func.count()).group_by(sweeps.c.state)
    of_state.update({state: count for state, count in connection.execute(by_state)})
    yield _gauge("fraternal_queue_length", "Sweeps that wait for their turn.", of_state["queued"])
    yield _gauges("fraternal_sweeps", "Sweeps there are.", "state", of_state)
    yield from _trials(connection)
    kept = {name: value for name, value in connection.execute(select(totals.c.name, totals.c.value))}
    recorded = connection.execute(select(func.count()).select_from(epochs)).scalar_one()
    for name, what, value in (
        ("epochs", "Epochs that were recorded.", recorded + kept.get("epochs_of_deleted_sweeps", 0)),
        ("driver_starts", "Drivers that were started.", kept.get("driver_starts", 0)),
        (
            "driver_restarts",
            "Drivers that were started in place of one that died or fell silent.",
            kept.get("driver_restarts", 0),
        ),
    ):
        yield CounterMetricFamily(f"fraternal_{name}", what, value=value)


def _trials(connection: Connection) -> Iterator[Metric]:
    """As the API has them: what is open in a sweep that does not run, waits."""
    of_state: Counter[str] = Counter(dict.fromkeys(get_args(TrialState), 0))
    of_class: Counter[str] = Counter(dict.fromkeys((*get_args(FailureClass), UNKNOWN), 0))
    for state, state_of_sweep, written_class, count in connection.execute(_TRIALS):
        at_rest = state.name == "RUNNING" and state_of_sweep not in WITH_DRIVER
        of_state["WAITING" if at_rest else state.name] += count
        if state.name == "FAIL":
            of_class[_failure_class(written_class)] += count
    yield _gauge("fraternal_running_trials", "Trials that are being trained.", of_state["RUNNING"])
    yield _gauges("fraternal_trials", "Trials there are.", "state", of_state)
    yield _gauges("fraternal_failed_trials", "Trials that have failed.", "failure_class", of_class)


def _failure_class(written: str | None) -> str:
    if written is None:
        return "infrastructure"  # the trial ended without a word
    try:
        found = json.loads(written)
    except ValueError:
        return UNKNOWN
    return found if isinstance(found, str) and found in get_args(FailureClass) else UNKNOWN


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=float(value))


def _gauges(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family
