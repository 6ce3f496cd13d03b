"""The laws of a store in an object store, against a real S3 server: what of it a folder has by itself."""

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.auth.exceptions import RefreshError
from s3fs.core import S3File

import trials.buckets
import trials.files
from tests.object_store import BUCKET, KEY, SECRET, S3Server
from tests.service_process import wait_until
from tests.test_attempt import best_bytes, epochs_of, small_corpus, small_task
from trials.buckets import S3Bucket
from trials.corpora import PathCorpus
from trials.files import StoreAway, StoreRefused, Superseded
from trials.store import CheckpointStore
from trials.tasks import Task

FILES = {"weights": bytes(range(256)) * 4}
PART = 5 * 2**20
LARGE = {"weights": bytes(2 * PART)}
names = itertools.count()


@pytest.fixture(autouse=True)
def without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests by the client, which takes seconds."""
    monkeypatch.setitem(trials.buckets.OPTIONS["s3"]["config_kwargs"]["retries"], "total_max_attempts", 1)


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{BUCKET}/{next(names)}"


@pytest.fixture
def store(url: str) -> CheckpointStore:
    return CheckpointStore(url)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """LARGE is uploaded in three of them."""
    monkeypatch.setattr(trials.buckets, "PART_BYTES", PART)


def unfinished(store: CheckpointStore) -> list[Any]:
    files = store._files
    assert isinstance(files, S3Bucket)
    bucket, _, prefix = files.place("").partition("/")
    return files._uploads(bucket, prefix)


# What goes over the network.


def test_what_is_sent_has_a_checksum_and_is_refused_without_it(store: CheckpointStore, s3: S3Server) -> None:
    before = len(s3.requests())
    store.save_last("s1", 0, FILES)
    sent = [request for request in s3.requests()[before:] if request.startswith("PUT")]
    assert len(sent) == 1
    assert "HTTP_X_AMZ_CHECKSUM_CRC32" in sent[0]
    with s3.flipping_bits(), pytest.raises(StoreAway, match=r"XAmzContentSHA256Mismatch|BadDigest"):
        store.save_last("s1", 0, {"weights": b"new"})
    assert store.find_last("s1", 0) == FILES


def test_a_large_checkpoint_is_sent_in_parts_each_with_a_checksum(
    store: CheckpointStore, s3: S3Server, in_parts: None
) -> None:
    before = len(s3.requests())
    store.save_last("s1", 0, LARGE)
    parts = [request for request in s3.requests()[before:] if "partNumber=" in request]
    assert len(parts) == 3
    assert all("HTTP_X_AMZ_CHECKSUM_CRC32" in part for part in parts)
    assert store.find_last("s1", 0) == LARGE
    assert not unfinished(store)


def test_an_upload_that_fails_leaves_the_file_before_it_and_no_parts(
    store: CheckpointStore, s3: S3Server, in_parts: None
) -> None:
    store.save_last("s1", 0, FILES)
    with s3.failing("InternalError", 500, "PUT"), pytest.raises(StoreAway):
        store.save_last("s1", 0, LARGE)
    gc.collect()  # a file that nobody has any more closes itself, which would complete it
    assert store.find_last("s1", 0) == FILES
    assert not unfinished(store)


UPLOADER = """
import sys, trials.buckets
from trials.store import CheckpointStore
trials.buckets.PART_BYTES = 5 * 2**20
CheckpointStore(sys.argv[1]).save_last("s1", 0, {"weights": bytes(100 * 2**20)})
"""


def test_an_upload_that_is_killed_leaves_nothing_to_see_and_its_parts_are_removed_with_the_sweep(
    store: CheckpointStore, url: str, s3: S3Server
) -> None:
    store.save_last("s1", 0, FILES)
    for remove in (store.discard_unfinished, store.remove_sweep):
        before = len(s3.requests())
        uploader = subprocess.Popen([sys.executable, "-c", UPLOADER, url])
        wait_until(
            lambda start=before: any("partNumber=2" in request for request in s3.requests()[start:]),  # type: ignore[misc]
            "a part is there",
        )
        uploader.kill()
        uploader.wait()
        assert store.find_last("s1", 0) == FILES
        assert len(unfinished(store)) == 1
        remove("s")
        assert len(unfinished(store)) == 1
        remove("s1")
        assert not unfinished(store)


def test_a_reader_sees_one_version_even_where_another_comes_between_two_ranges(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.buckets, "BLOCK_BYTES", 3000)
    contents = [{"weights": bytes([number]) * 10_000} for number in range(3)]
    fetch, asked = S3File._fetch_range, itertools.count()

    def overtaken(file: S3File, start: int, end: int) -> Any:
        if next(asked) in (1, 3):
            store.save_last("s1", 0, contents.pop(1))
        return fetch(file, start, end)

    store.save_last("s1", 0, contents[0])
    store.save_best("s1", 0, contents[0])
    monkeypatch.setattr(S3File, "_fetch_range", overtaken)
    assert store.find_last("s1", 0) == {"weights": bytes([2]) * 10_000}


def test_a_look_for_a_pause_is_one_request(store: CheckpointStore, s3: S3Server) -> None:
    for asked in (False, True):
        before = len(s3.requests())
        assert store.pause_is_asked("s1", "d1") == asked
        assert len(s3.requests()) == before + 1
        store.ask_to_pause("s1", "d1")


# Who may write.


@pytest.mark.parametrize("files", [FILES, LARGE], ids=["whole", "in parts"])
def test_an_attempt_with_a_successor_overwrites_nothing(
    store: CheckpointStore, files: dict[str, bytes], in_parts: None
) -> None:
    store.save_last("s1", 0, files, attempt=1)
    store.save_best("s1", 0, files, attempt=1)
    new = {"weights": b"of the second"}
    for _ in range(2):
        store.save_last("s1", 0, new, attempt=2)
        sha256 = store.save_best("s1", 0, new, attempt=2)
        with pytest.raises(Superseded, match="attempt 2 at this trial has written last"):
            store.save_last("s1", 0, files, attempt=1)
        with pytest.raises(Superseded):
            store.save_best("s1", 0, files, attempt=1)
    assert store.find_last("s1", 0) == new
    assert store.best_sha256("s1", 0) == sha256
    store.save_last("s1", 1, files, attempt=1)


@pytest.mark.parametrize("files", [FILES, LARGE], ids=["whole", "in parts"])
@pytest.mark.parametrize("there", [True, False])
def test_nor_does_one_that_had_looked_before_its_successor_wrote(
    store: CheckpointStore,
    files: dict[str, bytes],
    there: bool,
    in_parts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find, upload = S3Bucket._find_version, S3Bucket._upload
    if there:
        store.save_last("s1", 0, FILES, attempt=1)

    def overtaken(bucket: S3Bucket, path: str) -> Any:
        found = find(bucket, path)
        monkeypatch.setattr(S3Bucket, "_find_version", find)
        store.save_last("s1", 0, {"weights": b"of the second"}, attempt=2)
        return found

    monkeypatch.setattr(S3Bucket, "_find_version", overtaken)
    with pytest.raises(Superseded):
        store.save_last("s1", 0, files, attempt=1)
    assert S3Bucket._upload is upload
    assert store.find_last("s1", 0) == {"weights": b"of the second"}


def test_an_attempt_overwrites_what_an_earlier_one_writes_in_the_meantime(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = S3Bucket._find_version

    def overtaken(bucket: S3Bucket, path: str) -> Any:
        found = find(bucket, path)
        monkeypatch.setattr(S3Bucket, "_find_version", find)
        store.save_last("s1", 0, {"weights": b"of the first"}, attempt=1)
        return found

    monkeypatch.setattr(S3Bucket, "_find_version", overtaken)
    store.save_last("s1", 0, FILES, attempt=2)
    assert store.find_last("s1", 0) == FILES


def test_of_two_services_that_find_it_empty_at_once_one_becomes_its_owner(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3Bucket, "names", lambda bucket, path: [])
    assert [store.is_owned_by(owner) for owner in ("aaaaaa", "bbbbbb", "aaaaaa")] == [True, False, True]


# A store that does not do as it is asked.


@pytest.mark.parametrize("code", ["InternalError 500", "SlowDown 503", "ServiceUnavailable 503", "502 502"])
def test_a_store_that_fails_is_away(store: CheckpointStore, s3: S3Server, code: str) -> None:
    store.save_best("s1", 0, FILES)
    name, status = code.split()
    with s3.failing(name, int(status)):
        for ask in (
            lambda: store.find_last("s1", 0),
            lambda: store.save_last("s1", 0, FILES),
            lambda: store.open_best("s1", 0),
            lambda: store.numbers_with_best("s1"),
        ):
            with pytest.raises(StoreAway, match=f"s3://{BUCKET}/.* does not answer as it should"):
                ask()
    assert store.best_sha256("s1", 0)


def test_a_store_that_refuses_says_what_it_wants(
    store: CheckpointStore, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.failing("AccessDenied", 403), pytest.raises(StoreRefused, match="AWS_ACCESS_KEY_ID"):
        store.save_last("s1", 0, FILES)
    for name, value in (("AWS_ACCESS_KEY_ID", "AKIAWRONG"), ("AWS_SECRET_ACCESS_KEY", SECRET)):
        monkeypatch.setenv(name, value)
    anew(monkeypatch)
    with pytest.raises(StoreRefused) as refusal:
        CheckpointStore(f"s3://{BUCKET}/x").require()
    assert "list, read, write and delete" in str(refusal.value)
    assert SECRET not in str(refusal.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    anew(monkeypatch)
    with pytest.raises(StoreRefused, match="NoCredentialsError"):
        CheckpointStore(f"s3://{BUCKET}/x").require()


@pytest.mark.parametrize(
    ("fault", "way_out"),
    [
        ("ExpiredToken 403", "give others, or ones that renew themselves"),
        ("400 400", "credentials that have expired are one, and another region"),
        ("RequestTimeTooSkewed 403", "set this machine's clock"),
        ("IllegalLocationConstraintException 400", "set AWS_DEFAULT_REGION"),
    ],
)
def test_what_waiting_does_not_end_is_refused_with_its_own_way_out(
    store: CheckpointStore, s3: S3Server, fault: str, way_out: str
) -> None:
    code, status = fault.split()
    with s3.failing(code, int(status)), pytest.raises(StoreRefused, match=way_out):
        store.numbers_with_best("s1")


def test_an_upload_that_is_listed_though_it_was_ended_is_ended_once(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [{"Key": "x", "UploadId": "1"}, {"Key": "x", "UploadId": "2"}]
    monkeypatch.setattr(S3Bucket, "_uploads", lambda bucket, name, prefix: listed)
    ended: list[str] = []
    monkeypatch.setattr(store._files._files, "abort_mpu", lambda bucket, key, upload: ended.append(upload))
    store.discard_unfinished("s1")
    assert ended == ["1", "2"]


@pytest.mark.parametrize(
    ("error", "refused", "way_out"),
    [
        (
            OSError("Forbidden: https://storage/b/x\nno storage.objects.get"),
            True,
            r"\(Forbidden\): give credentials by GOOGLE_",
        ),
        (
            RefreshError("invalid_grant: Token has been expired or revoked."),
            True,
            "give credentials by GOOGLE_",
        ),
        (ValueError("Bad Request: https://storage/b/x\nInvalid bucket name"), True, "name a bucket"),
        (OSError("Connection reset by peer"), False, "see that it is up"),
    ],
    ids=str,
)
def test_what_googles_store_refuses_is_told_from_its_being_away(
    error: Exception, refused: bool, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore("gs://bucket/x")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(store._files._files, "find", fail)
    with pytest.raises(StoreRefused if refused else StoreAway, match=way_out):
        store.numbers_with_best("s1")


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would find it."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


def test_a_store_of_which_it_may_only_be_read_is_refused(store: CheckpointStore, s3: S3Server) -> None:
    store.require()
    with s3.failing("AccessDenied", 403, "PUT"), pytest.raises(StoreRefused):
        store.require()


def test_a_bucket_that_is_not_there_is_named(s3: S3Server) -> None:
    store = CheckpointStore("s3://none-such/x")
    for ask in (store.require, lambda: store.save_last("s1", 0, FILES)):
        with pytest.raises(StoreRefused, match="there is no bucket 'none-such'; make it, or name another"):
            ask()


def test_a_store_that_is_away_or_silent_is_said_to_be(
    own_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(f"s3://{BUCKET}/x")
    assert store.check() is None
    monkeypatch.setattr(trials.buckets, "CHECK_S", 0.5)
    own_s3.freeze()
    said = store.check()
    own_s3.thaw()
    assert said is not None
    assert "does not answer as it should (FSTimeoutError)" in said
    own_s3.kill()
    with pytest.raises(StoreAway, match="EndpointConnectionError"):
        store.find_last("s1", 0)


def test_a_client_that_is_not_installed_is_named() -> None:
    with pytest.raises(StoreRefused, match="needs a client that is not installed"):
        CheckpointStore("abfs://container/x")
    with pytest.raises(StoreRefused, match="cannot be opened: Protocol not known: s4"):
        CheckpointStore("s4://bucket/x")


# An attempt.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PathCorpus:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def task(corpus: PathCorpus) -> Task:
    return replace(small_task(corpus), checkpoint_every_s=0.01)


@pytest.fixture
def twins_best(task: Task, tmp_path: Path) -> bytes:
    """Of a twin in a folder that nothing happens to."""
    twin = CheckpointStore((tmp_path / "twin").as_uri())
    list(epochs_of(task, twin, tmp_path))
    return best_bytes(twin)


def test_a_store_that_is_killed_and_started_again_costs_an_attempt_nothing(
    task: Task, twins_best: bytes, own_s3: S3Server, tmp_path: Path
) -> None:
    store, said = CheckpointStore(f"s3://{BUCKET}/x"), []
    for report in epochs_of(task, store, tmp_path):
        said.append(report)
        if len(said) == 2:
            own_s3.kill()
            again = threading.Timer(2.0, own_s3.start)
            again.start()
    again.join()
    assert [report.failure for report in said] == [None] * 5
    assert best_bytes(store) == twins_best


def test_an_attempt_whose_store_stays_away_or_refuses_is_infrastructure(
    task: Task, s3: S3Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.files, "PATIENCE_S", 0.0)
    for code, status in (("InternalError", 500), ("AccessDenied", 403)):
        with s3.failing(code, status):
            *_, last = epochs_of(task, CheckpointStore(url), tmp_path)
        assert last.failure is not None
        assert last.failure.failure_class == "infrastructure"
        assert f"({status}):" in last.failure.message.splitlines()[-1], last.failure.message
        assert SECRET not in last.failure.message
        assert KEY not in last.failure.message


def test_an_attempt_shows_that_it_lives_while_it_waits_for_its_store(
    task: Task, s3: S3Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trials.attempt import ALIVE, run_attempt

    monkeypatch.setattr(trials.attempt.time, "sleep", lambda seconds: None)
    running = run_attempt(replace(task, hang_s=0.001), CheckpointStore(url), tmp_path)
    assert next(running) == ALIVE
    with s3.failing("InternalError", 500):
        assert [next(running) for _ in range(2)] == [ALIVE, ALIVE]
    assert any(report.epoch is not None for report in running)


def test_an_attempt_that_has_a_successor_ends(
    task: Task, twins_best: bytes, store: CheckpointStore, tmp_path: Path
) -> None:
    first: Iterator[Any] = epochs_of(task, store, tmp_path)
    next(first)
    second = list(epochs_of(replace(task, attempt=2), store, tmp_path))
    *_, last = first
    assert last.failure is not None
    assert (last.failure.failure_class, last.epoch) == ("infrastructure", None)
    assert "this is attempt 1: it ends" in last.failure.message
    assert second[-1].finished
    assert best_bytes(store) == twins_best


@pytest.mark.parametrize(
    "prefix",
    ["a b", "ü/ñ", "x/../y", "x/", "", "a%20b", "a+b", "x#y", "x//y"],
    ids=lambda prefix: prefix or "none",
)
def test_a_prefix_is_what_it_says(prefix: str, s3: S3Server) -> None:
    store, other = CheckpointStore(f"s3://{BUCKET}/{prefix}"), CheckpointStore(f"s3://{BUCKET}/other")
    store.require()
    for each in (store, other):
        each.save_best("s9", 0, FILES)
    assert store.numbers_with_best("s9") == [0]
    assert [file.path for file in store.files() if file.sweep_id == "s9"] == ["s9/t00000/best.tar"]
    store.remove_sweep("s9")
    assert [each.has_sweep("s9") for each in (store, other)] == [False, True]


@pytest.mark.parametrize("prefix", ["run*", "a?", "[x]"])
def test_a_prefix_that_would_stand_for_others_is_refused(prefix: str) -> None:
    """To remove something below it would be to remove it below all that it matches."""
    with pytest.raises(StoreRefused, match=r"has one of \*\?\[ in it, .* choose another prefix"):
        CheckpointStore(f"s3://{BUCKET}/{prefix}")
