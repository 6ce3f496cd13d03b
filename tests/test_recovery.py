"""What dies, and what must be true afterwards: real processes, a real Ray, a real kill -9.

Equal seeds make equal weights, so a sweep that was disturbed is compared with a twin that was not: checkpoint
by checkpoint, by SHA-256.
"""

import ipaddress
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.launcher import MARK, marked_processes
from tests.service_process import (
    ServiceProcess,
    assert_exactly_the_budget,
    assert_nothing_left,
    find_process,
    kill_process,
    open_files,
    small_spec,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "generations", "attempts"),
    [
        pytest.param("ray::ResourceTrainable.train", 1, {1, 2}, id="worker"),
        pytest.param("raylet/raylet", 2, {1, 2}, id="raylet"),
    ],
)
def test_sweep_ends_as_if_nothing_had_been_killed(
    service: ServiceProcess,
    corpus: Path,
    undisturbed: dict[int, str],
    words: str,
    generations: int,
    attempts: set[int],
) -> None:
    in_mid_epoch = {"checkpoint_every_s": 0.01}
    sweep_id = service.submit(small_spec(corpus, retry=in_mid_epoch))
    service.wait_for_epochs(sweep_id, 5)
    kill_process(sweep_id, words)
    sweep = service.wait_for_end(sweep_id)
    assert sweep["state"] == "succeeded"
    assert sweep["driver_generation"] == generations
    assert_exactly_the_budget(service, sweep_id)
    assert {trial["attempt"] for trial in service.trials(sweep_id)} == attempts
    assert service.checkpoints(sweep_id) == undisturbed
    assert_nothing_left(service, sweep_id)


def test_sweep_that_learns_and_prunes_ends_as_if_its_driver_had_not_been_killed(
    service: ServiceProcess, corpus: Path
) -> None:
    """One trial at a time, so that both sweeps learn in the same order."""
    asked = small_spec(
        corpus,
        arms={"fd": {"regularizer": "fraternal"}},
        space={"lr": {"type": "log_uniform", "low": 0.5, "high": 20.0}},
        sampler={"name": "tpe", "startup_trials": 2},
        pruner={"name": "hyperband", "reduction_factor": 2},
        training={"epochs": 4, "batch_size": 10, "bptt": 20},
        budget={"trials": 7},
        resources={"max_concurrent": 1},
    )
    twin, sweep_id = service.submit(asked), service.submit(asked)
    service.wait_for_epochs(sweep_id, 9)
    kill_process(sweep_id, "service.drive")
    for each in (twin, sweep_id):
        assert service.wait_for_end(each)["state"] == "succeeded"
    assert service.get(f"/v1/sweeps/{sweep_id}")["driver_generation"] == 2
    ended, undisturbed = service.trials(sweep_id), service.trials(twin)
    assert [trial["params"] for trial in ended] == [trial["params"] for trial in undisturbed]
    assert [trial["state"] for trial in ended] == [trial["state"] for trial in undisturbed]
    assert {trial["state"] for trial in ended} == {"COMPLETE", "PRUNED"}
    assert service.checkpoints(sweep_id) == service.checkpoints(twin)
    assert_nothing_left(service, sweep_id)


def test_sweep_goes_on_and_ends_without_the_api(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    sweep_id = service.submit(small_spec(corpus))
    service.wait_for_epochs(sweep_id, 2)
    service.kill()
    wait_until(lambda: find_process(sweep_id, "service.drive") is None, "the driver has done its work alone")
    service.start()
    assert service.sweep(sweep_id)["state"] == "succeeded"
    assert service.sweep(sweep_id)["driver_generation"] == 1
    assert_exactly_the_budget(service, sweep_id)
    assert service.checkpoints(sweep_id) == undisturbed


def test_restarted_api_adopts_a_driver_and_restarts_it_when_it_dies(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    in_mid_epoch = {"checkpoint_every_s": 0.01}
    sweep_id = service.submit(small_spec(corpus, retry=in_mid_epoch))
    service.wait_for_epochs(sweep_id, 2)
    service.kill()
    service.start()
    assert service.sweep(sweep_id)["driver_generation"] == 1
    kill_process(sweep_id, "service.drive")
    assert service.wait_for_end(sweep_id)["driver_generation"] == 2
    assert_exactly_the_budget(service, sweep_id)
    assert {trial["attempt"] for trial in service.trials(sweep_id)} == {1, 2}
    assert service.checkpoints(sweep_id) == undisturbed
    assert_nothing_left(service, sweep_id)


def test_a_running_sweep_is_by_itself_and_cancel_ends_it_and_leaves_nothing(
    service: ServiceProcess, corpus: Path
) -> None:
    sweep_id = service.submit(small_spec(corpus, budget={"trials": 1000}))
    service.wait_for_epochs(sweep_id, 2)
    assert_every_socket_is_on_loopback(service, sweep_id)
    assert_no_temporary_file_would_outlive_its_folder(service, sweep_id)
    service.cancel(sweep_id)
    sweep = service.wait_for_end(sweep_id)
    assert sweep["state"] == "cancelled"
    assert sweep["trials"]["running"] == 0
    failures = [trial["failure"] for trial in service.trials(sweep_id) if trial["state"] == "FAIL"]
    assert {failure["failure_class"] for failure in failures} == {"cancelled"}
    assert_nothing_left(service, sweep_id)


def test_diverging_trials_fail_and_the_sweep_goes_on(service: ServiceProcess, corpus: Path) -> None:
    arms = {"wild": {"regularizer": "fraternal", "kappa": 1e9}, "tame": {"regularizer": "fraternal"}}
    sweep_id = service.submit(small_spec(corpus, arms=arms, budget={"trials": 4}))
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    outcomes = {
        (trial["arm"], trial["state"], trial["failure"] and trial["failure"]["failure_class"])
        for trial in service.trials(sweep_id)
    }
    assert outcomes == {("wild", "FAIL", "diverged"), ("tame", "COMPLETE", None)}


def test_sweep_in_which_every_trial_fails_is_failed(service: ServiceProcess, corpus: Path) -> None:
    arms = {"wild": {"regularizer": "fraternal", "kappa": 1e9}}
    sweep_id = service.submit(small_spec(corpus, arms=arms, budget={"trials": 2}))
    sweep = service.wait_for_end(sweep_id)
    assert sweep["state"] == "failed"
    assert "2 trials" in sweep["state_reason"]


def assert_every_socket_is_on_loopback(service: ServiceProcess, sweep_id: str) -> None:
    listening = [
        (" ".join(process.cmdline()), connection.laddr.ip)
        for process in [*marked_processes(MARK, sweep_id), psutil.Process(service.pid)]
        for connection in _connections(process)
        if connection.status == psutil.CONN_LISTEN
    ]
    for words in ("service.cli serve", "service.drive", "raylet/raylet", "gcs_server", "ray::"):
        assert any(words in command for command, _ in listening), f"{words} listens"
    assert [(command, ip) for command, ip in listening if not _is_loopback(ip)] == []


def assert_no_temporary_file_would_outlive_its_folder(service: ServiceProcess, sweep_id: str) -> None:
    """No named shared memory, no session of Ray's in /tmp/ray: what is not made need not be removed."""
    folders = (tempfile.gettempdir(), "/dev/shm")
    own = (f"{tempfile.gettempdir()}/fraternal-{sweep_id}", str(service.data_dir))
    program = (sys.prefix, str(Path.cwd()))
    files = {file for _, file in open_files(marked_processes(MARK, sweep_id))}
    temporary = {file for file in files if file.startswith(folders) and not file.endswith(" (deleted)")}
    assert [file for file in temporary if file.startswith(own)]
    assert [file for file in temporary if not file.startswith((*own, *program))] == []


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections(kind="inet"))
    except psutil.Error:
        return []


def test_api_process_stays_small_and_never_loads_torch_or_ray(service: ServiceProcess) -> None:
    """After all the sweeps of these tests."""
    for path in ("/v1/sweeps", "/dashboard", "/api/studies", "/api/studies/1?after=0", "/openapi.json"):
        service._http.get(path)
    api = psutil.Process(service.pid)
    assert api.memory_info().rss < 200 * 2**20
    loaded = {Path(region.path).parts for region in api.memory_maps() if region.path.endswith(".so")}
    assert loaded, "the process's libraries can be read"
    assert not [parts for parts in loaded if "torch" in parts or "ray" in parts]
