"""What Prometheus is told, over both databases."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from optuna.storages import get_storage
from optuna.storages._rdb.models import StudyModel, TrialModel, TrialUserAttributeModel
from optuna.trial import TrialState
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from sqlalchemy import event, insert
from sqlalchemy.exc import OperationalError

from service.app import create_app
from service.database import migrate, naive, now, open_engine
from service.metrics import METHODS, Metrics
from service.reconciler import Reconciler
from service.records import Records
from service.settings import Settings
from service.studies import open_storage
from service.tables import epochs, sweeps
from tests.fakes import MemoryLauncher, epoch_fields, spec
from tests.played_service import SPEC, played_service, submit, wait_for
from trials.store import CheckpointStore

Sample = tuple[str, frozenset[tuple[str, str]]]


class Service:
    """A database with what the metrics are counted from, and nothing else."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self.engine = open_engine(url)
        migrate(self.engine)
        self._optuna = open_storage(url)
        self.records = Records(self.engine)
        self.launcher = MemoryLauncher()
        store = CheckpointStore(data_dir.as_uri())
        self.reconciler = Reconciler(self.records, get_storage(self._optuna), store, self.launcher, 100)
        self.metrics = Metrics(self.engine, self.reconciler, data_dir)

    def close(self) -> None:
        self.engine.dispose()
        self._optuna.engine.dispose()

    def scrape(self) -> dict[Sample, float]:
        return samples(self.metrics.written("")[0].decode())

    def add(self, sweep_id: str, state: str = "queued", **values: Any) -> None:
        self.records.add_sweep(sweep_id, spec())
        with self.engine.begin() as connection:
            connection.execute(sweeps.update().where(sweeps.c.id == sweep_id).values(state=state, **values))

    def add_trials(self, sweep_id: str, *states: str, failure_class: str = '"diverged"') -> None:
        """Rows of Optuna's, as its storage writes them."""
        with self.engine.begin() as connection:
            study = connection.execute(insert(StudyModel).values(study_name=sweep_id)).inserted_primary_key[0]
            for number, state in enumerate(states):
                values = {"study_id": study, "number": number, "state": TrialState[state]}
                trial = connection.execute(insert(TrialModel).values(values)).inserted_primary_key[0]
                if state == "FAIL":
                    attribute = {"trial_id": trial, "key": "failure_class", "value_json": failure_class}
                    connection.execute(insert(TrialUserAttributeModel).values(attribute))

    def add_epochs(self, sweep_id: str, count: int, number: int = 0) -> None:
        known = {name: value for name, value in epoch_fields(0, 1).items() if name in epochs.c}
        rows = [
            {
                **known,
                "sweep_id": sweep_id,
                "number": number,
                "epoch": epoch,
                "attempt": 1,
                "recorded_at": naive(now()),
            }
            for epoch in range(1, count + 1)
        ]
        with self.engine.begin() as connection:
            connection.execute(insert(epochs), rows)


@pytest.fixture
def service(url: str, tmp_path: Path) -> Iterator[Service]:
    running = Service(url, tmp_path)
    yield running
    running.close()


def samples(text: str) -> dict[Sample, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def of(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_sweeps_are_counted_by_state_and_those_that_wait_are_the_queue(service: Service) -> None:
    for index, state in enumerate(["queued", "queued", "running", "paused", "failed", "failed", "failed"]):
        service.add(f"s{index}", state)
    found = service.scrape()
    assert of(found, "fraternal_queue_length") == 2
    counted = {
        state: of(found, "fraternal_sweeps", state=state) for state in ("queued", "failed", "succeeded")
    }
    assert counted == {"queued": 2, "failed": 3, "succeeded": 0}


def test_trials_are_counted_as_the_api_has_them(service: Service) -> None:
    """What is open in a sweep that does not run waits; copies of studies and other people's do not count."""
    service.add("s1", "running")
    service.add_trials("s1", "COMPLETE", "PRUNED", "RUNNING", "RUNNING", "FAIL")
    service.add("s2", "paused")
    service.add_trials("s2", "RUNNING")
    service.add("s3", "running", study="s3~2")
    service.add_trials("s3", "FAIL", "FAIL")
    service.add_trials("s3~2", "FAIL", failure_class='"out_of_memory"')
    service.add_trials("somebody's own", "RUNNING", "FAIL")
    found = service.scrape()
    assert of(found, "fraternal_running_trials") == 2
    states = ("RUNNING", "WAITING", "COMPLETE", "PRUNED", "FAIL")
    assert [of(found, "fraternal_trials", state=state) for state in states] == [2, 1, 1, 1, 2]
    assert of(found, "fraternal_failed_trials", failure_class="diverged") == 1
    assert of(found, "fraternal_failed_trials", failure_class="out_of_memory") == 1
    assert of(found, "fraternal_failed_trials", failure_class="timeout") == 0


@pytest.mark.parametrize("written", ['"a class that is not"', "{broken", '{"a": 1}', "null", '"x\\ny"'])
def test_a_class_of_failure_that_is_none_of_ours_makes_no_label(service: Service, written: str) -> None:
    service.add("s1", "failed")
    service.add_trials("s1", "FAIL", failure_class=written)
    assert of(service.scrape(), "fraternal_failed_trials", failure_class="unknown") == 1


def test_counters_do_not_fall_when_a_sweep_is_deleted(service: Service) -> None:
    """Prometheus takes a counter that falls for one that has begun anew, and adds all of it once more."""
    names = ["fraternal_epochs_total", "fraternal_driver_starts_total", "fraternal_driver_restarts_total"]
    service.add("s1")
    service.add_trials("s1", "COMPLETE")
    service.add_epochs("s1", 7)
    assert service.records.claim(service.records.get_sweep("s1"), fruitless=0, epochs_done=0)
    assert service.records.claim(service.records.get_sweep("s1"), fruitless=0, epochs_done=0)
    before = service.scrape()
    assert [of(before, name) for name in names] == [7, 1, 1]
    with service.engine.begin() as connection:
        connection.execute(sweeps.update().values(state="deleting"))
    service.records.remove_sweep("s1")
    after = service.scrape()
    assert [of(after, name) for name in names] == [7, 1, 1]
    assert of(after, "fraternal_sweeps", state="deleting") == 0
    service.records.remove_sweep("s1")
    assert of(service.scrape(), "fraternal_epochs_total") == 7


def test_the_lease_and_the_pulse_of_the_reconciler_are_shown(service: Service) -> None:
    found = service.scrape()
    assert of(found, "fraternal_controller_lease_held") == 0
    assert of(found, "fraternal_reconciler_look_timestamp_seconds") == 0
    service.reconciler.reconcile()
    found = service.scrape()
    assert of(found, "fraternal_controller_lease_held") == 1
    assert now().timestamp() - of(found, "fraternal_reconciler_look_timestamp_seconds") < 60
    other = MemoryLauncher()
    other.me = {"controller": 2}
    service.records.give_lease_up("controller", service.launcher.identity())
    assert service.records.hold_lease("controller", other.identity(), timedelta(seconds=60), lambda _: False)
    service.reconciler.reconcile()
    assert of(service.scrape(), "fraternal_controller_lease_held") == 0


def test_a_database_that_is_away_leaves_the_other_metrics(service: Service) -> None:
    @event.listens_for(service.engine, "before_cursor_execute")
    def fail(*_: Any) -> None:
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    found = service.scrape()
    assert of(found, "fraternal_database_up") == 0
    assert of(found, "fraternal_disk_free_bytes") > 0
    assert not any(name == "fraternal_sweeps" for name, _ in found)


def fill(service: Service, count: int, trials: int, epochs_each: int) -> None:
    states = (["COMPLETE"] * 3 + ["PRUNED", "FAIL"]) * (trials // 5)
    for index in range(count):
        service.add(f"s{index}", "succeeded")
        service.add_trials(f"s{index}", *states)
        for number in range(trials):
            service.add_epochs(f"s{index}", epochs_each, number)


def statements(service: Service) -> list[str]:
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    event.listen(service.engine, "before_cursor_execute", note)
    service.scrape()
    event.remove(service.engine, "before_cursor_execute", note)
    return seen


def test_a_scrape_asks_as_often_however_much_there_is(service: Service) -> None:
    fill(service, 1, 5, 1)
    few = statements(service)
    for index in range(10, 20):
        service.add(f"s{index}", "running")
        service.add_trials(f"s{index}", *["RUNNING"] * 10)
    assert statements(service) == few
    assert len(few) == 4


# Over HTTP.


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


def scraped(client: httpx.Client) -> dict[Sample, float]:
    return samples(client.get("/metrics").text)


def test_what_a_sweep_did_is_there_to_be_scraped(client: httpx.Client) -> None:
    sweep_id = submit(client, arms={"wild": {"clip": 13}, "tame": {}})
    wait_for(client, sweep_id, "succeeded")
    found = scraped(client)
    assert of(found, "fraternal_sweeps", state="succeeded") == 1
    assert of(found, "fraternal_epochs_total") == 9
    assert of(found, "fraternal_failed_trials", failure_class="diverged") == 3
    assert of(found, "fraternal_driver_starts_total") == 1
    assert of(found, "fraternal_controller_lease_held") == 1
    assert of(found, "process_resident_memory_bytes") > 0
    (build,) = [labels for name, labels in found if name == "fraternal_build_info"]
    assert dict(build).keys() == {"version", "python"}


def test_requests_are_timed_by_their_routes_never_by_their_paths(client: httpx.Client) -> None:
    for path in ("/v1/sweeps/none", "/v1/sweeps/neither", "/v1/sweeps/none:fly", "/secret/path", "/static/x"):
        client.get(path)
    client.request("BREW", "/v1/sweeps")
    client.post("/v1/sweeps", json={**SPEC, "budget": {}})
    found = scraped(client)
    name = "fraternal_http_request_duration_seconds_count"
    known = {"method": "GET", "route": "/v1/sweeps/{sweep_id}", "status": "4xx"}
    assert of(found, name, **known) == 2
    assert of(found, name, method="GET", route="unmatched", status="4xx") == 2
    assert of(found, name, method="GET", route="/static{rest}", status="4xx") == 1
    assert of(found, name, method="other", route="/v1/sweeps", status="4xx") == 1
    assert of(found, name, method="POST", route="/v1/sweeps", status="4xx") == 1
    assert of(found, "fraternal_http_requests_in_progress") == 1  # the scrape itself
    routes = {dict(labels).get("route", "") for _, labels in found}
    assert not any(word in route for route in routes for word in ("none", "secret", "fly"))


def test_a_hundred_made_up_methods_and_paths_make_no_more_of_it(client: httpx.Client) -> None:
    for index in range(2):
        client.request(f"M{index}", f"/p{index}")
        client.get("/metrics")  # which is measured, too, once it is answered
    before = len(client.get("/metrics").content.splitlines())
    for index in range(100):
        client.request(f"A{index}", f"/q{index}")
    assert len(client.get("/metrics").content.splitlines()) == before


def test_every_name_and_label_is_as_prometheus_wants_it(client: httpx.Client) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    ours = {family.name: family for family in parse(answer.text) if family.name.startswith("fraternal_")}
    assert len(ours) >= 15
    for name, family in ours.items():
        assert family.documentation, name
        assert family.type in {"counter", "gauge", "histogram"}, name
        assert family.type != "gauge" or not name.endswith(("_total", "_count", "_sum")), name
    measured = [name for name in ours if "duration" in name or "disk" in name]
    assert all(name.removesuffix("_created").endswith(("_seconds", "_bytes")) for name in measured)


def test_openmetrics_is_given_to_those_who_ask_for_it(client: httpx.Client) -> None:
    """As Prometheus does."""
    accept = (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2"
    )
    answer = client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.text.endswith("# EOF\n")
    assert {family.name for family in parse_openmetrics(answer.text)} >= {
        "fraternal_epochs",
        "fraternal_sweeps",
    }


def test_two_applications_of_one_process_count_apart(tmp_path: Path) -> None:
    first, second = (
        create_app(Settings(data_dir=tmp_path / name), MemoryLauncher()).state.metrics for name in ("a", "b")
    )
    first.answered("GET", "/healthz", 200, 0.1)
    name = "fraternal_http_request_duration_seconds_count"
    labels = {"method": "GET", "route": "/healthz", "status": "2xx"}
    assert of(samples(first.written("")[0].decode()), name, **labels) == 1
    assert (name, frozenset(labels.items())) not in samples(second.written("")[0].decode())


def test_methods_are_those_that_routes_may_have() -> None:
    assert {"GET", "POST", "DELETE", "PATCH"} <= METHODS
