"""What is inside a checkpoint: `best`, weights to use; `last`, all that training needs to go on bit-exactly.

Tensors are safetensors, the rest is JSON and text: loading never executes anything.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from trials.corpora import Vocabulary
from trials.files import write_whole
from trials.store import CorruptCheckpoint, pack, unpack

NO_FIT = "the checkpoint's weights and its config.json do not fit together"


@dataclass(frozen=True)
class BestCheckpoint:
    """A trained model that can be used without anything else."""

    tensors: dict[str, Tensor]
    """The state dict of models.awd_lstm.AWDLSTM: averaged weights once averaging was on."""
    config: dict[str, Any]
    """`model`, `training`, `regularization`, `corpus`, `seed`."""
    vocabulary: Vocabulary
    metrics: dict[str, Any]
    """Epoch and losses (nats per token) of these weights."""
    file_sha256: str = field(default="", compare=False)
    """Of the bytes that it was read from, where it was."""

    def files(self) -> dict[str, bytes]:
        return {
            "model.safetensors": safetensors.torch.save(_contiguous(self.tensors)),
            "config.json": _to_json(self.config),
            "vocabulary.txt": self.vocabulary.to_text().encode(),
            "metrics.json": _to_json(self.metrics),
        }


def read_best(file: Path | BinaryIO) -> BestCheckpoint:
    """Read and verify a `best` archive. Raises CorruptCheckpoint, FileNotFoundError."""
    where = str(file if isinstance(file, Path) else getattr(file, "name", "the checkpoint"))
    content = file.read_bytes() if isinstance(file, Path) else file.read()
    files = unpack(content, where)
    try:
        return BestCheckpoint(
            tensors=safetensors.torch.load(files["model.safetensors"]),
            config=_from_json(files, "config.json"),
            vocabulary=Vocabulary.from_text(files["vocabulary.txt"].decode()),
            metrics=_from_json(files, "metrics.json"),
            file_sha256=hashlib.sha256(content).hexdigest(),
        )
    except KeyError as error:
        raise CorruptCheckpoint(f"{where} is no `best` checkpoint: it holds no {error.args[0]}") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise CorruptCheckpoint(f"{where} cannot be read: {error}") from error


def rebuilt(checkpoint: BestCheckpoint) -> AWDLSTM:
    """The model that a checkpoint holds. Raises CorruptCheckpoint where its parts do not fit together."""
    try:
        config = AWDLSTMConfig(**checkpoint.config["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"its config.json describes no model: {error}") from error
    said = config.parameter_count(len(checkpoint.vocabulary))
    held = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    if said != held:  # before memory is taken for whatever it says
        raise CorruptCheckpoint(f"{NO_FIT}: it holds {held:,} numbers for a model of {said:,}")
    if not all(tensor.isfinite().all() for tensor in checkpoint.tensors.values()):
        raise CorruptCheckpoint("the checkpoint's weights are not all finite numbers: train the model again")
    model = AWDLSTM(config, len(checkpoint.vocabulary), torch.Generator())
    try:
        model.load_state_dict(checkpoint.tensors)
    except RuntimeError as error:
        raise CorruptCheckpoint(f"{NO_FIT}: {' '.join(str(error).split())}") from error
    return model


def write_best(path: Path, checkpoint: BestCheckpoint) -> None:
    """Write a `best` archive whole."""
    write_whole(path, pack(checkpoint.files()))


def pack_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, bytes]:
    """The files of a `last` archive from what Training.state() gives."""
    return {
        "training.safetensors": safetensors.torch.save(_contiguous(tensors)),
        "training.json": _to_json(values),
    }


def unpack_state(files: dict[str, bytes], where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What pack_state was given. Raises CorruptCheckpoint."""
    try:
        return safetensors.torch.load(files["training.safetensors"]), _from_json(files, "training.json")
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise CorruptCheckpoint(f"{where} is no `last` checkpoint: {error}") from error


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _from_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        document = json.loads(files[name])
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"{name} holds no JSON object")
    return document


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()
