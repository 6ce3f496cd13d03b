"""A sweep on several hosts, each a network namespace of this machine, with PostgreSQL and an object store."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.clusters import RayCluster, RayNode, ray_cluster
from tests.databases import PostgreSQL
from tests.hosts import Host, Network, network
from tests.object_store import BUCKET, S3Server, reached
from tests.service_process import ServiceProcess, running_service, wait_until, workers_of, write_corpus
from tests.test_cluster import assert_whole, longer, running
from trials.store import CheckpointStore

pytestmark = pytest.mark.slow

STORE = f"s3://{BUCKET}/sweeps"
SOON_MISSED = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A host that does not answer is given up after some seconds; by default it takes half a minute."""


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture
def object_store(net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """That every host reaches."""
    running = S3Server(tmp_path / "s3", host=net.ip)
    running.start()
    with reached(running, monkeypatch):
        yield running
    running.kill()


@pytest.fixture
def cluster(net: Network, object_store: S3Server) -> Iterator[RayCluster]:
    with ray_cluster(net.ip, {**object_store.environment, **SOON_MISSED}) as started:
        yield started


@pytest.fixture
def service(cluster: RayCluster, server: PostgreSQL, tmp_path: Path) -> Iterator[ServiceProcess]:
    environment = {
        **cluster.environment,
        "FRATERNAL_DATABASE_URL": server.create_database(),
        "FRATERNAL_RAY_ADDRESS": cluster.address,
        "FRATERNAL_STORE_URL": STORE,
    }
    with running_service(tmp_path / "data", environment) as started:
        yield started


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def spec_of(corpus: Path) -> dict[str, Any]:
    return longer(corpus, budget={"trials": 3}, retry={"checkpoint_every_s": 1})


def add(cluster: RayCluster, host: Host) -> RayNode:
    return cluster.add_node(ip=host.ip, within=host.within)


def wait_for_worker(service: ServiceProcess, sweep: str, node: RayNode) -> psutil.Process:
    wait_until(lambda: any(map(node.runs, workers_of(sweep))), "the node runs a trial", service.describe)
    return next(filter(node.runs, workers_of(sweep)))


def weights_in(archive: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        weights = files.extractfile("model.safetensors")
        assert weights is not None
        return weights.read()


def assert_best_is_in_the_store(service: ServiceProcess, sweep_id: str) -> None:
    store, found = CheckpointStore(STORE), service.checkpoints(sweep_id)
    assert {number: store.best_sha256(sweep_id, number) for number in found} == found
    best = service.sweep(sweep_id)["best"]
    assert best["verification"]["outcome"] == "verified"
    fetched = httpx.get(f"{service.url}/v1/sweeps/{sweep_id}/best/checkpoint", trust_env=False)
    assert fetched.status_code == 200
    with store.open_best(sweep_id, best["number"]) as file:
        stored = weights_in(file.read())
    assert weights_in(fetched.content) == stored


def test_a_sweep_whose_hosts_leave_and_join_ends_with_its_budget(
    net: Network, cluster: RayCluster, service: ServiceProcess, corpus: Path
) -> None:
    leaving, staying = (add(cluster, net.add_host()) for _ in range(2))
    cluster.wait_for(nodes=3, cpus=2)
    sweep = service.submit(spec_of(corpus))
    for node in (leaving, staying):
        wait_for_worker(service, sweep, node)
    service.wait_for_epochs(sweep, 4)
    leaving.kill()
    joined = add(cluster, net.add_host())
    wait_for_worker(service, sweep, joined)
    assert service.wait_for_end(sweep)["state"] == "succeeded"
    assert_whole(service, sweep, trials=3)
    assert_best_is_in_the_store(service, sweep)


def test_a_host_whose_cable_is_pulled_and_plugged_in_spoils_nothing(
    net: Network, cluster: RayCluster, service: ServiceProcess, corpus: Path
) -> None:
    hosts = [net.add_host() for _ in range(2)]
    lonely, other = (add(cluster, host) for host in hosts)
    cluster.wait_for(nodes=3, cpus=2)
    sweep = service.submit(spec_of(corpus))
    wait_for_worker(service, sweep, other)
    alone = wait_for_worker(service, sweep, lonely)
    service.wait_for_epochs(sweep, 4)
    hosts[0].cut_off()
    wait_until(lambda: lost(service, sweep), "the sweep misses the trial", service.describe)
    hosts[0].plug_in()
    wait_until(lambda: not alone.is_running(), "its worker there is ended", service.describe)
    service.wait_for_end(sweep)
    assert_whole(service, sweep, trials=3)
    assert_best_is_in_the_store(service, sweep)
    assert running(sweep) == 0


def lost(service: ServiceProcess, sweep: str) -> bool:
    """Whether a worker was missed."""
    return any(trial["attempt"] > 1 for trial in service.trials(sweep))
