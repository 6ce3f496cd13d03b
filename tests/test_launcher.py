"""The laws of the local launcher, on real processes: what carries a sweep's mark is that sweep's."""

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import service.launcher
from models.precision import UnsupportedPrecision, require_precision
from service.errors import ClusterAway
from service.launcher import (
    LOG_TAIL_BYTES,
    MARK,
    OWNER,
    Cluster,
    LocalLauncher,
    _cpus_have_bf16,
    findable,
    marked_processes,
    owner_of,
    scratch_of,
)
from service.settings import Settings
from tests.nvml import Card, Nvml, installed
from trials.shares import Node
from trials.store import CheckpointStore

SLEEP = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("asleep", flush=True)
time.sleep(99)
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True, stdout=sys.stdout)
time.sleep(99)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher(Settings(data_dir=tmp_path))


@pytest.fixture
def sweep(launcher: LocalLauncher) -> Iterator[str]:
    """An id of no other test's, whose processes do not outlive the test."""
    name = f"s{secrets.token_hex(5)}"
    yield name
    launcher.end(name)


@contextlib.contextmanager
def running(program: str, sweep: str, data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of a service's sweep that says a word when it, or its child, sleeps."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MARK: sweep, OWNER: owner_of(Settings(data_dir=data_dir))},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asleep\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_end_kills_children_in_other_sessions_and_who_ignores_sigterm(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    with running(PARENT, sweep, tmp_path) as parent:
        family = marked_processes(MARK, sweep)
        assert len(family) == 2
        assert len({os.getsid(process.pid) for process in family}) == 2
        parent.kill()  # the child is an orphan now
        parent.wait()
        assert len(marked_processes(MARK, sweep)) == 1
        launcher.end(sweep)
        assert marked_processes(MARK, sweep) == []


def test_end_leaves_other_sweeps_alone(launcher: LocalLauncher, sweep: str, tmp_path: Path) -> None:
    other = f"{sweep}0"
    with running(SLEEP, sweep, tmp_path) as mine, running(SLEEP, other, tmp_path) as others:
        launcher.end(sweep)
        mine.wait(5)
        assert marked_processes(MARK, sweep) == []
        assert others.poll() is None
        assert len(marked_processes(MARK, other)) == 1


def test_end_leaves_the_same_sweep_of_another_service_alone(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    """As a backup restored beside its original has it."""
    other = LocalLauncher(Settings(data_dir=tmp_path / "restored"))
    drivers = [launcher.launch(sweep, 1), other.launch(sweep, 1)]
    launcher.end(sweep)
    assert [psutil.pid_exists(driver["pid"]) for driver in drivers] == [False, True]
    assert not scratch_of(sweep, owner_of(Settings(data_dir=tmp_path))).exists()
    assert scratch_of(sweep, owner_of(Settings(data_dir=tmp_path / "restored"))).exists()
    other.end(sweep)
    assert not psutil.pid_exists(drivers[1]["pid"])


def test_services_of_one_database_are_one_owner_whatever_the_password(tmp_path: Path) -> None:
    urls = (f"postgresql+psycopg://fraternal{password}@host/name" for password in ("", ":one", ":another"))
    owners = {owner_of(Settings(data_dir=tmp_path / url[-9:], database_url=url)) for url in urls}
    assert len(owners) == 1
    assert owner_of(Settings(data_dir=tmp_path)) not in owners


def test_end_removes_the_scratch_folder_and_may_be_repeated(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    scratch = scratch_of(sweep, owner_of(Settings(data_dir=tmp_path)))
    (scratch / "ray" / "session").mkdir(parents=True)
    launcher.end(sweep)
    assert not scratch.exists()
    launcher.end(sweep)


def test_end_removes_what_a_killed_worker_was_writing_and_nothing_else(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    url = Settings(data_dir=tmp_path).resolved_store_url
    store = CheckpointStore(url)
    for name in (sweep, "another"):
        store.save_last(name, 3, {"weights": b"1"})
        store.save_best(name, 3, {"weights": b"1"})
        (best,) = tmp_path.rglob(f"{name}/t00003/best.tar")
        best.with_name("best.tar.part").write_bytes(b"2")
    launcher.end(sweep)
    left = [sorted(path.name for path in tmp_path.rglob(f"{name}/t00003/*.*")) for name in (sweep, "another")]
    assert left == [["best.tar", "last.tar"], ["best.tar", "best.tar.part", "last.tar"]]


def test_own_driver_is_alive_until_it_ends(launcher: LocalLauncher, sweep: str, tmp_path: Path) -> None:
    driver = launcher.launch(sweep, 1)
    assert launcher.is_alive(driver)
    assert scratch_of(sweep, owner_of(Settings(data_dir=tmp_path))).stat().st_mode & 0o777 == 0o700
    launcher.end(sweep)
    assert not launcher.is_alive(driver)
    assert not psutil.pid_exists(driver["pid"]), "no zombie is left"


def test_driver_that_dies_at_once_is_one_that_is_not_alive(
    launcher: LocalLauncher, sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its mark can be read, or started where there is no memory left."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(service.launcher, "_wait_for_mark", lambda child, _: child.wait())
    assert not launcher.is_alive(launcher.launch(sweep, 1))


def test_a_process_whose_mark_cannot_be_read_at_first_is_ended_all_the_same(
    launcher: LocalLauncher, sweep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows no environment of a process in the middle of its exec."""
    looks = iter([True])
    monkeypatch.setattr(
        service.launcher,
        "marked_processes",
        lambda *mark, **others: [] if next(looks, False) else marked_processes(*mark, **others),
    )
    driver = launcher.launch(sweep, 1)
    launcher.end(sweep)
    assert not psutil.pid_exists(driver["pid"])


def test_driver_is_found_again_by_another_launcher(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    driver = launcher.launch(sweep, 1)
    restarted = LocalLauncher(Settings(data_dir=tmp_path))
    assert restarted.is_alive(driver)
    psutil.Process(driver["pid"]).kill()
    wait_until_dead(driver["pid"])
    assert not restarted.is_alive(driver), "a zombie is not alive"
    launcher.end(sweep)
    assert not restarted.is_alive(driver)


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_process_with_a_drivers_pid_is_not_the_driver(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    with running(SLEEP, sweep, tmp_path) as process:
        driver = findable(process.pid)
        assert launcher.is_alive(driver)
        assert not launcher.is_alive({**driver, "started": driver["started"] - 60})


def test_pid_that_nobody_has_is_not_alive(launcher: LocalLauncher) -> None:
    assert not launcher.is_alive({"pid": 2**22 + 1, "started": 0.0})


def test_no_command_line_shows_the_databases_password(tmp_path: Path, sweep: str) -> None:
    url = "postgresql+psycopg://fraternal:xyzzy-secret@127.0.0.1:1/fraternal"
    launcher = LocalLauncher(Settings(data_dir=tmp_path, database_url=url))
    driver = psutil.Process(launcher.launch(sweep, 1)["pid"])
    deadline = time.monotonic() + 10
    while "service.drive" not in driver.cmdline():  # between fork and exec it is a copy of us
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert driver.environ()["FRATERNAL_DATABASE_URL"] == url
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert "xyzzy-secret" not in " ".join(process.cmdline())
    launcher.end(sweep)


def test_drivers_clock_is_utc_and_its_ray_listens_here_only(launcher: LocalLauncher, sweep: str) -> None:
    environment = launcher._environment(sweep)
    assert environment["TZ"] == "UTC"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert environment["RAY_AUTH_TOKEN"] != launcher._environment(sweep)["RAY_AUTH_TOKEN"]


@pytest.mark.slow
def test_all_that_ray_starts_keeps_the_mark(sweep: str, launcher: LocalLauncher, tmp_path: Path) -> None:
    program = """
import ray, sys
ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20,
         _temp_dir=sys.argv[1])
ray.get(ray.remote(lambda: None).remote())
print("ready", flush=True)
sys.stdin.read()
"""
    scratch = scratch_of(sweep, owner_of(Settings(data_dir=tmp_path)))
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(scratch)],
        env=launcher._environment(sweep),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    assert len(family) > 3
    marked = marked_processes(MARK, sweep, **{OWNER: owner_of(Settings(data_dir=tmp_path))})
    assert family <= {process.pid for process in marked}
    launcher.end(sweep)
    process.wait(5)
    process.stdin.close()
    process.stdout.close()
    assert not [pid for pid in family if psutil.pid_exists(pid) and not is_zombie(pid)]
    assert not scratch.exists()


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Words.


def write_log(tmp_path: Path, sweep: str, content: bytes) -> None:
    (tmp_path / "drivers").mkdir()
    (tmp_path / "drivers" / f"{sweep}.log").write_bytes(content)


def test_log_that_is_not_there_has_no_words(launcher: LocalLauncher, sweep: str) -> None:
    assert launcher.log_tail(sweep) == ""


def test_short_log_is_told_whole(launcher: LocalLauncher, sweep: str, tmp_path: Path) -> None:
    write_log(tmp_path, sweep, b"ImportError: \xce\xba\n")
    assert launcher.log_tail(sweep) == "ImportError: κ\n"


def test_end_of_a_huge_log_is_told_without_reading_all_of_it(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    write_log(tmp_path, sweep, b"")
    with (tmp_path / "drivers" / f"{sweep}.log").open("r+b") as log:
        log.truncate(2**40)  # sparse: takes no room, and no machine could read it
        log.seek(0, os.SEEK_END)
        log.write(b"the last words")
    assert launcher.log_tail(sweep).endswith("the last words")
    assert len(launcher.log_tail(sweep)) <= LOG_TAIL_BYTES


def test_binary_log_is_told_in_characters_that_any_database_takes(
    launcher: LocalLauncher, sweep: str, tmp_path: Path
) -> None:
    write_log(tmp_path, sweep, bytes(range(256)) * 100)
    words = launcher.log_tail(sweep)
    assert "\0" not in words
    words.encode()


def test_the_launcher_and_torch_agree_on_whether_cpus_compute_in_bfloat16(launcher: LocalLauncher) -> None:
    try:
        require_precision("bf16", torch.device("cpu"))
    except UnsupportedPrecision:
        assert not launcher.capacity().cpus_have_bf16
    else:
        assert launcher.capacity().cpus_have_bf16


def test_capacity_is_what_this_process_may_use(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5})
    installed(Nvml(Card("GPU-1", gib=80), Card("GPU-2", parts=[Card("MIG-3", gib=10)])), monkeypatch)
    service.launcher._known_gpus.cache_clear()
    monkeypatch.setattr(service.launcher, "torch_version", lambda: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = launcher.capacity()
    assert (there.cpus, there.gpus, there.gpu_bytes) == (2, 2, 10 * 2**30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1")
    assert (launcher.capacity().gpus, launcher.capacity().gpu_bytes) == (1, 80 * 2**30)
    monkeypatch.setattr(service.launcher, "torch_version", lambda: "2.13.0+cpu")
    assert (launcher.capacity().gpus, launcher.capacity().gpu_bytes) == (0, None)
    service.launcher._known_gpus.cache_clear()


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("model name\t: avx512_bf16", False),
    ],
)
def test_whether_cpus_compute_in_bfloat16_is_read_from_the_kernels_list(
    tmp_path: Path, line: str, has: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert _cpus_have_bf16(tmp_path / "cpuinfo") == has


def test_process_that_does_not_run_is_told_from_one_that_does(tmp_path: Path) -> None:
    launcher = LocalLauncher(Settings(data_dir=tmp_path))
    process = subprocess.Popen(["sleep", "60"])
    driver = findable(process.pid)
    try:
        assert not launcher.is_stopped(driver)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not launcher.is_stopped(driver):
            assert time.monotonic() < deadline
        assert not launcher.is_stopped({**driver, "host": "elsewhere"})
        assert not launcher.is_stopped({**driver, "started": driver["started"] - 60})
    finally:
        process.kill()
        process.wait()
    assert not launcher.is_stopped(driver)


def test_of_a_cluster_that_has_never_answered_nothing_is_known(tmp_path: Path) -> None:
    launcher = LocalLauncher(Settings(data_dir=tmp_path, ray_address="127.0.0.1:1"))
    with pytest.raises(ClusterAway, match=r"^the Ray cluster at 127\.0\.0\.1:1 cannot be reached: "):
        launcher.capacity()


def test_a_cluster_that_is_away_has_what_it_had_and_is_not_asked_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, answers = Cluster("127.0.0.1:1", grows=False), [[Node(4)]]

    def ask(self: Cluster) -> list[Node]:
        if not answers:
            raise ClusterAway("it is away")
        return answers.pop()

    monkeypatch.setattr(Cluster, "_ask", ask)
    assert cluster.capacity().nodes == (Node(4),)
    monkeypatch.setattr(service.launcher, "CLUSTER_KNOWN_S", -1.0)
    assert cluster.capacity().nodes == (Node(4),), "as it was"
    answers.append([Node(8), Node(2, 1)])
    assert (cluster.capacity().cpus, cluster.capacity().gpus) == (8, 1)
    monkeypatch.setattr(service.launcher, "CLUSTER_KNOWN_S", 60.0)
    answers.append([])
    assert cluster.capacity().cpus == 8, "as of half a minute ago"


def test_a_cluster_that_has_just_not_answered_is_not_asked_by_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would hold up the next one, for as long as it takes to find out."""
    cluster, asked = Cluster("127.0.0.1:1", grows=False), []

    def ask(self: Cluster) -> list[Node]:
        asked.append(self)
        if len(asked) > 1:
            raise ClusterAway("it is away")
        return [Node(4)]

    monkeypatch.setattr(Cluster, "_ask", ask)
    cluster.capacity()
    cluster._asked_at = -math.inf
    assert [cluster.capacity().cpus for _ in range(3)] == [4] * 3
    assert len(asked) == 2
    never = Cluster("127.0.0.1:1", grows=False)
    for _ in range(3):
        with pytest.raises(ClusterAway, match="it is away"):
            never.capacity()
    assert asked[2:] == [never]


def test_a_driver_in_a_cluster_has_its_rays_token_and_no_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-clusters")
    in_cluster = LocalLauncher(Settings(data_dir=tmp_path, ray_address="head:6379"))._environment("s1")
    assert in_cluster["RAY_AUTH_TOKEN"] == "the-clusters"
    assert in_cluster["FRATERNAL_RAY_ADDRESS"] == "head:6379"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in in_cluster, "which would keep it on loopback"
    alone = LocalLauncher(Settings(data_dir=tmp_path))._environment("s1")
    assert alone["RAY_AUTH_TOKEN"] != "the-clusters"
    assert alone["RAY_AUTH_MODE"] == "token"
    assert alone["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
