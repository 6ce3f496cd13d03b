"""The laws of the searcher: who is silent for too long is ended, and nobody before."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from optuna.storages import InMemoryStorage
from ray import cloudpickle

import trials.search
from tests.fakes import MemoryJournal, failed, open_ledger, spec
from trials.ledger import StudyLedger
from trials.search import LONG_START_S, LedgerScheduler, StudySearch


@pytest.fixture
def ledger() -> StudyLedger:
    asked = spec(retry={"hang_s": 100})
    return open_ledger(asked, InMemoryStorage(), MemoryJournal())


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


class Clock:
    """The module's time, moved by hand."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trials.search, "time", made)
    return made


def test_silent_worker_is_killed_after_its_time_and_its_trial_tried_again(
    ledger: StudyLedger, worker: subprocess.Popen[bytes], clock: Clock
) -> None:
    search = StudySearch(ledger, {})
    assert search.suggest("a")["task"].number == 0
    search.on_report("a", worker.pid)
    clock.at += 99
    assert search.end_hung()
    assert worker.poll() is None
    clock.at += 2
    assert search.end_hung()
    assert worker.wait(10) == -signal.SIGKILL
    search.on_trial_complete("a", error=True)
    again = search.suggest("b")["task"]
    assert (again.number, again.attempt) == (0, 2)


def test_worker_is_not_blamed_for_the_time_in_which_nobody_read_what_it_said(
    ledger: StudyLedger, worker: subprocess.Popen[bytes], clock: Clock
) -> None:
    search = StudySearch(ledger, {})
    search.suggest("a")
    search.on_report("a", worker.pid)
    clock.at += 1000
    ledger.waited_at = clock.at - 50
    assert search.end_hung()
    assert worker.poll() is None
    clock.at += 51
    search.end_hung()
    assert worker.wait(10) == -signal.SIGKILL


def test_worker_is_blamed_for_no_time_in_which_a_task_was_chosen_and_for_all_other(
    ledger: StudyLedger,
    worker: subprocess.Popen[bytes],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = StudySearch(ledger, {})
    search.suggest("a")
    search.on_report("a", worker.pid)

    def slow() -> None:
        clock.at += 500
        assert search.end_hung(), "the watch looks while the main thread chooses"

    monkeypatch.setattr(ledger, "next_task", slow)
    for _ in range(3):
        clock.at += 30
        assert search.suggest("b") is None
        assert search.end_hung()
    assert not search._hung, "whose process may take a while to be gone"
    clock.at += 11
    search.end_hung()
    assert worker.wait(10) == -signal.SIGKILL, "however often another task was chosen"


def test_worker_that_never_comes_to_speak_is_told_of_but_has_time_to_start(
    ledger: StudyLedger, clock: Clock
) -> None:
    search = StudySearch(ledger, {})
    search.suggest("a")
    clock.at += LONG_START_S - 1
    assert search.end_hung()
    clock.at += 2
    assert not search.end_hung()


def test_who_waits_for_a_larger_part_of_a_gpu_does_not_hang(clock: Clock) -> None:
    ledger = open_ledger(spec(resources={"gpus": 0.5}), InMemoryStorage(), MemoryJournal())
    search = StudySearch(ledger, {})
    task = search.suggest("a")["task"]
    ledger.record(task, failed("out_of_memory"))
    search.on_trial_complete("a", {"report": failed("out_of_memory")})
    assert search.suggest("b")["task"].was_enlarged
    clock.at += 10 * LONG_START_S
    assert search.end_hung()
    search.suggest("c")
    clock.at += 10 * LONG_START_S
    assert not search.end_hung(), "who asks for what all have"


def test_tune_can_pickle_the_searcher_and_the_scheduler_and_learns_nothing(ledger: StudyLedger) -> None:
    """It writes them to its folder; the ledger's storage knows the database's password."""
    vars(ledger)["database_url"] = "postgresql://fraternal:xyzzy-secret@host/name"
    search = StudySearch(ledger, {"store_url": "xyzzy-secret"})
    search.suggest("a")
    for pickled in (search, LedgerScheduler(ledger, search)):
        assert b"xyzzy" not in cloudpickle.dumps(pickled)


NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
CUDA_SAID = f"""Failure # 1 (occurred at 2026-11-29_10-00-00)
ray::LanguageModelTrial.train() (pid=4, ip=127.0.0.1, actor_id=0f)
  File "trials/trainable.py", line 77, in step
    report = next(self._reports)
torch.AcceleratorError: {NO_KERNEL}
Search for `cudaErrorNoKernelImageForDevice' in https://docs.nvidia.com/cuda for more information.
CUDA kernel errors might be asynchronously reported at some other API call: the stack may be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
KILLED = """Failure # 1 (occurred at 2026-11-29_10-00-00)
The actor died unexpectedly before finishing this task.
\tclass_name: LanguageModelTrial
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            CUDA_SAID,
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
        ),
        (KILLED, "its process ended without a word: killed, or out of memory"),
    ],
)
def test_what_an_attempt_raised_is_what_its_loss_says(
    said: str, words: str, ledger: StudyLedger, tmp_path: Path
) -> None:
    search, journal = StudySearch(ledger, {}), ledger._journal
    assert isinstance(journal, MemoryJournal)
    (tmp_path / "error.txt").write_text(said)
    trial = SimpleNamespace(trial_id="a", error_file=str(tmp_path / "error.txt"))
    search.suggest("a")
    LedgerScheduler(ledger, search).on_trial_error(cast(Any, SimpleNamespace(_trials=[])), cast(Any, trial))
    search.on_trial_complete("a", error=True)
    assert [told["message"] for kind, told in journal.events if kind == "trial_lost"] == [words]


def test_trial_that_has_ended_is_no_longer_watched(ledger: StudyLedger, clock: Clock) -> None:
    search = StudySearch(ledger, {})
    search.suggest("a")
    search.on_trial_complete("a", error=True)
    clock.at += 10_000
    assert search.end_hung()


def test_once_no_task_is_left_the_database_is_not_asked_for_one(ledger: StudyLedger) -> None:
    search, journal = StudySearch(ledger, {}), ledger._journal
    assert isinstance(journal, MemoryJournal)
    handed_out = [search.suggest(str(number)) for number in range(6)]
    assert all(handed_out)
    journal.fenced = True  # from now on a beat is an error
    assert search.suggest("one more") is None


def test_a_trial_whose_worker_is_being_started_gets_no_other(ledger: StudyLedger) -> None:
    """Tune would throw away the one that it waits for: short trials would have them started for ever."""
    running, started_for, waiting = (
        SimpleNamespace(trial_id=name, status=status)
        for name, status in (("a", "RUNNING"), ("b", "PENDING"), ("c", "PENDING"))
    )
    controller = SimpleNamespace(
        _trials=[running, started_for, waiting], _pending_trials=["b", "c"], _trial_to_actor=[started_for]
    )
    scheduler = LedgerScheduler(ledger, StudySearch(ledger, {}))
    assert scheduler.choose_trial_to_run(cast(Any, controller)) is waiting
    controller._trials.remove(waiting)
    assert scheduler.choose_trial_to_run(cast(Any, controller)) is None
