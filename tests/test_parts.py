"""Parts of GPUs: no two processes have the same one, whichever driver they are of."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pynvml
import pytest

import trials.parts
import trials.probe
import trials.trainable
import trials.verify
from tests.nvml import Card, Nvml, installed
from trials.corpora import PathCorpus
from trials.gpus import VISIBLE
from trials.parts import Part, parts_dir, take_part
from trials.tasks import Report
from trials.trainable import LanguageModelTrial
from trials.verification import Check
from trials.verify import placed

TWO = ["GPU-1", "MIG-GPU-2/7/0"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process keeps what a test has taken, in a folder that no other test looks at."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return parts_dir()


def taken(share: float, uuids: list[str] = TWO) -> Part:
    part = take_part(uuids, share)
    assert part is not None
    return part


def test_whole_gpus_are_given_out_once_each() -> None:
    first, second = taken(1), taken(1)
    assert {first.uuid, second.uuid} == set(TWO)
    assert take_part(TWO, 0.0001) is None
    first.give_back()
    assert taken(1).uuid == first.uuid


def test_small_parts_leave_another_gpu_whole() -> None:
    thirds = [taken(0.3333) for _ in range(3)]
    assert len({part.uuid for part in thirds}) == 1
    whole = taken(1)
    assert whole.uuid != thirds[0].uuid
    thirds[1].give_back()
    assert (take_part(TWO, 0.5), taken(0.3333).uuid) == (None, thirds[0].uuid)


def test_who_may_use_fewer_gpus_gets_none_of_the_others() -> None:
    held = taken(1, TWO[:1])
    assert take_part(TWO[:1], 1) is None
    assert held.uuid == TWO[0]
    assert taken(1, TWO[1:]).uuid == TWO[1]


HOLD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from trials.parts import take_part
part = take_part(["GPU-1"], 0.75)
print(part.uuid, flush=True)
sys.stdin.readline()
"""


def test_a_killed_process_holds_nothing(folder: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(folder.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "GPU-1\n"
        assert take_part(["GPU-1"], 0.5) is None
        taken(0.25, ["GPU-1"]).give_back()
        other.kill()
    assert taken(1, ["GPU-1"]).uuid == "GPU-1"
    assert len([*folder.glob("*.part")]) == 1, "what the dead had is gone"


def test_a_part_that_could_not_be_written_down_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trials.parts.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            take_part(TWO, 1)
    assert {taken(1).uuid, taken(1).uuid} == set(TWO)


def worker(uuids: list[str], share: float, reports: list[Report]) -> Any:
    """A worker's process, as far as its GPU is concerned."""
    trial = object.__new__(LanguageModelTrial)
    trial._part = None
    return trial._on_its_gpu(uuids, share, (report for report in reports))


def test_a_worker_waits_for_its_part_with_signs_of_life_and_then_computes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-1")  # by Ray
    monkeypatch.setattr(trials.trainable, "ASK_AGAIN_S", 0.0)
    others = [taken(0.5, ["GPU-1"]), taken(1, ["GPU-2"])]
    alive, done = Report(epoch=None), Report(epoch=None, finished=True)
    running = worker(["GPU-1", "GPU-2"], 1.0, [done])
    assert [next(running) for _ in range(3)] == [alive] * 3
    others[1].give_back()
    assert next(running) == done
    assert trials.trainable.os.environ[VISIBLE] == "GPU-2"


def test_a_worker_keeps_off_a_gpu_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Card("GPU-1", trouble=pynvml.NVML_ERROR_GPU_IS_LOST)
    installed(Nvml(lost, Card("GPU-2")), monkeypatch)
    monkeypatch.setenv(VISIBLE, "GPU-1")
    done = Report(epoch=None, finished=True)
    assert next(worker(["GPU-1", "GPU-2"], 0.5, [done])) == done
    assert trials.trainable.os.environ[VISIBLE] == "GPU-2"


@pytest.mark.parametrize(("free", "on", "visible"), [(0.5, "cuda", "GPU-2"), (0.25, "cpu", "GPU-1,GPU-2")])
def test_a_verification_takes_what_trials_leave_and_else_the_cpu(
    free: float, on: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(Nvml(Card("GPU-1"), Card("GPU-2")), monkeypatch)
    monkeypatch.setenv(VISIBLE, "GPU-1,GPU-2")
    monkeypatch.setattr(trials.verify, "PART_PATIENCE_S", 0.0)
    taken(1, ["GPU-1"])
    taken(1 - free, ["GPU-2"])
    check = Check("s1", 0, 1, 4.5, None, None, PathCorpus(path="/text"), "cuda", 1, 60.0, gpu_share=0.5)
    found, part = placed(check)
    assert (found.on, trials.verify.os.environ[VISIBLE], part is not None) == (on, visible, on == "cuda")


def test_a_measurement_takes_nothing_from_trials_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-1,GPU-2")
    taken(1, ["GPU-1"])
    assert [trials.probe._part_of(["GPU-1", "GPU-2"], 0.5) is not None for _ in range(2)] == [True, True]
    assert trials.probe.os.environ[VISIBLE] == "GPU-2"
    with pytest.raises(
        RuntimeError, match=r"no GPU here has 0\.5 of it free .* trials that run have the rest"
    ):
        trials.probe._part_of(["GPU-1", "GPU-2"], 0.5)
    assert trials.probe._part_of([], 1) is None
