"""Trials read in plain queries are what Optuna's own objects say, on both databases."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from optuna import create_study
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import event, text

from service.studies import open_storage
from tests.databases import NO_TYPES
from trials.rows import CONFIG, Remembered, TrialReader, TrialRow
from trials.studies import DamagedRows, delete_study, set_failure
from trials.tasks import Failure

DISTRIBUTIONS = {
    "kappa": FloatDistribution(0.01, 1, log=True),
    "batch_size": CategoricalDistribution((20, "forty", None, True)),
    "nonmono": IntDistribution(2, 8, step=2),
}
STATES = [TrialState.COMPLETE, TrialState.RUNNING, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING]


@pytest.fixture
def database(url: str) -> Iterator[RDBStorage]:
    opened = open_storage(url)
    yield opened
    opened.remove_session()
    opened.engine.dispose()


@pytest.fixture
def storage(database: RDBStorage) -> BaseStorage:
    return get_storage(database)


def trial(number: int, state: TrialState) -> FrozenTrial:
    params = {"kappa": 0.1 + number / 100, "batch_size": [20, "forty", None, True][number % 4], "nonmono": 4}
    return create_trial(
        state=state,
        value=100.0 if state == TrialState.COMPLETE else None,
        params=params,
        distributions=DISTRIBUTIONS,
        user_attrs={"arm": "fd", "best_valid_loss": 4.6, "lost_attempts": [1, 2], CONFIG: {"seed": number}},
        intermediate_values={1: 120.0, 2: 100.0},
    )


def fill(storage: BaseStorage, name: str = "s1", states: list[TrialState] = STATES) -> int:
    study = create_study(study_name=name, storage=storage)
    for number, state in enumerate(states):
        storage.create_new_trial(study._study_id, template_trial=trial(number, state))
    return study._study_id


def as_optuna_has_it(storage: BaseStorage, study_id: int) -> list[TrialRow]:
    def utc(local: datetime | None) -> datetime | None:
        return None if local is None else local.astimezone(UTC).replace(tzinfo=None)

    return [
        TrialRow(
            row.number,
            row.state,
            row.params,
            {name: value for name, value in row.user_attrs.items() if name != CONFIG},
            utc(row.datetime_start),
            utc(row.datetime_complete),
        )
        for row in storage.get_all_trials(study_id)
    ]


def statements(database: RDBStorage) -> list[str]:
    seen: list[str] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        seen.append(statement)

    return seen


def test_rows_are_what_optuna_says(storage: BaseStorage) -> None:
    fill(storage, "another")
    study_id = fill(storage)
    reader = TrialReader(storage)
    for _ in range(2):  # the second time from memory
        found = reader.read("s1")
        assert found.study_id == study_id
        assert found.trials == as_optuna_has_it(storage, study_id)
        assert [list(row.params) for row in found.trials] == [list(DISTRIBUTIONS)] * len(STATES)


def test_memory_storage_says_the_same(storage: BaseStorage) -> None:
    memory = InMemoryStorage()
    for filled in (storage, memory):
        fill(filled)
    told = [TrialReader(filled).read("s1").trials for filled in (storage, memory)]
    assert [(row.number, row.state, dict(row.params), dict(row.user_attrs)) for row in told[0]] == [
        (row.number, row.state, dict(row.params), dict(row.user_attrs)) for row in told[1]
    ]
    assert TrialReader(memory).read("none") == TrialReader(storage).read("none")


def test_what_has_ended_is_read_once_and_what_runs_each_time(
    storage: BaseStorage, database: RDBStorage
) -> None:
    study_id = fill(storage)
    reader = TrialReader(storage)
    reader.read("s1")
    _, running, *_ = storage.get_all_trials(study_id)
    storage.set_trial_user_attr(running._trial_id, "best_valid_loss", 4.4)
    assert reader.read("s1").trials[1].user_attrs["best_valid_loss"] == 4.4
    storage.set_trial_state_values(running._trial_id, TrialState.COMPLETE, [81.0])
    storage.create_new_trial(study_id, template_trial=trial(5, TrialState.RUNNING))
    told = reader.read("s1").trials
    assert told == as_optuna_has_it(storage, study_id)
    for row in storage.get_all_trials(study_id, states=[TrialState.RUNNING]):
        storage.set_trial_state_values(row._trial_id, TrialState.FAIL)
    assert reader.read("s1").trials == as_optuna_has_it(storage, study_id)
    seen = statements(database)
    reader.read("s1")
    assert len(seen) == 2, "its id, and what trials there are"


def test_a_large_study_is_read_in_as_many_queries(storage: BaseStorage, database: RDBStorage) -> None:
    study_id = fill(storage, states=[TrialState.COMPLETE])
    with database.engine.begin() as connection:
        for number in range(1, 700):
            made = text("INSERT INTO trials (study_id, number, state) VALUES (:study, :number, 'COMPLETE')")
            connection.execute(made, {"study": study_id, "number": number})
    seen = statements(database)
    assert [row.number for row in TrialReader(storage).read("s1").trials] == list(range(700))
    assert len(seen) == 4


def test_a_study_of_the_same_name_is_another_one(storage: BaseStorage) -> None:
    fill(storage)
    reader = TrialReader(storage)
    assert len(reader.read("s1").trials) == len(STATES)
    delete_study("s1", storage)
    assert reader.read("s1").trials == []
    study_id = fill(storage, states=[TrialState.FAIL])
    assert [row.state for row in reader.read("s1").trials] == [TrialState.FAIL]
    assert reader.read("s1").study_id == study_id


DAMAGE = [
    pytest.param("UPDATE trials SET datetime_start = 'yesterday'", marks=NO_TYPES),
    "UPDATE trial_user_attributes SET value_json = '{dam'",
    "UPDATE trial_params SET distribution_json = '{dam'",
    "UPDATE trial_params SET distribution_json = '{}'",
    pytest.param("UPDATE trials SET state = 'ODD'", marks=NO_TYPES),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_are_told_of_as_such(optunas: RDBStorage, damage: str) -> None:
    fill(get_storage(optunas))
    with optunas.engine.begin() as connection:
        connection.execute(text(damage))
    reader = TrialReader(optunas)
    with pytest.raises(DamagedRows):
        reader.read("s1")
    with pytest.raises(DamagedRows):
        reader.find("s1", 0)


def test_a_trial_that_failed_in_whatever_words_hides_no_other(storage: BaseStorage) -> None:
    study = create_study(study_name="s1", storage=storage)
    for words in ("half a pair \ud800, a NUL \0", "why"):
        failing = study.ask()
        set_failure(failing, Failure("user_error", words))
        study.tell(failing, state=TrialState.FAIL)
    read = [row.user_attrs["failure_message"] for row in TrialReader(storage).read("s1").trials]
    assert read == ["half a pair ?, a NUL \N{REPLACEMENT CHARACTER}", "why"]


def test_one_trial_is_found_whatever_others_there_are(storage: BaseStorage, database: RDBStorage) -> None:
    study_id = fill(storage)
    reader = TrialReader(storage)
    expected = as_optuna_has_it(storage, study_id)
    seen = statements(database)
    found = [reader.find("s1", number) for number in range(len(STATES))]
    assert found == [(row, {"seed": row.number}) for row in expected]
    assert len(seen) == 3 * len(STATES)
    with database.engine.begin() as connection:
        connection.execute(text(f"DELETE FROM trial_user_attributes WHERE key = '{CONFIG}'"))
    assert reader.find("s1", 1) == (expected[1], {}), "not written yet"
    assert reader.find("s1", len(STATES)) is reader.find("s1", -1) is reader.find("none", 0) is None
    memory = InMemoryStorage()
    fill(memory)
    told = TrialReader(memory).find("s1", 3)
    assert told is not None
    assert (told[0].number, told[0].state, told[1]) == (3, TrialState.FAIL, {"seed": 3})
    assert TrialReader(memory).find("s1", 5) is TrialReader(memory).find("none", 0) is None


def test_what_was_used_last_is_remembered_as_far_as_there_is_room() -> None:
    """Each value takes one more than its length."""
    remembered: Remembered[str, list[int]] = Remembered(9, len)
    remembered.keep("a", [1, 2])
    remembered.keep("b", [3, 4])
    remembered.keep("a", [1, 2, 5])
    assert remembered.find("b") == [3, 4]
    remembered.keep("c", [6])  # exactly as much as there is room for
    assert remembered.find_all(["a", "b", "x", "c"]) == {"a": [1, 2, 5], "b": [3, 4], "c": [6]}
    remembered.find("a")
    remembered.keep("d", [7])
    assert [remembered.find(key) for key in "abcd"] == [[1, 2, 5], None, [6], [7]]
    assert remembered.keep("e", list(range(9))) == list(range(9))
    assert [remembered.find(key) for key in "acde"] == [[1, 2, 5], [6], [7], None], "too long to be kept"
    remembered.keep("a", list(range(9)))
    assert remembered.find("a") is None, "nor is what it was before"
    for number in range(100):
        remembered.keep(str(number), [])
    assert sum(remembered.find(str(number)) is not None for number in range(100)) == 9
