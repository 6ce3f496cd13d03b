"""The harness that disturbs sweeps: what it counts, and a short run of it."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from service.database import migrate, open_engine
from tests.chaos import EPOCHS, TIMES, Outcome, Story, deaths, judge, main, summary, to_markdown
from tests.databases import SQLite

LOSSES = [(epoch, 3.0 / epoch) for epoch in range(1, EPOCHS + 1)]


def test_the_deaths_of_a_round_are_a_function_of_seed_and_round() -> None:
    first, same, another_round, another_seed = (
        list(islice(deaths(seed, number), 50)) for seed, number in ((1, 1), (1, 1), (1, 2), (2, 1))
    )
    assert first == same
    assert len({tuple(each) for each in (first, another_round, another_seed)}) == 3


def test_everything_dies_sooner_or_later() -> None:
    assert {death.of for death in islice(deaths(1, 1), 200)} == set(TIMES)


@pytest.fixture
def as_promised() -> Outcome:
    return Outcome(
        sweep={"state": "succeeded", "state_reason": None},
        trials=[
            {"number": number, "state": "COMPLETE", "failure": None, "checkpoint_sha256": f"sum {number}"}
            for number in range(3)
        ],
        losses={number: LOSSES for number in range(3)},
        files={f"t{number:05d}/best.tar": f"sum {number}" for number in range(3)},
        left=[],
    )


def test_a_sweep_like_its_twin_is_as_promised(as_promised: Outcome) -> None:
    assert judge(as_promised, as_promised).faults == []


def _trial(outcome: Outcome, number: int, **changes: Any) -> Outcome:
    trials = list(outcome.trials)
    trials[number] = {**trials[number], **changes}
    return replace(outcome, trials=trials)


@pytest.mark.parametrize(
    ("kind", "fault", "tampered"),
    [
        ("zombies", "trial 1 is RUNNING", lambda was: _trial(was, 1, state="RUNNING")),
        ("zombies", "process 7 is left", lambda was: replace(was, left=["process 7"])),
        (
            "zombies",
            "t00002/last.tar is left",
            lambda was: replace(was, files={**was.files, "t00002/last.tar": "sum"}),
        ),
        (
            "duplicates",
            "its trials have the numbers [0, 1, 2, 2]",
            lambda was: replace(was, trials=[*was.trials, was.trials[-1]]),
        ),
        (
            "duplicates",
            "trial 0 has the epochs [1, 1, 2, 3, 4]",
            lambda was: replace(was, losses={**was.losses, 0: [LOSSES[0], *LOSSES]}),
        ),
        (
            "duplicates",
            "trial 0 has the epochs [1, 2, 3]",
            lambda was: replace(was, losses={**was.losses, 0: LOSSES[:-1]}),
        ),
        ("budget", "2 trials ended, of 3", lambda was: replace(was, trials=was.trials[:-1])),
        ("budget", "trial 1 failed: lost", lambda was: _trial(was, 1, state="FAIL", failure="lost")),
        (
            "budget",
            "the sweep is failed: no more drivers",
            lambda was: replace(was, sweep={"state": "failed", "state_reason": "no more drivers"}),
        ),
        (
            "weights",
            "trial 2 has the checkpoint ('other', 'sum 2'), its twin ('sum 2', 'sum 2')",
            lambda was: _trial(was, 2, checkpoint_sha256="other"),
        ),
        (
            "weights",
            "trial 2 has the checkpoint ('sum 2', 'other'), its twin ('sum 2', 'sum 2')",
            lambda was: replace(was, files={**was.files, "t00002/best.tar": "other"}),
        ),
    ],
)
def test_what_is_not_as_promised_is_said(
    as_promised: Outcome, kind: str, fault: str, tampered: Callable[[Outcome], Outcome]
) -> None:
    assert fault in getattr(judge(tampered(as_promised), as_promised), kind)


def test_a_round_that_does_not_end_counts_against_budget_and_weights() -> None:
    assert "budget exact 0/1, weights bit-identical 0/1" in summary([Story(1, "sqlite")])
    assert "| 1 | sqlite | none |" in to_markdown([Story(1, "sqlite")])


def test_only_what_a_trial_began_again_after_counts_as_redone() -> None:
    ages = {0: [3.0, 1.0, 2.0], 1: [9.0], 2: [0.5]}
    assert Story(1, "sqlite", ages=ages, attempts={0: 3, 1: 1, 2: 4, 3: 2}).redone_s == 3.0 + 2.0 + 0.5


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SQLite]:
    with closing(SQLite(tmp_path / "fraternal.db")) as one:
        yield one


@pytest.mark.sqlite_only("somebody has its lock")
def test_sqlite_that_was_taken_away_takes_no_write_until_it_is_given_back(
    tmp_path: Path, database: SQLite
) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'fraternal.db'}")
    migrate(engine)
    database.take_away()
    with engine.connect() as connection:
        connection.execute(text("PRAGMA busy_timeout = 1"))
        with pytest.raises(OperationalError, match="locked"):
            connection.execute(text("BEGIN IMMEDIATE"))
        connection.rollback()
        database.give_back()
        connection.execute(text("BEGIN IMMEDIATE"))
    engine.dispose()


@pytest.mark.slow
@pytest.mark.sqlite("one of the rounds is over SQLite")
def test_two_disturbed_sweeps_end_as_if_nothing_had_died(capsys: pytest.CaptureFixture[str]) -> None:
    """A short `make chaos`: one over SQLite, one over PostgreSQL; with this seed most things die soon."""
    assert main(["--rounds", "2", "--trials", "4", "--seed", "345"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "zombies 0, duplicates 0, budget exact 2/2, weights bit-identical 2/2" in said
    assert "| 2 | postgresql |" in said
