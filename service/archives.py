"""A checkpoint as it leaves the service: the file that the trial wrote, and what there is to know of it.

It is put together of pieces while it is sent, so that nothing as large as the weights is written or held.
Its bytes are a function of the trial's file and rows.
"""

import hashlib
import io
import json
import math
import tarfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from models.config import AWDLSTMConfig
from service.errors import CheckpointDamaged
from service.records import SweepRecord
from service.report_texts import escaped
from service.schemas import ENDED, TrialDetail
from service.views import find_spec
from trials.perplexity import perplexity
from trials.store import SUMS, CorruptCheckpoint, parse_sums, write_sums

WEIGHTS = "model.safetensors"
TEXTS = ("config.json", "vocabulary.txt", "metrics.json")
"""What a trial writes beside its weights and their sums."""
MOST_TEXT_BYTES = 64 * 2**20
"""Of one of them: a vocabulary of a million words has a sixth of that."""
CHUNK_BYTES = 2**20
BLOCK = tarfile.BLOCKSIZE
TEXT_LICENCES = {
    "sotu": "The State of the Union addresses are works of the United States government, and there in the "
    "public domain.",
    "ptb": "The Penn Treebank is text of the Wall Street Journal, licensed by the Linguistic Data Consortium "
    "(LDC99T42). Your agreement with it says whether you may pass on what was made from it.",
    "wikitext2": "WikiText-2 is text of Wikipedia, under the Creative Commons licence BY-SA 3.0: name the "
    "source, and pass on what you make of it under the same terms.",
}
OWN_TEXT = "The text is your own: its licence, and what it asks of weights, are for you to know."


@dataclass(frozen=True)
class Piece:
    """Bytes, or as many of a file from there on."""

    content: bytes | BinaryIO
    size: int
    start: int = 0

    def read(self, at: int, size: int) -> bytes:
        size = min(size, self.size - at)
        if isinstance(self.content, bytes):
            return self.content[at : at + size]
        self.content.seek(self.start + at)
        return self.content.read(size)


class Joined(io.RawIOBase):
    """Pieces as one file, to read; closing it closes the files in it."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._starts = list(accumulate((piece.size for piece in pieces), initial=0))
        self._at = 0

    @property
    def size(self) -> int:
        return self._starts[-1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at >= self.size or not view:
            return 0
        which = bisect_right(self._starts, self._at) - 1
        content = self._pieces[which].read(self._at - self._starts[which], len(view))
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        for piece in self._pieces:
            if not isinstance(piece.content, bytes):
                piece.content.close()
        super().close()


def archive_of(file: BinaryIO, record: SweepRecord, trial: TrialDetail) -> Joined:
    """The archive of a trial's checkpoint; takes the file over. Raises CheckpointDamaged."""
    try:
        return _archive_of(file, record, trial)
    except (
        tarfile.TarError,
        CorruptCheckpoint,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,  # a size, or an epoch, that is no number of this world
        RecursionError,
    ) as error:
        raise CheckpointDamaged(
            f"the checkpoint of trial {trial.number} of sweep {record.id} is not what was written: "
            f"{type(error).__name__}: {error}; take another trial's, or restore it from a backup"
        ) from error


def _archive_of(file: BinaryIO, record: SweepRecord, trial: TrialDetail) -> Joined:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # any that is read
    file.seek(0)
    written, weights, sums = _members_of(file)
    config, metrics = (_object_in(name, written[name]) for name in ("config.json", "metrics.json"))
    if not math.isfinite(metrics["valid_loss"]):
        raise ValueError("metrics.json has no finite valid_loss")
    if sha256 != trial.checkpoint_sha256:
        # A trial that runs is ahead of its rows; one whose process was killed may have been.
        if trial.state in ENDED and metrics["epoch"] <= (trial.best_epoch or 0):
            raise ValueError(f"its SHA-256 is {sha256}, and {trial.checkpoint_sha256} is on record")
        _require_sums(written, weights, sums)
    verification = trial.verification
    if verification is not None and (verification.checkpoint_sha256, verification.epoch) != (
        sha256,
        metrics["epoch"],
    ):
        verification = None  # of an earlier epoch
    metrics["verification"] = None if verification is None else verification.model_dump(mode="json")
    provenance = _provenance(record, trial, config, sha256)
    files: dict[str, bytes] = {
        "README.md": _readme(record, trial, config, metrics, written["vocabulary.txt"].count(b"\n")).encode(),
        "LICENSE.txt": _licence(config["corpus"]).encode(),
        **written,
        "metrics.json": _to_json(metrics),
        "provenance.json": _to_json(provenance),
    }
    summed = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    summed[WEIGHTS] = sums[WEIGHTS]
    pieces = [piece for name, content in files.items() for piece in _member(name, content)]
    pieces += _member(WEIGHTS, weights)
    pieces += _member(SUMS, write_sums(summed))
    pieces.append(Piece(b"\0" * (2 * BLOCK), 2 * BLOCK))
    return Joined(pieces)


def _members_of(file: BinaryIO) -> tuple[dict[str, bytes], Piece, dict[str, str]]:
    """The small files of an archive, where its weights lie, and what it says that their sums are.

    Nothing is believed: the file may be anybody's. Raises ValueError, TarError, CorruptCheckpoint.
    """
    with tarfile.open(fileobj=file, mode="r:") as archive:
        members: dict[str, tarfile.TarInfo] = {}
        for member in archive:
            if member.name not in {*TEXTS, WEIGHTS, SUMS} - members.keys():
                raise ValueError(f"it holds {member.name!r:.200}, or holds it twice")
            if not member.isreg() or member.issparse():
                raise ValueError(f"{member.name} is no plain file")
            if member.name != WEIGHTS and member.size > MOST_TEXT_BYTES:
                raise ValueError(
                    f"{member.name} has {member.size:,} bytes, of {MOST_TEXT_BYTES:,} that it may"
                )
            members[member.name] = member
        written = {name: _read(archive, members[name]) for name in TEXTS}
        sums = parse_sums(_read(archive, members[SUMS]), "the archive")
        weights = members[WEIGHTS]
    return written, Piece(file, weights.size, weights.offset_data), sums


def _require_sums(written: Mapping[str, bytes], weights: Piece, sums: Mapping[str, str]) -> None:
    """Raises ValueError."""
    found = {name: hashlib.sha256(content).hexdigest() for name, content in written.items()}
    of_weights = hashlib.sha256()
    for at in range(0, weights.size, CHUNK_BYTES):
        of_weights.update(weights.read(at, CHUNK_BYTES))
    found[WEIGHTS] = of_weights.hexdigest()
    for name, digest in found.items():
        if digest != sums[name]:
            raise ValueError(f"the SHA-256 of {name} differs from its {SUMS}")


def _object_in(name: str, content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no object")
    return found


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    extracted = archive.extractfile(member)
    assert extracted is not None  # it is a file
    return extracted.read()


def _member(name: str, content: bytes | Piece) -> list[Piece]:
    """A file in a tar: header, content, and zeros up to the next block."""
    piece = content if isinstance(content, Piece) else Piece(content, len(content))
    header = tarfile.TarInfo(name)
    header.size = piece.size
    head = header.tobuf(tarfile.USTAR_FORMAT)
    rest = -piece.size % BLOCK
    return [Piece(head, len(head)), piece, Piece(b"\0" * rest, rest)]


def _provenance(
    record: SweepRecord, trial: TrialDetail, config: Mapping[str, Any], sha256: str
) -> dict[str, Any]:
    """Where the weights come from: enough to train them again."""
    spec = find_spec(record)
    return {
        "sweep": {
            "id": record.id,
            "created_at": record.created_at.isoformat(),
            "sampler": None if spec is None else spec.sampler.model_dump(mode="json"),
        },
        "trial": {
            "number": trial.number,
            "arm": trial.arm,
            "draw": trial.draw,
            "attempt": trial.attempt,
            "params": trial.params,
        },
        "seed": trial.seed,
        "runtime": trial.runtime,
        "corpus": config["corpus"],
        "corpus_sha256": config["corpus_sha256"],
        "device": trial.device,
        "checkpoint_sha256": sha256,
    }


def _readme(
    record: SweepRecord,
    trial: TrialDetail,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    types: int,
) -> str:
    name, corpus, model = filename_of(record.id, trial.number), config["corpus"], config["model"]
    parameters = AWDLSTMConfig(**model).parameter_count(types)
    regularization = {key: value for key, value in config["regularization"].items() if value is not None}
    loss = metrics["valid_loss"]
    rows = {
        "validation": f"perplexity {perplexity(loss):.4f}, loss {loss:.6f} nats per token, "
        f"after epoch {metrics['epoch']}",
        "evaluated again": _words_of(trial.state, metrics["verification"]),
        "text": f"{corpus.get('name') or corpus.get('path')}, a vocabulary of {types:,} words",
        "model": f"AWD-LSTM, embedding {model['embedding_size']}, {model['layers']} layers of "
        f"{model['hidden_size']}, {parameters:,} parameters in float32",
        "regularization": ", ".join(f"{key} {value}" for key, value in regularization.items()),
    }
    table = "\n".join(f"| {key} | {escaped(value)} |" for key, value in rows.items())
    return f"""# Trial {trial.number}, {escaped(trial.arm)}, of sweep {record.id}

A language model over words, trained by fraternal.

| | |
|---|---|
{table}

## Use it

    fraternal evaluate {name}
    fraternal generate {name} --prompt "the" --temperature 0.8
    fraternal finetune {name} --out finetuned.tar
    fraternal export {name} --format onnx --out model.onnx

None of these needs the service that made it. Without fraternal, too, nothing in here has to be trusted to be
read: `tar -xf {name}`, `sha256sum --check {SUMS}`, and `safetensors.torch.load_file("{WEIGHTS}")`.

## What is inside

| file | |
|---|---|
| `{WEIGHTS}` | the weights: averaged ones, once averaging was on |
| `config.json` | every value that it was trained with |
| `vocabulary.txt` | a word a line, in the order of their ids |
| `metrics.json` | losses in nats per token, and how they came out when they were evaluated again |
| `provenance.json` | sweep, trial, seeds, versions, the text's checksums, the device |
| `LICENSE.txt` | what there is to say of licences |
| `{SUMS}` | SHA-256 of each of them |
"""


def _words_of(state: str, verification: Mapping[str, Any] | None) -> str:
    if verification is None:
        return "not yet" + (": the trial runs" if state == "RUNNING" else "")
    if verification["outcome"] != "verified":
        return f"{verification['outcome']}: {verification['message']}"
    apart = abs(verification["valid_loss"] - verification["recorded_valid_loss"])
    return (
        f"the loss is {apart:.1e} nats per token off, of {verification['tolerance']:.0e} allowed, on "
        f"{verification['device']}"
    )


def verification_in(path: Path) -> str:
    """What an archive that was fetched says of how it came out when it was evaluated again, in words."""
    with tarfile.open(path, mode="r:") as archive:
        metrics = json.loads(_read(archive, archive.getmember("metrics.json")))
    return _words_of("", metrics.get("verification"))


def filename_of(sweep_id: str, number: int) -> str:
    return f"{sweep_id}-t{number:05d}-best.tar"


def _licence(corpus: Mapping[str, Any]) -> str:
    return (
        "The program that trained these weights, fraternal, is under the MIT licence, which asks nothing of "
        "what it makes.\nWhat may be done with the weights and the vocabulary is for whoever had them "
        "trained, within what the licence of the text allows.\n"
        f"{TEXT_LICENCES.get(corpus.get('name', ''), OWN_TEXT)}\n"
    )


def _to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
