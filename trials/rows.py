"""Trials as who only looks at them reads them: a few plain queries, and what has ended only once.

Optuna's own way reads every intermediate value too, one object a row, and keeps all of it for ever.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Generic, TypeVar

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb.models import (
    StudyModel,
    StudyUserAttributeModel,
    TrialModel,
    TrialParamModel,
    TrialUserAttributeModel,
)
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
    user_attrs: dict[str, Any]
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


@contextmanager
def _damage_told() -> Iterator[None]:
    """Raises DamagedRows in place of what comes of rows that Optuna would not have written."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedRows(f"{type(error).__name__}: {error}") from error


def read_pages(
    connection: Connection, study_name: str, size: int
) -> Iterator[list[tuple[TrialRow, dict[str, Any]]]]:
    """All trials of a study by number, each with every value that it trains with, so many at a time.

    Nothing is remembered. Raises DamagedRows.
    """
    with _damage_told():
        study_id = connection.execute(_BY_NAME, {"study_name": study_name}).scalar_one_or_none()
        query = _TRIALS.execution_options(yield_per=size)
        with connection.execute(query, {"study_id": study_id}) as trials:
            for found in trials.partitions():
                named = {"trial_ids": [row.trial_id for row in found]}
                attributes = _by_trial(connection, _ATTRIBUTES_WITH_CONFIG, named)
                params = _by_trial(connection, _PARAMS, named)
                rows = [_row(row, attributes, params) for row in found]
                yield [(row, dict(row.user_attrs.pop(CONFIG, {}))) for row in rows]


def read_study_attributes(connection: Connection, study_name: str) -> dict[str, Any]:
    """What is written down of a study as a whole; nothing where no driver has opened it yet.

    Raises DamagedRows.
    """
    found = connection.execute(_STUDY_ATTRIBUTES, {"study_name": study_name}).all()
    with _damage_told():
        return {key: from_json(written) for key, written in found}


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
        with _damage_told():
            return self._read(study_name)

    def find(self, study_name: str, number: int) -> tuple[TrialRow, dict[str, Any]] | None:
        """One trial, whatever others there are, and every value that it trains with, as far as that is
        written yet. None where it has not begun. Raises DamagedRows.
        """
        with _damage_told():
            return self._find(study_name, number)

    def _find(self, study_name: str, number: int) -> tuple[TrialRow, dict[str, Any]] | None:
        if self._engine is None:
            rows = find_rows(study_name, self._storage)
            if not 0 <= number < len(rows):
                return None
            return _of_frozen(rows[number]), dict(rows[number].user_attrs.get(CONFIG, {}))
        with self._engine.connect() as connection:
            found = connection.execute(_ONE, {"study_name": study_name, "number": number}).one_or_none()
            if found is None:
                return None
            written = {"trial_ids": [found.trial_id]}
            attributes = _by_trial(connection, _ATTRIBUTES_WITH_CONFIG, written)
            row = _row(found, attributes, _by_trial(connection, _PARAMS, written))
        config = row.user_attrs.pop(CONFIG, {})
        return row, dict(config)

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
        ended = {row.number: row for row in trials if row.number not in known and row.state.is_finished()}
        if ended:
            self._ended.keep(study_id, {**known, **ended})
        return StudyRows(study_id, trials)


# Built once: to build a statement takes longer than SQLite does to run it.
_STUDY, _TRIAL, _ATTRIBUTE, _PARAM, _STUDY_ATTRIBUTE = (
    model.__table__.c
    for model in (StudyModel, TrialModel, TrialUserAttributeModel, TrialParamModel, StudyUserAttributeModel)
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
_OTHERS = _TRIALS.where(
    (_TRIAL.number > bindparam("upto")) | _TRIAL.number.in_(bindparam("numbers", expanding=True))
)
_ONE = _COLUMNS.join(StudyModel.__table__, _STUDY.study_id == _TRIAL.study_id).where(
    _STUDY.study_name == bindparam("study_name"), _TRIAL.number == bindparam("number")
)
_STUDY_ATTRIBUTES = (
    select(_STUDY_ATTRIBUTE.key, _STUDY_ATTRIBUTE.value_json)
    .join(StudyModel.__table__, _STUDY.study_id == _STUDY_ATTRIBUTE.study_id)
    .where(_STUDY.study_name == bindparam("study_name"))
)
_NAMED: Any = bindparam("trial_ids", expanding=True)
_OF_STUDY = select(_TRIAL.trial_id).where(_TRIAL.study_id == bindparam("study_id"))
_EVERY_ATTRIBUTE = select(_ATTRIBUTE.trial_id, _ATTRIBUTE.key, _ATTRIBUTE.value_json)
_EVERY_PARAM = select(
    _PARAM.trial_id, _PARAM.param_name, _PARAM.param_value, _PARAM.distribution_json
).order_by(_PARAM.param_id)
_ATTRIBUTES_WITH_CONFIG = _EVERY_ATTRIBUTE.where(_ATTRIBUTE.trial_id.in_(_NAMED))
_ATTRIBUTES = _ATTRIBUTES_WITH_CONFIG.where(_ATTRIBUTE.key != CONFIG)
_PARAMS = _EVERY_PARAM.where(_PARAM.trial_id.in_(_NAMED))
_ATTRIBUTES_OF_STUDY = _EVERY_ATTRIBUTE.where(_ATTRIBUTE.trial_id.in_(_OF_STUDY), _ATTRIBUTE.key != CONFIG)
_PARAMS_OF_STUDY = _EVERY_PARAM.where(_PARAM.trial_id.in_(_OF_STUDY))


def _read_trials(connection: Connection, study_id: int, known: Mapping[int, TrialRow]) -> list[TrialRow]:
    """Those that are known to have ended are not asked for again: a large study has few others."""
    upto = max(known, default=-1)
    asked: dict[str, Any] = {"study_id": study_id}
    query = _TRIALS
    if 0 <= upto + 1 - len(known) <= MOST_NAMED:
        open_numbers = [number for number in range(upto + 1) if number not in known]
        query, asked = _OTHERS, {**asked, "upto": upto, "numbers": open_numbers}
    # The states first: who had ended by then has all its attributes by now.
    found = connection.execute(query, asked).all()
    new = _read_rows(connection, study_id, [row for row in found if row.number not in known])
    return sorted([*known.values(), *new], key=lambda row: row.number)


def _read_rows(connection: Connection, study_id: int, found: Sequence[Any]) -> list[TrialRow]:
    """With what belongs to them."""
    if not found:
        return []
    if len(found) <= MOST_NAMED:
        named = {"trial_ids": [row.trial_id for row in found]}
        attributes, params = (_by_trial(connection, query, named) for query in (_ATTRIBUTES, _PARAMS))
    else:
        of = {"study_id": study_id}
        attributes, params = (
            _by_trial(connection, query, of) for query in (_ATTRIBUTES_OF_STUDY, _PARAMS_OF_STUDY)
        )
    return [_row(row, attributes, params) for row in found]


def _by_trial(connection: Connection, query: Select[Any], asked: dict[str, Any]) -> dict[int, list[Any]]:
    written: dict[int, list[Any]] = {}
    for trial_id, *values in connection.execute(query, asked).all():
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
