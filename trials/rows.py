"""Trials as who only looks at them reads them: a few plain queries, and what has ended only once.

Optuna's own way reads every intermediate value too, one object a row, and keeps all of it for ever.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Generic, TypeVar

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb.models import StudyModel, TrialModel, TrialParamModel, TrialUserAttributeModel
from optuna.trial import FrozenTrial, TrialState
from pydantic_core import from_json
from sqlalchemy import Connection, Select, bindparam, select

from trials.studies import DamagedRows, find_rows

CONFIG = "config"
"""The attribute that is larger than all others together, and asked for by who looks at one trial."""
MOST_REMEMBERED = 110_000
"""Rows of trials that have ended, of some 2 KiB each: all of the largest sweep there can be."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MOST_NAMED = 500
"""Trials named one by one in a query; of more, the whole study is read."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """What of Optuna's trial is looked at; named as there."""

    number: int
    state: TrialState
    params: Mapping[str, Any]
    user_attrs: Mapping[str, Any]
    """Without `config`."""
    datetime_start: datetime | None
    datetime_complete: datetime | None
    """Both are naive UTC, as they are written: Optuna's own objects have local time."""


@dataclass(frozen=True)
class StudyRows:
    study_id: int | None
    """None where no driver has opened it yet."""
    trials: list[TrialRow]
    """By number."""


class Remembered(Generic[K, V]):
    """What was used last, as long as there is room for it; may be asked by many threads at once."""

    def __init__(self, room: int, size: Callable[[V], int]) -> None:
        """Each takes as much room as its size, and one more for itself."""
        self._room, self._size, self._taken = room, size, 0
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: K) -> V | None:
        return self.find_all([key]).get(key)

    def find_all(self, keys: Collection[K]) -> dict[K, V]:
        """Of these, what is remembered."""
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
        return found

    def keep(self, key: K, value: V) -> V:
        """Unless it alone takes more than there is room for."""
        with self._lock:
            if key in self._kept:
                self._taken -= 1 + self._size(self._kept.pop(key))
            if 1 + self._size(value) > self._room:
                return value
            self._kept[key] = value
            self._taken += 1 + self._size(value)
            while self._taken > self._room:
                self._taken -= 1 + self._size(self._kept.popitem(last=False)[1])
        return value


class TrialReader:
    """The studies of one storage; may be asked by many threads at once."""

    def __init__(self, storage: BaseStorage, most_remembered: int = MOST_REMEMBERED) -> None:
        self._storage = storage
        backend = getattr(storage, "_backend", storage)  # behind Optuna's cache
        self._engine = backend.engine if isinstance(backend, RDBStorage) else None
        self._ended: Remembered[int, dict[int, TrialRow]] = Remembered(most_remembered, len)
        """By study and number: Optuna lets nobody change a trial that has ended."""

    def read(self, study_name: str) -> StudyRows:
        """Raises DamagedRows."""
        try:
            return self._read(study_name)
        except (ValueError, LookupError, TypeError) as error:
            raise DamagedRows(f"{type(error).__name__}: {error}") from error

    def find(self, study_name: str, number: int) -> TrialRow | None:
        """One trial, whatever others there are; None where it has not begun. Raises DamagedRows."""
        if self._engine is None:
            trials = self._read(study_name).trials
            return trials[number] if 0 <= number < len(trials) else None
        with self._engine.connect() as connection:
            asked = {"study_name": study_name, "number": number}
            try:
                found = connection.execute(_ONE, asked).one_or_none()
                if found is None:
                    return None
                known = (self._ended.find(found.study_id) or {}).get(number)
                return known or _read_rows(connection, found.study_id, [found])[0]
            except (ValueError, LookupError, TypeError) as error:
                raise DamagedRows(f"{type(error).__name__}: {error}") from error

    def config(self, study_name: str, number: int) -> dict[str, Any]:
        """Every value that a trial trains with; nothing where that is not written yet. Raises DamagedRows."""
        if self._engine is None:
            rows = find_rows(study_name, self._storage)
            return dict(rows[number].user_attrs.get(CONFIG, {})) if number < len(rows) else {}
        asked = {"study_name": study_name, "number": number, "key": CONFIG}
        with self._engine.connect() as connection:
            written = connection.execute(_ATTRIBUTE, asked).scalar_one_or_none()
        try:
            return {} if written is None else dict(from_json(written))
        except (ValueError, TypeError) as error:
            raise DamagedRows(f"the config of trial {number}: {error}") from error

    def _read(self, study_name: str) -> StudyRows:
        if self._engine is None:
            rows = find_rows(study_name, self._storage)
            study_id = None
            with suppress(KeyError):
                study_id = self._storage.get_study_id_from_name(study_name)
            return StudyRows(study_id, [_of_frozen(row) for row in rows])
        with self._engine.connect() as connection:
            study_id = connection.execute(_BY_NAME, {"study_name": study_name}).scalar_one_or_none()
            if study_id is None:
                return StudyRows(None, [])
            known = self._ended.find(study_id) or {}
            trials = _read_trials(connection, study_id, known)
        if len(trials) > len(known):
            self._ended.keep(study_id, {row.number: row for row in trials if row.state.is_finished()})
        return StudyRows(study_id, trials)


# Built once: to build a statement takes longer than SQLite does to run it.
_STUDY, _TRIAL, _ATTRIBUTES = (
    model.__table__.c for model in (StudyModel, TrialModel, TrialUserAttributeModel)
)
_BY_NAME = select(_STUDY.study_id).where(_STUDY.study_name == bindparam("study_name"))
_COLUMNS = select(
    _TRIAL.trial_id,
    _TRIAL.study_id,
    _TRIAL.number,
    _TRIAL.state,
    _TRIAL.datetime_start,
    _TRIAL.datetime_complete,
)
_TRIALS = _COLUMNS.where(_TRIAL.study_id == bindparam("study_id")).order_by(_TRIAL.number)
_ONE = _COLUMNS.join(StudyModel.__table__, _STUDY.study_id == _TRIAL.study_id).where(
    _STUDY.study_name == bindparam("study_name"), _TRIAL.number == bindparam("number")
)
_ATTRIBUTE = (
    select(_ATTRIBUTES.value_json)
    .join(TrialModel.__table__, _TRIAL.trial_id == _ATTRIBUTES.trial_id)
    .join(StudyModel.__table__, _STUDY.study_id == _TRIAL.study_id)
    .where(_STUDY.study_name == bindparam("study_name"), _TRIAL.number == bindparam("number"))
    .where(_ATTRIBUTES.key == bindparam("key"))
)


def _read_trials(connection: Connection, study_id: int, known: Mapping[int, TrialRow]) -> list[TrialRow]:
    # The states first: who had ended by then has all its attributes by now.
    found = connection.execute(_TRIALS, {"study_id": study_id}).all()
    new = _read_rows(connection, study_id, [row for row in found if row.number not in known])
    read = {row.number: row for row in new}
    return [known.get(row.number) or read[row.number] for row in found]


def _read_rows(connection: Connection, study_id: int, found: Sequence[Any]) -> list[TrialRow]:
    """With what belongs to them."""
    if not found:
        return []
    ids = [row.trial_id for row in found]
    attributes = _by_trial(connection, _written_attributes(study_id, ids))
    params = _by_trial(connection, _written_params(study_id, ids))
    return [_row(row, attributes, params) for row in found]


def _written_attributes(study_id: int, trial_ids: Collection[int]) -> Select[Any]:
    model = TrialUserAttributeModel
    query = select(model.trial_id, model.key, model.value_json).where(model.key != CONFIG)
    return query.where(_are_those(model.trial_id, study_id, trial_ids))


def _written_params(study_id: int, trial_ids: Collection[int]) -> Select[Any]:
    model = TrialParamModel
    query = select(model.trial_id, model.param_name, model.param_value, model.distribution_json)
    return query.where(_are_those(model.trial_id, study_id, trial_ids)).order_by(model.param_id)


def _are_those(column: Any, study_id: int, trial_ids: Collection[int]) -> Any:
    if len(trial_ids) <= MOST_NAMED:
        return column.in_(trial_ids)
    return column.in_(select(TrialModel.trial_id).where(TrialModel.study_id == study_id))


def _by_trial(connection: Connection, query: Select[Any]) -> dict[int, list[Any]]:
    written: dict[int, list[Any]] = {}
    for trial_id, *values in connection.execute(query).all():
        written.setdefault(trial_id, []).append(values)
    return written


def _row(row: Any, attributes: dict[int, list[Any]], params: dict[int, list[Any]]) -> TrialRow:
    return TrialRow(
        row.number,
        row.state,
        {
            name: _distribution(written).to_external_repr(value)
            for name, value, written in params.get(row.trial_id, [])
        },
        {name: from_json(written) for name, written in attributes.get(row.trial_id, [])},
        row.datetime_start,
        row.datetime_complete,
    )


@lru_cache(maxsize=1024)
def _distribution(written: str) -> BaseDistribution:
    return json_to_distribution(written)


def _of_frozen(row: FrozenTrial) -> TrialRow:
    attributes = {name: value for name, value in row.user_attrs.items() if name != CONFIG}
    times = (_utc(row.datetime_start), _utc(row.datetime_complete))
    return TrialRow(row.number, row.state, row.params, attributes, *times)


def _utc(local: datetime | None) -> datetime | None:
    return None if local is None else local.astimezone(UTC).replace(tzinfo=None)
