"""What stays on the disk: what somebody refers to, and nothing else."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage

import service.retention
from service.database import now
from service.records import Records, SweepJournal
from service.retention import KEPT_ASIDE, LEFT_ALONE, collect_orphans
from service.studies import write_down
from tests.fakes import failed, report, reports, spec
from trials.ledger import StudyLedger
from trials.store import CheckpointStore
from trials.tasks import Report, Task

FILES = {"weights": bytes(500)}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore((tmp_path / "checkpoints").as_uri())


def play(
    records: Records,
    storage: InMemoryStorage,
    store: CheckpointStore,
    work: Callable[[Task], Any] = reports,
    **changes: Any,
) -> StudyLedger:
    """A sweep whose trials save what they report of."""
    asked = spec(**changes)
    record = records.add_sweep("s1", asked)
    generation = records.claim(record, fruitless=0, epochs_done=0)
    assert generation is not None
    ledger = StudyLedger(asked, "s1", storage, SweepJournal(records, "s1", generation), store)
    while (task := ledger.next_task()) is not None:
        for said in work(task):
            store.save_best("s1", task.number, FILES)
            store.save_last("s1", task.number, FILES)
            if not ledger.record(task, said):
                break
    write_down(records, "s1", generation, ledger)
    return ledger


def there(tmp_path: Path) -> set[str]:
    root = tmp_path / "checkpoints"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def put(tmp_path: Path, name: str, age: timedelta = LEFT_ALONE * 2) -> None:
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"left")
    at = time.time() - age.total_seconds()
    os.utime(path, (at, at))


def make_old(tmp_path: Path) -> None:
    for name in there(tmp_path):
        put(tmp_path, name)


def fails_in_trial_1(task: Task) -> list[Report]:
    return [report(task, 1), failed("out_of_memory")] if task.number == 1 else list(reports(task))


def test_what_rests_refers_to_stays_and_everything_else_is_put_aside(
    records: Records, store: CheckpointStore, tmp_path: Path
) -> None:
    storage = InMemoryStorage()
    play(records, storage, store, fails_in_trial_1)
    referred_to = {"s1/t00001/last.tar", *(f"s1/t{number:05}/best.tar" for number in range(6))}
    assert there(tmp_path) == referred_to
    orphans = {
        "s1/t00000/last.tar",  # the driver died after the trial had ended
        "s1/t00001/last.tar.part",  # a worker was killed while it wrote
        "s1/t00002/previous.tar",  # of an earlier version
        "s1/t00006/best.tar",  # of no trial
        "s1/pause-1-abc",
        "s2/t00000/best.tar",  # of no sweep
        "odd",
    }
    for name in orphans:
        put(tmp_path, name)
    make_old(tmp_path)
    found = collect_orphans(records, storage, store, store_is_ours=True)
    assert set(found) == orphans
    aside = {f"quarantine/{now():%Y-%m-%d}/{name}" for name in orphans}
    assert there(tmp_path) == referred_to | aside
    assert collect_orphans(records, storage, store, store_is_ours=True) == []


def test_in_a_store_that_others_use_only_ones_own_sweeps_are_looked_at(
    records: Records, store: CheckpointStore, tmp_path: Path
) -> None:
    storage = InMemoryStorage()
    play(records, storage, store)
    put(tmp_path, "s2/t00000/best.tar")
    put(tmp_path, "s1/t00002/previous.tar")
    (found,) = collect_orphans(records, storage, store, store_is_ours=False)
    assert found.endswith("s1/t00002/previous.tar")


def test_what_was_just_written_and_what_a_sweep_that_moves_has_are_left_alone(
    records: Records, store: CheckpointStore, tmp_path: Path
) -> None:
    storage = InMemoryStorage()
    play(records, storage, store)
    put(tmp_path, "s1/t00002/previous.tar", age=timedelta(0))
    put(tmp_path, "s2/t00000/best.tar", age=timedelta(0))
    records.add_sweep("s3", spec())
    put(tmp_path, "s3/t00000/last.tar.part")
    assert collect_orphans(records, storage, store, store_is_ours=True) == []


def test_what_was_put_aside_is_removed_when_its_time_has_come_and_not_before(
    records: Records, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = InMemoryStorage()
    put(tmp_path, "s2/t00000/best.tar")
    assert collect_orphans(records, storage, store, store_is_ours=True)
    day = now()
    for later, left in ((KEPT_ASIDE, 1), (KEPT_ASIDE + timedelta(days=1), 0)):
        monkeypatch.setattr(service.retention, "now", lambda later=later: day + later)
        assert collect_orphans(records, storage, store, store_is_ours=True) == []
        assert len(there(tmp_path)) == left


@pytest.mark.parametrize("kept", [1, 2, None])
def test_bests_of_so_many_trials_of_each_arm_stay_and_those_that_may_be_tried_again(
    records: Records, store: CheckpointStore, tmp_path: Path, kept: int | None
) -> None:
    storage = InMemoryStorage()
    ledger = play(records, storage, store, fails_in_trial_1, retention={"bests_per_arm": kept})
    rows = ledger._study.get_trials()
    expected = {1}
    for arm in (0, 1):
        ended = [row for row in rows if row.number % 2 == arm and row.number != 1]
        ended.sort(key=lambda row: (row.user_attrs["best_valid_loss"], row.number))
        expected |= {row.number for row in ended[:kept]}
    assert {name for name in there(tmp_path) if "best" in name} == {
        f"s1/t{number:05}/best.tar" for number in expected
    }


def test_after_every_epoch_there_are_the_bests_and_lasts_of_live_trials_and_the_bests_kept(
    records: Records, store: CheckpointStore, tmp_path: Path
) -> None:
    seen = []

    def watched(task: Task) -> Any:
        for said in reports(task):
            yield said
            seen.append(there(tmp_path))

    play(records, InMemoryStorage(), store, watched, retention={"bests_per_arm": 1})
    assert len(seen) == 6 * 2, "the last epoch of a trial is followed by its end"
    for names in seen:
        assert len([name for name in names if name.endswith("last.tar")]) == 1
        assert len([name for name in names if name.endswith("best.tar")]) <= 2 + 1
        assert all(name.endswith(("last.tar", "best.tar")) for name in names)


def test_sweep_that_wakes_while_it_is_looked_at_loses_nothing(
    records: Records, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next driver puts another study in the place of the one whose rows are being read."""
    storage = InMemoryStorage()
    play(records, storage, store)
    make_old(tmp_path)

    def wake(study_name: str, storage: Any) -> list[Any]:
        records.extend("s1", lambda record: record.spec.budget.model_copy(update={"trials": 9}))
        return []

    monkeypatch.setattr(service.retention, "find_rows", wake)
    assert collect_orphans(records, storage, store, store_is_ours=True) == []
