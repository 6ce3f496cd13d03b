"""What a worker loads, and what one of a cluster looks at before it begins."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from trials.cluster import ClusterAway, own_address
from trials.encoded import node_dir
from trials.spec import Resources
from trials.store import CheckpointStore
from trials.trainable import runnable, why_not_here
from trials.version import own_version


def test_a_worker_loads_nothing_of_the_drivers() -> None:
    """As it comes from Tune, which makes a class that names what the driver gave it."""
    sent = cloudpickle.dumps(runnable(Resources(cpus=2)))
    code = (
        "import pickle, sys; runs = pickle.loads(sys.stdin.buffer.read()); import trials.attempt\n"
        "bundles = runs.default_resource_request({'task': None}).bundles\n"
        "print(bundles, {'optuna', 'sqlalchemy', 'trials.driver', 'trials.ledger'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert ran.stdout.decode().strip() == "[{'CPU': 2.0}] set()"


def test_a_node_that_sees_another_store_than_the_service_says_so(tmp_path: Path) -> None:
    """A folder of the same name, on another disk: nobody would ever find what is saved there."""
    service, node = CheckpointStore(str(tmp_path / "one")), CheckpointStore(str(tmp_path / "two"))
    service.announce("s1", "d1")
    assert why_not_here(own_version(), service, "s1", "d1") is None
    words = why_not_here(own_version(), node, "s1", "d1")
    assert words is not None
    assert f"node {socket.gethostname()} has another store than the service" in words
    assert str(tmp_path / "two") in words
    assert "FRATERNAL_STORE_URL" in words
    service.withdraw("s1", "d1")
    assert why_not_here(own_version(), service, "s1", "d1") is not None


def test_a_node_with_another_version_says_so(tmp_path: Path) -> None:
    words = why_not_here("99.0", CheckpointStore(str(tmp_path)), "s1", "d1")
    assert words is not None
    assert f"has fraternal {own_version()}, and the service 99.0" in words


def test_a_node_keeps_corpora_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert node_dir().name.startswith("fraternal-")
    monkeypatch.setenv("FRATERNAL_NODE_DIR", str(tmp_path))
    assert node_dir() == tmp_path


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379", "here"])
def test_a_cluster_that_cannot_be_reached_is_named(address: str) -> None:
    with pytest.raises(ClusterAway, match=f"^the Ray cluster at {address} cannot be reached: "):
        own_address(address)


def test_this_machine_is_known_by_the_address_from_which_it_reaches_the_cluster() -> None:
    with socket.create_server(("127.0.0.7", 0)) as server:
        assert own_address(f"127.0.0.7:{server.getsockname()[1]}").startswith("127.")
