"""Time real training steps here: `python -m trials.probe DATA_DIR SCRATCH PARENT`, JSON in and out.

As many processes as trials will run train at the same time, each with a worker's threads, allocator and
priority, since they share the cores' caches and the memory's bandwidth. They go round the points, as often as
there is time, and stop together. Each ends by itself where the process that started it is gone.
"""

import itertools
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import fmean
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import psutil

from models.config import AWDLSTMConfig
from trials.corpora import Corpus, CorpusError
from trials.cpus import usable_cpus
from trials.encoded import load_encoded, text_digests
from trials.gpus import VISIBLE, visible_gpus
from trials.memory import NotEnoughMemory, keep_to_share, peak_bytes, require_memory, total_bytes
from trials.parts import Part, take_part
from trials.spec import TrialConfig
from trials.steps import (
    EXIT_CORPUS,
    PROBE,
    PROBE_ORDER,
    Probe,
    ProbeOrder,
    Timed,
    evaluated_columns,
    evaluated_words,
)
from trials.store import CheckpointStore

ENOUGH_S = 7.0
"""Of measuring, once every point has had its turn."""
AT_MOST_S = 20.0
"""Of measuring: no point is begun after it."""
TURN_S = 0.4
"""Of a point, at least one step."""
QUICK_S, AT_ONCE_S, MOST_AT_ONCE = 0.008, 0.05, 150
"""A GPU is asked for a step while it takes the one before, and each pause waits for it: steps so quick
are timed for so long at once, which is no more than so many of them."""
LONGEST_START_S = 90.0
"""For all processes to have loaded what they need."""
ORPHAN_S = 0.25
"""A process whose parent is gone ends after at most so long."""
MOST_EVALUATED = 4096
"""Words that evaluation is timed on, in as many columns as all of them have."""
NICENESS = "RAY_worker_niceness"
"""The environment's variable that tells Ray, too, how much a worker gives way to others."""
MOST_TOKENS = 2**22
MOST_WINDOWS = 1000
"""Of the text that steps are measured on."""


def probe(order: ProbeOrder, data_dir: Path, scratch: Path) -> Probe:
    """Raises CorpusError, and RuntimeError where a process did not come to its end."""
    began = time.monotonic()
    corpus = load_encoded(order.corpus, data_dir, text_digests(order.corpus, data_dir), scratch)
    encode_s = time.monotonic() - began
    points, left_out = _that_fit(order, len(corpus.vocabulary))
    found = _side_by_side(order, points, data_dir, scratch) if points else []
    timed = [_joined(config, [one.timed[i] for one in found]) for i, config in enumerate(points)]
    refused = [words for one in found[:1] for words in one.refused]
    return Probe(
        device=found[0].device if found else order.device,
        train_tokens=len(corpus.train),
        valid_tokens=len(corpus.valid),
        vocabulary_size=len(corpus.vocabulary),
        start_s=encode_s + max((one.start_s for one in found), default=0.0),
        took_s=time.monotonic() - began,
        share=min(1.0, fmean(one.share for one in found) / _share_alone(order)) if found else 1.0,
        timed=tuple(one for one in timed if one is not None),
        not_timed=tuple(dict.fromkeys((*left_out, *refused))),
        is_of_the_moment=bool(left_out),
    )


def _share_alone(order: ProbeOrder) -> float:
    """Of a core that each process has where there is nobody else: trials of less than a CPU share some."""
    return min(1.0, usable_cpus() / order.processes)


def _that_fit(order: ProbeOrder, vocabulary_size: int) -> tuple[list[TrialConfig], list[str]]:
    """What the memory that is free now has room for, in all processes at once; a GPU's is asked for there."""
    if order.device != "cpu":
        return list(order.points), []
    free = min(psutil.virtual_memory().available, total_bytes("cpu"))
    needed = {point: order.processes * peak_bytes(point, vocabulary_size) for point in order.points}
    points = [point for point in order.points if needed[point] <= free]
    words = "a configuration was not timed: {:.1f} GiB of memory would be needed now, and {:.1f} are free"
    left_out = [
        words.format(needed[point] / 2**30, free / 2**30) for point in order.points if point not in points
    ]
    return points, left_out


@dataclass(frozen=True)
class _Rest:
    """What an epoch of a model takes beside its steps."""

    word_s: float
    dynamics_s: float
    save_s: float


@dataclass
class _Measured:
    """Of one point, in one process."""

    step_s: list[float] = field(default_factory=list)
    """A mean a turn."""
    rest: _Rest | None = None


@dataclass
class _Found:
    """By one process."""

    device: str
    start_s: float
    share: float
    timed: list[_Measured]
    refused: list[str]


def _joined(config: TrialConfig, each: list[_Measured]) -> Timed | None:
    """The means over the processes; None where no turn of it was had by all."""
    rests = [one.rest for one in each if one.rest is not None]
    if not each or len(rests) < len(each):
        return None
    return Timed(
        config=config,
        step_s=tuple(fmean(turn) for turn in zip(*(one.step_s for one in each), strict=False)),
        word_s=fmean(rest.word_s for rest in rests),
        dynamics_s=fmean(rest.dynamics_s for rest in rests),
        save_s=fmean(rest.save_s for rest in rests),
    )


def _side_by_side(
    order: ProbeOrder, points: list[TrialConfig], data_dir: Path, scratch: Path
) -> list[_Found]:
    context = multiprocessing.get_context("spawn")  # a fork would have a torch that knows nothing of threads
    together = context.Barrier(order.processes)
    gpus = [gpu.uuid for gpu in visible_gpus()] if order.device == "cuda" else []
    workers = []
    for _ in range(order.processes):
        here, there = context.Pipe(duplex=False)
        where = (str(data_dir), str(scratch), os.getpid(), time.time())
        arguments = (there, together, order, points, gpus, *where)
        worker = context.Process(target=_work, args=arguments, daemon=True)
        worker.start()
        there.close()
        workers.append((worker, here))
    try:
        found = [here.recv() for _, here in workers]
    except EOFError as error:
        raise RuntimeError("a process of the probe was killed: there may be too little memory") from error
    finally:
        for worker, _ in workers:
            worker.terminate()
            worker.join()
    if words := [one for one in found if isinstance(one, str)]:
        raise RuntimeError(min(words, key=lambda said: said.startswith(BrokenBarrierError.__name__)))
    return found


def _work(
    answer: Connection,
    together: Barrier,
    order: ProbeOrder,
    points: list[TrialConfig],
    gpus: list[str],
    data_dir: str,
    scratch: str,
    parent: int,
    began: float,
) -> None:
    """One process: as a worker's, but that it trains a little of each point."""
    end_with(parent, Path(scratch))
    os.nice(int(os.environ.get(NICENESS, "0")))
    try:
        _held = _part_of(gpus, order.gpu_share)  # as long as this process lives
        import torch

        torch.set_num_threads(order.threads)
        corpus = load_encoded(
            order.corpus, Path(data_dir), text_digests(order.corpus, Path(data_dir)), Path(scratch)
        )
        from trials.attempt import describe_device

        keep_to_share(order.device, order.gpu_share)
        refused = [words for point in points if (words := _refusal(order, point, corpus))]
        points_here = [point for point in points if not _refusal(order, point, corpus)]
        rests: dict[AWDLSTMConfig, _Rest] = {}
        turns = [_Point(point, corpus, order.device, rests) for point in points_here]
        start_s = time.time() - began
        store = CheckpointStore(f"{Path(scratch).as_uri()}/{os.getpid()}")
        together.wait(LONGEST_START_S)
        _go_round(turns, store)
        by_config = {turn.config: turn.measured for turn in turns}
        timed = [by_config.get(point, _Measured()) for point in points]
        answer.send(_Found(describe_device(order.device), start_s, share_of_core(), timed, refused))
    except Exception as error:
        together.abort()
        answer.send(f"{type(error).__name__}: {error}")


def _part_of(gpus: list[str], share: float) -> Part | None:
    """As a trial has it, and beside those that run. Raises RuntimeError where these have too much."""
    if not gpus:
        return None
    part = take_part(gpus, share)
    if part is None:
        raise RuntimeError(
            f"no GPU here has {share:g} of it free for a measurement: trials that run have the rest; ask "
            "again when they have ended"
        )
    os.environ[VISIBLE] = part.uuid  # before torch is loaded
    return part


def _refusal(order: ProbeOrder, point: TrialConfig, corpus: Corpus) -> str | None:
    try:
        require_memory(point, len(corpus.vocabulary), order.device, order.gpu_share)
    except NotEnoughMemory as error:
        return f"a configuration was not timed: {error}"
    if len(corpus.train) // point.training.batch_size < 2:
        return f"batch_size {point.training.batch_size} is too large for {len(corpus.train)} training tokens"
    return None


def _go_round(turns: list["_Point"], store: CheckpointStore) -> None:
    """Every point, then all again: whoever is done keeps the others company."""
    began = time.monotonic()
    for round_number in itertools.count():
        for turn in turns:
            passed = time.monotonic() - began
            if passed > AT_MOST_S or (round_number > 0 and passed > ENOUGH_S):
                return
            turn.take(store)
        if not turns:
            return


class _Point:
    """A configuration, and what was measured of it."""

    def __init__(
        self, config: TrialConfig, corpus: Corpus, device: str, rests: dict[AWDLSTMConfig, _Rest]
    ) -> None:
        """`rests` are those that are known; points of one model share theirs."""
        self.config, self._corpus, self._device, self._rests = config, corpus, device, rests
        self.measured = _Measured()

    def take(self, store: CheckpointStore) -> None:
        """A turn: a step to warm up, then as many as there is time for; the first time, all else, too."""
        training = self._training()
        pauses, at_once = training.run(0), 1  # a pause after every step, but for the last of its text
        next(pauses)
        began, took_s = training.steps, _seconds(lambda: next(pauses))
        if self._device != "cpu" and took_s < QUICK_S and self._windows > 2 * MOST_AT_ONCE:
            pauses, at_once = training.run(AT_ONCE_S), MOST_AT_ONCE
            began, took_s = training.steps, 0.0
        while took_s < TURN_S and training.steps + at_once < self._windows - 1:
            took_s += _seconds(lambda: next(pauses))
        if (model := self.config.model) not in self._rests:
            self._rests[model] = self._measured_rest(training, store)
        self.measured.rest = self._rests[model]
        self.measured.step_s.append(took_s / (training.steps - began))

    @property
    def _windows(self) -> int:
        tokens = self.config.training.batch_size * self.config.training.bptt
        return max(5, min(MOST_WINDOWS, MOST_TOKENS // tokens))

    def _training(self) -> Any:
        from trials.training import Training

        config = self.config
        length = config.training.batch_size * (self._windows * config.training.bptt + 1)
        return Training(
            config.model,
            config.training,
            config.regularization,
            len(self._corpus.vocabulary),
            np.resize(self._corpus.train, length),  # again from its beginning, where it is too short
            self._corpus.valid,
            0,
            self._device,
        )

    def _measured_rest(self, training: Any, store: CheckpointStore) -> _Rest:
        from trials.checkpoints import BestCheckpoint, pack_state
        from trials.dynamics import COLUMNS, STEPS, prediction_dynamics
        from trials.evaluation import as_tokens, evaluate

        model, columns = training.model, evaluated_columns(len(self._corpus.valid))
        valid = self._corpus.valid[:MOST_EVALUATED]

        def measure_masks() -> None:
            tokens_N = as_tokens(valid[: COLUMNS * STEPS], model.decoder_bias.device)
            prediction_dynamics(model, tokens_N, itertools.count())

        def save() -> None:
            best = BestCheckpoint(training.weights_to_use(), {}, self._corpus.vocabulary, {})
            store.save_best("probe", 0, best.files())
            store.save_last("probe", 0, pack_state(*training.state()))

        evaluate(model, valid[:300])  # to warm up
        return _Rest(
            word_s=_seconds(lambda: evaluate(model, valid, columns=columns))
            / evaluated_words(len(valid), columns),
            dynamics_s=_seconds(measure_masks),
            save_s=_seconds(save),
        )


def _seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def share_of_core(told: Path = Path("/proc/self/schedstat")) -> float:
    """Of the time in which this process wanted a core, that in which it had one; 1 where that is not told."""
    try:
        ran, waited, _ = map(int, told.read_text().split())
    except (OSError, ValueError):
        return 1.0
    return ran / max(1, ran + waited)


def end_with(parent: int, scratch: Path) -> None:
    """End this process soon after the one that started it, whatever that dies of, and remove `scratch`.

    Its id is given: by now it may be gone, and this process somebody else's child.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_S)
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=look, name="orphan", daemon=True).start()


def main() -> int:
    data_dir, scratch = map(Path, sys.argv[1:3])
    end_with(int(sys.argv[3]), scratch)
    order = PROBE_ORDER.validate_json(sys.stdin.buffer.read())
    try:
        found = probe(order, data_dir, scratch)
    except CorpusError as error:
        print(error.pointer)
        print(error, file=sys.stderr)
        return EXIT_CORPUS
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(PROBE.dump_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
