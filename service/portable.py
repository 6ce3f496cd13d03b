"""`fraternal export FILE.tar`: a model as a file for others, once that computes the same. Loads torch."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from models.portable import (
    NotTheSame,
    Parity,
    TooLarge,
    require_parity,
    run_onnx,
    run_plain,
    to_onnx,
    to_plain,
    widths,
)
from service.errors import CommandFailed
from service.local import read_checkpoint, rebuild
from service.runs import missing_extra
from trials.checkpoints import BestCheckpoint
from trials.files import write_together, write_whole


def export_onnx(file: Path, out: Path) -> str:
    """Write one ONNX file; what was written, in words. Raises CommandFailed, with nothing written."""
    checkpoint = read_checkpoint(file)
    model = rebuild(checkpoint)
    told = facts(checkpoint)
    metadata = {
        "vocabulary": checkpoint.vocabulary.to_text(),
        **{name: value if isinstance(value, str) else json.dumps(value) for name, value in told.items()},
    }
    try:
        content = to_onnx(model, metadata)
        parity = require_parity(run_onnx(content), model)
    except ImportError as error:
        raise missing_extra("onnx", "onnx and onnxruntime") from error
    except TooLarge as error:
        raise CommandFailed(f"{error}: --format state-dict has no such limit") from error
    except NotTheSame as error:
        raise _differs(out, error) from error
    write_whole(out, content)
    return _said(out, content, parity)


def export_state_dict(file: Path, out: Path) -> str:
    """Write a state_dict, and `.json` beside it; what was written, in words.

    Raises CommandFailed, with nothing written.
    """
    checkpoint = read_checkpoint(file)
    model = rebuild(checkpoint)
    buffer = io.BytesIO()
    torch.save(to_plain(model), buffer)
    content = buffer.getvalue()
    try:
        parity = require_parity(run_plain(content, model), model)
    except NotTheSame as error:
        raise _differs(out, error) from error
    document = {
        "model": {
            "vocabulary_size": len(checkpoint.vocabulary),
            "widths": widths(model),
            "tied": model.config.tied,
        },
        **facts(checkpoint),
        "state_dict_sha256": hashlib.sha256(content).hexdigest(),
        "vocabulary": checkpoint.vocabulary.tokens,
    }
    write_together({sidecar(out): (json.dumps(document, indent=1) + "\n").encode(), out: content})
    return f"{_said(out, content, parity)}\n{sidecar(out)}  vocabulary, config and widths of {out.name}"


def sidecar(out: Path) -> Path:
    return out.with_suffix(".json")


def facts(checkpoint: BestCheckpoint) -> dict[str, Any]:
    """What is to be known of a model, whatever the form it is in."""
    return {
        "config": checkpoint.config,
        "valid_loss": checkpoint.metrics["valid_loss"],
        "checkpoint_sha256": checkpoint.file_sha256,
        "vocabulary_sha256": hashlib.sha256(checkpoint.vocabulary.to_text().encode()).hexdigest(),
    }


def _said(out: Path, content: bytes, parity: Parity) -> str:
    return (
        f"{out}  sha256 {hashlib.sha256(content).hexdigest()}\n"
        f"computes what the checkpoint does: in float32, logits differ by at most {parity.logits:.2g}, "
        f"states by {parity.states:.2g}"
    )


def _differs(out: Path, error: NotTheSame) -> CommandFailed:
    return CommandFailed(
        f"{out} is not written, since it would not compute what the checkpoint does: {error}; "
        "please report this"
    )
