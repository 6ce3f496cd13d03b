"""Where checkpoints live: every path, and what is in an archive. No torch.

An archive is an uncompressed tar of a few named files and their SHA256SUMS. It is one file, so that replacing
it is one rename and fetching it is one download; its bytes are a function of its contents.
"""

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from trials.buckets import open_files

SUMS = "SHA256SUMS"
QUARANTINE = "quarantine"
OWNER = "owner"


class CorruptCheckpoint(Exception):
    """The file is no checkpoint, or is not what was written."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, by its path there."""

    path: str
    sweep_id: str
    number: int | None
    """Of the trial; None for what is no trial's."""
    name: str
    written_at: datetime


class CheckpointStore:
    """`{url}/{sweep}/t00042/last.tar` (to go on with) and `best.tar` (to use), for each trial of a sweep.

    Raises StoreAway and StoreRefused of trials.files, and StoreRefused for a URL that cannot be one.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files = open_files(url)

    def check(self) -> str | None:
        """What is to be said where the store does not do its work; None where it does."""
        try:
            self._files.check()
        except OSError as error:
            return str(error)
        return None

    def require(self) -> None:
        """Raises StoreAway, StoreRefused where an object store cannot be read and written."""
        self._files.require()

    def save_last(self, sweep_id: str, number: int, files: Mapping[str, bytes], attempt: int = 0) -> None:
        """Raises Superseded where a later attempt at the trial has saved one, if the store can tell."""
        self._files.write(_path(sweep_id, number, "last.tar"), pack(files), attempt)

    def find_last(self, sweep_id: str, number: int) -> dict[str, bytes] | None:
        """The files of `last`, if it is there. Raises CorruptCheckpoint."""
        path = _path(sweep_id, number, "last.tar")
        try:
            return unpack(self._files.read(path), self._files.place(path))
        except FileNotFoundError:
            return None

    def numbers_with_last(self, sweep_id: str) -> list[int]:
        """Of the trials that have a `last`."""
        return self._numbers_with(sweep_id, "last.tar")

    def numbers_with_best(self, sweep_id: str) -> list[int]:
        """Of the trials that have a `best`."""
        return self._numbers_with(sweep_id, "best.tar")

    def _numbers_with(self, sweep_id: str, name: str) -> list[int]:
        found = map(_stored, self._files.find(sweep_id))
        return [file.number for file in found if file.name == name and file.number is not None]

    def discard_last(self, sweep_id: str, number: int) -> None:
        self._files.remove(_path(sweep_id, number, "last.tar"))

    def ask_to_pause(self, sweep_id: str, driver: str) -> None:
        """Have the running trials of a driver save their state: workers see the store, and no database."""
        self._files.write(_pause(sweep_id, driver), b"1")

    def pause_is_asked(self, sweep_id: str, driver: str) -> bool:
        return self._files.is_there(_pause(sweep_id, driver))

    def withdraw_pause(self, sweep_id: str, driver: str) -> None:
        self._files.remove(_pause(sweep_id, driver))

    def announce(self, sweep_id: str, driver: str) -> None:
        """Write down that this is where a driver's workers are to save what they do."""
        self._files.write(_announced(sweep_id, driver), b"1")

    def is_announced(self, sweep_id: str, driver: str) -> bool:
        """Whether that driver sees the same store as who asks, on another machine say."""
        return self._files.is_there(_announced(sweep_id, driver))

    def withdraw(self, sweep_id: str, driver: str) -> None:
        self._files.remove(_announced(sweep_id, driver))

    def remove_sweep(self, sweep_id: str) -> None:
        """All that is kept of a sweep, if anything is."""
        self._files.remove_all(sweep_id)

    def files(self) -> Iterator[StoredFile]:
        """Everything in the store, but for what was put aside."""
        for file in map(_stored, self._files.find()):
            if file.sweep_id not in {QUARANTINE, OWNER}:
                yield file

    def is_owned_by(self, owner: str) -> bool:
        """Whether only this owner's sweeps are kept here: who finds the store empty becomes its owner."""
        if not self._files.names(""):
            self._files.create(OWNER, owner.encode())
        try:
            return self._files.read(OWNER) == owner.encode()
        except FileNotFoundError:
            return False

    def put_aside(self, file: StoredFile, at: datetime) -> None:
        """Where nobody looks for it, below the day on which it was done."""
        with suppress(FileNotFoundError):  # somebody removed it
            self._files.move(file.path, f"{QUARANTINE}/{at:%Y-%m-%d}/{file.path}")

    def empty_quarantine(self, until: datetime) -> None:
        """Remove for good what was put aside on the days before that one."""
        for day in self._files.names(QUARANTINE):
            if day < f"{until:%Y-%m-%d}":
                self._files.remove_all(f"{QUARANTINE}/{day}")

    def discard_unfinished(self, sweep_id: str) -> None:
        """Remove what workers of a sweep were writing when they were killed; none may be alive."""
        self._files.end_unfinished(sweep_id)

    def save_best(self, sweep_id: str, number: int, files: Mapping[str, bytes], attempt: int = 0) -> str:
        """Replace the trial's best checkpoint; returns its SHA-256. Raises Superseded, as save_last does."""
        archive = pack(files)
        self._files.write(_path(sweep_id, number, "best.tar"), archive, attempt)
        return hashlib.sha256(archive).hexdigest()

    def discard_best(self, sweep_id: str, number: int) -> None:
        self._files.remove(_path(sweep_id, number, "best.tar"))

    def has_best(self, sweep_id: str, number: int) -> bool:
        return self._files.exists(_path(sweep_id, number, "best.tar"))

    def open_best(self, sweep_id: str, number: int) -> BinaryIO:
        """The archive, open for reading: undisturbed by a replacement. Raises FileNotFoundError."""
        return self._files.open(_path(sweep_id, number, "best.tar"))

    def open_all(self, sweep_id: str, number: int) -> Iterator[tuple[str, BinaryIO]]:
        """Each checkpoint that a trial has, by its path in the store, open for reading: undisturbed by a
        replacement.

        `best` comes last: of what the `last` before it has seen, it is never behind.
        """
        for name in ("last.tar", "best.tar"):
            path = _path(sweep_id, number, name)
            with suppress(FileNotFoundError):
                yield path, self._files.open(path)

    def has_sweep(self, sweep_id: str) -> bool:
        return self._files.exists(sweep_id)

    def put(self, name: str, file: Path) -> None:
        """Take a checkpoint in under its path in the store, as `open_all` gives it."""
        self._files.take(name, file)

    def best_sha256(self, sweep_id: str, number: int) -> str:
        """SHA-256 of the best checkpoint's file. Raises FileNotFoundError."""
        with self.open_best(sweep_id, number) as file:
            return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def _path(sweep_id: str, number: int, name: str) -> str:
    return f"{sweep_id}/t{number:05d}/{name}"


def _announced(sweep_id: str, driver: str) -> str:
    return f"{sweep_id}/driver-{driver}"


def _pause(sweep_id: str, driver: str) -> str:
    return f"{sweep_id}/pause-{driver}"


def _stored(found: tuple[str, datetime]) -> StoredFile:
    path, written_at = found
    parts = path.split("/")
    trial = re.fullmatch(r"t(\d{5,})", parts[1]) if len(parts) == 3 else None
    return StoredFile(path, parts[0], int(trial[1]) if trial else None, parts[-1], written_at)


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
