"""What ours is measured against does the same work; and no benchmark looks at a test split unasked."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.plain import largest_difference
from benchmarks.trajectories import Run, row, train
from service.looks import LOG
from tests.service_process import write_corpus
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
