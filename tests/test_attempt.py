"""The laws of an attempt: whatever cuts it short, the next one ends in the same bytes."""

import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trials.attempt
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from tests.nvml import Card, Nvml, installed
from tests.service_process import write_corpus
from trials.attempt import ALIVE, Timer, describe_runtime, run_attempt, wait_for_room
from trials.checkpoints import read_best, unpack_state
from trials.corpora import SPLITS, PathCorpus, Split, load_corpus
from trials.evaluation import evaluate
from trials.memory import NotEnoughMemory
from trials.spec import TrainingConfig, TrialConfig
from trials.store import CheckpointStore
from trials.tasks import Report, Task
from trials.training import EpochResult, Training

EPOCHS = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PathCorpus:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def task(corpus: PathCorpus) -> Task:
    return small_task(corpus)


def small_corpus(folder: Path) -> PathCorpus:
    return PathCorpus(path=str(write_corpus(folder, tokens=300)), valid_tokens=150)


def small_task(corpus: PathCorpus) -> Task:
    """Averaging starts in the middle: the learning rate is too high to get better for long."""
    config = TrialConfig(
        model=AWDLSTMConfig(embedding_size=6, hidden_size=5, layers=2),
        training=TrainingConfig(
            epochs=EPOCHS, batch_size=3, bptt=9, lr=60, clip=2.0, non_monotone_interval=0
        ),
        regularization=Regularization(regularizer="fraternal"),
    )
    return Task("s1", 0, 1, "fd", 7, config, corpus, "cpu", 0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore((tmp_path / "store").as_uri())


@pytest.fixture(scope="module")
def undisturbed(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Report], bytes]:
    """All reports of a run that nothing happened to, and its best checkpoint."""
    directory = tmp_path_factory.mktemp("twin")
    store = CheckpointStore(directory.as_uri())
    said = list(epochs_of(task, store, directory))
    assert [report.failure for report in said] == [None] * EPOCHS
    return said, best_bytes(store)


def best_bytes(store: CheckpointStore) -> bytes:
    with store.open_best("s1", 0) as file:
        return file.read()


def essence(report: Report) -> dict[str, Any]:
    """All of a report but how long its epoch took."""
    timings = ("seconds", "tokens_per_s")
    epoch = {name: value for name, value in (report.epoch or {}).items() if name not in timings}
    return {**vars(report), "epoch": epoch}


def epochs_of(task: Task, store: CheckpointStore, data_dir: Path) -> Iterator[Report]:
    """An attempt's reports, signs of life left out."""
    return (report for report in run_attempt(task, store, data_dir) if report != ALIVE)


def kill_after(task: Task, store: CheckpointStore, data_dir: Path, reports: int) -> list[Report]:
    running: Iterator[Report] = epochs_of(task, store, data_dir)
    said = list(itertools.islice(running, reports))
    running.close()  # type: ignore[attr-defined]  # a generator
    return said


def test_the_task_switches_to_averaging_in_the_middle(undisturbed: tuple[list[Report], bytes]) -> None:
    averaged = [report.epoch["averaged"] for report in undisturbed[0] if report.epoch is not None]
    assert not averaged[1]
    assert averaged[EPOCHS - 2]


def test_every_report_says_what_it_was_computed_on(
    task: Task, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "17")
    (report,) = kill_after(task, store, tmp_path, 1)
    assert report.device is not None
    assert report.runtime is not None
    assert re.fullmatch(r"cpu: \S.* \(.+\)", report.device)
    assert f"torch {torch.__version__}; threads {torch.get_num_threads()}; " in report.runtime
    assert " MALLOC_TRIM_THRESHOLD_=17" in report.runtime


def test_of_a_gpu_a_report_says_the_versions_below_and_which_one_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials.attempt._gpu_runtime.cache_clear()
    installed(Nvml(Card("GPU-1"), Card("GPU-2")), monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2,GPU-1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91200)
    for device, uuid in (("cuda", "GPU-2"), ("cuda:1", "GPU-1")):
        assert describe_runtime(device).endswith(f"; CUDA 13.0; cuDNN 91200; driver 580.65.06; {uuid}")
    assert "driver" not in describe_runtime("cpu")
    trials.attempt._gpu_runtime.cache_clear()


def test_a_trial_waits_for_a_gpus_memory_and_says_who_keeps_it_where_it_waits_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    free = iter([1 * 2**30, 2 * 2**30, 3 * 2**30])
    assert list(wait_for_room(3 * 2**30, lambda: next(free), lambda: "", 60)) == [ALIVE, ALIVE]
    assert list(wait_for_room(3, lambda: 3, lambda: "", 60)) == []
    full = wait_for_room(3 * 2**30, lambda: 2**29, lambda: " (process 7 has 79.5 GiB)", 0.01)
    with pytest.raises(NotEnoughMemory) as refused:
        list(full)
    assert str(refused.value) == (
        "this configuration takes up to 3.0 GiB of the GPU's memory, of which only 512 MiB has been free for "
        "0.01 s (process 7 has 79.5 GiB): end what else uses it, or give each trial more of it by "
        "resources.gpus"
    )


def test_who_has_a_gpus_memory_is_told_without_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {os.getpid(): 2**30, 12: 3 * 2**30, 13: None}
    installed(Nvml(Card("GPU-1", users=users)), monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert trials.attempt._who_has("cuda") == " (process 12 has 3.0 GiB, process 13)"
    assert trials.attempt._who_has("cuda:1") == ""


def test_an_attempt_that_has_ended_keeps_no_tensor(
    task: Task, store: CheckpointStore, tmp_path: Path
) -> None:
    """On a GPU it would be in the way of the next trial."""
    gc.collect()
    before = {id(each) for each in _tensors()}
    for reports in (1, EPOCHS):
        kill_after(task, store, tmp_path, reports)
        gc.collect()  # as the worker does: a first import from within the optimizer leaves cycles
        assert [each.shape for each in _tensors() if id(each) not in before] == []


def _tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def test_last_report_says_it_is_the_last_and_what_was_best(
    undisturbed: tuple[list[Report], bytes],
) -> None:
    said, _ = undisturbed
    assert [report.finished for report in said] == [False] * (EPOCHS - 1) + [True]
    losses = [report.epoch["valid_loss"] for report in said if report.epoch is not None]
    assert said[-1].best_valid_loss == min(losses)
    assert said[-1].best_epoch == losses.index(min(losses)) + 1
    assert [report.checkpoint_sha256 is not None for report in said] == [
        report.best_epoch == epoch for epoch, report in enumerate(said, 1)
    ]


@pytest.mark.parametrize("killed_after", range(1, EPOCHS + 1))
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
def test_killed_and_resumed_attempt_ends_in_the_same_bytes(
    task: Task,
    store: CheckpointStore,
    undisturbed: tuple[list[Report], bytes],
    tmp_path: Path,
    killed_after: int,
    recorded: bool,
) -> None:
    kill_after(task, store, tmp_path, killed_after)
    on_record = killed_after if recorded else killed_after - 1
    resumed = list(epochs_of(replace(task, attempt=2, recorded_epochs=on_record), store, tmp_path))
    expected, best = undisturbed
    assert best_bytes(store) == best
    first = max(1, on_record)
    assert [report.epoch and report.epoch["epoch"] for report in resumed] == [*range(first, EPOCHS + 1)]
    final, twin = essence(resumed[-1]), essence(expected[-1])
    assert final == twin


@pytest.mark.parametrize("killed_after", [0, 7])
def test_best_keeps_the_averaged_weights_of_the_best_epoch_though_worse_ones_follow(
    task: Task, store: CheckpointStore, tmp_path: Path, killed_after: int
) -> None:
    task = replace(task, config=replace(task.config, training=replace(task.config.training, epochs=8)))
    kill_after(task, store, tmp_path, killed_after)
    said = list(epochs_of(replace(task, attempt=2, recorded_epochs=killed_after), store, tmp_path))
    # Of a finished trial every epoch is only reported again.
    epochs = [report.epoch for report in kill_after(task, store, tmp_path, 8) if report.epoch is not None]
    best = min(epochs, key=lambda epoch: float(epoch["valid_loss"]))
    assert (best["averaged"], best["epoch"] < 7) == (True, True)
    assert said[-1].best_epoch == best["epoch"]
    with store.open_best("s1", 0) as file:
        saved = read_best(file)
    assert saved.metrics["epoch"] == best["epoch"]
    assert saved.metrics["valid_loss"] == best["valid_loss"] < saved.metrics["raw_valid_loss"]
    model = AWDLSTM(task.config.model, len(saved.vocabulary), torch.Generator())
    model.load_state_dict(saved.tensors)
    assert evaluate(model, load_corpus(task.corpus, tmp_path).valid) == best["valid_loss"]
    assert saved.config["regularization"]["eld_stop_gradient"] is True


def test_resumed_attempt_trains_no_epoch_twice(
    task: Task, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_after(task, store, tmp_path, 3)
    trained = []
    end_epoch = Training._end_epoch

    def counting(*arguments: Any) -> EpochResult:
        trained.append(end_epoch(*arguments))
        return trained[-1]

    monkeypatch.setattr(Training, "_end_epoch", counting)
    list(epochs_of(replace(task, recorded_epochs=3), store, tmp_path))
    assert [result.epoch for result in trained] == [4, 5]


class ComparingStore(CheckpointStore):
    """Compares, whenever it has written `last`, the best epoch that it has seen with that of `best`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.best_epochs: list[tuple[int, int]] = []

    def save_last(self, sweep_id: str, number: int, files: Any, attempt: int = 0) -> None:
        super().save_last(sweep_id, number, files, attempt)
        history = json.loads(files["training.json"])["history"]
        seen = min(history, key=lambda epoch: float(epoch["valid_loss"]))["epoch"]
        with self.open_best(sweep_id, number) as file:
            self.best_epochs.append((seen, read_best(file).metrics["epoch"]))


def test_killed_right_after_writing_last_a_trial_has_the_best_that_last_has_seen(
    task: Task, tmp_path: Path
) -> None:
    """Else it would be lost: who goes on from `last` does not train that epoch again."""
    store = ComparingStore((tmp_path / "store").as_uri())
    list(epochs_of(task, store, tmp_path))
    assert len({seen for seen, _ in store.best_epochs}) > 1
    assert all(seen == best for seen, best in store.best_epochs)


class DyingStore(CheckpointStore):
    """Dies before it writes `last` for the n-th time; without a number it only counts."""

    def __init__(self, url: str, dies_at: int | None = None) -> None:
        super().__init__(url)
        self._dies_at = dies_at
        self.saves = 0

    def save_last(self, sweep_id: str, number: int, files: Any, attempt: int = 0) -> None:
        self.saves += 1
        if self.saves == self._dies_at:
            raise KeyboardInterrupt
        super().save_last(sweep_id, number, files, attempt)


@pytest.fixture(scope="module")
def saves_at_every_step(tmp_path_factory: pytest.TempPathFactory, task: Task) -> tuple[Task, int]:
    """The task that saves after every step, and how often it saves."""
    task = replace(task, checkpoint_every_s=1e-9)
    directory = tmp_path_factory.mktemp("counted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.attempt, "SHARE", 0)
        store = DyingStore(directory.as_uri())
        list(epochs_of(task, store, directory))
    return task, store.saves


@pytest.mark.parametrize("moment", [i / 13 for i in range(14)])
def test_killed_at_any_step_the_trial_ends_in_the_same_bytes(
    saves_at_every_step: tuple[Task, int],
    undisturbed: tuple[list[Report], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: float,
) -> None:
    """From the first step to the last: before, at and after the switch, and between `best` and `last`."""
    task, saves = saves_at_every_step
    saved = round(moment * (saves - 1))
    monkeypatch.setattr(trials.attempt, "SHARE", 0)
    url = (tmp_path / "store").as_uri()
    said: list[Report] = []
    with pytest.raises(KeyboardInterrupt):
        said.extend(epochs_of(task, DyingStore(url, dies_at=saved + 1), tmp_path))
    steps: list[int] = []
    step = Training._step
    monkeypatch.setattr(Training, "_step", lambda *args: steps.append(1) or step(*args))
    best_epoch = said[-1].best_epoch or 0 if said else 0
    again = replace(task, attempt=2, recorded_epochs=len(said), best_epoch=best_epoch)
    resumed = list(epochs_of(again, CheckpointStore(url), tmp_path))
    assert best_bytes(CheckpointStore(url)) == undisturbed[1]
    first, *later = map(essence, resumed)
    twin, *twins = map(essence, undisturbed[0][max(0, len(said) - 1) :])
    assert later == twins
    # The latest recorded epoch is reported again, with the digest of the file, which may be a newer one's.
    assert {**first, "checkpoint_sha256": None} == {**twin, "checkpoint_sha256": None}
    assert len(steps) == saves - saved > 0


def test_killed_during_validation_the_trial_ends_in_the_same_bytes(
    task: Task,
    store: CheckpointStore,
    undisturbed: tuple[list[Report], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            list(epochs_of(replace(task, checkpoint_every_s=1e-9), store, tmp_path))
    assert store.find_last("s1", 0)
    list(epochs_of(replace(task, attempt=2), store, tmp_path))
    assert best_bytes(store) == undisturbed[1]


def scrap(tmp_path: Path, *names: str) -> None:
    for name in names:
        file = tmp_path / "store" / "s1" / "t00000" / name
        file.write_bytes(file.read_bytes()[:5000])


def test_where_last_is_corrupt_the_trial_starts_over_and_ends_the_same(
    task: Task, store: CheckpointStore, undisturbed: tuple[list[Report], bytes], tmp_path: Path
) -> None:
    kill_after(task, store, tmp_path, 3)
    scrap(tmp_path, "last.tar")
    resumed = list(epochs_of(replace(task, attempt=2, recorded_epochs=3), store, tmp_path))
    assert [*map(essence, resumed)] == [*map(essence, undisturbed[0])]
    assert best_bytes(store) == undisturbed[1]


def test_epochs_trained_again_never_replace_a_better_checkpoint(task: Task, tmp_path: Path) -> None:
    for seed in range(20):  # the first one whose third epoch is the best so far
        folder, seeded = tmp_path / str(seed), replace(task, seed=seed)
        store = CheckpointStore((folder / "store").as_uri())
        said = kill_after(seeded, store, tmp_path, 3)
        if said[-1].best_epoch == 3:
            break
    assert said[-1].best_epoch == 3
    best = best_bytes(store)
    scrap(folder, "last.tar")
    again = replace(seeded, attempt=2, recorded_epochs=3, best_epoch=3)
    for report in itertools.islice(epochs_of(again, store, tmp_path), 3):
        assert report.epoch is not None
        assert best_bytes(store) == best


def test_a_state_of_another_version_is_not_used(
    task: Task, store: CheckpointStore, undisturbed: tuple[list[Report], bytes], tmp_path: Path
) -> None:
    kill_after(task, store, tmp_path, 2)
    files = store.find_last("s1", 0)
    assert files is not None
    older = {key: value for key, value in json.loads(files["training.json"]).items() if key != "version"}
    for _ in range(2):
        store.save_last("s1", 0, {**files, "training.json": json.dumps(older).encode()})
    resumed = list(epochs_of(replace(task, recorded_epochs=2), store, tmp_path))
    assert [report.epoch and report.epoch["epoch"] for report in resumed] == [1, 2, 3, 4, 5]
    assert best_bytes(store) == undisturbed[1]


def wild(task: Task, lr: float) -> Task:
    return replace(
        task, config=replace(task.config, training=replace(task.config.training, lr=lr, clip=1e30))
    )


def test_diverged_trial_says_so_and_keeps_its_last_good_checkpoint(
    task: Task, store: CheckpointStore, tmp_path: Path
) -> None:
    kill_after(task, store, tmp_path, 1)
    best = best_bytes(store)
    said = list(epochs_of(replace(wild(task, 1e30), recorded_epochs=1), store, tmp_path))
    assert said[-1].failure is not None
    assert said[-1].failure.failure_class == "diverged"
    assert said[-1].finished
    assert said[-1].epoch is None
    assert best_bytes(store) == best


@pytest.mark.parametrize("name", ["gradient_norm", "penalty", "train_loss"])
def test_epoch_with_anything_infinite_has_diverged_and_is_not_kept(
    task: Task, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    end_epoch = Training._end_epoch
    infinite: dict[str, Any] = {name: float("inf")}
    monkeypatch.setattr(Training, "_end_epoch", lambda *args: replace(end_epoch(*args), **infinite))
    (only,) = epochs_of(task, store, tmp_path)
    assert only.failure is not None
    assert only.failure.failure_class == "diverged"
    assert name in only.failure.message
    with pytest.raises(FileNotFoundError):
        store.open_best("s1", 0)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(Training, "_end_epoch", fail)


@pytest.mark.parametrize(
    ("error", "failure_class"),
    [
        (ZeroDivisionError("a bug"), "user_error"),
        (RuntimeError("a bug in a kernel"), "user_error"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            "out_of_memory",
        ),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
            "out_of_memory",
        ),
        (OSError(28, "No space left on device"), "disk_full"),
        (OSError(113, "No route to host"), "infrastructure"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failure_is_the_last_report_and_is_classed(
    task: Task,
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    failure_class: str,
) -> None:
    failing(monkeypatch, error)
    (only,) = epochs_of(task, store, tmp_path)
    assert only.failure is not None
    assert only.failure.failure_class == failure_class
    assert only.finished
    if failure_class == "user_error":
        assert "Traceback" in only.failure.message
        assert str(error) in only.failure.message


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("No CUDA GPUs are available"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=str,
)
def test_what_breaks_the_gpu_for_this_process_is_left_to_another_process(
    task: Task, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As a report it would end the trial for good, and every later one of the process after it."""
    failing(monkeypatch, error)
    with pytest.raises(type(error), match=str(error)):
        list(epochs_of(task, store, tmp_path))


@pytest.mark.parametrize(
    ("error", "of_gpu"),
    [
        (MemoryError(), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False),
        (NotEnoughMemory("it would not fit"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
    ],
    ids=str,
)
def test_whose_memory_was_too_little_is_told(
    error: Exception,
    of_gpu: bool,
    task: Task,
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, error)
    *_, last = epochs_of(task, store, tmp_path)
    assert last.failure is not None
    assert last.failure.of_gpu == of_gpu


def test_model_too_large_for_the_machine_is_out_of_memory(
    task: Task, store: CheckpointStore, tmp_path: Path
) -> None:
    model = replace(task.config.model, embedding_size=2**31 - 1)
    (only,) = epochs_of(replace(task, config=replace(task.config, model=model)), store, tmp_path)
    assert only.failure is not None
    assert only.failure.failure_class == "out_of_memory"
    assert "takes up to" in only.failure.message, "it is refused before anything is allocated"


def test_missing_corpus_is_a_user_error_in_the_corpuss_words(
    task: Task, store: CheckpointStore, tmp_path: Path
) -> None:
    missing = PathCorpus(path=str(tmp_path / "nowhere"))
    (only,) = epochs_of(replace(task, corpus=missing), store, tmp_path)
    assert only.failure is not None
    assert only.failure.failure_class == "user_error"
    assert "nowhere" in only.failure.message
    assert "Traceback" not in only.failure.message


@pytest.mark.parametrize("split", SPLITS)
def test_text_that_changes_during_a_sweep_is_noticed_and_never_served_from_a_cache(
    task: Task, store: CheckpointStore, corpus: PathCorpus, tmp_path: Path, split: Split
) -> None:
    own = tmp_path / "own"
    shutil.copytree(corpus.path, own)
    task = replace(task, corpus=PathCorpus(path=str(own)))
    before = next(epochs_of(task, store, tmp_path))
    (own / f"{split}.txt").write_text((own / f"{split}.txt").read_text() * 2)
    after = next(epochs_of(replace(task, number=task.number + 1), store, tmp_path))
    assert before.corpus_sha256 is not None
    assert after.corpus_sha256 is not None
    assert {name for name in SPLITS if before.corpus_sha256[name] != after.corpus_sha256[name]} == {split}
    (only,) = epochs_of(replace(task, corpus_sha256=before.corpus_sha256), store, tmp_path)
    assert only.failure is not None
    assert only.failure.failure_class == "user_error"
    assert "the text has changed since this sweep began" in only.failure.message


def test_words_absent_from_the_training_text_are_counted_in_the_checkpoint(
    task: Task, store: CheckpointStore, corpus: PathCorpus, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(corpus.path, own)
    (own / "test.txt").write_text("w00 unheard-of w01 words\n")
    kill_after(replace(task, corpus=PathCorpus(path=str(own))), store, tmp_path, 1)
    with store.open_best("s1", 0) as file:
        assert read_best(file).config["unk_counts"] == {"train": 0, "valid": 0, "test": 2}


def test_text_too_short_for_the_batch_is_a_user_error(
    task: Task, store: CheckpointStore, tmp_path: Path
) -> None:
    training = replace(task.config.training, batch_size=5000)
    (only,) = epochs_of(replace(task, config=replace(task.config, training=training)), store, tmp_path)
    assert only.failure is not None
    assert only.failure.failure_class == "user_error"
    assert "batch_size 5000" in only.failure.message


def test_what_is_due_comes_so_often_but_takes_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(trials.attempt, "time", SimpleNamespace(monotonic=lambda: now))
    timer, done_at = Timer(5), []
    for now in itertools.takewhile(lambda at: at < 200, itertools.count(0.0, 1.0)):
        if timer.is_due:
            done_at.append(now)
            with timer.doing():
                now += 0.1 if len(done_at) < 3 else 1.0
    assert done_at == [5, 11, 17, 58, 99, 140, 181]


def test_state_is_saved_at_once_when_a_pause_is_asked_for(
    task: Task, store: CheckpointStore, undisturbed: tuple[list[Report], bytes], tmp_path: Path, slow: None
) -> None:
    asked = False
    running = run_attempt(
        replace(task, checkpoint_every_s=1e6), store, tmp_path, pause_is_asked=lambda: asked
    )
    assert next(running) == ALIVE
    assert store.find_last("s1", 0) is None
    asked = True
    assert next(running) == ALIVE
    files = store.find_last("s1", 0)
    assert files is not None
    _, values = unpack_state(files, "last.tar")
    assert values["history"] == []
    assert "under_way" in values
    running.close()
    list(run_attempt(replace(task, attempt=2), store, tmp_path))
    assert best_bytes(store) == undisturbed[1]


def test_sign_of_life_comes_with_its_state_saved(
    task: Task, store: CheckpointStore, tmp_path: Path, slow: None
) -> None:
    patient = replace(task, checkpoint_every_s=1e6, hang_s=0.02)
    running = run_attempt(patient, store, tmp_path)
    assert next(running) == ALIVE
    assert store.find_last("s1", 0) is None  # nothing is trained yet
    windows = []
    for _ in range(2):
        assert next(running) == ALIVE
        files = store.find_last("s1", 0)
        assert files is not None
        windows.append(unpack_state(files, "last.tar")[1]["under_way"]["windows"])
    assert 0 < windows[0] < windows[1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch lasts long enough to be looked into."""
    step = Training._step

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.005)
        return step(*arguments)

    monkeypatch.setattr(trials.attempt, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(Training, "_step", slowly)


SMALL_ADDRESS_SPACE = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from models.config import AWDLSTMConfig
from tests.test_attempt import small_corpus, small_task
from trials.attempt import run_attempt
from trials.store import CheckpointStore

folder = Path(sys.argv[1])
task = small_task(small_corpus(folder))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
large = replace(task.config, model=AWDLSTMConfig(embedding_size=1500, hidden_size=3000, layers=2))
*_, said = run_attempt(replace(task, config=large), CheckpointStore((folder / "store").as_uri()), folder)
print(said.failure.failure_class, said.failure.message)
*_, said = run_attempt(task, CheckpointStore((folder / "store").as_uri()), folder)
print("then", said.failure, said.finished)
"""


def test_trial_that_outgrows_a_real_limit_of_memory_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL_ADDRESS_SPACE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, then = done.stdout.splitlines()
    assert first.startswith("out_of_memory ")
    assert then == "then None True"
