"""Ray clusters of real nodes, each an own raylet, for tests that add, cut off and kill them."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

from service.launcher import end_marked_processes, marked_processes
from tests.service_process import wait_until

MARK = "FRATERNAL_TEST_NODE"


class RayNode:
    """`ray start --block` with all that it starts."""

    def __init__(self, process: "subprocess.Popen[bytes]", mark: str, folder: Path) -> None:
        self._process, self._mark, self.folder = process, mark, folder

    def runs(self, process: psutil.Process) -> bool:
        """Whether it is one of this node's."""
        return process in marked_processes(MARK, self._mark)

    def kill(self) -> None:
        """As if the machine lost its power: kill -9, of everything at once."""
        end_marked_processes(MARK, self._mark)
        self._process.wait()

    def stop(self) -> None:
        """As whoever takes the machine away would."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self.kill()


class RayCluster:
    """Its head has no CPUs: the trials run on the nodes that are added."""

    def __init__(self, folder: Path, ip: str, environment: Mapping[str, str]) -> None:
        self._folder, self._ip = folder, ip
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**environment, **token}
        """For whoever is to be a part of it."""
        self.address = f"{ip}:{_free_port(ip)}"
        self.nodes: list[RayNode] = []
        self.begin_again()

    def begin_again(self) -> None:
        """With a head alone, at the same address."""
        port = f"--port={self.address.rpartition(':')[2]}"
        self._start("--head", port, "--include-dashboard=false", ip=self._ip)
        self.wait_for(nodes=1, cpus=0)

    def add_node(
        self,
        cpus: int = 1,
        ip: str | None = None,
        within: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> RayNode:
        """`within` is a command that runs others in a network namespace, say."""
        written = ",".join(f"{name}={value}" for name, value in (labels or {}).items())
        options = [f"--address={self.address}", *([f"--labels={written}"] if written else [])]
        return self._start(*options, cpus=cpus, ip=ip or self._ip, within=within)

    def wait_for(self, nodes: int, cpus: float) -> None:
        """Until it has so many of both."""
        command = [sys.executable, "-m", "trials.cluster", self.address]

        def there() -> bool:
            asked = subprocess.run(
                command, env={**os.environ, **self.environment}, capture_output=True, check=False
            )
            found = json.loads(asked.stdout) if asked.returncode == 0 else []
            return (len(found), sum(node["cpus"] for node in found)) == (nodes, cpus)

        wait_until(there, f"the cluster has {nodes} nodes and {cpus} CPUs", self._describe)

    def _describe(self) -> str:
        return "\n".join((node.folder / "node.log").read_text()[-500:] for node in self.nodes)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()

    def _start(self, *options: str, ip: str, within: Sequence[str] = (), cpus: int = 0) -> RayNode:
        mark = secrets.token_hex(4)
        folder = self._folder / f"n{len(self.nodes)}"
        folder.mkdir()
        with (folder / "node.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *within,
                    *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options, "--block"),
                    f"--node-ip-address={ip}",
                    f"--temp-dir={folder}",
                    f"--num-cpus={cpus}",
                    "--num-gpus=0",
                    f"--object-store-memory={80 * 2**20}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **self.environment,
                    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5",  # in place of 30 s
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
                    "FRATERNAL_NODE_DIR": str(folder / "fraternal"),
                    "SPT_NOENV": "1",
                    MARK: mark,
                },
            )
        self.nodes.append(RayNode(process, mark, folder))
        return self.nodes[-1]


@contextmanager
def ray_cluster(ip: str = "127.0.0.1", environment: Mapping[str, str] | None = None) -> Iterator[RayCluster]:
    """In a folder of a short name, since Ray keeps sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="frc"))
    try:
        with closing(RayCluster(folder, ip, environment or {})) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port(ip: str) -> int:
    with socket.create_server((ip, 0)) as server:
        return int(server.getsockname()[1])
