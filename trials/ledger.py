"""The study as the ledger of trials: who runs next, what was reported, how each one ended. No ray, no torch.

Only the driver that holds a sweep's lease writes trial rows, and it does so here.
"""

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, NopPruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from trials.corpora import CorpusSpec
from trials.perplexity import perplexity
from trials.samplers import build_sampler, suggest
from trials.spec import FailureClass, SuccessiveHalving, SweepSpec, TrialConfig
from trials.store import CheckpointStore

MOST_INTERMEDIATE_VALUES = 50
"""Of one trial in Optuna: the dashboard takes seconds to draw 400 trials of 500 epochs."""


class Fenced(Exception):
    """Another driver has taken this sweep over; nothing more may be written."""


class Journal(Protocol):
    """Our own tables as a driver sees them. Every method raises Fenced once another driver has taken over."""

    def beat(self) -> None:
        """Renew the lease."""

    def record_epoch(self, number: int, attempt: int, epoch: Mapping[str, Any]) -> None:
        """Keep one epoch of a trial; a second record of the same epoch replaces the first."""

    def recorded_epochs(self, number: int) -> int:
        """The highest epoch on record for a trial, 0 if there is none."""

    def record_event(self, kind: str, **detail: Any) -> None: ...


@dataclass(frozen=True)
class Task:
    """One attempt at a trial, as it travels to a worker."""

    sweep_id: str
    number: int
    attempt: int
    arm: str
    seed: int
    config: TrialConfig
    corpus: CorpusSpec
    device: str
    recorded_epochs: int
    best_epoch: int = 0
    """The best one on record; 0 before the first."""
    checkpoint_every_s: float = 60.0
    corpus_sha256: dict[str, str] | None = None
    """Digests of the text that the sweep began with; None before its first epoch."""
    gpu_share: float = 1.0
    """How much of a GPU's memory this trial may take, where it runs on one."""


@dataclass(frozen=True)
class Failure:
    failure_class: FailureClass
    message: str


@dataclass(frozen=True)
class Report:
    """What a worker says after one epoch, or when it cannot go on."""

    epoch: Mapping[str, Any] | None
    """The fields of trials.training.EpochResult."""
    finished: bool = False
    failure: Failure | None = None
    best_epoch: int | None = None
    best_valid_loss: float | None = None
    checkpoint_sha256: str | None = None
    device: str | None = None
    runtime: str | None = None
    corpus_sha256: dict[str, str] | None = None


class StudyLedger:
    """Hands out tasks and writes down what becomes of them.

    A ledger that is opened on a study with RUNNING rows hands those out first, under their own numbers and
    with their own parameters: they are what an earlier driver left behind.

    A crash may come between any two writes. So what tells that something is done is written last: an epoch's
    row in the journal, the class of a failure. An attempt reports the latest recorded epoch again, and what
    should have followed it then follows.
    """

    def __init__(
        self, spec: SweepSpec, sweep_id: str, storage: BaseStorage, journal: Journal, store: CheckpointStore
    ) -> None:
        self._spec = spec
        self._sweep_id = sweep_id
        self._journal = journal
        self._store = store
        journal.beat()
        self._study = open_study(spec, sweep_id, storage)
        pruner = spec.pruner
        self._rungs = rung_epochs(pruner, spec.training.epochs) if pruner.name != "none" else frozenset()
        self._trials: dict[int, Trial] = {}
        self._created = 0
        self._waiting: deque[int] = deque()
        for row in self._study.get_trials(deepcopy=False):
            self._created += 1
            if not row.state.is_finished():
                self._adopt(row)
            elif row.state != TrialState.FAIL:  # a crash may have come between its end and this
                store.discard_last(sweep_id, row.number)

    def _adopt(self, row: FrozenTrial) -> None:
        self._trials[row.number] = Trial(self._study, row._trial_id)
        if "failure_class" in row.user_attrs:  # it had ended
            self._tell(self._trials[row.number], TrialState.FAIL)
        else:
            self._waiting.append(row.number)

    @property
    def exhausted(self) -> bool:
        """Whether no task is left to hand out, now or for as long as nothing fails."""
        return not self._waiting and self._created >= self._spec.budget.trials

    def next_task(self) -> Task | None:
        """The next attempt, or None where all have been handed out."""
        self._journal.beat()
        if self._waiting:
            number = self._waiting.popleft()
        elif self._created < self._spec.budget.trials:
            trial = self._study.ask()
            self._created += 1
            number = trial.number
            self._trials[number] = trial
        else:
            return None
        return self._task(self._trials[number])

    def _task(self, trial: Trial) -> Task:
        arm = self._spec.arm_of(trial.number)
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
        for key, value in attributes.items():
            trial.set_user_attr(key, value)
        return Task(
            sweep_id=self._sweep_id,
            number=trial.number,
            attempt=attempt,
            arm=arm,
            seed=attributes["seed"],
            config=config,
            corpus=self._spec.corpus,
            device="cuda" if self._spec.resources.gpus else "cpu",
            recorded_epochs=self._journal.recorded_epochs(trial.number),
            best_epoch=trial.user_attrs.get("best_epoch", 0),
            checkpoint_every_s=self._spec.retry.checkpoint_every_s,
            corpus_sha256=self._study.user_attrs.get("corpus_sha256"),
            gpu_share=self._spec.resources.gpus or 1.0,
        )

    def record(self, task: Task, report: Report) -> bool:
        """Write a report down; True if the trial goes on. To write one down again changes nothing."""
        self._journal.beat()
        trial = self._trials[task.number]
        if report.epoch is not None:
            self._record_epoch(trial, task, report, report.epoch)
        if report.failure is not None and report.failure.failure_class == "infrastructure":
            self.lost(task, report.failure.message)
            return False
        if report.failure is not None:
            self._fail(trial, report.failure)
            return False
        if report.finished:
            self._tell(trial, TrialState.COMPLETE, perplexity(report.best_valid_loss))
            return False
        if report.epoch is None or report.epoch["epoch"] <= trial.user_attrs.get("passed_epoch", 0):
            return True  # decided before: against the trials that have come since, it might not pass again
        if trial.should_prune():
            self._tell(trial, TrialState.PRUNED)
            return False
        if report.epoch["epoch"] in self._rungs:
            trial.set_user_attr("passed_epoch", report.epoch["epoch"])
        return True

    def _record_epoch(self, trial: Trial, task: Task, report: Report, epoch: Mapping[str, Any]) -> None:
        if report.corpus_sha256 and "corpus_sha256" not in self._study.user_attrs:
            self._study.set_user_attr("corpus_sha256", report.corpus_sha256)
        if report.best_epoch == epoch["epoch"] >= task.best_epoch:  # epochs may be trained again
            trial.set_user_attr("best_epoch", report.best_epoch)
            trial.set_user_attr("best_valid_loss", report.best_valid_loss)
            trial.set_user_attr("checkpoint_sha256", report.checkpoint_sha256)
        for name in ("device", "runtime"):
            if trial.user_attrs.get(name) != getattr(report, name):
                trial.set_user_attr(name, getattr(report, name))
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        if epoch["epoch"] in intermediate_epochs(task.config.training.epochs) - known.keys():
            trial.report(perplexity(epoch["valid_loss"]), epoch["epoch"])
        if epoch["epoch"] > task.recorded_epochs:
            self._journal.record_epoch(task.number, task.attempt, epoch)

    def lost(self, task: Task, message: str) -> None:
        """This attempt came to nothing: try the trial again, unless that has happened too often."""
        self._journal.beat()
        trial = self._trials[task.number]
        failures = int(trial.user_attrs.get("failures", 0)) + 1
        trial.set_user_attr("failures", failures)
        if failures > self._spec.retry.max_failures:
            words = f"{failures} attempts came to nothing; the last one: {message}"
            self._fail(trial, Failure("infrastructure", words))
        else:
            self._journal.record_event(
                "trial_lost", number=task.number, attempt=task.attempt, message=message
            )
            self._waiting.append(task.number)

    def _fail(self, trial: Trial, failure: Failure) -> None:
        _set_failure(trial, failure)
        self._tell(trial, TrialState.FAIL)

    def _tell(self, trial: Trial, state: TrialState, value: float | None = None) -> None:
        self._study.tell(trial, value, state, skip_if_finished=True)
        self._journal.record_event("trial_finished", number=trial.number, state=state.name)
        del self._trials[trial.number]
        if state != TrialState.FAIL:
            self._store.discard_last(self._sweep_id, trial.number)

    def outcome(self) -> tuple[Literal["succeeded", "failed"], str | None]:
        """How a sweep without open trials ends."""
        states = [row.state for row in self._study.get_trials(deepcopy=False)]
        if TrialState.COMPLETE in states:
            return "succeeded", None
        return "failed", f"none of the {len(states)} trials completed: see their failures"


def open_study(spec: SweepSpec, sweep_id: str, storage: BaseStorage) -> optuna.Study:
    """The sweep's study, created where it is not there yet."""
    study = optuna.create_study(
        study_name=sweep_id,
        storage=storage,
        sampler=build_sampler(spec),
        pruner=build_pruner(spec),
        direction="minimize",
        load_if_exists=True,
    )
    if not study.metric_names:
        study.set_user_attr("name", spec.name)
        with warnings.catch_warnings(category=ExperimentalWarning, action="ignore"):
            study.set_metric_names(["valid_perplexity"])
    return study


def close_open_trials(sweep_id: str, storage: BaseStorage, failure: Failure) -> None:
    """End the rows of a sweep that has no driver any more, and will get none."""
    try:
        study = optuna.load_study(study_name=sweep_id, storage=storage)
    except KeyError:  # cancelled before it had a driver
        return
    for row in study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
        trial = Trial(study, row._trial_id)
        _set_failure(trial, failure)
        study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def _set_failure(trial: Trial, failure: Failure) -> None:
    trial.set_user_attr("failure_message", failure.message[-4000:])
    trial.set_user_attr("failure_class", failure.failure_class)


class HalvingWithinArms(BasePruner):
    """Asynchronous successive halving (Li et al. 2018) that compares a trial with those of its own arm.

    Arms whose curves cross would otherwise prune one another, and the comparison between them would be of who
    starts faster. Which rung a trial has reached is read off its intermediate values: a decision that a crash
    undid is made again, where Optuna's pruner, which writes rungs down, would let the trial pass.
    """

    def __init__(self, spec: SweepSpec, halving: SuccessiveHalving) -> None:
        self._spec = spec
        self._halving = halving
        self._rungs = rung_epochs(halving, spec.training.epochs)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        epoch = trial.last_step
        if epoch not in self._rungs:
            return False
        arm = self._spec.arm_of(trial.number)
        there = sorted(
            row.intermediate_values[epoch]
            for row in study.get_trials(deepcopy=False)
            if epoch in row.intermediate_values and self._spec.arm_of(row.number) == arm
        )
        passing = max(1, len(there) // self._halving.reduction_factor)
        return trial.intermediate_values[epoch] > there[passing - 1]


def build_pruner(spec: SweepSpec) -> BasePruner:
    return HalvingWithinArms(spec, spec.pruner) if spec.pruner.name == "successive_halving" else NopPruner()


def rung_epochs(halving: SuccessiveHalving, epochs: int) -> frozenset[int]:
    """Where a trial may be pruned: after min_epochs times the powers of the reduction factor, or the next
    epoch that Optuna hears of; never after the last.
    """
    reported = sorted(intermediate_epochs(epochs))
    rungs, rung = set(), halving.min_epochs
    while rung < epochs:
        rungs.add(next(epoch for epoch in reported if epoch >= rung))
        rung *= halving.reduction_factor
    return frozenset(rungs - {epochs})


def intermediate_epochs(epochs: int) -> frozenset[int]:
    """The epochs that go to Optuna: all of them while they are few, else log-spaced, the last one always."""
    if epochs <= MOST_INTERMEDIATE_VALUES:
        return frozenset(range(1, epochs + 1))
    steps = MOST_INTERMEDIATE_VALUES - 1
    return frozenset(round(epochs ** (i / steps)) for i in range(steps + 1))
