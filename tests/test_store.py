"""The laws of archives and of the store: whole files or none, and nothing but what was written."""

import contextlib
import io
import os
import pickle
import random
import secrets
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.object_store import BUCKET
from trials.files import write_together, write_whole
from trials.store import SUMS, CheckpointStore, CorruptCheckpoint, pack, unpack

FILES = {"config.json": b'{"kappa": 0.1}', "weights": bytes(range(256)) * 3, "empty": b""}
NAMES = st.text("abcXYZ019._-", min_size=1, max_size=40).filter(lambda name: name not in {SUMS, ".", ".."})


@given(st.dictionaries(NAMES, st.binary(max_size=2000), max_size=5))
def test_archive_gives_back_what_was_packed(files: dict[str, bytes]) -> None:
    assert unpack(pack(files), "here") == files
    assert list(unpack(io.BytesIO(pack(files)), "here")) == list(files)


def test_same_content_is_the_same_bytes_whenever_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack(FILES)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert pack(dict(FILES)) == first


def test_no_changed_byte_goes_unnoticed_where_it_matters() -> None:
    archive, chance = pack(FILES), random.Random(1)
    for position in range(len(archive)):
        value = chance.choice([archive[position] ^ 1, archive[position] ^ 0x80, archive[position] ^ 0xFF])
        changed = archive[:position] + bytes([value]) + archive[position + 1 :]
        with contextlib.suppress(CorruptCheckpoint):
            assert unpack(changed, "here") == FILES, position


def test_changed_weight_is_refused() -> None:
    archive = pack(FILES)
    start = archive.index(FILES["weights"])
    for position in range(start, start + len(FILES["weights"])):
        changed = bytearray(archive)
        changed[position] ^= 1
        with pytest.raises(CorruptCheckpoint, match="weights in here is not what was written"):
            unpack(bytes(changed), "here")


def test_archive_cut_short_is_refused_or_whole() -> None:
    archive = pack(FILES)
    for length in range(0, len(archive), 7):
        with contextlib.suppress(CorruptCheckpoint):
            assert unpack(archive[:length], "here") == FILES


class Planted:
    """Unpickled, it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.file,)


def tar(members: dict[str, bytes], kind: bytes = tarfile.REGTYPE, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("config.json", "{}")
    return buffer.getvalue()


def huge_member() -> bytes:
    """A valid header of a member of 2**87 bytes."""
    header = bytearray(tarfile.TarInfo("weights").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"\x80" + b"\xff" * 11
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(2048)


FOREIGN = {
    "empty file": b"",
    "text": b"all work and no play",
    "zeros": bytes(10240),
    "zip": zipped(),
    "tar without sums": tar({"config.json": b"{}"}),
    "tar with unreadable sums": tar({SUMS: b"\xff\xfe"}),
    "tar with other files than its sums": tar({SUMS: b"", "config.json": b"{}"}),
    "compressed tar": tar(FILES, mode="w:gz"),
    "links": tar({"config.json": b"", SUMS: b""}, kind=tarfile.SYMTYPE),
    "devices": tar({"config.json": b"", SUMS: b""}, kind=tarfile.CHRTYPE),
    "huge member": huge_member(),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"the/file\.tar"):
        unpack(FOREIGN[kind], "the/file.tar")


def test_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    trap = pickle.dumps(Planted(tmp_path / "sprung"))
    with pytest.raises(CorruptCheckpoint):
        unpack(trap, "here")
    assert unpack(pack({"model.pkl": trap}), "here") == {"model.pkl": trap}
    assert not list(tmp_path.iterdir())
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists(), "the trap works"


@pytest.mark.parametrize("name", ["../out", "/tmp/fraternal-out", "a/../../out"])
def test_names_that_lead_elsewhere_never_touch_the_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert unpack(pack({name: b"x"}), "here") == {name: b"x"}
    assert not list(tmp_path.iterdir())
    assert not (tmp_path / name).exists()


# Conformance: every kind of store.


@pytest.fixture(params=["file", "memory", "s3", "gs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "file":
        return CheckpointStore((tmp_path / "checkpoints").as_uri())
    if request.param == "s3":
        request.getfixturevalue("s3")
        return CheckpointStore(f"s3://{BUCKET}/{secrets.token_hex(4)}")
    if request.param == "gs":
        return CheckpointStore(f"{request.getfixturevalue('gs_url')}/{secrets.token_hex(4)}")
    return CheckpointStore(f"memory://{secrets.token_hex(4)}")


def test_last_comes_back_as_it_was_saved_last_and_is_gone_when_discarded(store: CheckpointStore) -> None:
    assert store.find_last("s1", 0) is None
    store.save_last("s1", 0, FILES)
    assert store.find_last("s1", 0) == FILES
    store.save_last("s1", 0, {"other": b"newer"})
    assert store.find_last("s1", 0) == {"other": b"newer"}
    store.discard_last("s1", 0)
    store.discard_last("s1", 0)
    assert store.find_last("s1", 0) is None


def test_trials_and_sweeps_do_not_share_checkpoints(store: CheckpointStore) -> None:
    trials = (("s1", 0), ("s1", 1), ("s2", 0), ("s1", 123456))
    for sweep, number in trials:
        store.save_last(sweep, number, {"of": f"{sweep}/{number}".encode()})
    for sweep, number in trials:
        assert store.find_last(sweep, number) == {"of": f"{sweep}/{number}".encode()}


def test_pause_is_asked_of_one_driver_until_it_is_withdrawn(store: CheckpointStore) -> None:
    assert not store.pause_is_asked("s1", "d1")
    store.ask_to_pause("s1", "d1")
    assert store.pause_is_asked("s1", "d1")
    assert not store.pause_is_asked("s1", "d2")
    assert not store.pause_is_asked("s2", "d1")
    for _ in range(2):
        store.withdraw_pause("s1", "d1")
        assert not store.pause_is_asked("s1", "d1")


def test_removed_sweep_leaves_nothing_and_takes_no_other_with_it(store: CheckpointStore) -> None:
    for sweep in ("s1", "s11"):
        store.save_last(sweep, 0, FILES)
        store.save_best(sweep, 0, FILES)
    store.ask_to_pause("s1", "d1")
    for _ in range(2):
        store.remove_sweep("s1")
    assert store.find_last("s1", 0) is None
    assert not store.has_sweep("s1")
    assert store.find_last("s11", 0) == FILES


def test_best_has_the_sha256_that_saving_it_returned(store: CheckpointStore) -> None:
    sha256 = store.save_best("s1", 0, FILES)
    assert store.best_sha256("s1", 0) == sha256
    with store.open_best("s1", 0) as file:
        assert unpack(file, "best") == FILES
    assert store.save_best("s1", 1, FILES) == sha256


def test_missing_best_is_a_file_not_found(store: CheckpointStore) -> None:
    with pytest.raises(FileNotFoundError):
        store.open_best("s1", 0)
    with pytest.raises(FileNotFoundError):
        store.best_sha256("s1", 0)


def test_reader_of_best_is_not_disturbed_by_a_replacement(store: CheckpointStore) -> None:
    store.save_best("s1", 0, FILES)
    with store.open_best("s1", 0) as file:
        head = file.read(100)
        store.save_best("s1", 0, {"weights": bytes(100_000)})
        assert unpack(head + file.read(), "best") == FILES
    with store.open_best("s1", 0) as file:
        assert unpack(file, "best") == {"weights": bytes(100_000)}


def test_what_is_put_aside_is_no_file_of_the_store_and_goes_with_its_day(store: CheckpointStore) -> None:
    for number in range(2):
        store.save_best("s1", number, FILES)
    store.save_last("s1", 0, FILES)
    found = {file.path: file for file in store.files()}
    assert set(found) == {"s1/t00000/best.tar", "s1/t00000/last.tar", "s1/t00001/best.tar"}
    file = found["s1/t00000/best.tar"]
    assert (file.sweep_id, file.number, file.name) == ("s1", 0, "best.tar")
    assert abs(datetime.now(UTC) - file.written_at) < timedelta(minutes=5)
    for _ in range(2):
        store.put_aside(file, datetime(2026, 1, 2, tzinfo=UTC))
        assert {file.path for file in store.files()} == set(found) - {file.path}
    assert store.numbers_with_best("s1") == [1]
    assert store.numbers_with_last("s1") == [0]
    aside = "quarantine/2026-01-02/s1/t00000/best.tar"
    store.empty_quarantine(datetime(2026, 1, 2, tzinfo=UTC))
    assert unpack(store._files.read(aside), aside) == FILES
    store.empty_quarantine(datetime(2026, 1, 3, tzinfo=UTC))
    assert not store._files.exists(aside)


def test_who_finds_a_store_empty_becomes_its_owner_and_nobody_else(store: CheckpointStore) -> None:
    assert [store.is_owned_by(owner) for owner in ("aaaaaa", "bbbbbb", "aaaaaa")] == [True, False, True]
    assert list(store.files()) == []


def test_a_store_with_sweeps_and_without_an_owner_stays_so(store: CheckpointStore) -> None:
    store.save_last("s1", 0, FILES)
    assert not store.is_owned_by("aaaaaa")
    assert not store.is_owned_by("aaaaaa")


def test_a_checkpoint_is_taken_in_as_it_is_given(store: CheckpointStore, tmp_path: Path) -> None:
    store.save_last("s1", 0, FILES)
    store.save_best("s1", 0, {"best": b"1"})
    given = {}
    for name, opened in store.open_all("s1", 0):
        with opened:
            given[name] = opened.read()
    assert list(given) == ["s1/t00000/last.tar", "s1/t00000/best.tar"]
    store.remove_sweep("s1")
    assert not store.has_sweep("s1")
    for name, content in given.items():
        (tmp_path / "file").write_bytes(content)
        store.put(name, tmp_path / "file")
    assert store.has_sweep("s1")
    assert store.find_last("s1", 0) == FILES


SCRAPPED: list[Callable[[bytes], bytes]] = [
    lambda archive: b"",
    lambda archive: b"scrap",
    lambda archive: archive[:1000],
    lambda archive: archive.replace(b"1", b"2"),
]


@pytest.mark.parametrize("scrapped", SCRAPPED)
def test_a_last_that_is_not_what_was_written_is_refused(
    tmp_path: Path, scrapped: Callable[[bytes], bytes]
) -> None:
    store = CheckpointStore(tmp_path.as_uri())
    store.save_last("s1", 7, {"weights": b"111"})
    file = tmp_path / "s1" / "t00007" / "last.tar"
    file.write_bytes(scrapped(file.read_bytes()))
    with pytest.raises(CorruptCheckpoint):
        store.find_last("s1", 7)


def test_a_crash_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path.as_uri())
    store.save_last("s1", 0, FILES)

    def crash(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        store.save_last("s1", 0, {"new": b"1"})
    assert store.find_last("s1", 0) == FILES


# Whole files.


def test_part_of_a_file_is_no_checkpoint_and_does_not_stand_in_the_way(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path.as_uri())
    folder = tmp_path / "s1" / "t00000"
    folder.mkdir(parents=True)
    for name in ("last.tar.part", "best.tar.part"):
        (folder / name).write_bytes(pack(FILES)[:700])
    assert store.find_last("s1", 0) is None
    with pytest.raises(FileNotFoundError):
        store.open_best("s1", 0)
    store.save_last("s1", 0, {"new": b"1"})
    assert store.find_last("s1", 0) == {"new": b"1"}


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "last.tar", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(tmp_path / "last.tar", b"new")
    assert raised.value.filename == str(tmp_path / "last.tar"), "who reads of it has to know where"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"last.tar": b"old"}


def test_an_interrupted_write_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "last.tar", b"new")
    assert not list(tmp_path.iterdir())


def test_of_files_that_belong_together_none_is_replaced_before_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def full_for_the_second(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 1:
            raise OSError(28, "No space left on device")

    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full_for_the_second)
    with pytest.raises(OSError, match="No space left") as raised:
        write_together({tmp_path / "a": b"new", tmp_path / "b": b"new"})
    assert raised.value.filename == str(tmp_path / "b")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old", "b": b"old"}
    monkeypatch.undo()
    write_together({tmp_path / "a": b"new", tmp_path / "b": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new", "b": b"new"}


def test_an_archive_that_was_unpacked_and_packed_again_by_tar_is_one(tmp_path: Path) -> None:
    (tmp_path / "it.tar").write_bytes(pack(FILES))
    (tmp_path / "it").mkdir()
    for command in (["-C", "it", "-xf", "it.tar"], ["-C", "it", "-cf", "again.tar", "."]):
        subprocess.run(["tar", *command], cwd=tmp_path, check=True)
    assert unpack((tmp_path / "again.tar").read_bytes(), "again.tar") == FILES


WRITER = """
import itertools, sys
from pathlib import Path
from trials.files import write_whole
from trials.store import pack
for count in itertools.count():
    write_whole(Path(sys.argv[1]), pack({"count": b"%d" % count, "weights": bytes([count % 256]) * 200_000}))
    if count == 0:
        print("writing", flush=True)
"""


@pytest.mark.slow
def test_killed_writer_always_leaves_a_whole_file(tmp_path: Path) -> None:
    file, chance = tmp_path / "last.tar", random.Random(1)
    for _ in range(20):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        time.sleep(chance.random() * 0.02)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        files = unpack(file.read_bytes(), str(file))
        assert files["weights"] == bytes([int(files["count"]) % 256]) * 200_000


def test_a_file_that_cannot_take_its_place_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
