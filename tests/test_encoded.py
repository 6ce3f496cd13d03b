"""A corpus that one process encodes and all map: the same numbers, whatever happens to what is written down.

No torch here: the processes that are started load this file.
"""

import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.pool import AsyncResult
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

import trials.encoded
from tests.service_process import write_corpus
from trials.corpora import SPLITS, Corpus, CorpusError, CorpusSpec, PathCorpus, load_corpus
from trials.encoded import load_encoded, text_digests

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def text(tmp_path: Path) -> PathCorpus:
    return PathCorpus(path=str(write_corpus(tmp_path / "text")), vocabulary_size=50)


def load(corpus: CorpusSpec, tmp_path: Path) -> Corpus:
    return load_encoded(corpus, tmp_path, text_digests(corpus, tmp_path), tmp_path / "shared")


def assert_equal(one: Corpus, other: Corpus) -> None:
    assert one.vocabulary == other.vocabulary
    assert (one.unk_counts, one.sha256) == (other.unk_counts, other.sha256)
    for split in SPLITS:
        assert one.ids(split).dtype == other.ids(split).dtype
        np.testing.assert_array_equal(one.ids(split), other.ids(split))


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "shared").glob("*.ids"))


@pytest.mark.parametrize("options", [{}, {"train_tokens": 70, "valid_tokens": 30}, {"vocabulary": "all"}])
def test_what_is_mapped_is_what_load_corpus_gives(
    text: PathCorpus, tmp_path: Path, options: dict[str, object]
) -> None:
    corpus = text.model_copy(update=options)
    for _ in ("encoded", "found"):
        found = load(corpus, tmp_path)
        assert_equal(found, load_corpus(corpus, tmp_path))
        assert isinstance(found.train, np.memmap)
        assert not found.train.flags.writeable
    assert len(entries(tmp_path)) == 1


def test_a_text_that_cannot_change_is_found_again_without_its_digests(
    text: PathCorpus, tmp_path: Path
) -> None:
    for _ in ("encoded", "found"):
        assert_equal(load_encoded(text, tmp_path, (), tmp_path), load_corpus(text, tmp_path))
    assert len(list(tmp_path.glob("*.ids"))) == 1


def test_a_changed_text_or_another_limit_is_another_entry(text: PathCorpus, tmp_path: Path) -> None:
    before = load(text, tmp_path)
    fewer = text.model_copy(update={"train_tokens": 20})
    assert len(load(fewer, tmp_path).train) == 20
    (Path(text.path) / "test.txt").write_text("w01 w02\n")
    after = load(text, tmp_path)
    assert_equal(after, load_corpus(text, tmp_path))
    assert before.sha256 != after.sha256
    assert len(entries(tmp_path)) == 3


def test_text_that_changes_while_it_is_read_is_not_kept_for_what_it_was(
    text: PathCorpus, tmp_path: Path
) -> None:
    digests = text_digests(text, tmp_path)
    train = Path(text.path) / "train.txt"
    original = train.read_text()
    train.write_text("w01 w02\n" * 40)
    assert load_encoded(text, tmp_path, digests, tmp_path / "shared").vocabulary.tokens[:2] == ("w01", "w02")
    train.write_text(original)
    assert_equal(load(text, tmp_path), load_corpus(text, tmp_path))


@pytest.mark.parametrize("suffix", [".ids", ".tar"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_entry_is_made_again(text: PathCorpus, tmp_path: Path, suffix: str, damage: str) -> None:
    load(text, tmp_path)
    (path,) = (tmp_path / "shared").glob("*" + suffix)
    whole = path.read_bytes()
    flipped = whole[:600] + bytes([whole[600] ^ 1]) + whole[601:]
    damaged = {"flipped": flipped, "cut": whole[:700], "empty": b""}
    path.unlink()  # a new file: the old one may be mapped
    if damage != "gone":
        path.write_bytes(damaged[damage])
    assert_equal(load(text, tmp_path), load_corpus(text, tmp_path))
    assert path.read_bytes() == whole


def test_what_is_mapped_stays_when_the_folder_is_removed(text: PathCorpus, tmp_path: Path) -> None:
    found = load(text, tmp_path)
    shutil.rmtree(tmp_path / "shared")
    assert_equal(found, load_corpus(text, tmp_path))


def test_a_corpus_that_cannot_be_kept_is_used_all_the_same(text: PathCorpus, tmp_path: Path) -> None:
    """As where the disk is full: here, folders are in the way."""
    load(text, tmp_path)
    (path,) = entries(tmp_path)
    path.unlink()
    path.mkdir()
    assert_equal(load(text, tmp_path), load_corpus(text, tmp_path))


def test_a_corpus_that_cannot_be_used_says_so_and_leaves_no_entry(text: PathCorpus, tmp_path: Path) -> None:
    (Path(text.path) / "valid.txt").unlink()
    with pytest.raises(CorpusError, match=r"valid\.txt"):
        load(text, tmp_path)
    assert entries(tmp_path) == []


def load_together(text: PathCorpus, tmp_path: Path, meeting: Barrier) -> Corpus:
    """In a process of its own; notes when it encodes, and takes its time."""

    def noted(corpus: CorpusSpec, root: Path) -> Corpus:
        (tmp_path / f"encoding-{os.getpid()}").touch()
        time.sleep(0.3)
        return load_corpus(corpus, root)

    trials.encoded.load_corpus = noted
    meeting.wait(60)
    return load(text, tmp_path)


def die_while_encoding(text: PathCorpus, tmp_path: Path, where: str) -> None:
    """In a process of its own, killed -9 before anything is written or between the two files."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(trials.encoded, where, die)
    load(text, tmp_path)


@pytest.mark.slow
def test_processes_that_start_at_once_encode_a_corpus_once(text: PathCorpus, tmp_path: Path) -> None:
    with SPAWN.Manager() as manager, SPAWN.Pool(4) as pool:
        meeting = manager.Barrier(4)
        asked: list[AsyncResult[Corpus]] = [
            pool.apply_async(load_together, (text, tmp_path, meeting)) for _ in range(4)
        ]
        for result in asked:
            assert_equal(result.get(60), load_corpus(text, tmp_path))
    assert len(list(tmp_path.glob("encoding-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["load_corpus", "pack"])
def test_a_process_that_dies_while_it_encodes_leaves_nothing_half_read(
    text: PathCorpus, tmp_path: Path, where: str
) -> None:
    process = SPAWN.Process(target=die_while_encoding, args=(text, tmp_path, where))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(entries(tmp_path)) == (where == "pack")
    assert_equal(load(text, tmp_path), load_corpus(text, tmp_path))
