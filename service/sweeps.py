"""What clients may do with sweeps: create, look, cancel, fetch.

Wishes are written down; the reconciler carries them out.
"""

import hashlib
import math
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from optuna.storages import BaseStorage, get_storage
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError
from sqlalchemy import RowMapping
from sqlalchemy.exc import SQLAlchemyError

from service.database import aware, migrate, open_engine
from service.errors import (
    InvalidSpec,
    NoCheckpointYet,
    Problem,
    TrialNotFound,
    UnreadableSpec,
    UnreadableStudy,
)
from service.launcher import Launcher
from service.lifecycle import TERMINAL_STATES, WISHES, WITH_DRIVER, Verb, legal_requests
from service.problems import problems_in
from service.records import Records, SweepRecord
from service.resources import placed, problems_with
from service.revisions import check_schema
from service.schemas import (
    EpochView,
    Extension,
    Failure,
    RetryRequest,
    SweepDetail,
    SweepView,
    TrialCounts,
    TrialDetail,
    TrialView,
)
from service.settings import Settings
from service.studies import open_storage
from trials.corpora import CorpusError, check_corpus, resolved
from trials.ledger import find_rows
from trials.perplexity import finite_perplexity
from trials.spec import MOST_TRIALS, Budget, FailureClass, SweepRequest, SweepSpec, merged
from trials.store import CheckpointStore

LITTLE_ROOM = 256 * 2**20
"""Bytes, or a twentieth of a smaller disk."""
ENDED_FROM_OUTSIDE = {"cancelled", "infrastructure", "timeout"}
"""Classes of failure that say nothing against what the trial had reached."""
RETRIED_BY_DEFAULT: frozenset[FailureClass] = frozenset(get_args(FailureClass)) - {"diverged"}


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
        self.store = store
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

    def look(self, sweep_id: str) -> SweepView:
        """As `get`, also where the spec makes no sense. Raises SweepNotFound."""
        return self._view(self.records.get_sweep(sweep_id))

    def trials(self, sweep_id: str) -> list[TrialView]:
        """In the order of their numbers. Raises SweepNotFound."""
        return self._trials(self.records.get_sweep(sweep_id))

    def _trials(self, record: SweepRecord) -> list[TrialView]:
        latest = self.records.latest_epochs(record.id)
        return [TrialView(**_trial_fields(record, row, latest.get(row.number))) for row in self._rows(record)]

    def trial(self, sweep_id: str, number: int) -> TrialDetail:
        """One trial with its whole curve. Raises SweepNotFound, TrialNotFound."""
        record = self.records.get_sweep(sweep_id)
        rows = self._rows(record)
        if not 0 <= number < len(rows):
            raise TrialNotFound(f"sweep {sweep_id} has no trial {number}; it has {len(rows)} so far, from 0")
        curve = self.records.curve(sweep_id, number)
        return TrialDetail(
            **_trial_fields(record, rows[number], curve[-1] if curve else None),
            config=rows[number].user_attrs.get("config", {}),
            curve=[_epoch_view(row) for row in curve],
        )

    def ask(self, sweep_id: str, verb: Verb) -> SweepView:
        """Pause, resume, stop, cancel or delete. Raises SweepNotFound, IllegalMove."""
        if verb != "delete":
            self.records.ask(sweep_id, verb)
            return self._view(self.records.get_sweep(sweep_id))
        before = self._view(self.records.get_sweep(sweep_id))  # afterwards it may be gone already
        state = self.records.ask(sweep_id, verb)
        return before.model_copy(update={"state": state, "desired_state": WISHES[state], "legal": []})

    def extend(self, sweep_id: str, by: Extension) -> SweepView:
        """Raise a budget; a sweep that has ended goes on. Raises SweepNotFound, IllegalMove, InvalidSpec."""
        self.records.extend(sweep_id, lambda record: self._extended(record, by))
        return self._view(self.records.get_sweep(sweep_id))

    def _extended(self, record: SweepRecord, by: Extension) -> Budget:
        budget, trials = record.spec.budget, self._trials(record)
        problems = [
            Problem(
                f"/{name}", "no_such_limit", f"the budget of sweep {record.id} has no {name}: leave it out"
            )
            for name in ("wall_s", "max_failed")
            if getattr(by, name) and getattr(budget, name) is None
        ]
        if not by.model_dump(exclude_defaults=True):
            words = "an extension raises at least one limit: trials, wall_s, max_failed or target"
            problems.append(Problem("", "nothing_asked", words))
        if by.trials + budget.trials > MOST_TRIALS:
            words = f"a sweep has at most {MOST_TRIALS} trials; this one has {budget.trials}"
            problems.append(Problem("/trials", "too_many_trials", words))
        if problems:
            raise InvalidSpec(problems)
        try:
            larger = Budget(
                trials=budget.trials + by.trials,
                wall_s=None if budget.wall_s is None else budget.wall_s + by.wall_s,
                max_failed=None if budget.max_failed is None else budget.max_failed + by.max_failed,
                target=budget.target if by.target is None else by.target,
            )
        except ValidationError as error:
            raise InvalidSpec(problems_in(error.errors(), {}, Budget.model_json_schema())) from error
        _require_room(larger, record, trials)
        return larger

    def retry_failed(self, sweep_id: str, request: RetryRequest) -> SweepView:
        """Have failed trials tried again, under their own numbers.

        Raises SweepNotFound, IllegalMove, InvalidSpec.
        """
        classes = set(request.classes if request.classes is not None else RETRIED_BY_DEFAULT)
        record = self.records.get_sweep(sweep_id)
        self.records.require_legal(record, "retry_failed")
        trials = self._trials(record)
        again = [trial for trial in trials if trial.failure and trial.failure.failure_class in classes]
        if not again:
            had = sorted({trial.failure.failure_class for trial in trials if trial.failure})
            words = f"no trial of sweep {sweep_id} has failed of {', '.join(sorted(classes))}"
            raise InvalidSpec(
                [Problem("/classes", "nothing_to_retry", f"{words}; failures: {had or 'none'}")]
            )
        _require_room(record.spec.budget, record, trials, again)
        asked_before = set(record.retry_classes or [])
        self.records.ask(sweep_id, "retry_failed", retry_classes=sorted(classes | asked_before))
        return self._view(self.records.get_sweep(sweep_id))

    def clone(self, sweep_id: str, changes: dict[str, Any]) -> SweepDetail:
        """Queue a new sweep with this one's spec and some changes. Raises SweepNotFound, InvalidSpec."""
        if "preset" in changes:
            words = "a clone has the spec of its origin: change its fields, or submit a sweep with the preset"
            raise InvalidSpec([Problem("/preset", "no_preset", words)])
        written = self.records.get_sweep(sweep_id).spec.model_dump(mode="json")
        body = merged({**written, "preset": None}, changes)
        try:
            request = SweepRequest.model_validate(body)
        except ValidationError as error:
            raise InvalidSpec(problems_in(error.errors(), body, SweepRequest.model_json_schema())) from error
        return self.create(request)

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
            file = self.store.open_best(sweep_id, number)
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
        usage = shutil.disk_usage(self._data_dir)
        if usage.free < min(LITTLE_ROOM, usage.total / 20):
            return [f"the disk of {self._data_dir} has only {usage.free / 2**20:.0f} MiB left: free some"]
        return []

    def _rows(self, record: SweepRecord) -> list[FrozenTrial]:
        try:
            return find_rows(record.study, self.storage)
        except ValueError as error:  # what is no JSON any more
            raise UnreadableStudy(
                f"the trials of sweep {record.id} cannot be read: {error}; it can be cancelled and deleted, "
                "and its checkpoints are where they were"
            ) from error

    def _detail(self, record: SweepRecord) -> SweepDetail:
        return SweepDetail(**dict(self._view(record)), spec=record.spec)

    def _view(self, record: SweepRecord) -> SweepView:
        reason = record.state_reason
        try:
            trials = self._trials(record)
        except UnreadableStudy as error:
            trials, reason = [], reason or str(error)
        spec: SweepSpec | None = None
        try:
            spec = record.spec
        except UnreadableSpec as error:
            reason = reason or str(error)
        counts = _count(trials, spec.budget.trials if spec else len(trials))
        return SweepView(
            id=record.id,
            name=spec.name if spec else "",
            labels=spec.labels if spec else {},
            state=record.state,
            state_since=record.state_since,
            desired_state=WISHES[record.state],
            state_reason=reason,
            legal=legal_requests(record.state),
            created_at=record.created_at,
            started_at=record.started_at,
            finished_at=record.finished_at,
            trials=counts,
            epochs_done=sum(trial.epochs_done for trial in trials),
            best=_best(trials),
            ran_s=record.running_s(),
            time_left_s=_time_left_s(record, counts),
            driver_generation=record.generation,
            dashboard_url=self._dashboard_url(record),
        )

    def _dashboard_url(self, record: SweepRecord) -> str | None:
        try:
            return f"/dashboard/studies/{self.storage.get_study_id_from_name(record.study)}"
        except KeyError:
            return None


def _find_spec(record: SweepRecord) -> SweepSpec | None:
    try:
        return record.spec
    except UnreadableSpec:
        return None


def build_controller(settings: Settings, launcher: Launcher) -> SweepController:
    """Open the database and the store, making what is missing."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    check_schema(settings.resolved_database_url)
    engine = open_engine(settings.resolved_database_url)
    migrate(engine)
    storage = get_storage(open_storage(settings.resolved_database_url))
    store = CheckpointStore(settings.resolved_store_url)
    return SweepController(Records(engine), storage, store, launcher, settings.data_dir.resolve())


def _require_room(
    budget: Budget, record: SweepRecord, trials: list[TrialView], again: Sequence[TrialView] = ()
) -> None:
    """Raises InvalidSpec where a sweep that has ended would end at once, though these are tried again."""
    used_up = _used_up(budget, record, trials, again) if record.state in TERMINAL_STATES else None
    if used_up is not None:
        raise InvalidSpec([Problem("", "still_used_up", used_up)])


def _used_up(
    budget: Budget, record: SweepRecord, trials: list[TrialView], again: Sequence[TrialView]
) -> str | None:
    """Which limit it would end at, in words."""
    best = _best(trials)
    failed = [trial for trial in trials if _has_failed(trial) and trial not in again]
    if len(trials) >= budget.trials and not again and all(trial.state != "WAITING" for trial in trials):
        return f"all {budget.trials} trials of the budget have ended: extend trials"
    if budget.wall_s is not None and record.running_s() >= budget.wall_s:
        return f"the sweep has run for {record.running_s():.0f} s of {budget.wall_s:g}: extend wall_s"
    if budget.max_failed is not None and len(failed) > budget.max_failed:
        return f"{len(failed)} trials have failed, of {budget.max_failed} that may: extend max_failed"
    if (
        budget.target is not None
        and best is not None
        and (best.best_valid_perplexity or math.inf) <= budget.target
    ):
        return f"trial {best.number} has reached the target of {budget.target:g}: give a lower one"
    return None


def _has_failed(trial: TrialView) -> bool:
    return trial.failure is not None and trial.failure.failure_class != "cancelled"


def _count(trials: list[TrialView], budget: int) -> TrialCounts:
    states = [trial.state for trial in trials]
    return TrialCounts(
        budget=budget,
        running=states.count("RUNNING"),
        waiting=states.count("WAITING"),
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
    """What is left of the budget's trials at the pace so far."""
    if record.state in TERMINAL_STATES or counts.done == 0:
        return None
    return record.running_s() / counts.done * (counts.budget - counts.done)


def _trial_fields(record: SweepRecord, row: FrozenTrial, latest: RowMapping | None) -> dict[str, Any]:
    spec, attributes = _find_spec(record), row.user_attrs
    at_rest = row.state == TrialState.RUNNING and record.state not in WITH_DRIVER
    return {
        "number": row.number,
        "arm": spec.arm_of(row.number) if spec else attributes.get("arm", ""),
        "draw": spec.draw_of(row.number) if spec else attributes.get("draw", 0),
        "seed": spec.seed_of(row.number) if spec else attributes.get("seed", 0),
        "attempt": attributes.get("attempt", 0),
        "state": "WAITING" if at_rest else row.state.name,
        "params": row.params,
        "epochs_done": latest["epoch"] if latest else 0,
        "best_epoch": attributes.get("best_epoch"),
        "best_valid_loss": attributes.get("best_valid_loss"),
        "best_valid_perplexity": finite_perplexity(attributes.get("best_valid_loss")),
        "valid_perplexity": finite_perplexity(latest["valid_loss"] if latest else None),
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
    return EpochView(**fields, valid_perplexity=finite_perplexity(row["valid_loss"]))
