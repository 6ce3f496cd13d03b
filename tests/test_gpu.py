"""Training on a CUDA device, where one is there; the laws of a step and of the head have their own files."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import trials.attempt
import trials.recorded
from models.config import AWDLSTMConfig, Precision
from models.precision import tf32_products
from models.side_by_side import _cell, _cell_backward
from regularizers.config import Regularization
from tests.test_step import REGULARIZATIONS
from tests.test_training import (
    CONFIG,
    KEPT,
    MODEL,
    TRAIN,
    VALID,
    V,
    assert_equal_weights,
    saved_and_read,
    text,
    untimed,
)
from trials.attempt import ALIVE, is_out_of_memory, run_attempt
from trials.corpora import PathCorpus
from trials.evaluation import evaluate, evaluate_mc
from trials.gpus import driver_version, visible_gpus
from trials.memory import (
    GPU_CONTEXT,
    KERNEL,
    give_back_gpu,
    graphs_bytes,
    keep_to_share,
    peak_bytes,
    total_bytes,
)
from trials.recorded import cuda_recorder
from trials.spec import TrainingConfig, TrialConfig
from trials.store import CheckpointStore
from trials.tasks import Task
from trials.training import Training

pytestmark = pytest.mark.gpu


GRAPHS = pytest.mark.parametrize("cuda_graphs", [False, True])


def build(
    device: str = "cuda",
    averaging: Literal["none", "from-start"] = "from-start",
    cuda_graphs: bool = False,
) -> Training:
    config = replace(CONFIG, epochs=3, averaging=averaging, cuda_graphs=cuda_graphs)
    return Training(MODEL, config, Regularization("fraternal"), V, TRAIN, VALID, 1, device)


@GRAPHS
@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_every_regularizer_trains(name: str, cuda_graphs: bool) -> None:
    config = replace(CONFIG, cuda_graphs=cuda_graphs)
    training = Training(MODEL, config, REGULARIZATIONS[name], V, TRAIN, VALID, 1, "cuda")
    first, *_, last = training.epochs()
    assert last.train_loss < first.train_loss
    assert {tensor.device.type for tensor in training.weights_to_use().values()} == {"cuda"}


@GRAPHS
@pytest.mark.parametrize("averaging", ["none", "from-start"])
def test_training_that_goes_on_in_mid_epoch_equals_training_that_never_stopped(
    averaging: Literal["none", "from-start"], cuda_graphs: bool
) -> None:
    whole = build(averaging=averaging, cuda_graphs=cuda_graphs)
    states = [whole.state() for _ in whole.run(pause_every_s=0)]
    for state in states[::29]:
        resumed = build(averaging=averaging, cuda_graphs=cuda_graphs)
        resumed.load_state(*saved_and_read(state))
        list(resumed.epochs())
        assert untimed(resumed.history) == untimed(whole.history)
        assert_equal_weights(resumed.state()[0], whole.state()[0])


@pytest.mark.parametrize(("one", "other"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_state_is_taken_up_on_another_device(one: str, other: str) -> None:
    started = build(one)
    next(started.epochs())
    resumed = build(other)
    resumed.load_state(*started.state())
    *_, last = resumed.epochs()
    assert last.epoch == 3


@GRAPHS
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_every_regularizer_trains_in_every_precision(
    name: str, precision: Precision, cuda_graphs: bool
) -> None:
    configs = [
        replace(CONFIG, lr=1.0, precision=each, cuda_graphs=cuda_graphs) for each in ("float32", precision)
    ]
    single, other = (
        Training(MODEL, config, REGULARIZATIONS[name], V, TRAIN, VALID, 1, "cuda") for config in configs
    )
    for expected, found in zip(single.epochs(), other.epochs(), strict=True):
        if precision == "bf16":  # in TF32 cuBLAS may find so small a product no worse without tensor cores
            assert found.train_loss != expected.train_loss
        assert found.train_loss == pytest.approx(expected.train_loss, rel=0.01)
        assert found.valid_loss == pytest.approx(expected.valid_loss, rel=0.01)


@GRAPHS
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_computing_layers_again_changes_no_bit(precision: Precision, cuda_graphs: bool) -> None:
    config = replace(CONFIG, epochs=2, precision=precision, cuda_graphs=cuda_graphs)
    kept, recomputed = (
        Training(
            MODEL,
            replace(config, recompute=recompute),
            Regularization("fraternal"),
            *(V, TRAIN, VALID, 1, "cuda"),
        )
        for recompute in (False, True)
    )
    assert untimed(tuple(kept.epochs())) == untimed(tuple(recomputed.epochs()))


@pytest.mark.parametrize("batch_size", [3, 400])
def test_graphs_train_as_single_steps_do_but_for_rounding(batch_size: int) -> None:
    """In float64, and in windows of many lengths; tests/test_step.py has one step. Of more than 3,072 words
    torch sorts the gradients of the embedding."""
    config = replace(CONFIG, lr=1.0, state_reset_p=0.3, batch_size=batch_size)
    words = text(60 * batch_size, 1)
    plain, graphs = (
        Training(
            MODEL,
            replace(config, cuda_graphs=cuda_graphs),
            Regularization("fraternal"),
            *(V, words, VALID, 1, "cuda"),
        )
        for cuda_graphs in (False, True)
    )
    for training in (plain, graphs):
        training.model.double()
    for expected, found in zip(plain.epochs(), graphs.epochs(), strict=True):
        assert found.optimised == pytest.approx(expected.optimised, rel=1e-9)
        assert found.valid_loss == pytest.approx(expected.valid_loss, rel=1e-9)


def test_lengths_without_a_graph_train_bit_for_bit_as_those_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = untimed(tuple(build(cuda_graphs=True).epochs()))
    monkeypatch.setattr(trials.recorded, "MOST_GRAPHS", 2)
    assert untimed(tuple(build(cuda_graphs=True).epochs())) == expected


def test_graphs_go_on_when_those_of_another_training_are_gone() -> None:
    """And what these worked with has become somebody else's."""
    expected = untimed(tuple(build(cuda_graphs=True).epochs()))
    going_on, other = build(cuda_graphs=True), build(cuda_graphs=True)
    first = next(going_on.epochs())
    next(other.epochs())
    del other
    give_back_gpu()
    taken = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    assert untimed((first, *going_on.epochs())) == expected
    assert all(each.isnan().all() for each in taken)


@GRAPHS
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_step_of_the_full_size_takes_no_more_memory_than_is_reckoned_with(
    precision: Precision, recompute: bool, cuda_graphs: bool
) -> None:
    model, words = AWDLSTMConfig(), 10_000
    config = TrainingConfig(
        windows="fixed", averaging="none", precision=precision, recompute=recompute, cuda_graphs=cuda_graphs
    )
    give_back_gpu()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    train = np.arange(config.batch_size * (2 * config.bptt + 1), dtype=np.int32) % words
    regularization = Regularization("fraternal")
    training = Training(model, config, regularization, words, train, train[:100], 1, "cuda")
    for _ in training.run(pause_every_s=0):
        break
    taken = torch.cuda.max_memory_reserved() - before
    reckoned = peak_bytes(TrialConfig(model, config, regularization), words, "cuda")
    print(f"{taken / 2**20:,.0f} MiB, reckoned with are {reckoned / 2**20:,.0f}")
    assert taken <= reckoned


def test_a_cell_in_one_kernel_is_that_in_many() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs_AG, recurrent_AG = (torch.randn(3, 20, generator=generator).double() for _ in range(2))
    c_AH, d_h_AH, d_c_AH = (torch.randn(3, 5, generator=generator).double() for _ in range(3))
    results = []
    for device in ("cpu", "cuda"):
        before_AH = c_AH.to(device)
        h_AH, after_AH, gates_AG = _cell(inputs_AG.to(device), recurrent_AG.to(device), before_AH)
        backward = _cell_backward(d_h_AH.to(device), d_c_AH.to(device), before_AH, after_AH, gates_AG)
        results.append([each.cpu() for each in (h_AH, after_AH, *backward)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_float32_is_not_tf32() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = one.double() @ other.double()
    product = (one.cuda() @ other.cuda()).cpu().double()
    assert (product - exact).abs().max().item() < 1e-3
    with tf32_products(True):
        rounded = (one.cuda() @ other.cuda()).cpu().double()
    assert (rounded - exact).abs().max().item() > 1e-3


@pytest.mark.parametrize("columns", [2, 7])
def test_columns_give_the_loss_of_batch_1(columns: int) -> None:
    model = build("cuda").model
    assert evaluate(model, VALID, columns=columns) == pytest.approx(
        evaluate(model, VALID, columns=1), abs=1e-5
    )


def test_a_model_predicts_the_same_on_either_device() -> None:
    training = build("cpu")
    next(training.epochs())
    expected = evaluate(training.model, VALID)
    model = training.model.to("cuda")
    assert evaluate(model, VALID) == pytest.approx(expected, rel=1e-5)
    assert evaluate_mc(model, VALID, 3, seed=1) != pytest.approx(expected, rel=1e-5)
    model.config = KEPT  # nothing is dropped: every sample of the masks is the whole model
    assert evaluate_mc(model, VALID, 3, seed=1) == pytest.approx(expected, rel=1e-5)


def one_epoch(folder: Path, **changes: Any) -> Task:
    for split, ids in (("train", TRAIN), ("valid", VALID), ("test", VALID)):
        (folder / f"{split}.txt").write_text(" ".join(map(str, ids)))
    config = TrialConfig(MODEL, replace(CONFIG, epochs=1), Regularization("fraternal"))
    return replace(Task("s1", 0, 1, "fd", 1, config, PathCorpus(path=str(folder)), "cuda", 0), **changes)


def test_a_report_names_the_card_and_what_is_below_it(tmp_path: Path) -> None:
    *_, report = run_attempt(one_epoch(tmp_path), CheckpointStore((tmp_path / "store").as_uri()), tmp_path)
    assert report.failure is None
    assert report.device == f"cuda: {torch.cuda.get_device_name()}"
    assert report.runtime is not None
    (gpu, *_) = visible_gpus()
    assert f"; CUDA {torch.version.cuda}; cuDNN {torch.backends.cudnn.version()}; driver " in report.runtime
    assert report.runtime.endswith(f"driver {driver_version()}; {gpu.uuid}")
    assert gpu.name == torch.cuda.get_device_name()
    assert str(torch.cuda.get_device_properties(0).uuid) in gpu.uuid or gpu.uuid.startswith("MIG-")


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    """Afterwards this process may take all of it again."""
    yield
    keep_to_share("cuda", 1.0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("whole_gpu")
def test_a_trial_that_takes_more_than_its_part_runs_out_of_memory_by_itself() -> None:
    total = total_bytes("cuda")
    torch.cuda.empty_cache()
    keep_to_share("cuda", 0.5)
    own = torch.empty(int(0.3 * total), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.empty(int(0.3 * total), dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(refused.value)
    del own
    torch.cuda.empty_cache()
    keep_to_share("cuda", 1.0)
    torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")


@pytest.mark.usefixtures("whole_gpu")
def test_a_recording_that_runs_out_of_memory_says_so_and_another_goes_on() -> None:
    number, large, kept = torch.zeros((), device="cuda"), 2**28, []

    def compute() -> None:
        number.add_(1)
        if torch.cuda.is_current_stream_capturing():
            kept.append(torch.empty(large, dtype=torch.uint8, device="cuda"))

    torch.cuda.empty_cache()
    room = (torch.cuda.memory_reserved() + large // 2) / total_bytes("cuda")
    torch.cuda.set_per_process_memory_fraction(room)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        cuda_recorder(torch.device("cuda"))(compute)
    assert is_out_of_memory(refused.value)
    assert not kept
    keep_to_share("cuda", 1.0)
    give_back_gpu()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    list(build(cuda_graphs=True).epochs())


HOLD = """
import sys, torch
held = torch.empty(int(float(sys.argv[1]) * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def held_by_another(share: float) -> Iterator["subprocess.Popen[str]"]:
    """So much of the GPU's memory, by a process that gives it back for a line, or at the end of the block."""
    command = [sys.executable, "-c", HOLD, str(share)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            yield other
        finally:
            other.kill()


@pytest.mark.usefixtures("whole_gpu")
def test_a_trial_waits_until_another_process_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.empty_cache()
    monkeypatch.setattr(trials.attempt, "peak_bytes", lambda *_: int(0.6 * total_bytes("cuda")))
    monkeypatch.setattr(trials.attempt, "GPU_PATIENCE_S", 60.0)
    store = CheckpointStore((tmp_path / "store").as_uri())
    with held_by_another(0.6) as other:
        running = run_attempt(one_epoch(tmp_path), store, tmp_path)
        assert [next(running) for _ in range(3)] == [ALIVE] * 3, "it waits"
        other.communicate("\n")
    *_, report = running
    assert report.finished
    assert report.failure is None


@pytest.mark.usefixtures("whole_gpu")
def test_a_gpu_that_stays_full_is_an_end_of_memory_that_names_who_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.empty_cache()
    monkeypatch.setattr(trials.attempt, "peak_bytes", lambda *_: int(0.6 * total_bytes("cuda")))
    monkeypatch.setattr(trials.attempt, "GPU_PATIENCE_S", 1.0)
    store = CheckpointStore((tmp_path / "store").as_uri())
    with held_by_another(0.6):
        *_, report = run_attempt(one_epoch(tmp_path), store, tmp_path)
    assert report.failure is not None
    assert report.failure.failure_class == "out_of_memory"
    assert "has been free for 1 s" in report.failure.message


CONTEXT = """
import sys, torch
from tests.test_gpu import build
training = build(cuda_graphs=sys.argv[1] == "True")
list(training.epochs())
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
print(total - free - torch.cuda.memory_reserved())
"""


@GRAPHS
def test_what_cuda_takes_beside_tensors_is_no_more_than_is_reckoned_with(cuda_graphs: bool) -> None:
    """By what is free on the card before and while one process has it: in a container NVML knows no ids."""
    torch.cuda.synchronize()
    before = total_bytes("cuda") - torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-c", CONTEXT, str(cuda_graphs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken = int(done.stdout) - before
    print(f"CUDA's context takes {taken / 2**20:.0f} MiB")
    config = TrialConfig(MODEL, build("cpu")._config, Regularization("fraternal"))
    assert 0 < taken <= GPU_CONTEXT + (graphs_bytes(config) if cuda_graphs else 0)


def test_a_kernel_in_a_graph_takes_no_more_than_is_reckoned_with() -> None:
    number = torch.zeros((), device="cuda")
    record = cuda_recorder(torch.device("cuda"))

    def compute() -> None:
        for _ in range(1000):
            number.add_(1)

    replays = [record(compute)]
    before = torch.cuda.mem_get_info()[0]
    for _ in range(40):
        replays.append(record(compute))
        replays[-1]()
    torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info()[0]
    print(f"CUDA keeps {taken / 40_000:.0f} bytes of a kernel")
    assert taken <= 40_000 * KERNEL
    assert number.item() == 81_000


@GRAPHS
def test_a_worker_gives_a_trials_memory_back_before_the_next_one(tmp_path: Path, cuda_graphs: bool) -> None:
    list(build(cuda_graphs=cuda_graphs).epochs())  # after which cuBLAS keeps its workspaces
    give_back_gpu()
    before, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    task = one_epoch(tmp_path)
    training = replace(task.config.training, cuda_graphs=cuda_graphs)
    task = replace(task, config=replace(task.config, training=training))
    running = run_attempt(task, CheckpointStore((tmp_path / "store").as_uri()), tmp_path)
    next(running), next(running)
    assert torch.cuda.memory_allocated() > allocated
    running.close()
    give_back_gpu()
    assert torch.cuda.memory_reserved() <= before


CHOSEN_LATE = """
import os
import ray
import torch
import trials.attempt
import trials.trainable
from trials.memory import give_back_gpu
give_back_gpu()
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(torch.cuda.is_available())
"""


def test_a_worker_may_choose_its_gpu_after_torch_is_loaded() -> None:
    """CUDA reads which it may use when it is first asked for something, and nothing asks before."""
    done = subprocess.run([sys.executable, "-c", CHOSEN_LATE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
