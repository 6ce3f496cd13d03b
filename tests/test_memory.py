"""What a trial is said to take is what it takes: measured in processes of their own."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import trials.memory
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from models.pieces import EVALUATION_WINDOW
from regularizers.config import Regularization
from service.launcher import DRIVER_ENVIRONMENT
from tests.service_process import write_corpus
from tests.test_cli import run
from trials.evaluation import evaluate
from trials.memory import (
    HEADROOM,
    LIBRARIES,
    NotEnoughMemory,
    bytes_on,
    graphs_bytes,
    limit_of_cgroup,
    peak_bytes,
    require_memory,
    total_bytes,
)
from trials.recorded import Recorded
from trials.spec import TrainingConfig, TrialConfig
from trials.training import Training, _window

MEASURE = """
import json, re, sys
import numpy as np, torch
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from models.pieces import EVALUATION_WINDOW
from regularizers.config import Regularization
from trials.checkpoints import BestCheckpoint, pack_state
from trials.corpora import Vocabulary
from trials.spec import TrainingConfig
from trials.store import CheckpointStore
from trials.training import Training

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

given = json.loads(sys.argv[1])
torch.set_num_threads(1)
before = resident("VmRSS")
config = TrainingConfig(**given["training"], epochs=1, windows="fixed")
window = config.bptt + 10
rng = np.random.default_rng(1)
text = rng.integers(0, given["V"], config.batch_size * (2 * window + 1), dtype=np.int32)
config = TrainingConfig(**{**given["training"], "bptt": window}, epochs=1, windows="fixed")
model, regularization = AWDLSTMConfig(**given["model"]), Regularization(given["regularizer"])
valid = rng.integers(0, given["V"], 600, dtype=np.int32)
training = Training(model, config, regularization, given["V"], text, valid, 1)
words = Vocabulary(tuple(map(str, range(given["V"]))))
store = CheckpointStore(given["store"])
for result in training.run(1e9):
    store.save_best("s", 0, BestCheckpoint(training.weights_to_use(), {}, words, {}).files())
    store.save_last("s", 0, pack_state(*training.state()))
print(resident("VmHWM") - before)
"""

SMALL = {"embedding_size": 64, "hidden_size": 64, "layers": 1}
CASES: list[tuple[dict[str, Any], dict[str, Any], str, int]] = [
    (SMALL, {"batch_size": 20, "bptt": 70}, "fraternal", 10_000),
    (SMALL, {"batch_size": 200, "bptt": 70}, "none", 1_000),
    (
        {"embedding_size": 150, "hidden_size": 250, "layers": 3, "tied": False},
        {"batch_size": 40, "bptt": 35, "averaging": "from-start"},
        "pi_model",
        20_000,
    ),
    (
        {"embedding_size": 300, "hidden_size": 600, "layers": 2},
        {"batch_size": 10, "bptt": 20, "averaging": "none"},
        "expectation_linear",
        5_000,
    ),
    (
        {"layers": 2, "hidden_size": 900},
        {"batch_size": 20, "bptt": 10, "averaging": "from-start"},
        "fraternal",
        31,
    ),
    (
        {"embedding_size": 16, "layers": 1},
        {"batch_size": 2, "bptt": 10, "averaging": "none"},
        "none",
        300_000,
    ),
    (
        {"embedding_size": 300, "hidden_size": 1100, "layers": 3},
        {"batch_size": 40, "bptt": 35, "averaging": "none"},
        "fraternal",
        1_000,
    ),
    (
        {"embedding_size": 300, "hidden_size": 1100, "layers": 3},
        {"batch_size": 40, "bptt": 35, "averaging": "none", "recompute": True},
        "fraternal",
        1_000,
    ),
    (
        {"embedding_size": 200, "hidden_size": 300, "layers": 4},
        {"batch_size": 60, "bptt": 70, "averaging": "none", "recompute": True},
        "pi_model",
        1_000,
    ),
]


def trial(model: dict[str, Any], training: dict[str, Any], regularizer: str) -> TrialConfig:
    return TrialConfig(
        AWDLSTMConfig(**model), TrainingConfig(**training), Regularization(regularizer=regularizer)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "training", "regularizer", "size"), CASES)
def test_the_estimate_lies_above_the_measured_peak_and_not_far_above(
    tmp_path: Path, model: dict[str, Any], training: dict[str, Any], regularizer: str, size: int
) -> None:
    """As a worker does it: with its allocator, saving both checkpoints."""
    given = {"model": model, "training": training, "regularizer": regularizer, "V": size}
    given["store"] = tmp_path.as_uri()
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(given)],
        env={**os.environ, **DRIVER_ENVIRONMENT},
        capture_output=True,
        check=True,
        text=True,
    )
    measured = int(ended.stdout)
    estimate = peak_bytes(trial(model, training, regularizer), size)
    assert measured <= estimate <= 1.8 * measured


def test_more_of_anything_takes_more() -> None:
    base = trial({}, {}, "none")
    for more in (
        trial({"embedding_size": 500}, {}, "none"),
        trial({"hidden_size": 1500}, {}, "none"),
        trial({"layers": 4}, {}, "none"),
        trial({}, {"batch_size": 200}, "none"),
        trial({}, {"bptt": 700}, "none"),
        trial({}, {"batch_size": 200}, "fraternal"),
    ):
        assert peak_bytes(more, 10_000) > peak_bytes(base, 10_000)
    assert peak_bytes(base, 33_278) > peak_bytes(base, 10_000)
    assert peak_bytes(trial({}, {"batch_size": 200, "windows": "fixed"}, "none"), 10_000) < peak_bytes(
        trial({}, {"batch_size": 200}, "none"), 10_000
    )
    assert peak_bytes(trial({}, {"averaging": "none"}, "none"), 10_000) < peak_bytes(base, 10_000)
    for regularizer in ("none", "fraternal"):
        large, recomputing = (
            trial({}, {"batch_size": 80, "recompute": recompute}, regularizer) for recompute in (False, True)
        )
        assert peak_bytes(recomputing, 10_000) < peak_bytes(large, 10_000)


def test_a_trial_that_does_not_fit_is_refused_with_what_it_takes_and_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials.memory, "total_bytes", lambda device: 2**30)
    require_memory(trial({"embedding_size": 64, "layers": 1}, {}, "none"), 10_000, "cpu")
    with pytest.raises(
        NotEnoughMemory, match=r"takes up to [\d.]+ GiB of memory, and cpu has 1.0 GiB in all: lower "
    ):
        require_memory(trial({}, {"batch_size": 400}, "fraternal"), 10_000, "cpu")


def test_training_that_does_not_fit_ends_in_one_line_before_it_starts(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", tokens=3_000)
    result = run("train", "--corpus", str(corpus), "--embedding-size", "9000000", "--layers", "1")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "in all: lower batch_size" in result.stderr


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    assert limit_of_cgroup(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert limit_of_cgroup(tmp_path) == limit_of_cgroup(tmp_path / "nowhere") == math.inf
    assert 0 < total_bytes("cpu") < 2**50


def test_what_is_free_at_the_moment_refuses_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other trials come and go: a refusal is for good."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0, total=2**36))
    require_memory(trial({}, {}, "fraternal"), 10_000, "cpu")


def test_trials_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = trial({}, {}, "fraternal")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2 * bytes_on("cuda", config, 10_000)))
    require_memory(config, 10_000, "cuda", gpu_share=0.5)
    with pytest.raises(NotEnoughMemory, match=r"for a share of 0\.25: .*raise resources\.gpus"):
        require_memory(config, 10_000, "cuda", gpu_share=0.25)


def test_an_evaluation_makes_its_logits_where_the_last_ones_were() -> None:
    """Pieces in places of their own left holes, and one process took twice the memory of another."""
    model = AWDLSTM(AWDLSTMConfig(16, 16, 1), 20_000, torch.Generator().manual_seed(1))
    ids = np.arange(3_000, dtype=np.int32)
    peak, _ = allocated(lambda: evaluate(model, ids))
    assert 4 * EVALUATION_WINDOW * 20_000 <= peak < 1.2 * 4 * EVALUATION_WINDOW * 20_000


def test_graphs_take_memory_of_a_gpu_alone() -> None:
    plain, graphs = trial({}, {}, "fraternal"), trial({}, {"cuda_graphs": True}, "fraternal")
    assert bytes_on("cpu", graphs, 10_000) == bytes_on("cpu", plain, 10_000)
    assert bytes_on("cuda", graphs, 10_000) > bytes_on("cuda", plain, 10_000)


def test_graphs_are_reckoned_with_by_kernels() -> None:
    """Time steps of all layers, pieces of logits, and lengths of windows."""
    base = trial({}, {}, "fraternal")
    for more in (
        trial({"layers": 4}, {}, "fraternal"),
        trial({}, {"bptt": 100}, "fraternal"),
        trial({}, {"batch_size": 100}, "fraternal"),
        trial({}, {"recompute": True}, "fraternal"),
    ):
        assert graphs_bytes(more) > graphs_bytes(base)
    assert graphs_bytes(trial({}, {"windows": "fixed"}, "fraternal")) < graphs_bytes(base) / 30
    assert graphs_bytes(trial({"hidden_size": 100}, {}, "fraternal")) == graphs_bytes(base)


OF_GRAPHS: list[tuple[dict[str, Any], dict[str, Any], str, int]] = [
    ({"embedding_size": 64, "layers": 1}, {"batch_size": 20, "bptt": 70}, "fraternal", 5_000),
    ({"layers": 2, "hidden_size": 900}, {"batch_size": 20, "bptt": 10}, "fraternal", 31),
    ({"embedding_size": 1200, "layers": 1}, {"batch_size": 2, "bptt": 5}, "fraternal", 50),
    ({"embedding_size": 1050, "layers": 1}, {"batch_size": 40, "bptt": 35}, "none", 500),
    (
        {"embedding_size": 300, "layers": 1, "locked": False},
        {"batch_size": 80, "bptt": 70, "recompute": True},
        "fraternal",
        500,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "training", "regularizer", "size"), OF_GRAPHS)
def test_graphs_tensors_lie_below_the_estimate(
    model: dict[str, Any], training: dict[str, Any], regularizer: str, size: int
) -> None:
    """By what torch's allocator gives to the same operations here: to a step's twice, once to all else."""
    of = trial(model, {**training, "windows": "fixed", "averaging": "none", "cuda_graphs": True}, regularizer)
    config, window = of.training, of.training.bptt
    text = np.arange(config.batch_size * (window + 1), dtype=np.int32) % size
    begun: list[Training] = []

    def step() -> None:
        one, zero = begun[0], begun[0].model.zero_state(config.batch_size)
        one._step(*_window(one._columns_TB, 0, window), zero, 1.0)

    def begin() -> None:
        begun.append(Training(of.model, config, of.regularization, size, text, text[:2], 1))
        begun[0]._recorded = Recorded(list(begun[0].model.parameters()), window, lambda compute: compute)
        step()

    (_, stays), (peak, _) = allocated(begin), allocated(step)
    estimate = peak_bytes(of, size, "cuda") - HEADROOM * (LIBRARIES + graphs_bytes(of))
    assert stays + 2 * peak <= estimate


def allocated(act: Callable[[], None]) -> tuple[int, int]:
    """Bytes of tensors beyond those that there were before: at most, and in the end."""
    with torch.profiler.profile(profile_memory=True) as profiled:
        act()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    sizes = list(itertools.accumulate(size for _, size in sorted(events, key=lambda event: event[0])))
    return max(sizes), sizes[-1]


@pytest.mark.gpu
def test_a_gpus_memory_is_its_own() -> None:
    assert total_bytes("cuda") == torch.cuda.mem_get_info()[1]
