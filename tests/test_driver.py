"""What a driver settles before any trial runs. Whole drivers run in tests/test_recovery.py."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from optuna.storages import InMemoryStorage

import trials.driver
from service.database import migrate, open_engine
from service.drive import main
from service.launcher import DRIVER_ENVIRONMENT, OWN_RAY, findable
from service.records import Records
from service.settings import Settings
from service.studies import open_storage
from tests.fakes import MemoryJournal, open_ledger, report, spec, verified
from tests.nvml import Card, Nvml, installed
from trials.cpus import usable_cpus
from trials.driver import (
    EXIT_UNSETTLED,
    PauseSwitch,
    _ray_has_died,
    _Watch,
    drive,
    require_gpus,
)
from trials.ledger import JournalAway, Orders, StudyLedger
from trials.shares import Node
from trials.spec import Resources, SweepSpec
from trials.store import CheckpointStore
from trials.studies import open_study
from trials.trainable import place_of
from trials.tuning import build_search, why_full
from trials.verification import Check, InFreshProcess, Verification, Verifier


@pytest.fixture
def rays(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Children of ours that have the names of Ray's processes."""
    started = {}
    for name in ("raylet", "gcs_server"):
        shutil.copy("/bin/sleep", tmp_path / name)
        started[name] = subprocess.Popen([tmp_path / name, "99"])
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_of_ray_that_dies_is_missed_while_ray_starts_and_afterwards(
    rays: dict[str, subprocess.Popen[bytes]], name: str, is_up: bool
) -> None:
    """Ray itself would wait for ever, or for half a minute while it starts."""
    assert not _ray_has_died(is_up)
    rays[name].kill()
    os.waitid(os.P_PID, rays[name].pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert _ray_has_died(is_up)


def test_a_ray_that_is_not_there_is_missed_once_it_was() -> None:
    assert _ray_has_died(is_up=True)
    assert not _ray_has_died(is_up=False)


def test_a_driver_of_which_nobody_took_note_says_itself_where_it_is(tmp_path: Path) -> None:
    """So that it is cleaned up after: its service may have died between starting it and writing it down."""
    settings = Settings(data_dir=tmp_path)
    records = Records(open_engine(settings.resolved_database_url))
    migrate(records.engine)
    asked = spec(budget={"trials": 1})
    records.claim(records.add_sweep("s1", asked), fruitless=0, epochs_done=0)
    storage = open_storage(settings.resolved_database_url)
    study = open_study(asked, "s1", storage)
    study.tell(study.ask(), 1.0)  # so there is nothing left to run
    assert main("s1", 1, tmp_path / "scratch", settings) == 0
    record = records.get_sweep("s1")
    assert (record.state, record.driver) == ("succeeded", findable(os.getpid()))
    assert [left.id for left in records.list_left_behind()] == ["s1"]
    records.engine.dispose()
    storage.engine.dispose()


def test_a_driver_loads_no_torch_and_no_tune_at_first() -> None:
    """What the first epoch waits for are its workers, which do. Nor Tune, before Ray is up."""
    code = "import sys, service.drive; print([name for name in ('torch', 'ray.tune') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


COUNTED = """
import sys
from ray.tune import tune
from trials.search import NoProgress
from trials.tuning import callbacks_uncounted

with callbacks_uncounted():
    tune.air_usage.tag_callbacks([NoProgress()])
print("ray.air.integrations.mlflow" in sys.modules)
"""


def test_tune_does_not_load_what_it_would_count_callbacks_of() -> None:
    """MLflow's client takes more than a second, where it is installed."""
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def never() -> None:
    raise AssertionError("the sweep is not over")


def test_the_lease_is_renewed_while_torch_looks_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take longer than a lease: CUDA's build of torch is large."""
    beaten = threading.Event()

    class Journal(MemoryJournal):
        def beat(self) -> Orders:
            if threading.current_thread() is not threading.main_thread():
                beaten.set()
            return super().beat()

    def looking(spec: SweepSpec) -> NoReturn:
        assert beaten.wait(10)
        raise RuntimeError("no GPU after all")

    monkeypatch.setattr(trials.driver, "BEAT_S", 0.01)
    monkeypatch.setattr(trials.driver, "require_gpus", looking)
    asked = spec(resources={"gpus": 1})
    ledger = open_ledger(asked, InMemoryStorage(), Journal())
    with pytest.raises(RuntimeError, match="no GPU after all"):
        drive(ledger, Journal(), asked, store_url="memory://", data_dir=tmp_path, scratch=tmp_path, end=never)


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (Nvml(Card("GPU-1"), Card("GPU-2")), r"finds no CUDA device: .* resources\.gpus 0"),
        (Nvml(), r"NVIDIA's driver shows no GPU here: .* resources\.gpus 0"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_torch_cannot_use_is_said_before_any_trial(
    nvml: Nvml, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(nvml, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    asked = spec(resources={"gpus": 0.5})
    journal = MemoryJournal()
    ledger = open_ledger(asked, InMemoryStorage(), journal)
    with pytest.raises(RuntimeError, match=words):
        drive(
            ledger,
            MemoryJournal(),
            asked,
            store_url="memory://",
            data_dir=tmp_path,
            scratch=tmp_path,
            end=never,
        )
    task = ledger.next_task()
    assert task is not None
    assert (task.device, task.gpu_share) == ("cuda", 0.5)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("GPU-2,GPU-1" if nvml.cards else "1,0")


def test_a_gpu_that_hangs_holds_no_sweep_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(Nvml(Card("GPU-1")), monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(trials.driver, "GPU_CHECK_S", 0.01)
    with pytest.raises(RuntimeError, match=r"not computed on the GPUs here in 0\.01 s: see nvidia-smi"):
        require_gpus(spec(resources={"gpus": 1}))


def test_a_trial_asks_for_its_own_part_of_a_gpu() -> None:
    ledger = open_ledger(spec(resources={"cpus": 2, "gpus": 0.25}), InMemoryStorage(), MemoryJournal())
    task = ledger.next_task()
    assert task is not None
    resources = Resources(cpus=2, gpus=0.25, labels={"zone": "in(a, b)"})
    larger = replace(task, gpu_share=0.5)
    asked = [place_of(resources, {"task": each}) for each in (task, larger, replace(larger, number=9))]
    assert [place.bundles for place in asked] == [[{"CPU": 2, "GPU": share}] for share in (0.25, 0.5, 0.5)]
    assert asked[0]._kwargs["bundle_label_selector"] == [{"zone": "in(a,b)"}]
    assert asked[0] != asked[1] == asked[2], "workers are Tune's to use again where this is equal"
    assert place_of(Resources(cpus=2), {"task": task}).bundles == [{"CPU": 2}]


@pytest.mark.parametrize(
    ("resources", "nodes", "words"),
    [
        (
            Resources(cpus=4, gpus=0.5, labels={"zone": "in(a, b)"}),
            [Node(8, 1), Node(2, 1, (("zone", "a"),))],
            "no machine has room for a trial now, which takes 4 cpus and 0.5 of a GPU on a machine labelled "
            "zone=in(a, b): one that joins is used at once",
        ),
        (
            Resources(cpus=0.5),
            [],
            "no machine has room for a trial now, which takes 0.5 cpus: one that joins",
        ),
        (Resources(), [Node(1)], "sweeps of a higher priority, or earlier ones, have all the machines"),
    ],
)
def test_a_sweep_of_which_nothing_can_run_says_what_it_waits_for(
    resources: Resources, nodes: list[Node], words: str
) -> None:
    assert why_full(resources, nodes).startswith(words)


GPUS_OF_RAY = """
import os, sys
from pathlib import Path
import ray
from trials.driver import start_ray
from trials.gpus import Gpu
uuids = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
start_ray(Path(sys.argv[1]), [Gpu(uuid, "a card", 2**34) for uuid in uuids])

@ray.remote(num_cpus=0.1)
class Worker:
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

workers = [Worker.options(num_gpus=share).remote() for share in (1, 0.5, 0.5)]
print(*ray.get([worker.gpu.remote() for worker in workers]))
"""


@pytest.mark.slow
def test_a_worker_knows_its_gpu_or_the_part_that_mig_has_made_by_its_identity() -> None:
    uuids = "MIG-7c1d-11e4,GPU-2b"
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:  # Ray's sockets want a short path
        command = [sys.executable, "-c", GPUS_OF_RAY, scratch]
        env = {**os.environ, **DRIVER_ENVIRONMENT, **OWN_RAY, "RAY_AUTH_TOKEN": "0" * 64}
        env["CUDA_VISIBLE_DEVICES"] = uuids
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    whole, *halves = done.stdout.split()
    assert {whole, *halves} == set(uuids.split(",")), done.stderr
    assert len(set(halves)) == 1


def test_a_driver_that_finds_all_trials_ended_and_none_verified_verifies_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it may have died between the two."""
    asked, journal = spec(training={"epochs": 1}, budget={"trials": 1}), MemoryJournal()
    ledger = open_ledger(asked, InMemoryStorage(), journal)
    task = ledger.next_task()
    assert task is not None
    ledger.record(task, report(task, 1))
    found: list[str] = []

    class Fresh(InFreshProcess):
        def __call__(self, check: Check) -> Verification:
            return verified(check)

    monkeypatch.setattr(trials.driver, "InFreshProcess", Fresh)

    def end() -> None:
        found.append(journal.verified[0].outcome)

    drive(ledger, journal, asked, store_url="memory://", data_dir=tmp_path, scratch=tmp_path, end=end)
    assert found == ["verified"]


# A limit of the budget, reached while trials run.


class Left(BaseException):
    """The driver's process is gone."""


class AbsentJournal(MemoryJournal):
    """Whose database is away for so many beats of the watch."""

    absences = 0

    def beat(self) -> Orders:
        if threading.current_thread() is threading.main_thread() and self.absences:
            self.absences -= 1
            raise JournalAway("no route to it")
        return super().beat()


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> AbsentJournal:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(trials.driver, "leave", leave)
    monkeypatch.setattr(trials.driver, "BEAT_S", 0.01)
    return AbsentJournal()


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "99"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def ledger(journal: AbsentJournal) -> StudyLedger:
    """Of a sweep that has run for long enough."""
    asked = spec(budget={"trials": 6, "wall_s": 100})
    return open_ledger(asked, InMemoryStorage(), journal)


def run_watch(
    ledger: StudyLedger,
    journal: MemoryJournal,
    verifier: Verifier,
    worker: subprocess.Popen[bytes],
    write_down: Callable[[], None],
) -> int:
    """With a trial that has done one epoch, in a process that was heard of. Returns what it leaves with."""
    search = build_search(ledger, {})
    task = search.suggest("a")["task"]
    search.on_report("a", worker.pid)
    ledger.record(task, report(task, 1))
    journal.orders = replace(journal.orders, running_s=100.0)
    pause = PauseSwitch(CheckpointStore("memory://"), ledger.sweep_id, "d")
    watch = _Watch(ledger, journal, pause, verifier, write_down)
    watch.search = search
    with pytest.raises(Left) as left:
        watch.run()
    return int(left.value.args[0])


def test_at_a_limit_the_trials_processes_are_killed_and_then_the_best_is_verified_and_then_it_ends(
    ledger: StudyLedger, journal: AbsentJournal, worker: subprocess.Popen[bytes]
) -> None:
    said: list[object] = []

    def looking(check: Check) -> Verification:
        said.append(("killed", worker.wait(10)))
        return verified(check)

    code = run_watch(ledger, journal, Verifier(ledger, looking), worker, lambda: said.append("written down"))
    assert said == [("killed", -signal.SIGKILL), "written down"]
    assert (code, journal.verified[0].outcome) == (0, "verified")


def test_the_lease_is_renewed_while_the_best_is_verified_after_a_limit(
    ledger: StudyLedger, journal: AbsentJournal, worker: subprocess.Popen[bytes]
) -> None:
    beats: list[str] = []
    many = threading.Event()

    def counted() -> Orders:
        if threading.current_thread() is threading.main_thread():
            beats.append("")
            if len(beats) > 10:
                many.set()
        return MemoryJournal.beat(journal)

    def looking(check: Check) -> Verification:
        journal.beat = counted  # type: ignore[method-assign]
        assert many.wait(10)
        return verified(check)

    assert run_watch(ledger, journal, Verifier(ledger, looking), worker, lambda: None) == 0


def test_what_keeps_the_best_from_being_verified_keeps_the_sweep_from_its_end(
    ledger: StudyLedger, journal: AbsentJournal, worker: subprocess.Popen[bytes]
) -> None:
    def failing(check: Check) -> Verification:
        raise JournalAway("it has been away for longer than anybody waits")

    def written() -> None:
        raise Left(-1)

    assert run_watch(ledger, journal, Verifier(ledger, failing), worker, written) == EXIT_UNSETTLED
    assert journal.verified == {}


def test_a_database_that_is_away_after_a_limit_is_asked_again_no_more_often_than_before(
    ledger: StudyLedger,
    journal: AbsentJournal,
    worker: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []

    class Done(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if journal.absences:
                waits.append(timeout)
            return super().wait(timeout)

    def looking(check: Check) -> Verification:
        journal.absences = 5
        while journal.absences:
            threading.Event().wait(0.001)
        return verified(check)

    monkeypatch.setattr("trials.driver.threading.Event", Done)
    assert run_watch(ledger, journal, Verifier(ledger, looking), worker, lambda: None) == 0
    assert waits.count(trials.driver.BEAT_S) >= 4
    assert waits.count(0) <= 1


def test_cpus_are_those_of_the_affinity_and_of_a_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for written, cpus in (
        ("max 100000", 4),
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("800000 100000", 4),
        ("50000 20000", 2),
    ):
        (tmp_path / "cpu.max").write_text(written + "\n")
        assert usable_cpus(tmp_path) == cpus, written
    assert usable_cpus(tmp_path / "nowhere") == 4


CPUS_OF_RAY = """
import os, sys
from pathlib import Path
import ray
from trials.cpus import usable_cpus
from trials.driver import start_ray
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
start_ray(Path(sys.argv[1]))
print(usable_cpus(), ray.cluster_resources()["CPU"])
"""


@pytest.mark.slow
def test_ray_has_the_cpus_that_the_service_tells_of(tmp_path: Path) -> None:
    """By itself it would take all of the machine's, though only one may be used."""
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:  # Ray's sockets want a short path
        command = [sys.executable, "-c", CPUS_OF_RAY, scratch]
        env = {**os.environ, **DRIVER_ENVIRONMENT, **OWN_RAY, "RAY_AUTH_TOKEN": "0" * 64}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.split() == ["1", "1.0"], done.stderr


PARTS_OF_RAY = """
import os, sys
from pathlib import Path

import psutil
import ray
from ray.tune.execution.class_cache import _ActorClassCache
from trials.driver import start_ray
from trials.tuning import hand_on

class Told:
    def __call__(self):
        loaded = sorted({"torch", "optuna", "trials.attempt", "trials.trainable"} & set(sys.modules))
        told = os.environ["RAY_CHDIR_TO_TRIAL_DIR"], ray.get_runtime_context().runtime_env
        return os.getpid(), *loaded, *told

start_ray(Path(sys.argv[1]))
parts = sorted((each.name(), each.pid) for each in psutil.Process().children(recursive=True))
print(*(name for name, _ in parts))
hand_on(in_cluster=False)
pid, *told = ray.get(_ActorClassCache().get(Told).remote().__call__.remote())
print(("ray::IDLE", pid) in parts, *told)
"""


@pytest.mark.slow
def test_of_a_ray_of_our_own_there_is_what_runs_trials() -> None:
    """No dashboard, autoscaler or reader of logs; and one worker, which loads all while Tune is loaded here,
    and is the first trial's. It inherits what it needs: with a runtime environment of its own, another
    process would have to set it up first."""
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:
        command = [sys.executable, "-c", PARTS_OF_RAY, scratch]
        env = {**os.environ, **DRIVER_ENVIRONMENT, **OWN_RAY, "RAY_AUTH_TOKEN": "0" * 64}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.splitlines() == [
        "gcs_server ray::DashboardAgent ray::IDLE ray::RuntimeEnvAgent raylet",
        "True torch trials.attempt trials.trainable 0 {}",
    ], done.stderr
