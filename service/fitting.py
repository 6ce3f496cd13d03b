"""Whether a sweep fits: the memory and the disk that it takes, against what there is. No torch."""

import hashlib
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError
from pydantic_core import to_json

from service.errors import Problem
from service.launcher import Capacity
from trials.corpora import FILES, CorpusSpec, PathCorpus
from trials.memory import amount, bytes_on
from trials.plan import MOST_PLANNED, Planned, plan
from trials.spec import SweepSpec, TrialConfig

LITTLE_ROOM = 256 * 2**20
"""Bytes, or a twentieth of a smaller disk."""
FEWEST_TYPES = 2
"""Of any vocabulary; whatever does not fit with so few never does."""
MOST_LOOKED_AT = 64
"""Trials of a submission that could be too large: it is to be answered at once."""
TORCH = 350 * 2**20
"""Bytes of a process that has loaded torch and Ray."""
SERVICE = 2**30
"""Bytes of the service, a driver and Ray's own processes."""
BYTES_OF_A_WORD, BYTES_OF_A_CONFIG = 12, 16 * 1024
"""In a checkpoint."""
BYTES_OF_AN_EPOCH, BYTES_OF_A_TRIAL = 600, 8 * 1024
"""In the database."""
SIZES = {"embedding_size", "hidden_size", "layers", "batch_size", "bptt"}
"""Parameters of which more takes more memory; of the others that change it, no order is known."""
CHANGING_SIZE = {"tied", "averaging", "windows", "recompute", "regularizer", "eld_stop_gradient"}


def slots(spec: SweepSpec, capacity: Capacity) -> int:
    """How many trials run at once."""
    room = capacity.room(spec.resources)
    return min(room, spec.resources.max_concurrent or room, spec.budget.trials)


def certain_problems(
    spec: SweepSpec, capacity: Capacity, vocabulary_size: int | None, disk: "Disk"
) -> list[Problem]:
    """Why it could never run to its end here, as far as that is seen without a look at the text.

    Quick, since most sweeps are far from it: their largest possible trials fit.
    """
    types = vocabulary_size or FEWEST_TYPES
    largest = _largest(spec)
    if largest is not None and _fits(spec, largest, capacity, types, disk):
        return []
    planned = plan(spec, min(MOST_PLANNED, max(MOST_LOOKED_AT, slots(spec, capacity))))
    return [
        *memory_problems(spec, planned, capacity, types),
        *disk_problems(spec, planned, types, disk),
    ]


def _largest(spec: SweepSpec) -> list[TrialConfig] | None:
    """Of each arm, one that no trial is larger than; None where that is not seen at once."""
    if spec.searched.keys() & CHANGING_SIZE:
        return None
    try:
        return [
            spec.trial_config(
                arm, {name: max(range_.extremes) for name, range_ in spec.sampled(arm) if name in SIZES}
            )
            for arm in spec.arms
        ]
    except ValidationError:
        return None


def _fits(
    spec: SweepSpec, largest: Sequence[TrialConfig], capacity: Capacity, types: int, disk: "Disk"
) -> bool:
    device = spec.resources.device
    peak = max(bytes_on(device, config, types) for config in largest)
    at_once = slots(spec, capacity)
    if spec.resources.gpus:
        in_memory = capacity.gpu_bytes is None or peak <= spec.resources.gpus * capacity.gpu_bytes
    else:
        in_memory = peak * at_once <= capacity.memory_bytes
    kept = spec.budget.trials * max(best_bytes(config, types) for config in largest)
    saved = at_once * max(best_bytes(config, types) + 2 * last_bytes(config, types) for config in largest)
    return in_memory and kept + saved <= disk.room


def memory_problems(
    spec: SweepSpec, planned: Sequence[Planned], capacity: Capacity, vocabulary_size: int
) -> list[Problem]:
    """Where one of these trials alone does not fit its part of a GPU, or the machine, or those that run at
    once do not."""
    if not planned:
        return []
    peaks = [bytes_on(spec.resources.device, trial.config, vocabulary_size) for trial in planned]
    worst = max(range(len(planned)), key=peaks.__getitem__)
    share = spec.resources.gpus or 1.0
    one_has = capacity.gpu_bytes if spec.resources.gpus else capacity.memory_bytes
    if one_has is None:
        return []
    if peaks[worst] > share * one_has:
        return [_too_large(spec, planned[worst], peaks[worst], share * one_has, vocabulary_size, share)]
    if spec.resources.gpus:  # each has its own part
        return []
    at_once = slots(spec, capacity)
    sums = [0, *accumulate(peaks)]

    def together(count: int) -> int:
        """What so many take that follow one another, at most."""
        return max(after - before for before, after in zip(sums, sums[count:], strict=False))

    at_once = min(at_once, len(peaks))
    if together(at_once) <= capacity.memory_bytes:
        return []
    fitting = bisect_right(range(1, at_once), capacity.memory_bytes, key=together)
    words = (
        f"{at_once} trials at once take up to {amount(together(at_once))} of memory, and there are "
        f"{amount(capacity.memory_bytes)}: set resources.max_concurrent to {fitting}, or lower batch_size, "
        "bptt or the sizes of the model"
    )
    return [Problem("/resources/max_concurrent", "too_little_memory", words)]


def text_problems(spec: SweepSpec, train_tokens: int) -> list[Problem]:
    """Where no trial has two tokens a column: each would fail before its first step."""
    sizes = list(spec.written("batch_size"))
    if any(is_long_enough(train_tokens, int(size)) for _, size in sizes):
        return []
    pointer, size = min(sizes, key=lambda written: written[1])
    words = (
        f"batch_size {size} cuts {train_tokens:,} training tokens into columns of fewer than two: lower it "
        f"to {max(1, train_tokens // 2)}, or give a longer text"
    )
    return [Problem(pointer, "text_too_short", words)]


def is_long_enough(train_tokens: int, batch_size: int) -> bool:
    return train_tokens // batch_size >= 2


def _too_large(
    spec: SweepSpec, trial: Planned, peak: float, there: float, vocabulary_size: int, share: float
) -> Problem:
    part = "in all" if share == 1 else f"for a share of {share:g}"
    part += " of the smallest GPU here" if spec.resources.gpus else ""
    more = "" if share == 1 else ", or raise resources.gpus"
    words = (
        f"trial {trial.number} of arm {trial.arm!r} takes up to {amount(peak)} of memory, and there are "
        f"{amount(there)} {part}: lower batch_size, bptt or the sizes of the model{more}"
    )
    return Problem(_blamed(spec, trial, there, vocabulary_size), "too_little_memory", words)


def _blamed(spec: SweepSpec, trial: Planned, there: float, vocabulary_size: int) -> str:
    """The place of what makes it so large: the model, where that is too large for any window."""
    least = replace(trial.config, training=replace(trial.config.training, batch_size=1, bptt=5))
    of_model = bytes_on(spec.resources.device, least, vocabulary_size) > there
    names = ("hidden_size", "embedding_size", "layers") if of_model else ("batch_size", "bptt")
    for name in names:
        if name in spec.arms[trial.arm]:
            return f"/arms/{trial.arm}/{name}"
        if name in spec.space:
            return f"/space/{name}"
    if not of_model:
        return "/training/batch_size"
    model = trial.config.model
    widest = max(inner for inner, _ in model.layer_sizes) > model.embedding_size
    return f"/model/{'hidden_size' if widest else 'embedding_size'}"


@dataclass(frozen=True)
class Disk:
    """Where checkpoints go."""

    free_bytes: float
    """Infinite where the store is not on this machine."""
    floor_bytes: float = 0.0
    """What has to stay free: below it nothing runs."""

    @property
    def room(self) -> float:
        return self.free_bytes - self.floor_bytes


def disk_of(store_url: str | None) -> Disk:
    """Of a checkpoint store, or of the folder that it will be made in."""
    if store_url is None:
        return Disk(math.inf)
    parts = urlsplit(store_url)
    if parts.scheme not in {"", "file"}:
        return Disk(math.inf)
    folder = Path(unquote(parts.path))
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return Disk(usage.free, floor_of(usage.total))


def floor_of(total: float) -> float:
    return min(LITTLE_ROOM, total / 20)


def find_little_room(folder: Path) -> str | None:
    """What there is to say where a disk is almost full."""
    usage = shutil.disk_usage(folder)
    if usage.free >= floor_of(usage.total):
        return None
    return f"the disk of {folder} has only {usage.free / 2**20:.0f} MiB left: free some"


def checkpoints_bytes(spec: SweepSpec, planned: Sequence[Planned], vocabulary_size: int, at_once: int) -> int:
    """At most: of all trials, of which those that were planned tell, and of those that run."""
    if not planned:
        return 0
    kept = sum(
        count * (max(sizes) if count < trials else sum(sizes) / len(sizes))
        for trials, count, sizes in _kept(spec, planned, lambda config: best_bytes(config, vocabulary_size))
    )
    running = max(
        best_bytes(trial.config, vocabulary_size) * (1 if spec.retention.bests_per_arm is None else 2)
        + 2 * last_bytes(trial.config, vocabulary_size)  # the next one is written before the last one goes
        for trial in planned
    )
    return int(kept + at_once * running)


def weights_bytes(spec: SweepSpec, planned: Sequence[Planned], vocabulary_size: int) -> int:
    """Of what is kept in the end, at least: the weights alone."""
    return int(
        sum(
            count * (min(sizes) if count < trials else sum(sizes) / len(sizes))
            for trials, count, sizes in _kept(
                spec, planned, lambda config: 4 * config.model.parameter_count(vocabulary_size)
            )
        )
    )


def _kept(
    spec: SweepSpec, planned: Sequence[Planned], size: Callable[[TrialConfig], int]
) -> Iterator[tuple[float, float, list[int]]]:
    """(trials, best checkpoints that stay, sizes of those that were planned) of each arm."""
    share = spec.budget.trials / max(1, len(planned))
    for arm in spec.arms:
        sizes = [size(trial.config) for trial in planned if trial.arm == arm]
        if sizes:
            trials = share * len(sizes)
            yield trials, min(trials, spec.retention.bests_per_arm or trials), sizes


def best_bytes(config: TrialConfig, vocabulary_size: int) -> int:
    words = BYTES_OF_A_WORD * vocabulary_size + BYTES_OF_A_CONFIG
    return 4 * config.model.parameter_count(vocabulary_size) + words


def last_bytes(config: TrialConfig, vocabulary_size: int) -> int:
    """With averaged weights, where there may be any, and the state that the next window starts from."""
    copies = 1 if config.training.averaging == "none" else 2
    state = 8 * config.training.batch_size * sum(out for _, out in config.model.layer_sizes)
    return 4 * copies * config.model.parameter_count(vocabulary_size) + state + BYTES_OF_A_CONFIG


def database_bytes(spec: SweepSpec) -> int:
    """Of all trials to their last epochs."""
    return spec.budget.trials * (BYTES_OF_A_TRIAL + spec.training.epochs * BYTES_OF_AN_EPOCH)


def disk_problems(
    spec: SweepSpec, planned: Sequence[Planned], vocabulary_size: int, disk: Disk
) -> list[Problem]:
    """Where the checkpoints do not fit, though the budget has nothing that may end the sweep before."""
    needed = weights_bytes(spec, planned, vocabulary_size)
    ends_early = spec.budget.wall_s is not None or spec.budget.target is not None
    if needed <= disk.room or ends_early:
        return []
    words = (
        f"the weights that it keeps take {amount(needed)}, and {amount(max(0.0, disk.room))} of disk can be "
        "filled: keep fewer with retention.bests_per_arm, ask for fewer trials, or free some"
    )
    return [Problem("/retention/bests_per_arm", "too_little_disk", words)]


def corpus_stamp(corpus: CorpusSpec) -> bytes:
    """Of a text without a look into it: another one where its files have been written to."""
    files = []
    if isinstance(corpus, PathCorpus):
        with suppress(OSError):  # it is told of elsewhere
            for name in FILES.values():
                status = os.stat(Path(corpus.path, name))
                files.append((status.st_size, status.st_mtime_ns))
    return hashlib.sha256(to_json([corpus.model_dump(mode="json"), files])).digest()
