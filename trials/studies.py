"""A sweep's study as a whole: opened, looked at, copied to try failed trials again, closed, deleted."""

import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb.models import StudyModel, TrialUserAttributeModel
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import select

from trials.adaptive import build_sampler
from trials.pruners import build_pruner
from trials.spec import SweepSpec
from trials.tasks import Failure

ENDED_WELL = (TrialState.COMPLETE, TrialState.PRUNED)
ENDED_FROM_OUTSIDE = frozenset({"cancelled", "infrastructure", "timeout"})
"""Classes of failure that say nothing against what the trial had reached."""
REMOVED = "(removed until here)"
"""Begins the name of a study that keeps an id from being used again."""
TOLD_OF_FAILURE = frozenset({"failure_class", "failure_message", "lost_attempts"})
"""Attributes that a failed trial has, and one that is tried again has not."""


class DamagedRows(ValueError):
    """The database does not hold what Optuna would have written."""


def reopen_failed(
    study_name: str, new_name: str, spec: SweepSpec, storage: BaseStorage, numbers: Collection[int]
) -> None:
    """A copy of a study in which these trials, if they failed, are open again.

    A finished row cannot be changed in Optuna. A half-made copy of the same name is made anew.
    """
    delete_study(new_name, storage)
    before = optuna.load_study(study_name=study_name, storage=storage)
    after = open_study(spec, new_name, storage)
    for name, value in before.user_attrs.items():
        after.set_user_attr(name, value)
    for row in before.get_trials():
        if row.state == TrialState.FAIL and row.number in numbers:
            row.state, row.values, row.datetime_complete = TrialState.RUNNING, None, None
            row.user_attrs = {
                name: value for name, value in row.user_attrs.items() if name not in TOLD_OF_FAILURE
            }
        storage.create_new_trial(after._study_id, template_trial=row)


def find_rows(study_name: str, storage: BaseStorage) -> list[FrozenTrial]:
    """The trials of a study, by number; none where no driver has opened it yet. Raises DamagedRows."""
    try:
        study_id = storage.get_study_id_from_name(study_name)
    except KeyError:
        return []
    try:
        return storage.get_all_trials(study_id, deepcopy=False)
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedRows(f"{type(error).__name__}: {error}") from error


def studies_of(sweep_id: str, storage: BaseStorage) -> list[str]:
    """Its study, and what was left of earlier ones or of a copy half made."""
    return [name for name in _names(storage).values() if name.partition("~")[0] == sweep_id]


def _names(storage: BaseStorage) -> dict[int, str]:
    """Of all studies, by id. From their own table alone: in another one, one of them may be damaged."""
    backend = getattr(storage, "_backend", storage)  # behind Optuna's cache
    if not isinstance(backend, RDBStorage):
        return {study._study_id: study.study_name for study in storage.get_all_studies()}
    with backend.engine.connect() as connection:
        rows = connection.execute(select(StudyModel.study_id, StudyModel.study_name)).all()
    return {row.study_id: row.study_name for row in rows}


def delete_study(name: str, storage: BaseStorage) -> None:
    """Remove a study, if there is one."""
    with suppress(KeyError):
        study_id = storage.get_study_id_from_name(name)
        _mark_end_of_ids(study_id, storage)
        storage.delete_study(study_id)


def _mark_end_of_ids(study_id: int, storage: BaseStorage) -> None:
    """See to it that this id, once it is deleted, is not given to another study.

    SQLite gives the highest one again, and Optuna's cache, of this process or another, may still have the old
    trials under it. So an empty study stays behind where that was the latest one.
    """
    ids = _names(storage)
    if study_id == max(ids):
        storage.create_new_study([StudyDirection.MINIMIZE], f"{REMOVED} {study_id}")
    for marker, name in ids.items():
        if name.startswith(REMOVED) and marker != max(ids):
            with suppress(KeyError):  # another process was faster
                storage.delete_study(marker)


def open_study(spec: SweepSpec, name: str, storage: BaseStorage) -> optuna.Study:
    """The sweep's study, created where it is not there yet."""
    study = optuna.create_study(
        study_name=name,
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


def rename_study(study_name: str, name: str, storage: BaseStorage) -> None:
    """What people call the sweep, where its study is there already: the dashboard shows it."""
    with suppress(KeyError):
        storage.set_study_user_attr(storage.get_study_id_from_name(study_name), "name", name)


def close_open_trials(study_name: str, storage: BaseStorage, failure: Failure) -> None:
    """End the rows of a sweep that has no driver any more, and will get none."""
    try:
        study = optuna.load_study(study_name=study_name, storage=storage)
    except KeyError:  # cancelled before it had a driver
        return
    for row in study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
        trial = Trial(study, row._trial_id)
        set_failure(trial, failure)
        study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def set_attributes(trial: Trial, attributes: Mapping[str, Any]) -> None:
    """All in one transaction, where the storage has them; Optuna's own way is one for each."""
    backend = getattr(trial.storage, "_backend", trial.storage)  # behind Optuna's cache
    if not isinstance(backend, RDBStorage):
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
    elif attributes:
        with _create_scoped_session(backend.scoped_session) as session:
            for name, value in attributes.items():
                backend._set_trial_attr_without_commit(
                    session, TrialUserAttributeModel, trial._trial_id, name, value
                )
        trial._cached_frozen_trial.user_attrs.update(attributes)


def storable(text: str) -> str:
    """Text as both databases take it: PostgreSQL knows no NUL, and neither knows half a surrogate pair."""
    clean = text.encode("utf-8", "replace").decode()
    return clean.replace("\0", "\N{REPLACEMENT CHARACTER}")


def set_failure(trial: Trial, failure: Failure) -> None:
    trial.set_user_attr("failure_message", storable(failure.message[-4000:]))
    trial.set_user_attr("failure_class", failure.failure_class)
