"""A Ray cluster that others started: a driver joins it, and looks at its nodes. Loads no torch.

A driver brings a node of its own, which has nothing for trials: so it can run on any machine that the
cluster's can reach, one that is no part of it too, and its end is the node's. `python -m trials.cluster
ADDRESS` prints the nodes.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trials.encoded import ENCODED, node_dir
from trials.shares import Node, as_ray_reads
from trials.spec import Resources
from trials.verification import Check, InFreshProcess, Verification

HANDED_ON = (
    "FRATERNAL_DRIVER_OF",
    "FRATERNAL_OWNER",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "SPT_NOENV",
    "TZ",
)
"""Variables of a driver that its workers on other machines have, too. No secret: Ray writes them down."""
REACH_S = 5.0
"""For a connection to the cluster to be made."""
JOIN_S = 60.0
"""For the driver's node to be one of the cluster's."""
OBJECT_STORE_BYTES = 100 * 2**20
NODE_ID = "ray.io/node-id"
"""A label that Ray gives each node, and that makes no two of them alike."""


class ClusterAway(Exception):
    """The cluster does not answer, or does not take a node; the message says which, and why."""


def join(address: str, scratch: Path) -> None:
    """Become a part of the cluster at `host:port`, with a node that has no CPU. Raises ClusterAway.

    The node's processes end with this one, whatever ends it.
    """
    ip = own_address(address)
    log = scratch / "node.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trials.cluster", address, str(os.getpid()), ip, str(scratch)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_joined(address, scratch, process)
        ray.init(
            address=address,
            _node_ip_address=ip,
            _temp_dir=str(scratch),
            log_to_driver=False,
            runtime_env={"env_vars": {name: os.environ[name] for name in HANDED_ON if name in os.environ}},
        )
    except Exception as error:
        process.kill()
        process.wait()
        words = error if isinstance(error, ClusterAway) else f"{type(error).__name__}: {error}"
        said = log.read_text(errors="replace").strip()[-1000:]
        raise ClusterAway(f"{words}; its node's log ends: {said}") from error


def own_address(address: str) -> str:
    """Of this machine, as the cluster sees it. Raises ClusterAway where it cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_S) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ClusterAway(
            f"the Ray cluster at {address} cannot be reached: {error}; see that its head runs, and listens "
            "there for this machine, too"
        ) from error


def _wait_until_joined(address: str, scratch: Path, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ClusterAway(f"the Ray cluster at {address} does not take a node of this driver")
        if any(info.temp_dir == str(scratch) for info in _alive(address)):
            return
        time.sleep(0.2)
    raise ClusterAway(f"the Ray cluster at {address} has not taken a node of this driver in {JOIN_S:g} s")


def _alive(address: str) -> Iterator[Any]:
    """Ray's own words on its nodes, asked without being a part of the cluster."""
    # As `ray health-check` does it. mypy sees neither: one is compiled, the other one generated.
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    infos = GcsClient(address=address).get_all_node_info(timeout=REACH_S)
    return (info for info in infos.values() if info.state == GcsNodeInfo.GcsNodeState.ALIVE)


def list_nodes(address: str) -> list[Node]:
    """The machines of a cluster that have something for trials. Raises ClusterAway."""
    own_address(address)
    try:
        return [_node(dict(info.resources_total), dict(info.labels)) for info in _alive(address)]
    except Exception as error:  # of Ray, which has no common one: the token is wrong, say
        raise ClusterAway(
            f"the Ray cluster at {address} does not say what it has ({error}): see that this is its head's "
            "port, as `ray start --head` says it, and that both have the same RAY_AUTH_TOKEN, if any"
        ) from error


def joined_nodes() -> list[Node]:
    """The same of the cluster, or the Ray of our own, that this process is a part of."""
    infos = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
    return [_node(info["Resources"], info["Labels"]) for info in infos if info["Alive"]]


def _node(resources: dict[str, float], labels: dict[str, str]) -> Node:
    kept = tuple(sorted((name, value) for name, value in labels.items() if name != NODE_ID))
    return Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0), kept)


class OnANode:
    """trials.verification.Verify: the fresh process is one of some node, with a GPU where trials have one."""

    def __init__(self, store_url: str, resources: Resources) -> None:
        self._store_url = store_url
        # It takes no CPU from the trials: it has little to do, and is not to wait until one of them ends.
        self._verify = ray.remote(max_retries=1)(verify_there).options(
            num_cpus=0, num_gpus=resources.gpus, label_selector=as_ray_reads(resources.labels)
        )

    def __call__(self, check: Check) -> Verification:
        began = time.monotonic()
        waiting = self._verify.remote(self._store_url, check)
        try:
            done: Verification = ray.get(waiting, timeout=2 * check.timeout_s)
            return done
        except Exception as error:  # no node, none in time, or it is lost
            with suppress(Exception):  # Ray is away, too
                ray.cancel(waiting, force=True)
            words = f"no node has evaluated it: {type(error).__name__}: {error}"
            seconds = time.monotonic() - began
            return Verification("impossible", check.checkpoint_sha256, seconds=seconds, message=words)


def verify_there(store_url: str, check: Check) -> Verification:
    shared = node_dir()
    check = replace(check, gpu_share=None)  # Ray has chosen the GPU
    return InFreshProcess(store_url, shared, shared / ENCODED)(check)


def end_process(node_id: str, pid: int) -> None:
    """Kill a worker's process on its node; does not wait."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    _end_there.options(scheduling_strategy=there).remote(pid)


@ray.remote(num_cpus=0, max_retries=0)
def _end_there(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become_a_node(address: str, parent: int, ip: str, scratch: str) -> None:
    """Of this process, `ray start`, which ends with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which outlasts an exec
    if os.getppid() != parent:
        return
    options = [
        f"--address={address}",
        f"--node-ip-address={ip}",
        f"--temp-dir={scratch}",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--block",
    ]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _become_a_node(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        try:
            found = list_nodes(sys.argv[1])
        except ClusterAway as error:
            sys.exit(f"ClusterAway: {error}")  # whoever asked reads what follows
        print(
            json.dumps(
                [{"cpus": node.cpus, "gpus": node.gpus, "labels": dict(node.labels)} for node in found]
            )
        )
