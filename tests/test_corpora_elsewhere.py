"""Corpora in an object store: fetched once a machine, whole, and by their contents."""

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.object_store import BUCKET, SECRET, S3Server
from tests.service_process import write_corpus
from trials.buckets import S3Bucket, open_files
from trials.corpora import CorpusError, PathCorpus, check_corpus, folder_of, load_corpus, resolved
from trials.encoded import text_digests
from trials.files import StoreAway


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text", tokens=300)


@pytest.fixture
def corpus(s3: S3Server, text: Path) -> PathCorpus:
    put(text, url := f"s3://{BUCKET}/corpora/{text.parent.name}")
    return PathCorpus(path=url)


def put(text: Path, url: str) -> None:
    for file in text.iterdir():
        open_files(url).take(file.name, file)


def fetches(s3: S3Server, corpus: PathCorpus) -> int:
    path = corpus.path.removeprefix("s3:/")
    return sum(request.startswith(f"GET {path}/train.txt") for request in s3.requests())


def test_a_corpus_by_url_is_the_one_in_its_folder_and_is_fetched_once(
    corpus: PathCorpus, text: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_corpus(corpus, tmp_path)
    looked, both, read = fetches(s3, corpus), threading.Barrier(2), S3Bucket.read

    def slowly(bucket: S3Bucket, path: str) -> bytes:
        with suppress(threading.BrokenBarrierError):  # where both fetch, they meet here
            both.wait(0.5)
        return read(bucket, path)

    monkeypatch.setattr(S3Bucket, "read", slowly)
    others = [threading.Thread(target=load_corpus, args=(corpus, tmp_path)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    found, here = load_corpus(corpus, tmp_path), load_corpus(PathCorpus(path=str(text)), tmp_path)
    assert (found.sha256, found.vocabulary) == (here.sha256, here.vocabulary)
    assert text_digests(corpus, tmp_path) == tuple(here.sha256.values())
    assert fetches(s3, corpus) == looked + 1
    assert resolved(corpus, tmp_path) == corpus


def test_a_text_that_is_replaced_is_another(corpus: PathCorpus, text: Path, tmp_path: Path) -> None:
    before = text_digests(corpus, tmp_path)
    (text / "train.txt").write_text("all work and no play\n" * 20)
    put(text, corpus.path)
    after = text_digests(corpus, tmp_path)
    assert before[0] != after[0]
    assert before[1:] == after[1:]


def test_what_a_killed_download_left_is_removed_by_the_next(corpus: PathCorpus, tmp_path: Path) -> None:
    folder = folder_of(corpus, tmp_path)
    for file in folder.iterdir():
        file.unlink()
    left, of_another = (folder.parent / f".download-{name}-x" for name in (folder.name, "ptb"))
    for each in (left, of_another):
        each.mkdir()
        (each / "train.txt").write_text("cut sh")
    assert folder_of(corpus, tmp_path) == folder
    assert not left.exists()
    assert of_another.exists()
    assert {file.name for file in folder.iterdir()} == {"train.txt", "valid.txt", "test.txt"}


def test_a_corpus_by_url_that_is_not_there_says_what_it_wants(s3: S3Server, tmp_path: Path) -> None:
    for url, words in (
        (f"s3://{BUCKET}/none", "has not all of them"),
        ("s3://none-such/none", "has not all of them"),
    ):
        for ask in (check_corpus, load_corpus):
            with pytest.raises(CorpusError, match=words) as refusal:
                ask(PathCorpus(path=url), tmp_path)
            assert refusal.value.pointer == "/path"
    with pytest.raises(CorpusError, match="leave credentials out of its URL") as refusal:
        resolved(PathCorpus(path=f"s3://{SECRET}@{BUCKET}/x"), tmp_path)
    assert SECRET not in str(refusal.value)


def test_a_store_that_is_away_is_no_fault_of_the_corpus(
    corpus: PathCorpus, s3: S3Server, tmp_path: Path
) -> None:
    with s3.failing("InternalError", 500):
        for ask in (check_corpus, load_corpus):
            with pytest.raises(StoreAway):
                ask(corpus, tmp_path)
        with pytest.raises(StoreAway):
            text_digests(corpus, tmp_path)


def test_a_folder_that_a_machine_has_not_is_named_with_the_machine(tmp_path: Path) -> None:
    corpus = PathCorpus(path=str(tmp_path / "only-there"))
    with pytest.raises(CorpusError, match=f"only-there' is no directory on {socket.gethostname()}: correct"):
        load_corpus(corpus, tmp_path)
