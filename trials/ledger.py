"""The study as the ledger of trials: who runs next, what was reported, how each one ended. No ray, no torch.

Only the driver that holds a sweep's lease writes trial rows, and it does so here.
"""

import logging
import math
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar, cast

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from trials.perplexity import finite_perplexity, perplexity
from trials.pruners import intermediate_epochs, rungs_of
from trials.samplers import suggest
from trials.shares import Claim, Division, Node
from trials.spec import Budget, FailureClass, SweepSpec
from trials.store import CheckpointStore
from trials.studies import ENDED_FROM_OUTSIDE, ENDED_WELL, open_study, set_attributes, set_failure
from trials.tasks import Failure, Report, Task
from trials.verification import LEAST_TIMEOUT_S, REFUSED, Check, Outcome, Verification

log = logging.getLogger(__name__)

ENLARGED = "enlarged"
"""Attribute of a trial that was too large for its part of a GPU: the attempt from which on it has two."""
OF_THE_BEST = ("best_epoch", "best_valid_loss", "checkpoint_sha256")
"""Attributes of a trial, named as in a report."""
DATABASE_PATIENCE_S = 600.0
"""How long a driver waits for a database that does not answer; then it ends, and another one is started."""


class Fenced(Exception):
    """Another driver has taken this sweep over; nothing more may be written."""


class JournalAway(Exception):
    """The database does not answer; it may do so later."""


@dataclass(frozen=True)
class Orders:
    """What is wished for of a driver, as of its latest beat."""

    state: Literal["running", "pausing", "stopping"]
    budget: Budget
    running_s: float
    """Seconds that the sweep has run."""
    max_concurrent: int | None = None
    """Trials at once; None: as many as there is room for."""
    stopping: frozenset[int] = frozenset()
    """Trials that are to end now, as they stand."""
    pinned: frozenset[int] = frozenset()
    """Trials whose best checkpoints stay, however good others are."""


class Journal(Protocol):
    """Our own tables as a driver sees them.

    Every method raises Fenced once another driver has taken over, JournalAway where the database is away.
    """

    def beat(self) -> Orders:
        """Renew the lease."""

    def record_epoch(self, number: int, attempt: int, epoch: Mapping[str, Any]) -> None:
        """Keep one epoch of a trial; a second record of the same epoch replaces the first."""

    def recorded_epochs(self, number: int) -> int:
        """The highest epoch on record for a trial, 0 if there is none."""

    def point_of(self, draw: int, *, take: bool) -> Mapping[str, Any] | None:
        """The values that a client wants a draw to have; with `take`, the next of those that no draw has."""

    def record_event(self, kind: str, **detail: Any) -> None:
        """Add to the sweep's story; what becomes of a trial's attempt is told once, however often said."""

    def claims(self, wants: int) -> Sequence[Claim]:
        """Say how many trials this sweep could run at once, and hear what all that run say, this one too."""

    def ends_told(self) -> set[tuple[int, int | None]]:
        """Trials whose ends the story tells of, as (number, attempt); an earlier version wrote no attempt."""

    def ask_to_pause(self, reason: str) -> None:
        """Have the sweep paused, if it runs."""

    def record_waiting(self, reason: str | None) -> None:
        """Say why nothing of the sweep can run now, if it is to run; None: it can."""

    def verifications(self) -> Mapping[int, tuple[Outcome, str | None]]:
        """Of each trial whose best checkpoint was looked at, what came of it, and which one that was."""

    def record_verification(self, number: int, verification: Verification) -> None:
        """Keep what came of looking at a trial's best checkpoint, in place of what came of it before."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _patient(method: Method) -> Method:
    """Have it done by one thread at a time, and again while the database is away: nothing is done twice."""

    @wraps(method)
    def insist(self: "StudyLedger", *args: Any) -> Any:
        pauses = _pauses(DATABASE_PATIENCE_S)
        again = False
        while True:
            try:
                with self._lock:
                    if again:
                        self._take_note_of_ends()
                    return method(self, *args)
            except (JournalAway, StorageInternalError) as error:
                if (pause := next(pauses, None)) is None:
                    raise
                log.warning("the database is away, asking again: %s", error)
                time.sleep(pause)
                again = True
                self.waited_at = time.monotonic()

    return cast("Method", insist)


def _pauses(total_s: float) -> Iterator[float]:
    """Half a second, doubled up to 8 s, until they come to `total_s`."""
    pause = 0.5
    while total_s > 0:
        yield pause
        total_s -= pause
        pause = min(2 * pause, 8.0)


@contextmanager
def _best_effort() -> Iterator[None]:
    """Around what only frees room: where the store is away, the next driver does it."""
    try:
        yield
    except Exception:
        log.exception("checkpoints that are no longer needed could not be removed")


class StudyLedger:
    """Hands out tasks and writes down what becomes of them.

    A ledger that is opened on a study with RUNNING rows hands those out first, under their own numbers and
    with their own parameters: they are what an earlier driver left behind.

    A crash may come between any two writes. So what tells that something is done is written last: an epoch's
    row in the journal, the class of a failure. An attempt reports the latest recorded epoch again, and what
    should have followed it then follows.
    """

    def __init__(
        self,
        spec: SweepSpec,
        sweep_id: str,
        storage: BaseStorage,
        journal: Journal,
        store: CheckpointStore,
        study_name: str | None = None,
    ) -> None:
        """`study_name` is the sweep's id unless said otherwise."""
        self._spec = spec
        self.sweep_id = sweep_id
        self._journal = journal
        self._store = store
        self._lock = threading.RLock()
        self._orders = journal.beat()
        self._study = open_study(spec, study_name or sweep_id, storage)
        self._trials: dict[int, Trial] = {}
        self._created = 0
        self._waiting: deque[int] = deque()
        self.waited_at = -math.inf
        """On the monotonic clock, when it last waited for the database: until then reports went unread."""
        self.limit: Limit | None = None
        """Of the budget, that the sweep has reached."""
        self._share: int | None = None
        """Of the machines: trials that may run at once; None where nobody has counted them."""
        self._division: Division | None = None
        """That it is of."""
        self._enlarged: set[int] = set()
        """Trials that have twice what the others have of a GPU."""
        self._heard_of: set[int] = set()
        """Open trials of which there has been a report since they were handed out last."""
        self._waits_for: str | None = None
        self._adopt_new_rows()
        self._tell_of_ends()
        self._look_for_limits()
        self._discarded: set[int] = set()
        """Trials whose best checkpoints did not stay."""
        with _best_effort():
            self._discard_what_is_over()

    def _discard_what_is_over(self) -> None:
        """A crash may have come between a trial's end and this."""
        rows = self._study.get_trials(deepcopy=False)
        for number in self._store.numbers_with_last(self.sweep_id):
            if number < len(rows) and rows[number].state in ENDED_WELL:
                self._store.discard_last(self.sweep_id, number)
        if self._spec.retention.bests_per_arm is not None:
            self._discarded = set(range(len(rows))) - set(self._store.numbers_with_best(self.sweep_id))
            self._keep_bests()

    def _tell_of_ends(self) -> None:
        """A crash may have come between a trial's end and its event."""
        rows = self._study.get_trials(deepcopy=False)
        ends = [told_of_end(row) for row in rows if row.state.is_finished()]
        for end in untold(ends, self._journal.ends_told()):
            self._journal.record_event("trial_finished", **end)

    def _adopt_new_rows(self) -> None:
        """Those of an earlier driver; and one of our own, whose making was not answered."""
        for row in self._study.get_trials(deepcopy=False)[self._created :]:
            if not row.state.is_finished():
                self._adopt(row)
            self._created += 1

    def _adopt(self, row: FrozenTrial) -> None:
        self._trials[row.number] = Trial(self._study, row._trial_id)
        if ENLARGED in row.user_attrs:
            self._enlarged.add(row.number)
        if "failure_class" in row.user_attrs:  # it had ended
            self._tell(self._trials[row.number], TrialState.FAIL)
        else:
            self._waiting.append(row.number)

    @property
    def exhausted(self) -> bool:
        """Whether no task is left to hand out, as long as nothing fails and nobody wishes otherwise."""
        if self.limit is not None or self._orders.state == "pausing":
            return True
        return not self._waiting and not self._may_begin_another

    @property
    def is_running_out(self) -> bool:
        """Whether the sweep ends once the trials that run have ended, rather than rests."""
        return self.exhausted and self._orders.state != "pausing"

    @property
    def is_full(self) -> bool:
        """Whether as many trials run as may, as of the latest beat and share."""
        if self._orders.max_concurrent is not None and self._running >= self._orders.max_concurrent:
            return True
        if self._share is None:
            return False
        next_one = self._size(self._waiting[0]) if self._waiting else 1
        # One that takes more than all of the share begins where nothing else runs: Ray finds it a place.
        return self._taken + next_one > self._share and (self._running > 0 or self._share < 1)

    @_patient
    def say_why_it_waits(self, reason: str | None) -> None:
        """For people: what keeps all of its trials from running; None once nothing does. Said once."""
        if reason != self._waits_for:
            self._journal.record_waiting(reason)
            self._waits_for = reason

    @property
    def _has_too_many(self) -> bool:
        """Whether one of those that run is to make room: not the only one, where it could begin anew.

        One that has not been heard of since it was handed out may wait for a place: it has none to leave.
        """
        if self._share is None:
            return False
        there = self._heard_of.difference(self._waiting)
        return sum(map(self._size, there)) > self._share and (len(there) > 1 or self._share < 1)

    @property
    def _running(self) -> int:
        return len(self._trials) - len(self._waiting)

    @property
    def _taken(self) -> int:
        """What of the share the running trials take."""
        larger = (self._enlarged & self._trials.keys()) - set(self._waiting)
        return self._running + sum(self._size(number) - 1 for number in larger)

    def _size(self, number: int) -> int:
        """Of a trial, in places of such as have what the sweep asked for: where a GPU has room for one of
        those alone, it has room for a larger one."""
        asked = self._spec.resources.gpus
        return min(2, int(1 / asked)) if number in self._enlarged and asked else 1

    def _gpu_share(self, number: int) -> float:
        asked = self._spec.resources.gpus or 1.0
        return min(1.0, 2 * asked) if number in self._enlarged else asked

    @_patient
    def share(self, nodes: Sequence[Node]) -> None:
        """Take no more of these machines than is left by those that run beside this sweep.

        Where that is less than it has, a trial is parked, with its state, when it reports.
        """
        remaining = self._orders.budget.trials - self._created if self._orders.state == "running" else 0
        wants = sum(map(self._size, self._trials)) + max(0, remaining)
        claims = self._journal.claims(wants)
        if all(
            claim.sweep_id != self.sweep_id for claim in claims
        ):  # it pauses, and ends no trial for others
            claims = [*claims, Claim(self.sweep_id, 0, 0, self._spec.resources, wants)]
        if self._division is None or not self._division.holds_for(nodes, claims):
            self._division = Division(nodes, claims)
        self._share = self._division.given[self.sweep_id]

    def is_to_stop(self, number: int) -> bool:
        return number in self._orders.stopping

    @property
    def _may_begin_another(self) -> bool:
        return self._orders.state == "running" and self._created < self._orders.budget.trials

    @property
    def done(self) -> bool:
        """Whether the sweep has come to its end, not to a pause: no trial is open, and none is to come."""
        used_up = self._orders.state == "stopping" or self._created >= self._orders.budget.trials
        return not self._trials and (self.limit is not None or used_up)

    def heed(self, orders: Orders) -> None:
        """Do what is wished for from now on."""
        self._orders = orders
        wall_s = orders.budget.wall_s
        if self.limit is None and wall_s is not None and orders.running_s >= wall_s:
            self.limit = Limit("succeed", f"budget.wall_s is {wall_s:g}: the sweep has run for so long")

    def _look_for_limits(self) -> None:
        """Of the budget, by what the trials have come to so far."""
        budget = self._orders.budget
        if budget.max_failed is None and budget.target is None:
            return
        rows = self._study.get_trials(deepcopy=False)
        failed = [row for row in rows if _has_failed(row)]
        if budget.max_failed is not None and len(failed) > budget.max_failed:
            words = f"budget.max_failed is {budget.max_failed}: {len(failed)} trials have failed"
            self.limit = Limit("fail", words)
        for row in rows:
            if self.limit is None and row.state != TrialState.FAIL and self._has_reached_target(row):
                words = f"budget.target is {budget.target:g}: trial {row.number} has reached it"
                self.limit = Limit("succeed", words)

    def _has_reached_target(self, row: FrozenTrial | Trial) -> bool:
        target = self._orders.budget.target
        if target is None or "best_valid_loss" not in row.user_attrs:
            return False
        return perplexity(row.user_attrs["best_valid_loss"]) <= target

    @_patient
    def next_task(self) -> Task | None:
        """The next attempt, or None where none is to be handed out now."""
        self.heed(self._journal.beat())
        while not self.exhausted and not self.is_full:
            self._adopt_new_rows()
            if not self._waiting:
                trial = self._study.ask()
                self._trials[trial.number] = trial
                self._created = trial.number + 1
                self._waiting.append(trial.number)
            number = self._waiting[0]
            if self.is_to_stop(number):
                self._stop(self._trials[number])
                continue
            try:
                task = self._task(self._trials[number])
            except (Fenced, JournalAway, StorageInternalError):
                raise
            except Exception:  # whatever is wrong with the values of one trial ends no other
                self._fail(self._trials[number], Failure("user_error", traceback.format_exc()))
                self.heed(self._journal.beat())
                continue
            self._waiting.popleft()
            self._heard_of.discard(number)
            return task
        return None

    def _task(self, trial: Trial) -> Task:
        arm = self._spec.arm_of(trial.number)
        trial = self._with_point(trial)
        params = {name: suggest(trial, name, choices) for name, choices in self._spec.sampled(arm)}
        config = self._spec.trial_config(arm, params)
        attempt = int(trial.user_attrs.get("attempt", 0)) + 1
        attributes: dict[str, Any] = {
            "arm": arm,
            "draw": self._spec.draw_of(trial.number),
            "seed": self._spec.seed_of(trial.number),
            "attempt": attempt,
            "config": asdict(config),
        }
        set_attributes(trial, attributes)
        recorded_epochs = self._journal.recorded_epochs(trial.number)
        self._journal.record_event("trial_started", number=trial.number, arm=arm, attempt=attempt)
        return Task(
            sweep_id=self.sweep_id,
            number=trial.number,
            attempt=attempt,
            arm=arm,
            seed=attributes["seed"],
            config=config,
            corpus=self._spec.corpus,
            device=self._spec.resources.device,
            recorded_epochs=recorded_epochs,
            best_epoch=trial.user_attrs.get("best_epoch", 0),
            checkpoint_every_s=self._spec.retry.checkpoint_every_s,
            hang_s=self._spec.retry.hang_s,
            corpus_sha256=self._study.user_attrs.get("corpus_sha256"),
            gpu_share=self._gpu_share(trial.number),
            was_enlarged=trial.number in self._enlarged,
        )

    def _with_point(self, trial: Trial) -> Trial:
        """A trial whose draw a client has chosen values for, with these: what is sampled then keeps to them.

        A draw is chosen for when its first arm begins, so that all of its arms have the same values.
        """
        begins = self._spec.arm_of(trial.number) == self._spec.arm_of(0) and "attempt" not in trial.user_attrs
        point = self._journal.point_of(self._spec.draw_of(trial.number), take=begins)
        if not point:
            return trial
        storage, trial_id = self._study._storage, trial._trial_id
        storage.set_trial_system_attr(trial_id, "fixed_params", self._spec.taken(dict(point)))
        self._trials[trial.number] = Trial(self._study, trial_id)
        return self._trials[trial.number]

    @_patient
    def record(self, task: Task, report: Report) -> bool:
        """Write a report down; True if the trial goes on. To write one down again changes nothing.

        Where the sweep is being paused, a trial does not go on, and stays open.
        """
        self.heed(self._journal.beat())
        if task.number not in self._trials:  # it was written down, and that was not answered
            return False
        trial = self._trials[task.number]
        self._heard_of.add(task.number)
        if report.epoch is not None:
            self._record_epoch(trial, task, report, report.epoch)
            if self._has_reached_target(trial):
                self._look_for_limits()
                self._tell(trial, TrialState.COMPLETE, perplexity(trial.user_attrs["best_valid_loss"]))
                return False
        if report.failure is not None and report.failure.failure_class == "infrastructure":
            self.lost(task, report.failure.message)
            return False
        if report.failure is not None and report.failure.failure_class == "disk_full":
            if self._orders.state == "stopping":  # which cannot be paused
                self.lost(task, report.failure.message, "disk_full")
                return False
            self._journal.ask_to_pause(
                "there is no room for a checkpoint: free some, then resume. Trial "
                f"{task.number}: {report.failure.message.strip()}"
            )
            self._park(task)
            return False
        if report.failure is not None:
            if not self._has_more_room(trial, task, report.failure):
                self._fail(trial, report.failure)
            return False
        if report.finished:
            self._tell(trial, TrialState.COMPLETE, perplexity(report.best_valid_loss))
            return False
        if report.epoch is not None and self._is_pruned(trial, report.epoch["epoch"]):
            self._tell(trial, TrialState.PRUNED)
            return False
        if self.is_to_stop(task.number):
            self._stop(trial)
            return False
        if self._orders.state == "pausing" or self._has_too_many:
            self._park(task)
            return False
        return True

    def _has_more_room(self, trial: Trial, task: Task, failure: Failure) -> bool:
        """Whether a trial that was too large for its part of a GPU is tried again: once, with two parts."""
        if failure.failure_class != "out_of_memory" or task.device == "cpu" or not failure.of_gpu:
            return False
        since = trial.user_attrs.get(ENLARGED)
        if since is None and task.gpu_share < 1:
            since = task.attempt + 1
            trial.set_user_attr(ENLARGED, since)
        if since != task.attempt + 1:  # it may have been written down, and that was not answered
            return False
        self._enlarged.add(task.number)
        words = f"{failure.message}; it is tried again with {self._gpu_share(task.number):g} of a GPU"
        self._journal.record_event("trial_lost", number=task.number, attempt=task.attempt, message=words)
        if task.number not in self._waiting:
            self._waiting.append(task.number)
        return True

    def _is_pruned(self, trial: Trial, epoch: int) -> bool:
        # Elsewhere the pruner would still see the latest rung. What was decided there is decided: against the
        # trials that have come since, it might not pass again.
        rungs = rungs_of(self._spec, self._spec.draw_of(trial.number))
        if epoch not in rungs or epoch <= trial.user_attrs.get("passed_epoch", 0):
            return False
        if trial.should_prune():
            return True
        trial.set_user_attr("passed_epoch", epoch)
        return False

    def _park(self, task: Task) -> None:
        """Its state is saved: the next driver goes on from there, or this one if the pause ends before it."""
        self._journal.record_event("trial_paused", number=task.number, attempt=task.attempt)
        if task.number not in self._waiting:
            self._waiting.append(task.number)

    def _record_epoch(self, trial: Trial, task: Task, report: Report, epoch: Mapping[str, Any]) -> None:
        if report.corpus_sha256 and "corpus_sha256" not in self._study.user_attrs:
            self._study.set_user_attr("corpus_sha256", report.corpus_sha256)
        told: dict[str, Any] = {name: getattr(report, name) for name in ("device", "runtime")}
        if report.best_epoch == epoch["epoch"] >= task.best_epoch:  # epochs may be trained again
            told |= {name: getattr(report, name) for name in OF_THE_BEST}
        before = trial.user_attrs
        set_attributes(trial, {name: value for name, value in told.items() if before.get(name) != value})
        # The trial's own copy: nobody else writes it, and to ask Optuna reads every row that is open.
        known = trial._cached_frozen_trial.intermediate_values
        if epoch["epoch"] in intermediate_epochs(task.config.training.epochs) - known.keys():
            trial.report(perplexity(epoch["valid_loss"]), epoch["epoch"])
        if epoch["epoch"] > task.recorded_epochs:
            self._journal.record_epoch(task.number, task.attempt, epoch)

    @_patient
    def lost(self, task: Task, message: str, failure_class: FailureClass = "infrastructure") -> None:
        """This attempt came to nothing: try the trial again, unless that has happened too often."""
        self.heed(self._journal.beat())
        if task.number not in self._trials or task.number in self._waiting:  # as written down before
            return
        trial = self._trials[task.number]
        if self.is_to_stop(task.number):
            self._stop(trial)
            return
        lost = sorted({*trial.user_attrs.get("lost_attempts", []), task.attempt})
        trial.set_user_attr("lost_attempts", lost)
        if len(lost) > self._spec.retry.max_failures:
            words = f"{len(lost)} attempts came to nothing; the last one: {message}"
            self._fail(trial, Failure(failure_class, words))
        else:
            self._journal.record_event(
                "trial_lost", number=task.number, attempt=task.attempt, message=message
            )
            self._waiting.append(task.number)

    def _stop(self, trial: Trial) -> None:
        """End a trial because a client wants that: it counts with what it has reached."""
        if "best_valid_loss" not in trial.user_attrs:
            words = "it was stopped on request before its first epoch"
            self._fail_quietly(trial, Failure("cancelled", words))
            return
        trial.set_user_attr("stopped", True)
        self._tell(trial, TrialState.PRUNED)

    def _fail(self, trial: Trial, failure: Failure) -> None:
        self._fail_quietly(trial, failure)
        self._look_for_limits()
        self._pause_if_alike()

    def _pause_if_alike(self) -> None:
        words = alike(self._study.get_trials(deepcopy=False), self._spec.retry.identical_failures)
        if words is not None:
            self._journal.ask_to_pause(words)

    @_patient
    def end_open_trials(self) -> bool:
        """Whatever still runs is over; False if the limit, raised in the meantime, is none any more."""
        self.limit = None
        self.heed(self._journal.beat())
        self._look_for_limits()
        if self.limit is None:
            return False
        for trial in list(self._trials.values()):
            if self._has_reached_target(trial):
                self._tell(trial, TrialState.COMPLETE, perplexity(trial.user_attrs["best_valid_loss"]))
            else:
                self._fail_quietly(trial, Failure("cancelled", self.limit.words))
        self._waiting.clear()
        return True

    def _fail_quietly(self, trial: Trial, failure: Failure) -> None:
        set_failure(trial, failure)
        self._tell(trial, TrialState.FAIL)

    def _tell(self, trial: Trial, state: TrialState, value: float | None = None) -> None:
        self._study.tell(trial, value, state, skip_if_finished=True)
        self._take_note_of_end(trial.number, state)

    def _take_note_of_ends(self) -> None:
        """Of trials whose rows say that they have ended, though that was not answered."""
        for row in self._study.get_trials(deepcopy=False):
            if row.number in self._trials and row.state.is_finished():
                self._take_note_of_end(row.number, row.state)
                self._look_for_limits()
                self._pause_if_alike()

    def _take_note_of_end(self, number: int, state: TrialState) -> None:
        row = self._study.get_trials(deepcopy=False)[number]
        self._journal.record_event("trial_finished", **told_of_end(row))
        del self._trials[number]
        self._heard_of.discard(number)
        if number in self._waiting:
            self._waiting.remove(number)
        if state != TrialState.FAIL:
            with _best_effort():
                self._store.discard_last(self.sweep_id, number)
                self._keep_bests()

    def _keep_bests(self) -> None:
        """Where it is wished for, remove the checkpoints of trials that are not among the best of their arm.

        Those that failed keep theirs: they may be tried again.
        """
        kept = self._spec.retention.bests_per_arm
        if kept is None:
            return
        ended: dict[str, list[tuple[float, int]]] = {}
        for row in self._study.get_trials(deepcopy=False, states=ENDED_WELL):
            loss = row.user_attrs.get("best_valid_loss", math.inf)
            ended.setdefault(self._spec.arm_of(row.number), []).append((loss, row.number))
        for ranked in map(sorted, ended.values()):
            for _, number in ranked[kept:]:
                if number not in self._discarded and number not in self._orders.pinned:
                    self._store.discard_best(self.sweep_id, number)
                    self._discarded.add(number)

    @_patient
    def next_check(self) -> Check | None:
        """What is to be verified before it is called best: see trials.verification.Ledger."""
        self.heed(self._journal.beat())
        if self._orders.state == "pausing" and not self.done:
            return None
        verified = self._journal.verifications()
        usable = [row for row in self._study.get_trials(deepcopy=False) if may_be_best(row)]
        usable.sort(key=lambda row: (row.user_attrs["best_valid_loss"], row.number))
        for row in usable:
            outcome, of = verified.get(row.number, (None, None))
            if of != row.user_attrs.get("checkpoint_sha256"):
                outcome = None
            if outcome not in REFUSED:
                return None if outcome == "verified" else self._check_of(row)
        return None

    def _check_of(self, row: FrozenTrial) -> Check:
        return Check(
            sweep_id=self.sweep_id,
            number=row.number,
            epoch=row.user_attrs["best_epoch"],
            valid_loss=row.user_attrs["best_valid_loss"],
            checkpoint_sha256=row.user_attrs.get("checkpoint_sha256"),
            device=row.user_attrs.get("device"),
            corpus=self._spec.corpus,
            on=self._spec.resources.device,
            threads=max(1, int(self._spec.resources.cpus)),
            timeout_s=max(self._spec.retry.hang_s, LEAST_TIMEOUT_S),
            gpu_share=self._spec.resources.gpus or None,
        )

    @_patient
    def record_verification(self, number: int, verification: Verification) -> None:
        self._journal.record_verification(number, verification)

    @_patient
    def refreshed_orders(self) -> Orders:
        """What is wished for now, and heeded from now on: a limit may have been raised."""
        self.limit = None
        self.heed(self._journal.beat())
        self._look_for_limits()
        return self._orders

    def outcome(self) -> tuple[Literal["succeed", "fail"], str | None]:
        """How a sweep that is done ends, and why so, where that is not plain."""
        states = [row.state for row in self._study.get_trials(deepcopy=False)]
        if TrialState.COMPLETE not in states:
            none = f"none of the {len(states)} trials completed: see their failures"
            none = none if states else "it ended before its first trial"
            return "fail", f"{self.limit.words}; {none}" if self.limit else none
        if self.limit is not None:
            return self.limit.verb, self.limit.words
        if len(states) < self._orders.budget.trials:
            return "succeed", f"stopped on request after {len(states)} of {self._orders.budget.trials} trials"
        return "succeed", None


@dataclass(frozen=True)
class Limit:
    """Of a budget, that a sweep has reached: how it ends, and why."""

    verb: Literal["succeed", "fail"]
    words: str


def may_be_best(row: FrozenTrial) -> bool:
    """It has ended, with a checkpoint, and not of a failure that speaks against that."""
    if not row.state.is_finished() or "best_valid_loss" not in row.user_attrs:
        return False
    return row.state != TrialState.FAIL or row.user_attrs.get("failure_class") in ENDED_FROM_OUTSIDE


def _has_failed(row: FrozenTrial) -> bool:
    """By itself, rather than ended from outside."""
    return row.state == TrialState.FAIL and row.user_attrs.get("failure_class") != "cancelled"


OF_A_FILE = re.compile(r"(\[Errno \d+\] .*?): '.*'$")
"""How Python says an OSError."""


def alike(rows: Sequence[FrozenTrial], most: int | None) -> str | None:
    """What the latest `most` trials to end all failed of, in words; None where they did not.

    Divergence is what a configuration comes to, and says nothing of the next one.
    """
    ended = [row for row in rows if row.datetime_complete is not None]
    ended.sort(key=lambda row: cast(Any, row.datetime_complete))
    latest = ended[-most:] if most is not None else []
    ways = {_way_of_failing(row) for row in latest}
    if most is None or len(latest) < most or len(ways) > 1 or None in ways:
        return None
    attributes = latest[-1].user_attrs
    return (
        f"{most} trials in a row failed alike ({attributes['failure_class']}); mend the cause, resume, and "
        f"retry the failed ones. Trial {latest[-1].number}: {attributes['failure_message']}"
    )


def _way_of_failing(row: FrozenTrial) -> tuple[str, str] | None:
    """A failure's class and the last line of its message, without the trial's own file where it is of one;
    None for what pauses no sweep."""
    failure_class = row.user_attrs.get("failure_class")
    if row.state != TrialState.FAIL or failure_class in {None, "diverged", "cancelled"}:
        return None
    words = row.user_attrs["failure_message"].strip().rpartition("\n")[2]
    return failure_class, OF_A_FILE.sub(r"\1", words)


def told_of_end(row: FrozenTrial) -> dict[str, Any]:
    """What the event `trial_finished` says of a row that has ended."""
    attributes = row.user_attrs
    failed = attributes if row.state == TrialState.FAIL else {}
    return {
        "number": row.number,
        "state": row.state.name,
        "attempt": attributes.get("attempt", 0),
        "arm": attributes.get("arm"),
        "best_epoch": attributes.get("best_epoch"),
        "best_valid_loss": attributes.get("best_valid_loss"),
        "best_valid_perplexity": finite_perplexity(attributes.get("best_valid_loss")),
        "failure_class": failed.get("failure_class"),
        "failure_message": failed.get("failure_message"),
    }


def untold(ends: Sequence[dict[str, Any]], told: set[tuple[int, int | None]]) -> list[dict[str, Any]]:
    """Those of `ends`, as told_of_end makes them, that are not among what Journal.ends_told says."""
    return [end for end in ends if not {(end["number"], end["attempt"]), (end["number"], None)} & told]
