"""`python -m trials.verify STORE DATA_DIR [SHARED]`: one checkpoint evaluated again, in a process of its own.

Reads a trials.verification.Check from standard input, as JSON, and writes a Verification. Loads torch.
"""

import hashlib
import io
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trials.attempt import describe_device, describe_runtime, load_text
from trials.checkpoints import BestCheckpoint, read_best, rebuilt
from trials.corpora import Corpus, CorpusError
from trials.evaluation import evaluate
from trials.files import patiently
from trials.gpus import VISIBLE, visible_gpus
from trials.memory import keep_to_share
from trials.parts import Part, wait_for_part
from trials.store import CheckpointStore, CorruptCheckpoint
from trials.verification import GONE, TOLERANCE, TOLERANCE_ELSEWHERE, Check, Verification

PART_PATIENCE_S = 10.0
"""For a part of a GPU: the workers of trials that have just ended may still be ending."""


def verify(check: Check, store: CheckpointStore, data_dir: Path, shared: Path | None) -> Verification:
    """Evaluate a checkpoint on its validation split, and hold the loss against the one that it claims."""
    began = time.monotonic()
    so_far = Verification(
        "impossible",
        check.checkpoint_sha256,
        device=describe_device(check.on),
        runtime=describe_runtime(check.on),
    )
    try:
        found = _verified(check, so_far, store, data_dir, shared)
    except (CorruptCheckpoint, FileNotFoundError) as error:
        found = replace(so_far, outcome="damaged", message=str(error))
    except (CorpusError, OSError, MemoryError, RuntimeError) as error:  # no text, no store, no memory
        found = replace(so_far, message=f"{type(error).__name__}: {error}")
    return replace(found, seconds=time.monotonic() - began)


def _verified(
    check: Check, so_far: Verification, store: CheckpointStore, data_dir: Path, shared: Path | None
) -> Verification:
    try:
        with patiently(lambda: store.open_best(check.sweep_id, check.number)) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise FileNotFoundError(GONE) from error
    sha256 = hashlib.sha256(content).hexdigest()
    checkpoint = read_best(io.BytesIO(content))
    epoch, recorded = _claimed(checkpoint)
    so_far = replace(
        so_far,
        checkpoint_sha256=sha256,
        epoch=epoch,
        recorded_valid_loss=recorded,
        tolerance=TOLERANCE if check.device in (None, so_far.device) else TOLERANCE_ELSEWHERE,
    )
    # An attempt that was ended between saving and reporting has left a better one than is on record.
    is_ahead = epoch > check.epoch and recorded < check.valid_loss
    if sha256 != check.checkpoint_sha256 and not is_ahead:
        raise CorruptCheckpoint("the file is not the one that the trial reported: its SHA-256 differs")
    if recorded != check.valid_loss and not is_ahead:
        raise CorruptCheckpoint(
            f"its metrics say {recorded:.9f}, and the trial reported {check.valid_loss:.9f}"
        )
    model = rebuilt(checkpoint).to(check.on)
    corpus = patiently(lambda: load_text(check.corpus, data_dir, shared))
    _require_same_text(checkpoint, corpus)
    loss = evaluate(model, corpus.valid)
    if not math.isfinite(loss):
        return replace(so_far, outcome="differs", message=f"evaluated again, its validation loss is {loss}")
    so_far = replace(so_far, valid_loss=loss)
    difference = abs(loss - recorded)
    if difference <= (so_far.tolerance or 0.0):
        return replace(so_far, outcome="verified")
    words = (
        f"evaluated again, its validation loss is {loss:.9f} nats per token where {recorded:.9f} is "
        f"recorded: {difference:.2g} apart, and {so_far.tolerance:g} is allowed"
    )
    return replace(so_far, outcome="differs", message=words)


def _claimed(checkpoint: BestCheckpoint) -> tuple[int, float]:
    """Epoch and validation loss. Raises CorruptCheckpoint."""
    try:
        return int(checkpoint.metrics["epoch"]), float(checkpoint.metrics["valid_loss"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"its metrics have no epoch or no valid_loss: {error}") from error


def _require_same_text(checkpoint: BestCheckpoint, corpus: Corpus) -> None:
    """Raises CorpusError."""
    if corpus.vocabulary != checkpoint.vocabulary or corpus.sha256 != checkpoint.config.get("corpus_sha256"):
        raise CorpusError("the text has changed since it was trained: restore it to verify")


def placed(check: Check) -> tuple[Check, Part | None]:
    """On a part of a GPU, as long as this process holds it; on the CPU where none gets free: trials that run
    are not to run out of memory for it."""
    uuids = [gpu.uuid for gpu in visible_gpus()] if check.gpu_share is not None else []
    if check.gpu_share is None or not uuids:
        return check, None
    part = wait_for_part(uuids, check.gpu_share, PART_PATIENCE_S)
    if part is None:
        return replace(check, on="cpu"), None
    os.environ[VISIBLE] = part.uuid  # before CUDA is first asked for something
    return check, part


def main(store_url: str, data_dir: str, shared: str | None = None) -> None:
    values: dict[str, Any] = json.load(sys.stdin)
    check, part = placed(Check.from_json(values))
    if part is not None:
        keep_to_share(check.on, part.share)
    torch.set_num_threads(check.threads)
    found = verify(check, CheckpointStore(store_url), Path(data_dir), Path(shared) if shared else None)
    print(json.dumps(asdict(found)))
    if part is not None:
        part.give_back()


if __name__ == "__main__":
    main(*sys.argv[1:])
