"""The Ray cluster of docker/compose.cluster.yaml: its own commands, on hosts of their own, run a sweep.

Each host has its own address, so that the ports are the composition's; the service runs on this machine.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.launcher import end_marked_processes, marked_processes
from tests.clusters import MARK
from tests.hosts import Host, network
from tests.service_process import running_service, small_spec, wait_until, write_corpus

pytestmark = pytest.mark.slow

DOCKER = Path(__file__).parent.parent / "docker"
SERVICES = yaml.safe_load((DOCKER / "compose.cluster.yaml").read_text())["services"]
OF_THE_IMAGE = dict(
    re.findall(r"^    ((?:RAY|GRPC)_\w+)=(\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
)
"""What it says to Ray."""


class Composed:
    """A service of the composition as processes of a host."""

    def __init__(self, name: str, host: Host, head: str, folder: Path, token: Path) -> None:
        self._service, self._host, self._head = SERVICES[name], host, head
        self._log, self._mark = folder / f"{name}.log", secrets.token_hex(4)
        written = [*self._service["entrypoint"], *self._service["command"]]
        assert written[:4] == ["tini", "--", "ray", "start"]
        options = [option.replace("ray-head:", f"{head}:") for option in written[4:]]
        environment = {**OF_THE_IMAGE, **self._service["environment"]}
        assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_auth_token"
        environment["RAY_AUTH_TOKEN_PATH"] = str(token)
        if name == "ray-worker":
            environment["FRATERNAL_NODE_DIR"] = str(folder / "nodes")
            options.append("--num-cpus=2")
        temporary = f"--temp-dir={folder / name[4]}"  # which has sockets in it: short
        ray = (sys.executable, "-P", "-m", "ray.scripts.scripts", "start")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*host.within, *ray, *options, temporary],
                env={**os.environ, **environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_healthy(self) -> bool:
        """By the check of the composition."""
        kind, python, *arguments = self._service["healthcheck"]["test"]
        assert (kind, python) == ("CMD", "python")
        return subprocess.run([*self._host.within, sys.executable, *arguments], check=False).returncode == 0

    def wait(self) -> None:
        wait_until(self.is_healthy, f"{self._host.name} is healthy", self.said)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def processes(self) -> set[int]:
        return {process.pid for process in marked_processes(MARK, self._mark)}

    def stop(self) -> None:
        """As `docker stop`: SIGTERM to process 1, and what is left is killed."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)

    def kill(self) -> None:
        end_marked_processes(MARK, self._mark)
        self._process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="frc"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_the_composed_head_and_worker_run_a_sweep(folder: Path, tmp_path: Path) -> None:
    token = folder / "ray_auth_token"
    token.write_text(secrets.token_hex(32) + "\n")
    token.chmod(0o444)  # as up.sh leaves it
    assert OF_THE_IMAGE
    controller: dict[str, Any] = SERVICES["controller"]["environment"]
    assert controller["FRATERNAL_RAY_ADDRESS"] == "ray-head:6379"
    started: list[Composed] = []
    with network() as hosts:
        here, there = hosts.add_host(), hosts.add_host()
        for host in (here, there):  # Docker's has one, too, and Ray learns a node's address by it
            subprocess.run([*host.within, "ip", "route", "add", "default", "via", hosts.ip], check=True)
        try:
            head = Composed("ray-head", here, here.ip, folder, token)
            started.append(head)
            assert not head.is_healthy()
            head.wait()
            worker = Composed("ray-worker", there, here.ip, folder, token)
            started.append(worker)
            worker.wait()
            given = {
                **OF_THE_IMAGE,
                **controller,
                "RAY_AUTH_TOKEN_PATH": str(token),
                "FRATERNAL_RAY_ADDRESS": f"{here.ip}:6379",
            }
            with running_service(tmp_path / "data", given) as service:
                sweep = service.submit(
                    small_spec(write_corpus(tmp_path / "corpus"), budget={"trials": 2}),
                )
                service.wait_for_epochs(sweep, 1)
                training = {
                    process.pid
                    for process in marked_processes("FRATERNAL_DRIVER_OF", sweep)
                    if process.name().startswith(("ray::LanguageModel", "ray::ResourceTrain"))
                }
                assert training
                assert training <= worker.processes()
                ended = service.wait_for_end(sweep)
            assert ended["trials"]["complete"] == 2
            assert ended["best"]["verification"]["outcome"] == "verified"
            worker.stop()
            assert not worker.is_healthy()
        finally:
            for node in started:
                node.kill()
