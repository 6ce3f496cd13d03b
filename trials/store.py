"""Where checkpoints live: every path, and files that are written whole. No torch.

An archive is an uncompressed tar of a few named files and their SHA256SUMS. It is one file, so that replacing
it is one rename and fetching it is one download; its bytes are a function of its contents.
"""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import fsspec

SUMS = "SHA256SUMS"
QUARANTINE = "quarantine"
OWNER = "owner"


PART = ".part"
"""Ends the name of a file that is being written."""


class CorruptCheckpoint(Exception):
    """The file is no checkpoint, or is not what was written."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, by where it lies."""

    path: str
    sweep_id: str
    number: int | None
    """Of the trial; None for what is no trial's."""
    name: str
    written_at: datetime


class CheckpointStore:
    """`{url}/{sweep}/t00042/last.tar` (to go on with) and `best.tar` (to use), for each trial of a sweep."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, self._root = fsspec.core.url_to_fs(url)

    def save_last(self, sweep_id: str, number: int, files: Mapping[str, bytes]) -> None:
        self._write(self._path(sweep_id, number, "last.tar"), pack(files))

    def find_last(self, sweep_id: str, number: int) -> dict[str, bytes] | None:
        """The files of `last`, if it is there. Raises CorruptCheckpoint."""
        path = self._path(sweep_id, number, "last.tar")
        try:
            return unpack(self._files.cat_file(path), path)
        except FileNotFoundError:
            return None

    def numbers_with_last(self, sweep_id: str) -> list[int]:
        """Of the trials that have a `last`."""
        return self._numbers_with(sweep_id, "last.tar")

    def numbers_with_best(self, sweep_id: str) -> list[int]:
        """Of the trials that have a `best`."""
        return self._numbers_with(sweep_id, "best.tar")

    def _numbers_with(self, sweep_id: str, name: str) -> list[int]:
        self._files.invalidate_cache()
        found = self._files.glob(f"{self._root}/{sweep_id}/t*/{name}")
        return [int(path.split("/")[-2].removeprefix("t")) for path in found]

    def discard_last(self, sweep_id: str, number: int) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(sweep_id, number, "last.tar"))

    def ask_to_pause(self, sweep_id: str, driver: str) -> None:
        """Have the running trials of a driver save their state: workers see the store, and no database."""
        self._write(self._pause(sweep_id, driver), b"")

    def pause_is_asked(self, sweep_id: str, driver: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._pause(sweep_id, driver)))

    def withdraw_pause(self, sweep_id: str, driver: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._pause(sweep_id, driver))

    def announce(self, sweep_id: str, driver: str) -> None:
        """Write down that this is where a driver's workers are to save what they do."""
        self._write(self._announced(sweep_id, driver), b"")

    def is_announced(self, sweep_id: str, driver: str) -> bool:
        """Whether that driver sees the same store as who asks, on another machine say."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._announced(sweep_id, driver)))

    def withdraw(self, sweep_id: str, driver: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._announced(sweep_id, driver))

    def remove_sweep(self, sweep_id: str) -> None:
        """All that is kept of a sweep, if anything is."""
        with suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{sweep_id}", recursive=True)

    def files(self) -> Iterator[StoredFile]:
        """Everything in the store, but for what was put aside."""
        for path in self._files.find(self._root):
            parts = path.removeprefix(f"{self._root}/").split("/")
            if parts[0] in {QUARANTINE, OWNER}:
                continue
            trial = re.fullmatch(r"t(\d{5,})", parts[1]) if len(parts) == 3 else None
            with suppress(FileNotFoundError):  # it has just been replaced, or removed
                written_at = self._files.modified(path)
                number = int(trial[1]) if trial else None
                yield StoredFile(path, parts[0], number, parts[-1], written_at.astimezone(UTC))

    def is_owned_by(self, owner: str) -> bool:
        """Whether only this owner's sweeps are kept here: who finds the store empty becomes its owner."""
        path = f"{self._root}/{OWNER}"
        self._files.invalidate_cache()
        if not self._files.exists(self._root) or not self._files.ls(self._root, detail=False):
            self._write(path, owner.encode())
        return bool(self._files.exists(path) and self._files.cat_file(path) == owner.encode())

    def put_aside(self, file: StoredFile, at: datetime) -> None:
        """Where nobody looks for it, below the day on which it was done."""
        aside = f"{self._root}/{QUARANTINE}/{at:%Y-%m-%d}{file.path.removeprefix(self._root)}"
        self._files.makedirs(aside.rpartition("/")[0], exist_ok=True)
        with suppress(FileNotFoundError):  # somebody removed it
            self._files.mv(file.path, aside)

    def empty_quarantine(self, until: datetime) -> None:
        """Remove for good what was put aside on the days before that one."""
        self._files.invalidate_cache()
        folder = f"{self._root}/{QUARANTINE}"
        days = self._files.ls(folder, detail=False) if self._files.exists(folder) else []
        for path in days:
            if path.rstrip("/").rpartition("/")[2] < f"{until:%Y-%m-%d}":
                self._files.rm(path, recursive=True)

    def _announced(self, sweep_id: str, driver: str) -> str:
        return f"{self._root}/{sweep_id}/driver-{driver}"

    def _pause(self, sweep_id: str, driver: str) -> str:
        return f"{self._root}/{sweep_id}/pause-{driver}"

    def discard_unfinished(self, sweep_id: str) -> None:
        """Remove what workers of a sweep were writing when they were killed; none may be alive."""
        if self._is_local:
            for part in Path(self._root, sweep_id).glob(f"*/*{PART}"):
                part.unlink(missing_ok=True)

    def save_best(self, sweep_id: str, number: int, files: Mapping[str, bytes]) -> str:
        """Replace the trial's best checkpoint; returns its SHA-256."""
        archive = pack(files)
        self._write(self._path(sweep_id, number, "best.tar"), archive)
        return hashlib.sha256(archive).hexdigest()

    def discard_best(self, sweep_id: str, number: int) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(sweep_id, number, "best.tar"))

    def has_best(self, sweep_id: str, number: int) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(self._path(sweep_id, number, "best.tar")))

    def open_best(self, sweep_id: str, number: int) -> BinaryIO:
        """The archive, open for reading: undisturbed by a replacement. Raises FileNotFoundError."""
        return cast(BinaryIO, self._files.open(self._path(sweep_id, number, "best.tar"), "rb"))

    def open_all(self, sweep_id: str, number: int) -> Iterator[tuple[str, BinaryIO]]:
        """Each checkpoint that a trial has, by its path in the store, open for reading: undisturbed by a
        replacement.

        `best` comes last: of what the `last` before it has seen, it is never behind.
        """
        for name in ("last.tar", "best.tar"):
            path = self._path(sweep_id, number, name)
            with suppress(FileNotFoundError):
                yield path.removeprefix(f"{self._root}/"), self._files.open(path, "rb")

    def has_sweep(self, sweep_id: str) -> bool:
        return bool(self._files.exists(f"{self._root}/{sweep_id}"))

    def put(self, name: str, file: Path) -> None:
        """Take a checkpoint in under its path in the store, as `open_all` gives it."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), path)

    def best_sha256(self, sweep_id: str, number: int) -> str:
        """SHA-256 of the best checkpoint's file. Raises FileNotFoundError."""
        with self.open_best(sweep_id, number) as file:
            return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()

    @property
    def _is_local(self) -> bool:
        return "file" in _protocols(self._files)

    def _path(self, sweep_id: str, number: int, name: str) -> str:
        return f"{self._root}/{sweep_id}/t{number:05d}/{name}"

    def _write(self, path: str, content: bytes) -> None:
        if self._is_local:
            write_whole(Path(path), content)
        else:  # object stores replace objects whole
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file so that a crash at any moment leaves the old one or the new one."""
    write_together({path: content})


def write_together(files: Mapping[Path, bytes]) -> None:
    """Replace files that belong together, none before all of them are on the disk.

    Raises OSError with the name of the file that could not be written.
    """
    parts = {path: path.with_name(path.name + PART) for path in files}
    try:
        for path, content in files.items():
            with _named(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with parts[path].open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
        for path, part in parts.items():
            part.replace(path)
    except BaseException:  # the disk is full, `path` is a folder, or somebody has interrupted it
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in files}:
        _fsync_directory(folder)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What a write raises names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def pack(files: Mapping[str, bytes]) -> bytes:
    """An archive of these files, in this order, and their sums."""
    sums = write_sums({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in {**files, SUMS: sums}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def unpack(content: bytes | IO[bytes], where: str) -> dict[str, bytes]:
    """The files of an archive, each checked against its sum. Raises CorruptCheckpoint."""
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            # `tar -cf it.tar .` has each name begin with ./
            members = {
                member.name.removeprefix("./"): archive.extractfile(member)
                for member in archive
                if member.isfile()
            }
            files = {name: member.read() for name, member in members.items() if member is not None}
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise CorruptCheckpoint(f"{where} is no checkpoint archive: {error}") from error
    if SUMS not in files:
        raise CorruptCheckpoint(f"{where} is no checkpoint archive: it holds no {SUMS}; it may be cut short")
    expected = parse_sums(files.pop(SUMS), where)
    if set(expected) != set(files):
        raise CorruptCheckpoint(f"{where} holds {sorted(files)}, but its {SUMS} names {sorted(expected)}")
    for name, held in files.items():
        if hashlib.sha256(held).hexdigest() != expected[name]:
            raise CorruptCheckpoint(
                f"{name} in {where} is not what was written: its SHA-256 differs; fetch it again"
            )
    return files


def write_sums(digests: Mapping[str, str]) -> bytes:
    """What `sha256sum --check` reads, of digests by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def parse_sums(content: bytes, where: str) -> dict[str, str]:
    """What write_sums was given. Raises CorruptCheckpoint."""
    try:
        pairs = [line.split("  ", 1) for line in content.decode().splitlines()]
        return {name: digest for digest, name in pairs}
    except ValueError as error:
        raise CorruptCheckpoint(f"{SUMS} in {where} cannot be read: {error}") from error


def sha256_of(path: Path) -> str:
    """Of a whole file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)
