"""What clients may do with sweeps: create, look, cancel, fetch.

Wishes are written down; the reconciler carries them out.
"""

import hashlib
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import optuna
from optuna.storages import BaseStorage, get_storage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import RowMapping
from sqlalchemy.exc import SQLAlchemyError

from service.errors import IllegalMove, InvalidSpec, NoCheckpointYet, Problem, TrialNotFound
from service.launcher import Launcher
from service.records import Records, SweepRecord, aware, migrate, now, open_engine
from service.resources import placed, problems_with
from service.schemas import (
    TERMINAL_STATES,
    EpochView,
    Failure,
    SweepDetail,
    SweepView,
    TrialCounts,
    TrialDetail,
    TrialView,
)
from service.settings import Settings
from service.studies import open_storage
from trials.corpora import CorpusError, check_corpus, resolved
from trials.perplexity import perplexity
from trials.spec import SweepSpec
from trials.store import CheckpointStore

ENDED_FROM_OUTSIDE = {"cancelled", "infrastructure"}
"""Classes of failure that say nothing against what the trial had reached."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint archive, open for reading; whoever asked for it closes it."""

    file: BinaryIO
    size: int
    sha256: str
    filename: str


class SweepController:
    """The verbs of the API, without HTTP."""

    def __init__(
        self,
        records: Records,
        storage: BaseStorage,
        store: CheckpointStore,
        launcher: Launcher,
        data_dir: Path,
    ) -> None:
        self.records = records
        self.storage = storage
        self._store = store
        self._launcher = launcher
        self._data_dir = data_dir

    def create(self, request: SweepSpec) -> SweepDetail:
        """Queue a sweep. Raises InvalidSpec where it could not run here; nothing is written then."""
        capacity = self._launcher.capacity()
        spec = placed(request, capacity)
        corpus, problems = self._check_corpus(spec)
        problems += problems_with(spec, capacity)
        if problems:
            raise InvalidSpec(problems)
        record = self.records.add_sweep(
            f"s{secrets.token_hex(5)}", spec.model_copy(update={"corpus": corpus})
        )
        return self._detail(record)

    def _check_corpus(self, spec: SweepSpec) -> tuple[Any, list[Problem]]:
        try:
            corpus = resolved(spec.corpus, Path.cwd())
            check_corpus(corpus, self._data_dir)
        except CorpusError as error:
            return None, [Problem(f"/corpus{error.pointer}", "corpus_unusable", str(error))]
        return corpus, []

    def list_sweeps(self) -> list[SweepView]:
        """All sweeps, the newest first."""
        return [self._view(record) for record in reversed(self.records.list_sweeps())]

    def get(self, sweep_id: str) -> SweepDetail:
        """Raises SweepNotFound."""
        return self._detail(self.records.get_sweep(sweep_id))

    def trials(self, sweep_id: str) -> list[TrialView]:
        """In the order of their numbers. Raises SweepNotFound."""
        record = self.records.get_sweep(sweep_id)
        latest = self.records.latest_epochs(sweep_id)
        return [
            TrialView(**_trial_fields(record, row, latest.get(row.number))) for row in self._rows(sweep_id)
        ]

    def trial(self, sweep_id: str, number: int) -> TrialDetail:
        """One trial with its whole curve. Raises SweepNotFound, TrialNotFound."""
        record = self.records.get_sweep(sweep_id)
        rows = self._rows(sweep_id)
        if not 0 <= number < len(rows):
            raise TrialNotFound(f"sweep {sweep_id} has no trial {number}; it has {len(rows)} so far, from 0")
        curve = self.records.curve(sweep_id, number)
        return TrialDetail(
            **_trial_fields(record, rows[number], curve[-1] if curve else None),
            config=rows[number].user_attrs.get("config", {}),
            curve=[_epoch_view(row) for row in curve],
        )

    def cancel(self, sweep_id: str) -> SweepView:
        """Ask for a sweep's end. Raises SweepNotFound, IllegalMove where it has ended already."""
        record = self.records.get_sweep(sweep_id)
        if not self.records.ask_to_cancel(sweep_id):
            state = self.records.get_sweep(sweep_id).state
            raise IllegalMove(f"sweep {record.id} is {state}: it has ended, and nothing is left to cancel")
        return self._view(self.records.get_sweep(sweep_id))

    def best(self, sweep_id: str) -> TrialView:
        """The trial with the lowest validation loss so far, whatever became of it. Raises NoCheckpointYet."""
        best = _best(self.trials(sweep_id))
        if best is None:
            state = self.records.get_sweep(sweep_id).state
            later = "" if state in TERMINAL_STATES else "; ask again later"
            raise NoCheckpointYet(f"no trial of sweep {sweep_id} has finished an epoch{later}")
        return best

    def best_checkpoint(self, sweep_id: str) -> OpenCheckpoint:
        """The best trial's archive as it is now: a better one, written later, does not disturb its reader."""
        number = self.best(sweep_id).number
        try:
            file = self._store.open_best(sweep_id, number)
        except FileNotFoundError as error:
            raise NoCheckpointYet(f"the checkpoint of trial {number} of sweep {sweep_id} is gone") from error
        sha256 = hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
        size = file.tell()
        file.seek(0)
        return OpenCheckpoint(file, size, sha256, f"{sweep_id}-t{number:05d}-best.tar")

    def check_ready(self) -> list[str]:
        """What does not work, in words; nothing when all is well."""
        try:
            self.records.ping()
        except SQLAlchemyError as error:
            return [f"the database does not answer: {type(error).__name__}"]
        return []

    def _rows(self, sweep_id: str) -> list[FrozenTrial]:
        try:
            study = optuna.load_study(study_name=sweep_id, storage=self.storage)
        except KeyError:  # no driver has opened the study yet
            return []
        return study.get_trials(deepcopy=False)

    def _detail(self, record: SweepRecord) -> SweepDetail:
        return SweepDetail(**dict(self._view(record)), spec=record.spec)

    def _view(self, record: SweepRecord) -> SweepView:
        trials = self.trials(record.id)
        counts = _count(trials, record.spec.budget.trials)
        return SweepView(
            id=record.id,
            name=record.spec.name,
            labels=record.spec.labels,
            state=record.state,
            desired_state=record.desired_state,
            state_reason=record.state_reason,
            created_at=record.created_at,
            started_at=record.started_at,
            finished_at=record.finished_at,
            trials=counts,
            epochs_done=sum(trial.epochs_done for trial in trials),
            best=_best(trials),
            time_left_s=_time_left_s(record, counts),
            driver_generation=record.generation,
            dashboard_url=self._dashboard_url(record.id),
        )

    def _dashboard_url(self, sweep_id: str) -> str | None:
        try:
            return f"/dashboard/studies/{self.storage.get_study_id_from_name(sweep_id)}"
        except KeyError:
            return None


def build_controller(settings: Settings, launcher: Launcher) -> SweepController:
    """Open the database and the store, making what is missing."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    engine = open_engine(settings.resolved_database_url)
    migrate(engine)
    storage = get_storage(open_storage(settings.resolved_database_url))
    store = CheckpointStore(settings.resolved_store_url)
    return SweepController(Records(engine), storage, store, launcher, settings.data_dir.resolve())


def _count(trials: list[TrialView], budget: int) -> TrialCounts:
    states = [trial.state for trial in trials]
    return TrialCounts(
        budget=budget,
        running=states.count("RUNNING"),
        complete=states.count("COMPLETE"),
        pruned=states.count("PRUNED"),
        failed=states.count("FAIL"),
    )


def _best(trials: list[TrialView]) -> TrialView | None:
    usable = [
        (trial.best_valid_loss, trial.number)
        for trial in trials
        if trial.best_valid_loss is not None
        and (trial.failure is None or trial.failure.failure_class in ENDED_FROM_OUTSIDE)
    ]
    return trials[min(usable)[1]] if usable else None


def _time_left_s(record: SweepRecord, counts: TrialCounts) -> float | None:
    """What is left of the budget at the pace so far."""
    if record.state in TERMINAL_STATES or record.started_at is None or counts.done == 0:
        return None
    return (now() - record.started_at).total_seconds() / counts.done * (counts.budget - counts.done)


def _trial_fields(record: SweepRecord, row: FrozenTrial, latest: RowMapping | None) -> dict[str, Any]:
    spec, attributes = record.spec, row.user_attrs
    return {
        "number": row.number,
        "arm": spec.arm_of(row.number),
        "draw": spec.draw_of(row.number),
        "seed": spec.seed_of(row.number),
        "attempt": attributes.get("attempt", 0),
        "state": row.state.name,
        "params": row.params,
        "epochs_done": latest["epoch"] if latest else 0,
        "best_epoch": attributes.get("best_epoch"),
        "best_valid_loss": attributes.get("best_valid_loss"),
        "best_valid_perplexity": _finite_perplexity(attributes.get("best_valid_loss")),
        "valid_perplexity": _finite_perplexity(latest["valid_loss"] if latest else None),
        "failure": _failure(row),
        "checkpoint_sha256": attributes.get("checkpoint_sha256"),
        "device": attributes.get("device"),
        "runtime": attributes.get("runtime"),
        "started_at": aware(row.datetime_start),
        "finished_at": aware(row.datetime_complete),
    }


def _failure(row: FrozenTrial) -> Failure | None:
    if row.state != TrialState.FAIL:
        return None
    return Failure(
        failure_class=row.user_attrs.get("failure_class", "infrastructure"),
        message=row.user_attrs.get("failure_message", "the trial ended without a word"),
    )


def _epoch_view(row: RowMapping) -> EpochView:
    fields = {name: row[name] for name in EpochView.model_fields if name in row}
    return EpochView(**fields, valid_perplexity=_finite_perplexity(row["valid_loss"]))


def _finite_perplexity(loss: float | None) -> float | None:
    value = perplexity(loss)
    return value if math.isfinite(value) else None
