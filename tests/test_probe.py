"""The probe for real, in a process of its own, on a model that takes next to nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import trials.probe
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from service.launcher import DRIVER_ENVIRONMENT, LocalLauncher, ProbeFailed, TextUnusable, marked_processes
from service.settings import Settings
from tests.service_process import write_corpus
from trials.corpora import PathCorpus
from trials.spec import TrainingConfig, TrialConfig
from trials.steps import PROBE_ORDER, ProbeOrder, points_to_probe

TINY = AWDLSTMConfig(embedding_size=8, hidden_size=8, layers=1)


def order(text: Path, **changes: Any) -> ProbeOrder:
    configs = [
        TrialConfig(TINY, TrainingConfig(batch_size=b, bptt=10), Regularization(name))
        for name in ("none", "fraternal")
        for b in (4, 8)
    ]
    given = ProbeOrder(PathCorpus(path=str(text)), "cpu", 1, 2, 1.0, points_to_probe(configs))
    return replace(given, **changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), tokens=3_000)


@pytest.mark.slow
def test_a_probe_times_every_point_in_as_many_processes_and_leaves_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    launcher = LocalLauncher(Settings(data_dir=tmp_path))
    asked = order(text)
    found = asyncio.run(launcher.probe(asked))
    assert [one.config for one in found.timed] == list(asked.points)
    for one in found.timed:
        assert min(one.step_s) > 0
        assert min(one.word_s, one.dynamics_s, one.save_s) > 0
    assert (found.train_tokens, found.valid_tokens) == (
        len_of(text / "train.txt"),
        len_of(text / "valid.txt"),
    )
    assert found.vocabulary_size > 2
    assert found.device.startswith("cpu: ")
    assert found.start_s > 0
    assert 0 < found.share <= 1
    assert (found.not_timed, found.is_of_the_moment) == ((), False)
    assert not [*(tmp_path / "temporary").iterdir()]


def len_of(file: Path) -> int:
    """Words, and an end of each line."""
    return sum(len(line.split()) + 1 for line in file.read_text().splitlines())


@pytest.mark.slow
def test_a_probe_that_cannot_read_its_text_says_why(tmp_path: Path) -> None:
    launcher = LocalLauncher(Settings(data_dir=tmp_path))
    with pytest.raises(TextUnusable, match="a corpus path is a directory that holds") as told:
        asyncio.run(launcher.probe(order(tmp_path / "nowhere")))
    assert told.value.pointer == "/path"


def test_a_probe_that_cannot_be_started_says_why(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LocalLauncher(Settings(data_dir=tmp_path))
    with monkeypatch.context() as without:
        without.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
        with pytest.raises(ProbeFailed, match="has no folder for its files"):
            asyncio.run(launcher.probe(order(text)))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such program"))
    with pytest.raises(ProbeFailed, match="could not be started"):
        asyncio.run(launcher.probe(order(text)))


@pytest.mark.parametrize(("processes", "share"), [(1, 1.0), (4, 1.0), (8, 0.5), (40, 0.1)])
def test_processes_of_less_than_a_cpu_share_cores_with_one_another(
    text: Path, monkeypatch: pytest.MonkeyPatch, processes: int, share: float
) -> None:
    """Which no other work has taken from them."""
    monkeypatch.setattr(trials.probe, "usable_cpus", lambda: 4)
    assert trials.probe._share_alone(order(text, processes=processes)) == share


@pytest.mark.slow
def test_a_configuration_that_would_not_fit_now_is_left_out_with_words(text: Path, tmp_path: Path) -> None:
    model = AWDLSTMConfig(hidden_size=100_000)
    huge = points_to_probe([TrialConfig(model, TrainingConfig(), Regularization())])
    found = asyncio.run(LocalLauncher(Settings(data_dir=tmp_path)).probe(order(text, points=huge)))
    assert (found.timed, len(found.not_timed)) == ((), 1)
    assert "GiB of memory would be needed now" in found.not_timed[0]
    assert found.is_of_the_moment
    assert found.vocabulary_size > 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the service", "the probe"])
def test_nothing_outlives_whoever_started_it(text: Path, tmp_path: Path, killed: str) -> None:
    """The probe is started by a process that dies, as a service would; or it dies itself, with processes."""
    script = (
        "import subprocess, sys\n"
        "import os\n"
        "command = [sys.executable, '-P', '-m', 'trials.probe', '.', sys.argv[1], str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        "child.stdin.write(sys.stdin.buffer.read()); child.stdin.close()\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    mark = f"PROBE-{os.getpid()}-{killed}"
    started = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "scratch")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **DRIVER_ENVIRONMENT, "MARK_OF_A_TEST": mark},
    )
    assert started.stdin is not None
    assert started.stdout is not None
    started.stdin.write(PROBE_ORDER.dump_json(order(text)))
    started.stdin.close()
    probe = int(started.stdout.readline())
    wait_until(lambda: len(marked(mark)) >= 4)  # its two processes, too
    os.kill(started.pid if killed == "the service" else probe, signal.SIGKILL)
    started.wait()
    started.stdout.close()
    wait_until(lambda: not marked(mark) and not (tmp_path / "scratch").exists())


def marked(mark: str) -> list[psutil.Process]:
    return marked_processes("MARK_OF_A_TEST", mark)


def wait_until(holds: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_probe_that_is_called_off_is_ended(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"PROBE-{os.getpid()}-called-off"
    monkeypatch.setenv("MARK_OF_A_TEST", mark)

    async def call_off() -> None:
        probing = asyncio.create_task(LocalLauncher(Settings(data_dir=tmp_path)).probe(order(text)))
        while len(marked(mark)) < 2:
            await asyncio.sleep(0.1)
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing

    asyncio.run(call_off())
    wait_until(lambda: not marked(mark))


class Device:
    """Takes so long for a step, on a clock of its own, and longer where each is waited for. A GPU is asked
    for a step in no time, so that as many are asked for at once as training ever does."""

    def __init__(self, step_s: float, wait_s: float, windows: int) -> None:
        self.step_s, self.wait_s, self.windows = step_s, wait_s, windows
        self.now_s, self.steps = 0.0, 0

    def run(self, pause_every_s: float) -> Iterator[None]:
        while True:
            paused_s = self.now_s
            while True:
                some = min(50 if pause_every_s else 1, self.windows - self.steps)
                self.steps += some
                self.now_s += some * self.step_s + self.wait_s
                assert self.steps < self.windows, "the epoch has ended, and its validation is timed as steps"
                if self.now_s - paused_s >= pause_every_s:
                    break
            yield

    def seconds(self, act: Callable[[], Any]) -> float:
        began_s = self.now_s
        act()
        return self.now_s - began_s


@pytest.mark.parametrize("batch_size", [20, 400, 4000])
@pytest.mark.parametrize("step_s", [0.0005, 0.002, 0.02, 1.0])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpus_quick_steps_are_not_each_waited_for_and_a_turn_is_short(
    device: str, step_s: float, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = trials.probe._Rest(0.0, 0.0, 0.0)
    config = TrialConfig(TINY, TrainingConfig(batch_size=batch_size), Regularization("none"))
    # Its text is for a training that the device stands in for, the store for a rest that is known.
    point = trials.probe._Point(config, None, device, {TINY: rest})  # type: ignore[arg-type]
    training = Device(step_s, 0.1 * step_s, point._windows)
    monkeypatch.setattr(point, "_training", lambda: training)
    monkeypatch.setattr(trials.probe, "_seconds", training.seconds)
    point.take(None)  # type: ignore[arg-type]
    (found,) = point.measured.step_s
    at_once = device == "cuda" and step_s < 0.008 and batch_size == 20  # else the text has too few windows
    assert found == pytest.approx(step_s * (1.002 if at_once else 1.1))
    assert training.now_s <= 3 * 1.1 * step_s + trials.probe.TURN_S + trials.probe.AT_ONCE_S + 50 * 0.002


def test_a_share_is_what_the_kernel_tells(tmp_path: Path) -> None:
    assert trials.probe.share_of_core(tmp_path / "nothing") == 1
    (tmp_path / "schedstat").write_text("3000 1000 17\n")
    assert trials.probe.share_of_core(tmp_path / "schedstat") == 0.75


def test_threads_are_those_of_a_worker(monkeypatch: pytest.MonkeyPatch, text: Path, tmp_path: Path) -> None:
    """In this process, and with a barrier for one: the number of threads is what torch is told."""
    import multiprocessing

    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(trials.probe, "ENOUGH_S", 0.0)
    monkeypatch.setattr(trials.probe, "end_with", lambda parent, scratch: None)
    here, there = multiprocessing.Pipe(duplex=False)
    asked = order(text, threads=3, processes=1)
    try:
        trials.probe._work(
            there,
            multiprocessing.Barrier(1),
            asked,
            list(asked.points),
            [],  # GPUs
            str(tmp_path),
            str(tmp_path),
            os.getpid(),
            time.time(),
        )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    found = here.recv()
    assert [len(one.step_s) for one in found.timed] == [1] * len(asked.points)
