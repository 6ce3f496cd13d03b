"""How sweeps and trials look from outside: their rows and their studies', as the API answers them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import TrialState
from sqlalchemy import RowMapping

from service.database import aware, utc
from service.errors import TrialNotFound, UnreadableSpec, UnreadableStudy
from service.lifecycle import MOVING, TERMINAL_STATES, WISHES, WITH_DRIVER, legal_requests
from service.records import Mark, Records, Stamp, SweepRecord
from service.schemas import (
    Environment,
    EpochView,
    Failure,
    PointView,
    SweepDetail,
    SweepView,
    TrialCounts,
    TrialDetail,
    TrialView,
    VerificationView,
)
from trials.perplexity import finite_perplexity
from trials.rows import Remembered, StudyRows, TrialReader, TrialRow, read_study_attributes
from trials.spec import SweepSpec
from trials.studies import ENDED_FROM_OUTSIDE, DamagedRows
from trials.verification import REFUSED
from trials.version import own_version

CHANGING = MOVING - {"queued"}
"""Of any other state, a sweep looks the same until its stamp is another one."""
MOST_SWEEPS = 1024
"""That are told of as before: a list of hundreds would read every row of each."""
MOST_TRIALS = 20_000
"""Trials of sweeps at rest that are told of as before, some 3 KiB each."""
OPEN = {"RUNNING", "WAITING"}
MOST_ENDED = 400_000
"""Trials that have ended, of which only so much is remembered as a sweep in a list shows; 0.3 KiB each."""
MOST_EPOCHS = 20_000
"""Of single trials of sweeps at rest, some 2 KiB each."""


@dataclass(frozen=True)
class Progress:
    """What a sweep's trials have come to."""

    states: Mapping[str, int]
    epochs_done: int
    best: TrialView | None
    dashboard_url: str | None
    unreadable: str | None = None
    """Why nothing is known of its trials."""


NOTHING_YET = Progress({}, 0, None, None)


@dataclass(frozen=True)
class _Ended:
    """What a study's trials that have ended come to, as a list of sweeps shows it. Optuna lets nobody change
    them."""

    states: Counter[str] = field(default_factory=Counter)
    epochs_done: Mapping[int, int] = field(default_factory=dict)
    """By number."""
    ranked: tuple[tuple[float, int], ...] = ()
    """Those that may be best, the best first: rank and number."""

    def with_these(self, trials: Sequence[TrialView]) -> "_Ended":
        """And those of these that have ended; itself, where there is none."""
        new = [trial for trial in trials if trial.state not in OPEN and trial.number not in self.epochs_done]
        if not new:
            return self
        usable = [(trial.rank, trial.number) for trial in new if _may_be_best(trial)]
        return _Ended(
            self.states + Counter(trial.state for trial in new),
            {**self.epochs_done, **{trial.number: trial.epochs_done for trial in new}},
            tuple(sorted([*self.ranked, *usable])),
        )

    def best_where(self, is_usable: Callable[[int], bool]) -> int | None:
        return next((number for _, number in self.ranked if is_usable(number)), None)


class SweepViews:
    """Reads, and writes nothing; may be asked by many threads at once. A sweep at rest is looked at once."""

    def __init__(self, records: Records, storage: BaseStorage) -> None:
        self._records = records
        self._reader = TrialReader(storage)
        self._at_rest: Remembered[Stamp, tuple[SweepView, bytes]] = Remembered(MOST_SWEEPS, lambda _: 0)
        """And as JSON."""
        self._so_far: Remembered[str, tuple[Mark, Progress]] = Remembered(MOST_SWEEPS, lambda _: 0)
        """Of those that run, by id: as of which mark, and what."""
        self._trials_at_rest: Remembered[Stamp, list[TrialView]] = Remembered(MOST_TRIALS, len)
        self._ended: Remembered[tuple[int, int], _Ended] = Remembered(
            MOST_ENDED, lambda ended: len(ended.epochs_done)
        )
        """By study and revision."""
        self._environment_at_rest: Remembered[Stamp, Environment] = Remembered(MOST_SWEEPS, lambda _: 0)
        self._trial_at_rest: Remembered[tuple[Stamp, int], TrialDetail] = Remembered(
            MOST_EPOCHS, lambda trial: len(trial.curve)
        )

    def detail(self, record: SweepRecord, progress: Progress | None = None) -> SweepDetail:
        return SweepDetail(**dict(self.sweep(record, progress)), spec=record.spec)

    def sweep(self, record: SweepRecord, progress: Progress | None = None) -> SweepView:
        """`progress`, where it is known already."""
        if progress is not None or record.state in CHANGING:
            return self._sweep(record, progress)
        return self._written(record)[0]

    def sweeps(self, stamps: Sequence[Stamp]) -> list[SweepView]:
        """In their order; without those that have been removed meanwhile."""
        return [view for view, _ in self._told(stamps)]

    def written_sweeps(self, stamps: Sequence[Stamp]) -> list[bytes]:
        """The same as JSON."""
        return [written for _, written in self._told(stamps)]

    def _told(self, stamps: Sequence[Stamp]) -> list[tuple[SweepView, bytes]]:
        told = self._at_rest.find_all(stamps)
        read = self._records.find_sweeps([stamp.id for stamp in stamps if stamp not in told])
        told |= {stamp: self._written(read[stamp.id]) for stamp in stamps if stamp.id in read}
        return [told[stamp] for stamp in stamps if stamp in told]

    def _written(self, record: SweepRecord) -> tuple[SweepView, bytes]:
        told = self._at_rest.find(record.stamp)
        if told is None:
            view = self._sweep(record)
            told = view, view.model_dump_json().encode()
            if record.state not in CHANGING:
                self._at_rest.keep(record.stamp, told)
        return told

    def _sweep(self, record: SweepRecord, progress: Progress | None = None) -> SweepView:
        progress = progress or self.progress(record)
        reason = record.state_reason or progress.unreadable
        spec: SweepSpec | None = None
        try:
            spec = record.spec
        except UnreadableSpec as error:
            reason = reason or str(error)
        counts = TrialCounts(
            budget=spec.budget.trials if spec else sum(progress.states.values()),
            running=progress.states.get("RUNNING", 0),
            waiting=progress.states.get("WAITING", 0),
            complete=progress.states.get("COMPLETE", 0),
            pruned=progress.states.get("PRUNED", 0),
            failed=progress.states.get("FAIL", 0),
        )
        return SweepView(
            id=record.id,
            name=spec.name if spec else "",
            labels=spec.labels if spec else {},
            priority=spec.priority if spec else 0,
            state=record.state,
            state_since=record.state_since,
            desired_state=WISHES[record.state],
            state_reason=reason,
            legal=legal_requests(record.state),
            revision=record.revision,
            created_at=record.created_at,
            started_at=record.started_at,
            finished_at=record.finished_at,
            trials=counts,
            epochs_done=progress.epochs_done,
            best=progress.best,
            ran_s=record.running_s(),
            time_left_s=_time_left_s(record, counts),
            driver_generation=record.generation,
            dashboard_url=progress.dashboard_url,
        )

    def progress(self, record: SweepRecord) -> Progress:
        """What its trials have come to; looked at anew only once something of them has been written.

        The record was read before they are, so they are never older than what it says has been written.
        """
        if record.generation == 0:  # it has had no driver, hence no study
            return NOTHING_YET
        mark, progress = self._so_far.find(record.id) or (None, NOTHING_YET)
        if mark == record.mark:
            return progress
        try:
            progress = self._progress(record, self._rows(record))
        except UnreadableStudy as error:
            return Progress({}, 0, None, None, str(error))
        if record.writes is not None and record.state != "deleting":  # which counts nothing
            self._so_far.keep(record.id, (record.mark, progress))
        return progress

    def _progress(self, record: SweepRecord, rows: StudyRows) -> Progress:
        """Of a large sweep that runs, few trials are new: what the others have come to is remembered."""
        if rows.study_id is None:
            return NOTHING_YET
        key = rows.study_id, record.revision
        known = self._ended.find(key) or _Ended()
        verified = self._records.verifications(record.id)
        numbered = {row.number: row for row in rows.trials}

        def is_usable(number: int) -> bool:
            return not _is_refused(numbered[number], verified.get(number))

        looked_at = numbered.keys() - known.epochs_done.keys()
        if (best := known.best_where(is_usable)) is not None:
            looked_at.add(best)
        trials = self._views_of(record, [numbered[number] for number in sorted(looked_at)], verified)
        ended = known.with_these(trials)
        if ended is not known:
            self._ended.keep(key, ended)
        best = ended.best_where(is_usable)
        still_open = [trial for trial in trials if trial.number not in ended.epochs_done]
        return Progress(
            states=ended.states + Counter(trial.state for trial in still_open),
            epochs_done=sum(ended.epochs_done.values()) + sum(trial.epochs_done for trial in still_open),
            best=best_of([trial for trial in trials if trial.number == best] + still_open),
            dashboard_url=f"/dashboard/studies/{rows.study_id}",
        )

    def trials(self, record: SweepRecord) -> list[TrialView]:
        """In the order of their numbers. Raises UnreadableStudy."""
        if record.state in CHANGING:
            return self._trials(record, self._rows(record))
        known = self._trials_at_rest.find(record.stamp)
        if known is not None:
            return known
        return self._trials_at_rest.keep(record.stamp, self._trials(record, self._rows(record)))

    def _trials(self, record: SweepRecord, rows: StudyRows) -> list[TrialView]:
        if not rows.trials:
            return []
        return self._views_of(record, rows.trials, self._records.verifications(record.id))

    def _views_of(
        self, record: SweepRecord, rows: Sequence[TrialRow], verified: Mapping[int, RowMapping]
    ) -> list[TrialView]:
        spec = find_spec(record)
        latest = self._records.latest_epochs(record.id, [row.number for row in rows])
        pinned = self._records.pinned(record.id)
        with reading(record):
            return [
                trial_view(
                    record,
                    spec,
                    row,
                    latest.get(row.number),
                    row.number in pinned,
                    verified.get(row.number),
                )
                for row in rows
            ]

    def trial(self, record: SweepRecord, number: int) -> TrialDetail:
        """With its whole curve. Raises TrialNotFound, UnreadableStudy."""
        if record.state in CHANGING:
            return self._trial(record, number)
        known = self._trial_at_rest.find((record.stamp, number))
        return known or self._trial_at_rest.keep((record.stamp, number), self._trial(record, number))

    def _trial(self, record: SweepRecord, number: int) -> TrialDetail:
        with reading(record):
            found = self._reader.find(record.study, number)
        if found is None:
            count = len(self._rows(record).trials)
            raise TrialNotFound(f"sweep {record.id} has no trial {number}; it has {count} so far, from 0")
        row, config = found
        curve = self._records.curve(record.id, number)
        pinned = number in self._records.pinned(record.id)
        verified = self._records.verifications(record.id).get(number)
        with reading(record):
            latest = curve[-1] if curve else None
            view = trial_view(record, find_spec(record), row, latest, pinned, verified)
            return TrialDetail(**dict(view), config=config, curve=[epoch_view(epoch) for epoch in curve])

    def environment(self, record: SweepRecord, trials: Sequence[TrialView]) -> Environment:
        """Raises UnreadableStudy."""
        if record.state in CHANGING:
            return self._environment(record, trials)
        known = self._environment_at_rest.find(record.stamp)
        return known or self._environment_at_rest.keep(record.stamp, self._environment(record, trials))

    def _environment(self, record: SweepRecord, trials: Sequence[TrialView]) -> Environment:
        devices, runtimes = [trial.device for trial in trials], [trial.runtime for trial in trials]
        with reading(record), self._records.engine.connect() as connection:
            of_study = read_study_attributes(connection, record.study)
            return environment_of(record, of_study, devices, runtimes)

    def _rows(self, record: SweepRecord) -> StudyRows:
        with reading(record):
            return self._reader.read(record.study)


@contextmanager
def reading(record: SweepRecord) -> Iterator[None]:
    """Around what makes something of a sweep's trials: they may hold anything. Raises UnreadableStudy."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        told = error if isinstance(error, DamagedRows) else f"{type(error).__name__}: {error}"
        raise UnreadableStudy(
            f"the trials of sweep {record.id} cannot be read: {told}; it can be cancelled and deleted, "
            "and its checkpoints are where they were"
        ) from error


def environment_of(
    record: SweepRecord,
    of_study: Mapping[str, Any],
    devices: Iterable[str | None],
    runtimes: Iterable[str | None],
) -> Environment:
    """From what is written down of its study, and what its trials say."""
    return Environment(
        version=own_version(),
        corpus_sha256=of_study.get("corpus_sha256"),
        devices=sorted({device for device in devices if device is not None}),
        runtimes=sorted({runtime for runtime in runtimes if runtime is not None}),
        driver_generation=record.generation,
    )


def point_view(row: RowMapping) -> PointView:
    return PointView(id=row["id"], params=row["params"], draw=row["draw"], created_at=utc(row["created_at"]))


def best_of(trials: Sequence[TrialView]) -> TrialView | None:
    """The one with the lowest validation loss, whatever ended it but itself; of equals, the first.

    Never one whose checkpoint, evaluated again, did not come to that loss.
    """
    usable = [
        trial
        for trial in trials
        if _may_be_best(trial) and (trial.verification is None or trial.verification.outcome not in REFUSED)
    ]
    return min(usable, key=lambda trial: (trial.rank, trial.number), default=None)


def _may_be_best(trial: TrialView) -> bool:
    """Whatever came of evaluating its checkpoint again."""
    of_itself = trial.failure is not None and trial.failure.failure_class not in ENDED_FROM_OUTSIDE
    return trial.best_valid_loss is not None and not of_itself


def _is_of(verified: RowMapping | None, row: TrialRow) -> bool:
    """Whether that is of the checkpoint that is on record now: the trial may have gone on since."""
    recorded = row.user_attrs.get("checkpoint_sha256")
    return verified is not None and verified["recorded_sha256"] == recorded


def _is_refused(row: TrialRow, verified: RowMapping | None) -> bool:
    return verified is not None and _is_of(verified, row) and verified["outcome"] in REFUSED


def find_spec(record: SweepRecord) -> SweepSpec | None:
    try:
        return record.spec
    except UnreadableSpec:
        return None


def _time_left_s(record: SweepRecord, counts: TrialCounts) -> float | None:
    """What is left of the budget's trials at the pace so far."""
    if record.state in TERMINAL_STATES or counts.done == 0:
        return None
    return record.running_s() / counts.done * max(0, counts.budget - counts.done)


def trial_view(
    record: SweepRecord,
    spec: SweepSpec | None,
    row: TrialRow,
    latest: RowMapping | dict[str, Any] | None,
    pinned: bool,
    verified: RowMapping | None,
) -> TrialView:
    attributes = row.user_attrs
    if not _is_of(verified, row):
        verified = None
    at_rest = row.state == TrialState.RUNNING and record.state not in WITH_DRIVER
    return TrialView(
        number=row.number,
        arm=spec.arm_of(row.number) if spec else attributes.get("arm", ""),
        draw=spec.draw_of(row.number) if spec else attributes.get("draw", 0),
        seed=spec.seed_of(row.number) if spec else attributes.get("seed", 0),
        attempt=attributes.get("attempt", 0),
        state="WAITING" if at_rest else row.state.name,
        stopped=attributes.get("stopped", False),
        pinned=pinned,
        params=dict(row.params),
        epochs_done=latest["epoch"] if latest else 0,
        best_epoch=attributes.get("best_epoch"),
        best_valid_loss=attributes.get("best_valid_loss"),
        best_valid_perplexity=finite_perplexity(attributes.get("best_valid_loss")),
        valid_perplexity=finite_perplexity(latest["valid_loss"] if latest else None),
        failure=_failure(row),
        checkpoint_sha256=attributes.get("checkpoint_sha256"),
        verification=None if verified is None else _verification(verified),
        device=attributes.get("device"),
        runtime=attributes.get("runtime"),
        started_at=aware(row.datetime_start),
        finished_at=aware(row.datetime_complete),
    )


def _verification(row: RowMapping) -> VerificationView:
    values = {name: row[name] for name in VerificationView.model_fields if name in row}
    return VerificationView(**{**values, "verified_at": utc(row["verified_at"])})


def _failure(row: TrialRow) -> Failure | None:
    if row.state != TrialState.FAIL:
        return None
    return Failure(
        failure_class=row.user_attrs.get("failure_class", "infrastructure"),
        message=row.user_attrs.get("failure_message", "the trial ended without a word"),
    )


def epoch_view(row: Mapping[str, Any]) -> EpochView:
    known = {**row, "recorded_at": utc(row["recorded_at"])}
    return EpochView(**known, valid_perplexity=finite_perplexity(row["valid_loss"]))
