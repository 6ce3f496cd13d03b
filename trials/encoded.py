"""A corpus encoded once a machine: who needs it first writes its ids down, and all map them. No torch.

An entry is a file of the ids of all splits, one after another, and an archive that says the rest and their
digest; it is written last, so an entry that a crash cut short is none.
"""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from trials.corpora import (
    FILES,
    SPLITS,
    Corpus,
    CorpusError,
    CorpusSpec,
    PathCorpus,
    Vocabulary,
    folder_of,
    load_corpus,
)
from trials.files import StoreAway, alone, write_whole
from trials.store import CorruptCheckpoint, pack, sha256_of, unpack

ENCODED = "encoded"
NODE_DIR = "FRATERNAL_NODE_DIR"
"""Variable of a node: the folder in which its workers keep corpora; by default one for temporary files."""


def node_dir() -> Path:
    """Where the workers of a machine of a Ray cluster keep what they share: corpora, as text and as ids."""
    return Path(os.environ.get(NODE_DIR) or Path(tempfile.gettempdir(), f"fraternal-{os.getuid()}"))


def load_encoded(corpus: CorpusSpec, root: Path, digests: tuple[str, ...], folder: Path) -> Corpus:
    """What `load_corpus` returns, with ids that are mapped from `folder`, read-only, wherever it has them.

    `digests` are the text's, as it is now. Processes that ask at once wait for the one that encodes. Raises
    CorpusError.
    """
    key = hashlib.sha256(json.dumps([corpus.model_dump(mode="json"), digests]).encode()).hexdigest()
    entry = folder / key[:16]
    if (found := _find(entry, digests)) is not None:
        return found
    with alone(entry.with_suffix(".lock")):
        if (found := _find(entry, digests)) is not None:  # by now
            return found
        loaded = load_corpus(corpus, root)
        with suppress(OSError):  # where it cannot be kept, it is not shared
            _write(entry, loaded)
        return _find(entry, digests) or loaded


def text_digests(corpus: CorpusSpec, root: Path) -> tuple[str, ...]:
    """SHA-256 of the files that may change between two trials: those of a corpus by name cannot.

    Those of an object store are fetched first, where this machine has them not. Raises StoreAway.
    """
    if not isinstance(corpus, PathCorpus):
        return ()
    try:
        return tuple(sha256_of(folder_of(corpus, root) / name) for name in FILES.values())
    except StoreAway:
        raise
    except (OSError, CorpusError):  # load_corpus says what is wrong with it
        return ()


def _find(entry: Path, digests: tuple[str, ...]) -> Corpus | None:
    """An entry that is whole, and of this text."""
    try:
        files = unpack(entry.with_suffix(".tar").read_bytes(), f"{entry}.tar")
        ids = np.memmap(entry.with_suffix(".ids"), np.int32, "r")
    except (OSError, ValueError, CorruptCheckpoint):  # not there, or not what was written
        return None
    written = json.loads(files["corpus.json"])
    if hashlib.sha256(ids.data).hexdigest() != written["ids_sha256"]:
        return None
    if digests and digests != tuple(written["sha256"].values()):  # it changed while it was read
        return None
    train, valid, test = np.split(ids, np.cumsum(written["sizes"])[:-1])
    return Corpus(
        vocabulary=Vocabulary(tuple(written["vocabulary"])),
        train=train,
        valid=valid,
        test=test,
        unk_counts=written["unk_counts"],
        sha256=written["sha256"],
    )


def _write(entry: Path, corpus: Corpus) -> None:
    ids = np.concatenate([corpus.ids(split) for split in SPLITS])
    described = {
        "vocabulary": corpus.vocabulary.tokens,
        "sizes": [len(corpus.ids(split)) for split in SPLITS],
        "unk_counts": dict(corpus.unk_counts),
        "sha256": dict(corpus.sha256),
        "ids_sha256": hashlib.sha256(ids.data).hexdigest(),
    }
    write_whole(entry.with_suffix(".ids"), ids.tobytes())
    write_whole(entry.with_suffix(".tar"), pack({"corpus.json": json.dumps(described).encode()}))
