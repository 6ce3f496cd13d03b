"""A sweep goes on from a backup that was made while it ran, beside the original. Real processes, real Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.databases import environment_of
from tests.service_process import (
    ServiceProcess,
    assert_exactly_the_budget,
    assert_nothing_left,
    running_service,
    small_spec,
    write_corpus,
)
from trials.store import CheckpointStore

pytestmark = pytest.mark.slow


def fraternal(command: str, backup: Path, data_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", command, str(backup), "--data-dir", str(data_dir)],
        env={**os.environ, **environment_of(data_dir)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_backup_made_while_a_sweep_runs_goes_on_beside_the_original_and_both_end_the_same(
    tmp_path: Path,
) -> None:
    """The original is the twin: nothing may have disturbed it, neither the backup nor the copy's drivers."""
    corpus = write_corpus(tmp_path / "corpus")
    with running_service(tmp_path / "original") as original:
        asked = small_spec(corpus, retry={"checkpoint_every_s": 0.01}, budget={"trials": 4})
        sweep_id = original.submit(asked)
        original.wait_for_epochs(sweep_id, 3)
        fraternal("backup", tmp_path / "backup", tmp_path / "original")
        fraternal("restore", tmp_path / "backup", tmp_path / "copy")
        with running_service(tmp_path / "copy") as copy:
            assert copy.sweep(sweep_id)["epochs_done"] >= 3
            for service, generation in ((original, 1), (copy, 2)):
                sweep = service.wait_for_end(sweep_id)
                assert (sweep["state"], sweep["driver_generation"]) == ("succeeded", generation)
                assert_exactly_the_budget(service, sweep_id)
            assert {trial["attempt"] for trial in original.trials(sweep_id)} == {1}
            assert {trial["attempt"] for trial in copy.trials(sweep_id)} == {1, 2}
            assert copy.checkpoints(sweep_id) == original.checkpoints(sweep_id)
            for service in (original, copy):
                assert files(service, sweep_id) == service.checkpoints(sweep_id)
            assert_nothing_left(original, sweep_id)


def files(service: ServiceProcess, sweep_id: str) -> dict[int, str]:
    """SHA-256 of the best checkpoints as they lie in the store."""
    store = CheckpointStore((service.data_dir / "checkpoints").as_uri())
    return {
        trial["number"]: store.best_sha256(sweep_id, trial["number"]) for trial in service.trials(sweep_id)
    }
