"""The ledger behind Ray Tune's two public faces: a Searcher hands out tasks, a scheduler takes reports."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.air.execution import PlacementGroupResourceManager
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from trials.ledger import StudyLedger
from trials.tasks import Report, Task

ASK_ANEW_S = 5.0
"""For a placement group to be placed where there is room, which takes milliseconds."""
LONG_START_S = 300.0
"""For a worker's process to come to its first report, however soon a silent one is taken for hung."""


def end_here(node_id: str, pid: int) -> None:
    """Kill a process of this machine, the only node."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class StudySearch(Searcher):
    """Suggests the ledger's tasks, and tells it of lost workers."""

    def __init__(
        self,
        ledger: StudyLedger,
        shared: dict[str, Any],
        end_process: Callable[[str, int], None] = end_here,
        *,
        waits_for_nodes: bool = False,
    ) -> None:
        """`shared` goes to the workers with every task; `end_process` kills one of theirs, by its node and
        id.

        `waits_for_nodes`: a worker may have to wait for a machine until it starts, and does not hang then.
        """
        super().__init__()
        self._ledger = ledger
        self._shared = shared
        self._end_process = end_process
        self._waits_for_nodes = waits_for_nodes
        self.tasks: dict[str, Task] = {}
        """Open tasks by Tune's trial id."""
        self._heard: dict[str, tuple[float, tuple[str, int] | None]] = {}
        """When an attempt last reported, or began, on the monotonic clock; its process's node and id, once
        known."""
        self._asking_since: float | None = None
        """On the monotonic clock, where the ledger is being asked for a task."""
        self._raised: dict[str, str] = {}
        """What an attempt has raised, in words: its process is not to be used again."""
        self._hung: set[str] = set()
        self._ended: set[str] = set()

    def suggest(self, trial_id: str) -> Any:
        """The next task, None to be asked again, or FINISHED, which Tune's own annotation forgets."""
        # It is asked many times a second: not the database, too. What is wished for, each beat tells.
        task = None if self._ledger.is_full or self._ledger.exhausted else self._next_task()
        if task is not None:
            self.tasks[trial_id] = task
            self._heard[trial_id] = time.monotonic(), None
            return {"task": task, **self._shared}
        # While a trial runs it may still come back; once none does, saying None would spin Tune for ever.
        # Where there is no room for any, the driver begins anew once there is.
        return None if self.tasks else Searcher.FINISHED

    def _next_task(self) -> Task | None:
        """To choose one's values may take its time, in which no report is read: the workers' clocks stop."""
        self._asking_since = began = time.monotonic()
        try:
            return self._ledger.next_task()
        finally:
            took = time.monotonic() - began
            for trial_id, (at, process) in list(self._heard.items()):
                self._heard[trial_id] = at + took, process
            self._asking_since = None

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        task = self.tasks[trial_id]
        if trial_id in self._hung:
            words = f"its process was ended: it had not reported for retry.hang_s, {task.hang_s:g} s"
            self._ledger.lost(task, words, "timeout")
        elif error or result is None:
            words = self._raised.get(trial_id) or "its process ended without a word: killed, or out of memory"
            self._ledger.lost(task, words)
        elif result["report"].finished:  # Tune shows a trial's final result to nobody else
            self._ledger.record(task, result["report"])
        del self.tasks[trial_id]
        self._heard.pop(trial_id, None)
        self._raised.pop(trial_id, None)
        self._hung.discard(trial_id)
        self._ended.discard(trial_id)

    def on_report(self, trial_id: str, pid: int, node_id: str = "") -> None:
        self._heard[trial_id] = time.monotonic(), (node_id, pid)

    def on_raised(self, trial_id: str, text: str) -> None:
        """Before the end of a trial in an error; `text` is what Ray says of it."""
        self._raised[trial_id] = raised_in(text)

    def end_hung(self) -> bool:
        """Kill the processes that have not reported for too long.

        False where one cannot be found, since it has never reported: only all of Ray can be ended then.
        """
        asking_since = self._asking_since
        now = time.monotonic() if asking_since is None else asking_since
        for trial_id, (at, process) in list(self._heard.items()):
            task = self.tasks.get(trial_id)
            if task is None or trial_id in self._hung:
                continue
            if process is None and (self._waits_for_nodes or task.was_enlarged):  # it waits for a place
                continue
            patience_s = task.hang_s if process is not None else max(task.hang_s, LONG_START_S)
            if now - max(at, self._ledger.waited_at) <= patience_s:
                continue
            if process is None:
                return False
            self._hung.add(trial_id)
            self._end_process(*process)
        return True

    def end_stopped(self) -> None:
        """Kill the processes of trials that are to end now; they are told of as lost, and so they end."""
        self._end_where(lambda task: self._ledger.is_to_stop(task.number))

    def end_all(self) -> None:
        """The same of all trials."""
        self._end_where(lambda task: True)

    def _end_where(self, is_to_end: Callable[[Task], bool]) -> None:
        for trial_id, task in list(self.tasks.items()):
            _, process = self._heard.get(trial_id, (0.0, None))
            if process is not None and is_to_end(task) and trial_id not in self._ended:
                self._ended.add(trial_id)
                self._end_process(*process)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study remembers."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep goes on from its study, never from Tune's own checkpoint")

    def __getstate__(self) -> dict[str, Any]:
        """Nothing for Tune to pickle: the ledger knows the database's password."""
        return {}


class LedgerScheduler(FIFOScheduler):
    """Passes every report to the ledger and stops the trials that it says are over."""

    def __init__(self, ledger: StudyLedger, search: StudySearch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Ray's
        self._ledger = ledger
        self._search = search
        self._asked_at = time.monotonic()

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """The first that waits for a worker and has none that is being started.

        Tune would give that one the worker of a trial that has just ended, and throw away the one being
        started: where trials are short, again and again. Also let go of workers for which there is no trial:
        their places are others'. And ask anew for those that have not been placed.
        """
        controller: TuneController = getattr(tune_controller, "_tune_controller", tune_controller)
        if not controller._pending_trials and (self._ledger.is_full or self._ledger.exhausted):
            controller._cleanup_cached_actors(force_all=True)
        if time.monotonic() - self._asked_at > ASK_ANEW_S:
            self._asked_at = time.monotonic()
            _ask_anew_for_places(controller)
        pending = (trial for trial in controller._trials if trial.status == Trial.PENDING)
        return next((trial for trial in pending if trial not in controller._trial_to_actor), None)

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        report: Report = result["report"]
        self._search.on_report(trial.trial_id, result["pid"], result["node"])
        goes_on = self._ledger.record(self._search.tasks[trial.trial_id], report)
        return TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP

    def on_trial_complete(
        self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]
    ) -> None:
        _forget_finished(tune_controller)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        if trial.error_file is not None:
            with suppress(OSError):
                self._search.on_raised(trial.trial_id, Path(trial.error_file).read_text())
        _forget_finished(tune_controller)

    def __getstate__(self) -> dict[str, Any]:
        return {}


def raised_in(text: str) -> str:
    """The exception at the end of a traceback, on one line; nothing where a process was killed."""
    found = re.findall(r"^[\w.]*(?:Error|Exception): .*$", text, re.MULTILINE)
    return found[-1] if found else ""


class NoProgress(TrialProgressCallback):
    """In place of Tune's own, which keeps every trial so as to print nothing of it."""

    def on_trial_complete(self, *arguments: Any, **named: Any) -> None: ...

    def log_result(self, *arguments: Any, **named: Any) -> None: ...


def _ask_anew_for_places(controller: TuneController) -> None:
    """Replace the placement groups that wait.

    Ray looks at one that fits nowhere again when a node is added, but before it knows that node's labels, and
    then never more.
    """
    places = controller._actor_manager._resource_manager
    if isinstance(places, PlacementGroupResourceManager):
        for request, waiting in list(places._request_to_staged_pgs.items()):
            for _ in range(len(waiting)):
                places.cancel_resource_request(request)
                places.request_resources(request)


def _forget_finished(controller: TuneController) -> None:
    """Take the trials that have ended before this one out of Tune, which has no way for it.

    It would keep all that was ever said of them, and a folder of each, and look at every one in every step.
    """
    for trial in [trial for trial in controller._trials if trial.status in (Trial.TERMINATED, Trial.ERROR)]:
        controller._trials.remove(trial)
        controller._trial_metadata.pop(trial.trial_id, None)
        for kept in (controller._stopped_trials, controller._failed_trials, controller._trials_to_cache):
            kept.discard(trial)
        shutil.rmtree(str(trial.local_path), ignore_errors=True)
