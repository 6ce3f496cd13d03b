"""The configurations that are told before a sweep runs are those that it tries."""

from dataclasses import asdict
from typing import Any

import optuna
import pytest

from tests.fakes import MemoryJournal, drive, open_ledger, rows, spec
from trials.plan import plan

SAMPLERS: list[dict[str, Any]] = [
    {"name": "random", "seed": 3},
    {"name": "qmc", "seed": 3},
    {"name": "grid", "seed": 3},
]
GRID_SPACE = {
    "batch_size": {"type": "choice", "values": [10, 20, 30]},
    "layers": {"type": "integer", "low": 1, "high": 2},
}


def tried(asked: Any) -> list[tuple[int, dict[str, Any]]]:
    """What the ledger hands out, in a study in memory."""
    storage, journal = optuna.storages.InMemoryStorage(), MemoryJournal()
    journal.points = [dict(point) for point in asked.points]
    drive(open_ledger(asked, storage, journal))
    return [(row.number, row.user_attrs["config"]) for row in rows(storage)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler["name"])
def test_planned_configurations_are_those_that_the_ledger_hands_out(sampler: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"sampler": sampler, "budget": {"trials": 9}}
    if sampler["name"] == "grid":
        changes["space"] = GRID_SPACE
    for points in ([], [{"batch_size": 20}]):
        asked = spec(**changes, points=points)
        planned = plan(asked)
        assert [(trial.number, asdict(trial.config)) for trial in planned] == tried(asked)
        assert all(trial.is_exact for trial in planned)
        assert [trial.seed for trial in planned] == [asked.seed_of(number) for number in range(9)]


def test_draws_of_a_sampler_that_learns_are_exact_until_it_has() -> None:
    asked = spec(sampler={"name": "tpe", "startup_trials": 2}, budget={"trials": 8})
    planned = plan(asked)
    assert [trial.is_exact for trial in planned] == [True] * 4 + [False] * 4
    first = [(trial.number, asdict(trial.config)) for trial in planned if trial.is_exact]
    assert tried(asked)[:4] == first


def test_a_large_sweep_is_told_by_its_first_trials() -> None:
    asked = spec(budget={"trials": 100_000})
    assert [trial.number for trial in plan(asked, 5)] == [0, 1, 2, 3, 4]
    assert plan(asked, 5)[:3] == plan(asked, 3)
