"""How sweeps and trials look from outside: their rows and their studies', as the API answers them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import RowMapping

from service.database import aware, utc
from service.errors import TrialNotFound, UnreadableSpec, UnreadableStudy
from service.lifecycle import MOVING, TERMINAL_STATES, WISHES, WITH_DRIVER, legal_requests
from service.records import Records, SweepRecord
from service.schemas import (
    EpochView,
    Failure,
    PointView,
    SweepDetail,
    SweepView,
    TrialCounts,
    TrialDetail,
    TrialView,
)
from trials.perplexity import finite_perplexity
from trials.spec import SweepSpec
from trials.studies import find_rows

ENDED_FROM_OUTSIDE = {"cancelled", "infrastructure", "timeout"}
"""Classes of failure that say nothing against what the trial had reached."""
MOST_REMEMBERED = 1024
"""Sweeps at rest whose trials are not looked at again: a list of hundreds would read every row of each."""


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


class SweepViews:
    """Reads, and writes nothing."""

    def __init__(self, records: Records, storage: BaseStorage) -> None:
        self._records = records
        self._storage = storage
        self._remembered = lru_cache(MOST_REMEMBERED)(self._progress_at_rest)

    def detail(self, record: SweepRecord, progress: Progress | None = None) -> SweepDetail:
        return SweepDetail(**dict(self.sweep(record, progress)), spec=record.spec)

    def sweep(self, record: SweepRecord, progress: Progress | None = None) -> SweepView:
        """`progress`, where it is known already."""
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
        """What its trials have come to; remembered while the sweep rests and nobody asks anything of it."""
        if record.generation == 0:  # it has had no driver, hence no study
            return NOTHING_YET
        if record.state in MOVING:
            return self._progress(record)
        return self._remembered(record.id, record.generation, record.state_since, record.revision)

    def _progress_at_rest(self, sweep_id: str, *_changes_with: int | datetime) -> Progress:
        return self._progress(self._records.get_sweep(sweep_id))

    def _progress(self, record: SweepRecord) -> Progress:
        url = self._dashboard_url(record)
        try:
            trials = self.trials(record)
        except UnreadableStudy as error:
            return Progress({}, 0, None, url, str(error))
        states = [trial.state for trial in trials]
        return Progress(
            states={state: states.count(state) for state in set(states)},
            epochs_done=sum(trial.epochs_done for trial in trials),
            best=best_of(trials),
            dashboard_url=url,
        )

    def trials(self, record: SweepRecord) -> list[TrialView]:
        """In the order of their numbers. Raises UnreadableStudy."""
        rows = self._rows(record)
        if not rows:
            return []
        latest = self._records.latest_epochs(record.id)
        pinned = self._records.pinned(record.id)
        return [
            TrialView(**_trial_fields(record, row, latest.get(row.number), row.number in pinned))
            for row in rows
        ]

    def trial(self, record: SweepRecord, number: int) -> TrialDetail:
        """With its whole curve. Raises TrialNotFound, UnreadableStudy."""
        rows = self._rows(record)
        if not 0 <= number < len(rows):
            raise TrialNotFound(f"sweep {record.id} has no trial {number}; it has {len(rows)} so far, from 0")
        curve = self._records.curve(record.id, number)
        pinned = number in self._records.pinned(record.id)
        return TrialDetail(
            **_trial_fields(record, rows[number], curve[-1] if curve else None, pinned),
            config=rows[number].user_attrs.get("config", {}),
            curve=[_epoch_view(row) for row in curve],
        )

    def _rows(self, record: SweepRecord) -> list[FrozenTrial]:
        try:
            return find_rows(record.study, self._storage)
        except ValueError as error:  # what is no JSON any more
            raise UnreadableStudy(
                f"the trials of sweep {record.id} cannot be read: {error}; it can be cancelled and deleted, "
                "and its checkpoints are where they were"
            ) from error

    def _dashboard_url(self, record: SweepRecord) -> str | None:
        try:
            return f"/dashboard/studies/{self._storage.get_study_id_from_name(record.study)}"
        except KeyError:
            return None


def point_view(row: RowMapping) -> PointView:
    return PointView(id=row["id"], params=row["params"], draw=row["draw"], created_at=utc(row["created_at"]))


def best_of(trials: Sequence[TrialView]) -> TrialView | None:
    """The one with the lowest validation loss, whatever ended it but itself; of equals, the first."""
    usable = [
        trial
        for trial in trials
        if trial.best_valid_loss is not None
        and (trial.failure is None or trial.failure.failure_class in ENDED_FROM_OUTSIDE)
    ]
    return min(usable, key=lambda trial: (trial.rank, trial.number), default=None)


def _find_spec(record: SweepRecord) -> SweepSpec | None:
    try:
        return record.spec
    except UnreadableSpec:
        return None


def _time_left_s(record: SweepRecord, counts: TrialCounts) -> float | None:
    """What is left of the budget's trials at the pace so far."""
    if record.state in TERMINAL_STATES or counts.done == 0:
        return None
    return record.running_s() / counts.done * max(0, counts.budget - counts.done)


def _trial_fields(
    record: SweepRecord, row: FrozenTrial, latest: RowMapping | None, pinned: bool
) -> dict[str, Any]:
    spec, attributes = _find_spec(record), row.user_attrs
    at_rest = row.state == TrialState.RUNNING and record.state not in WITH_DRIVER
    return {
        "number": row.number,
        "arm": spec.arm_of(row.number) if spec else attributes.get("arm", ""),
        "draw": spec.draw_of(row.number) if spec else attributes.get("draw", 0),
        "seed": spec.seed_of(row.number) if spec else attributes.get("seed", 0),
        "attempt": attributes.get("attempt", 0),
        "state": "WAITING" if at_rest else row.state.name,
        "stopped": attributes.get("stopped", False),
        "pinned": pinned,
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
