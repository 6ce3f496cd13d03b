"""Alive or ready: what is missing is said, and who starts and ends drivers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from service.database import now
from service.health import LONG_SILENCE, check_ready
from service.launcher import LocalLauncher
from service.reconciler import LEASE_NAME, Reconciler
from service.settings import Settings
from service.sweeps import SweepController, build_controller
from tests.databases import environment_of
from tests.fakes import MemoryLauncher


@pytest.fixture
def launcher() -> MemoryLauncher:
    return MemoryLauncher()


@pytest.fixture
def controller(tmp_path: Path, launcher: MemoryLauncher) -> Iterator[SweepController]:
    made = build_controller(Settings(data_dir=tmp_path), launcher)
    yield made
    made.records.engine.dispose()


@pytest.fixture
def reconciler(controller: SweepController, launcher: MemoryLauncher) -> Reconciler:
    return Reconciler(controller.records, controller.storage, controller.store, launcher, 1)


def test_a_service_whose_reconciler_has_looked_is_ready_and_names_itself(
    controller: SweepController, reconciler: Reconciler, launcher: MemoryLauncher
) -> None:
    reconciler.reconcile()
    found = check_ready(controller, reconciler)
    assert (found.status, found.not_ready) == ("ready", [])
    assert found.controller is not None
    assert (found.controller.holder, found.controller.is_this_service) == (launcher.me, True)
    assert found.controller.until > now()


def test_a_service_whose_reconciler_has_not_looked_is_not_ready(
    controller: SweepController, reconciler: Reconciler
) -> None:
    found = check_ready(controller, reconciler)
    assert found.status == "not ready"
    assert "has not looked at the sweeps yet" in found.not_ready[0]
    assert found.controller is None


def test_a_service_whose_reconciler_has_fallen_silent_is_not_ready(
    controller: SweepController, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciler.reconcile()
    later = now() + LONG_SILENCE + timedelta(seconds=1)
    monkeypatch.setattr("service.health.now", lambda: later)
    (missing,) = check_ready(controller, reconciler).not_ready
    assert re.match(r"the reconciler has not looked at the sweeps for 6\d s", missing)


def test_a_look_that_fails_is_no_look(
    controller: SweepController, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    monkeypatch.setattr(controller.records, "hold_lease", away)
    with pytest.raises(OperationalError):
        reconciler.reconcile()
    assert reconciler.looked_at is None


def test_a_service_without_its_database_is_not_ready_and_knows_of_no_controller(
    controller: SweepController, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    reconciler.reconcile()
    monkeypatch.setattr(controller.records, "ping", away)
    monkeypatch.setattr(controller.records, "find_lease", away)
    found = check_ready(controller, reconciler)
    assert found.not_ready == ["the database does not answer: OperationalError"]
    assert found.controller is None


def test_a_service_whose_disk_is_full_is_not_ready(
    controller: SweepController, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciler.reconcile()
    usage = type("usage", (), {"total": 10**12, "free": 10**6})
    monkeypatch.setattr("service.fitting.shutil.disk_usage", lambda _: usage)
    (missing,) = check_ready(controller, reconciler).not_ready
    assert "has only 1 MiB left" in missing


def test_a_second_service_at_the_database_is_ready_and_names_the_first(
    controller: SweepController, reconciler: Reconciler, launcher: MemoryLauncher
) -> None:
    first = {"controller": 7}
    assert controller.records.hold_lease(LEASE_NAME, first, timedelta(seconds=60), lambda _: False)
    reconciler.reconcile()
    found = check_ready(controller, reconciler)
    assert found.status == "ready"
    assert found.controller is not None
    assert (found.controller.holder, found.controller.is_this_service) == (first, False)


def test_a_lease_that_has_run_out_is_nobodys(controller: SweepController) -> None:
    assert controller.records.hold_lease(LEASE_NAME, {"controller": 7}, timedelta(0), lambda _: False)
    assert controller.records.find_lease(LEASE_NAME) is None


def test_a_process_is_named_by_host_and_number(tmp_path: Path) -> None:
    identity = LocalLauncher(Settings(data_dir=tmp_path)).identity()
    assert identity.keys() == {"host", "pid", "started"}


# The process, and what it writes.


@contextmanager
def serving(data_dir: Path, *options: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    command = [
        sys.executable,
        "-m",
        "service.cli",
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(data_dir),
        *options,
    ]
    environment = {**os.environ, **environment_of(data_dir)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            announced = [process.stdout.readline().split() for _ in range(4)]
            assert [name for name, _ in announced] == ["API", "home", "docs", "dashboard"]
            address = announced[0][1].removesuffix("/v1/sweeps")
            with httpx.Client(base_url=address, timeout=20, trust_env=False) as client:
                wait_until_ready(client)
                yield client, process
        finally:
            process.send_signal(signal.SIGTERM)


def wait_until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_log_for_programs_is_an_object_a_line_with_ids(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-format", "json") as (client, process):
        client.get(
            "/v1/sweeps/s1?token=hush", headers={"x-request-id": "mine", "authorization": "Bearer hush"}
        )
        client.get("/api/studies/1?after=abc")
        client.get("/nothing%0Aelse")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    lines = [json.loads(line) for line in err.splitlines()]
    for line in lines:
        assert {"timestamp", "level", "logger", "message"} <= line.keys()
    (mine,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (mine["sweep_id"], mine["route"], mine["status"]) == ("s1", "/v1/sweeps/{sweep_id}", 404)
    assert "hush" not in err + out
    assert "Traceback" not in out, "the dashboard's errors are records of the log, too"
    assert re.fullmatch("stopped; .*\n", out)


def test_the_log_for_people_is_quiet_unless_something_is_wrong(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, process):
        for path in ("/v1/sweeps", "/nothing", "/metrics"):
            client.get(path)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert err == ""
    assert re.fullmatch("stopped; .*\n", out)


def test_people_may_ask_for_a_line_a_request(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-level", "info") as (client, process):
        client.get("/v1/sweeps/s1", headers={"x-request-id": "mine"})
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    (mine,) = [line for line in err.splitlines() if "request_id=mine" in line]
    pattern = (
        r"\S+ \S+ INFO service.requests: GET /v1/sweeps/s1 404 in [\d.]+ ms \[request_id=mine sweep_id=s1\]"
    )
    assert re.fullmatch(pattern, mine)


@pytest.mark.parametrize("option", [("--log-format", "xml"), ("--log-level", "loud")])
def test_a_format_or_level_that_is_not_is_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--data-dir", str(tmp_path), *option]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert option[1] in result.stderr
