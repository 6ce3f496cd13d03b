"""One attempt at a trial, from its task to its last report. No ray, no database: only checkpoints."""

import errno
import logging
import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from models.precision import UnsupportedPrecision
from trials.checkpoints import BestCheckpoint, pack_state, unpack_state
from trials.corpora import Corpus, CorpusError, CorpusSpec, load_corpus
from trials.encoded import load_encoded, text_digests
from trials.files import StoreAway, waits
from trials.gpus import Gpu, driver_version, users_of, visible_gpus
from trials.memory import NotEnoughMemory, amount, keep_to_share, peak_bytes, require_memory, room_bytes
from trials.spec import FailureClass
from trials.store import CheckpointStore, CorruptCheckpoint
from trials.tasks import Failure, Report, Task
from trials.training import Diverged, EpochResult, Training
from trials.version import own_version

log = logging.getLogger(__name__)

T = TypeVar("T")

METRICS = ("epoch", "train_loss", "valid_loss", "raw_valid_loss", "averaged")
"""What is kept of an epoch beside its weights; no timings, so that equal runs make equal files."""

OUT_OF_HOST_MEMORY = ("can't allocate memory",)
OUT_OF_GPU_MEMORY = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "_STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",
)
"""What torch says where it does not raise OutOfMemoryError: of CUDA and its driver, cuBLAS and cuDNN."""

BROKEN_GPU = (
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "cuDNN error",
    "No CUDA GPUs are available",
    "CUDA unknown error",
    "CUDA driver initialization failed",
    "Unexpected error from cudaGetDeviceCount",
    "NVIDIA driver on your system",  # is not found, or too old: another node's may do
)
"""What torch says of a GPU that this process can use no more, or not at all."""


LOOK_EVERY_S = 1.0
"""Seconds of training between two looks at whether there is something else to do."""
SHARE = 40
"""What interrupts training may take at most one part in so many of the time."""
GPU_PATIENCE_S = 60.0
"""For the memory of a GPU that another process has: one that ends may take seconds to give its own back."""
SIGNS_OF_LIFE = 4
"""In the time after which an attempt without one is taken for dead."""


class Timer:
    """Tells whether something is due again: so often, but less often where doing it takes long."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.restart()

    def restart(self) -> None:
        self._due_at = time.monotonic() + self._every_s

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Around what was due."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        self._due_at = ended + max(self._every_s, SHARE * (ended - began))


def run_attempt(
    task: Task,
    store: CheckpointStore,
    data_dir: Path,
    shared: Path | None = None,
    pause_is_asked: Callable[[], bool] = lambda: False,
) -> Generator[Report]:
    """Train a trial to its end, from its `last` checkpoint where there is one, and report every epoch.

    `shared` is a folder in which the processes of this machine keep what one of them has encoded.

    In the middle of an epoch, too, `last` is saved now and then, and when a pause is asked for; a report
    without an epoch then says so. One such comes first of all, and others as signs of life.
    The latest recorded epoch is reported again, and so is what was trained but never recorded.
    Whatever goes wrong inside the trial is the last report; what breaks the GPU for this process is raised,
    so that another process takes over.
    """
    try:
        yield ALIVE
        yield from _train(task, store, data_dir, shared, pause_is_asked)
    except Diverged as error:
        yield _failed("diverged", str(error))
    except (CorpusError, UnsupportedPrecision) as error:
        yield _failed("user_error", str(error))
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        # Otherwise the store's network is down, say.
        yield _failed("disk_full" if full else "infrastructure", traceback.format_exc())
    except Exception as error:  # a trial's own failure ends that trial and no other
        if is_out_of_memory(error):
            words = str(error) or "the process could not allocate any more memory"
            yield _failed("out_of_memory", words, of_gpu=not is_out_of_host_memory(error))
        elif isinstance(error, RuntimeError) and _says(error, BROKEN_GPU):
            raise
        else:
            yield _failed("user_error", traceback.format_exc())


def is_out_of_memory(error: Exception) -> bool:
    """Of the machine or of a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _says(error, (*OUT_OF_HOST_MEMORY, *OUT_OF_GPU_MEMORY))
    )


def is_out_of_host_memory(error: Exception) -> bool:
    """Of the machine: a larger part of a GPU is no help."""
    if isinstance(error, NotEnoughMemory | torch.OutOfMemoryError):  # it was refused for its device's
        return False
    return isinstance(error, MemoryError) or _says(error, OUT_OF_HOST_MEMORY)


def _says(error: Exception, phrases: Iterable[str]) -> bool:
    return any(phrase in str(error) for phrase in phrases)


def _train(
    task: Task,
    store: CheckpointStore,
    data_dir: Path,
    shared: Path | None,
    pause_is_asked: Callable[[], bool],
) -> Generator[Report]:
    living = Timer(task.hang_s / SIGNS_OF_LIFE)
    corpus = yield from _patiently(partial(load_text, task.corpus, data_dir, shared), living)
    if task.corpus_sha256 not in (None, corpus.sha256):
        raise CorpusError(
            "the text has changed since this sweep began, and its trials would not compare: "
            "restore it, or submit a new sweep"
        )
    require_memory(task.config, len(corpus.vocabulary), task.device, task.gpu_share)
    if task.device.startswith("cuda"):
        keep_to_share(task.device, task.gpu_share)
        needed = peak_bytes(task.config, len(corpus.vocabulary), task.device)
        room = partial(room_bytes, task.device)
        yield from wait_for_room(needed, room, partial(_who_has, task.device), GPU_PATIENCE_S)
    training = Training(
        task.config.model,
        task.config.training,
        task.config.regularization,
        len(corpus.vocabulary),
        corpus.train,
        corpus.valid,
        task.seed,
        task.device,
    )
    saving, looking = Timer(task.checkpoint_every_s), Timer(0)
    report = partial(_report, task, store, training, corpus)
    yield from _patiently(partial(_resume, training, task, store), living)
    for earlier in training.history[max(0, task.recorded_epochs - 1) :]:
        yield (yield from _patiently(partial(report, earlier), living))
    for timer in (saving, living):
        timer.restart()
    for result in training.run(min(LOOK_EVERY_S, task.checkpoint_every_s, task.hang_s / SIGNS_OF_LIFE)):
        if result is not None:
            require_finite(result)
            # Before `last`: what `last` has seen, `best` never falls behind. Nor does it fall behind the
            # record, where no `last` could be read and epochs are trained again.
            best_sha256 = None
            if result.is_best and result.epoch >= task.best_epoch:
                files = best_checkpoint(training, task, corpus).files()
                save = partial(store.save_best, task.sweep_id, task.number, files, task.attempt)
                best_sha256 = yield from _patiently(save, living)
        wanted = False
        if result is None and looking.is_due:
            with looking.doing(), suppress(Exception):  # the store is away: another look may find it back
                wanted = pause_is_asked()
        # What the sweep hears while it pauses is this attempt's last word: also a sign of life.
        if result is not None or wanted or saving.is_due or living.is_due:
            yield from _patiently(partial(_save_last, training, task, store, saving), living)
        if result is not None:
            yield (yield from _patiently(partial(report, result, best_sha256), living))
        elif wanted or living.is_due:
            yield ALIVE
        else:
            continue
        living.restart()


def wait_for_room(
    needed: float, room: Callable[[], float], who_has: Callable[[], str], patience_s: float
) -> Generator[Report]:
    """Until a GPU has so many bytes free for this process. Raises NotEnoughMemory where it stays full."""
    gives_up_at = time.monotonic() + patience_s
    while (there := room()) < needed:
        if time.monotonic() > gives_up_at:
            raise NotEnoughMemory(
                f"this configuration takes up to {amount(needed)} of the GPU's memory, of which only "
                f"{amount(there)} has been free for {patience_s:g} s{who_has()}: end what else uses it, or "
                "give each trial more of it by resources.gpus"
            )
        yield ALIVE
        time.sleep(min(1.0, patience_s / 10))


def _who_has(device: str) -> str:
    """Of a GPU's memory, as far as this can be seen."""
    gpu = _gpu_of(device)
    others = [use for use in users_of(gpu.uuid) if use.pid != os.getpid()] if gpu is not None else []
    said = [
        f"process {use.pid}" + (f" has {amount(use.memory_bytes)}" if use.memory_bytes else "")
        for use in others
    ]
    return f" ({', '.join(said)})" if said else ""


def _patiently(ask: Callable[[], T], living: Timer) -> Generator[Report, None, T]:
    """As trials.files.patiently, with signs of life in between: training waits for a store that is away."""
    for wait_s in waits():
        try:
            return ask()
        except StoreAway as error:
            log.warning("%s; asking again in %.0f s", error, wait_s)
        if living.is_due:
            yield ALIVE
            living.restart()
        time.sleep(wait_s)
    return ask()


def _save_last(training: Training, task: Task, store: CheckpointStore, saving: Timer) -> None:
    with saving.doing():  # raised out of, it counts for nothing: waiting is not what saving takes
        store.save_last(task.sweep_id, task.number, pack_state(*training.state()), task.attempt)


def require_finite(result: EpochResult) -> None:
    """A gradient or a penalty may overflow where the loss does not. Raises Diverged."""
    for name, value in asdict(result).items():
        if not math.isfinite(value):
            raise Diverged(f"{name} is {value} in epoch {result.epoch}")


def best_checkpoint(training: Training, task: Task, corpus: Corpus) -> BestCheckpoint:
    """The weights as they stand, with all that is needed to use them elsewhere."""
    result = asdict(training.history[-1])
    return BestCheckpoint(
        tensors=training.weights_to_use(),
        config={
            **asdict(task.config),
            "corpus": task.corpus.model_dump(mode="json"),
            "corpus_sha256": dict(corpus.sha256),
            "unk_counts": dict(corpus.unk_counts),
            "seed": task.seed,
        },
        vocabulary=corpus.vocabulary,
        metrics={name: result[name] for name in METRICS},
    )


def _resume(training: Training, task: Task, store: CheckpointStore) -> None:
    """Go on from `last`. Without a readable one the trial starts over, which ends in the same weights."""
    try:
        if (files := store.find_last(task.sweep_id, task.number)) is not None:
            training.load_state(*unpack_state(files, "last.tar"))
    except (CorruptCheckpoint, ValueError):  # a state of another version of this program
        store.discard_last(task.sweep_id, task.number)


def _report(
    task: Task,
    store: CheckpointStore,
    training: Training,
    corpus: Corpus,
    result: EpochResult,
    best_sha256: str | None = None,
) -> Report:
    """`best_sha256` is of the best checkpoint where this attempt has just saved it."""
    best = min(training.history[: result.epoch], key=lambda earlier: earlier.valid_loss)
    return Report(
        epoch=asdict(result),
        finished=training.finished and result.epoch == len(training.history),
        best_epoch=best.epoch,
        best_valid_loss=best.valid_loss,
        checkpoint_sha256=(best_sha256 or _best_sha256(store, task)) if best.epoch == result.epoch else None,
        device=describe_device(task.device),
        runtime=describe_runtime(task.device),
        corpus_sha256={str(split): digest for split, digest in corpus.sha256.items()},
    )


def _best_sha256(store: CheckpointStore, task: Task) -> str | None:
    """None where it is gone, and the epochs that come to a better one are yet to be trained again."""
    try:
        return store.best_sha256(task.sweep_id, task.number)
    except FileNotFoundError:
        return None


def describe_device(device: str) -> str:
    """With the model of the card or the processor, which the last digits of a table depend on."""
    if device.startswith("cuda"):
        return f"{device}: {torch.cuda.get_device_name(device)}"
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    return f"{device}: {name} ({torch.backends.cpu.get_cpu_capability()})"


def describe_runtime(device: str) -> str:
    """What else numbers and speed depend on: versions, threads, the allocator with its settings, the GPU."""
    tuned = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    ]
    allocator = " ".join([*platform.libc_ver(), *tuned])
    preloaded = [Path(path).name for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    return "; ".join(
        [
            f"fraternal {own_version()}",
            f"python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"threads {torch.get_num_threads()}",
            allocator,
            *(f"preloaded {name}" for name in preloaded),
            *(_gpu_runtime(device) if device.startswith("cuda") else []),
        ]
    )


@lru_cache
def _gpu_runtime(device: str) -> list[str]:
    gpu = _gpu_of(device)
    return [
        f"CUDA {torch.version.cuda}",
        f"cuDNN {torch.backends.cudnn.version()}",  # type: ignore[no-untyped-call]  # torch's
        f"driver {driver_version() or 'unknown'}",
        *([gpu.uuid] if gpu is not None else []),
    ]


def _gpu_of(device: str) -> Gpu | None:
    """The driver's name for a device of torch's; None where it has none."""
    gpus = visible_gpus()
    number = torch.device(device).index or 0
    return gpus[number] if number < len(gpus) else None


ALIVE = Report(epoch=None)


def _failed(failure_class: FailureClass, message: str, *, of_gpu: bool = True) -> Report:
    return Report(epoch=None, finished=True, failure=Failure(failure_class, message, of_gpu))


def load_text(corpus: CorpusSpec, data_dir: Path, shared: Path | None) -> Corpus:
    """As a trial reads it: once for a process, and encoded once for a machine. Raises CorpusError."""
    return _load_corpus(corpus, data_dir, text_digests(corpus, data_dir), shared)


@lru_cache(maxsize=2)
def _load_corpus(corpus: CorpusSpec, data_dir: Path, digests: tuple[str, ...], shared: Path | None) -> Corpus:
    """Read a corpus once for all the trials of a worker, as long as its text stays the same."""
    if shared is None:
        return load_corpus(corpus, data_dir)
    return load_encoded(corpus, data_dir, digests, shared)
