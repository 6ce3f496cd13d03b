"""Sweeps on a Ray cluster of several nodes, which leave and join. Real raylets, on one machine."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.launcher import MARK, marked_processes
from tests.clusters import RayCluster, RayNode, ray_cluster
from tests.service_process import (
    ServiceProcess,
    running_service,
    small_spec,
    wait_until,
    workers_of,
    write_corpus,
)

pytestmark = pytest.mark.slow

EPOCHS = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as running:
        yield running


@pytest.fixture
def service(cluster: RayCluster, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Two sweeps at once, on the cluster."""
    environment = {
        **cluster.environment,
        "FRATERNAL_RAY_ADDRESS": cluster.address,
        "FRATERNAL_RUNNING_SWEEPS": "2",
    }
    with running_service(tmp_path / "data", environment) as running:
        yield running


def longer(corpus: Path, **changes: Any) -> dict[str, Any]:
    """Trials of many short epochs: long enough to see them move."""
    spec = small_spec(corpus, **changes)
    return {**spec, "training": {**spec["training"], "epochs": EPOCHS}}


def running(sweep_id: str) -> int:
    return len(workers_of(sweep_id))


def assert_whole(service: ServiceProcess, sweep_id: str, trials: int) -> None:
    """Each trial once, complete, with every epoch once."""
    found = service.trials(sweep_id)
    assert [(trial["number"], trial["state"]) for trial in found] == [(n, "COMPLETE") for n in range(trials)]
    for number in range(trials):
        assert [epoch["epoch"] for epoch in service.curve(sweep_id, number)] == [*range(1, EPOCHS + 1)]


def test_who_has_priority_gets_the_cluster_and_gives_it_back_and_no_epoch_is_lost(
    cluster: RayCluster, service: ServiceProcess, corpus: Path
) -> None:
    cluster.add_node(cpus=2)
    cluster.wait_for(nodes=2, cpus=2)
    first = service.submit(longer(corpus, budget={"trials": 2}))
    service.wait_for_epochs(first, 2)
    urgent = service.submit(small_spec(corpus, priority=5, budget={"trials": 4}))
    wait_until(lambda: running(urgent) == 2, "the urgent sweep has both CPUs", service.describe)
    assert running(first) == 0
    assert service.wait_for_end(urgent)["trials"]["complete"] == 4
    assert service.wait_for_end(first)["trials"]["complete"] == 2
    kinds = [event["kind"] for event in service.events(first)]
    assert kinds.count("trial_paused") == 2
    assert "trial_lost" not in kinds
    assert_whole(service, first, trials=2)


@pytest.mark.parametrize("leave", [RayNode.kill, RayNode.stop])
def test_a_node_that_leaves_costs_no_trial_and_one_that_joins_is_used(
    cluster: RayCluster, service: ServiceProcess, corpus: Path, leave: Callable[[RayNode], None]
) -> None:
    lost = cluster.add_node(labels={"zone": "a"})
    cluster.wait_for(nodes=2, cpus=1)
    spec = longer(corpus, budget={"trials": 3}, retry={"checkpoint_every_s": 1})
    sweep = service.submit({**spec, "resources": {"labels": {"zone": "in(a, b)"}}})
    service.wait_for_epochs(sweep, 2)
    assert running(sweep) == 1
    cluster.add_node(cpus=2)  # which the sweep does not want
    joined = cluster.add_node(labels={"zone": "b"})
    wait_until(
        lambda: any(map(joined.runs, workers_of(sweep))), "the node that has joined is used", service.describe
    )
    assert all(lost.runs(worker) or joined.runs(worker) for worker in workers_of(sweep))
    leave(lost)
    sweep_ended = service.wait_for_end(sweep)
    assert_whole(service, sweep, trials=3)
    assert sweep_ended["driver_generation"] == 1
    assert sweep_ended["best"]["verification"]["outcome"] == "verified"
    if leave is RayNode.kill:
        twin = service.submit({**spec, "resources": {}})
        service.wait_for_end(twin)
        assert service.checkpoints(sweep) == service.checkpoints(twin)


def test_a_driver_that_is_killed_leaves_no_worker_on_any_node_and_the_head_may_die_too(
    cluster: RayCluster, service: ServiceProcess, corpus: Path
) -> None:
    cluster.add_node()
    cluster.wait_for(nodes=2, cpus=1)
    sweep = service.submit(longer(corpus, budget={"trials": 1}, retry={"checkpoint_every_s": 1}))
    service.wait_for_epochs(sweep, 2)
    workers = workers_of(sweep)
    driver = next(
        process for process in marked_processes(MARK, sweep) if "service.drive" in process.cmdline()
    )
    driver.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(workers, timeout=60)
    assert not left
    wait_until(lambda: running(sweep) == 1, "another driver goes on", service.describe)
    cluster.close()  # all of it
    wait_until(lambda: running(sweep) == 0, "nothing runs", service.describe)
    away = f"the Ray cluster at {cluster.address} cannot be reached"
    wait_until(lambda: away in why_it_waits(service, sweep), "it says why", service.describe)
    cluster.begin_again()
    wait_until(lambda: "no machine has room" in why_it_waits(service, sweep), "nodes", service.describe)
    cluster.add_node()
    service.wait_for_end(sweep)
    assert_whole(service, sweep, trials=1)
    kinds = [event["kind"] for event in service.events(sweep)]
    waits = [kind for kind in kinds if kind in {"sweep_waiting", "sweep_going_on"}]
    assert waits.count("sweep_waiting") >= 2, "for the cluster, then for a machine"
    assert waits[-1] == "sweep_going_on"


def why_it_waits(service: ServiceProcess, sweep_id: str) -> str:
    found = service.get(f"/v1/sweeps/{sweep_id}")
    return (found["state_reason"] or "") if found["state"] == "running" else ""
