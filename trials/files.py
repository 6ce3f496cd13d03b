"""Files in a folder, or wherever fsspec reaches, asked in the same words. No torch.

What is written is there whole or not at all. An object store's client has errors of its own kind, which here
become OSErrors that say whether waiting helps; none of them repeats a credential.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar, cast

log = logging.getLogger(__name__)

PART = ".part"
"""Ends the name of a file that is being written in a folder."""
BLOCK_BYTES = 16 * 2**20
"""That are read of an object at a time."""
PATIENCE_S = 600.0
"""For an object store that is away; a driver waits as long for its database."""
LONGEST_WAIT_S = 15.0

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound="Files")


class StoreAway(OSError):
    """The store does not answer, or not as it should: it may, if it is asked again."""


class StoreRefused(OSError):
    """The store does not do what it is asked, and will not until somebody sees to it."""


class Superseded(OSError):
    """A later attempt at the trial has written the file."""


OURS = (FileNotFoundError, FileExistsError, StoreAway, StoreRefused, Superseded)


def asked(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Around whatever asks a file system: what it raises is in our words."""

    @wraps(method)
    def ask(self: F, /, *given: P.args, **named: P.kwargs) -> T:
        try:
            return method(self, *given, **named)
        except OURS:
            raise
        except Exception as error:
            told = self.told(error)
            if told is error:
                raise
            raise told from error

    return ask


class Files:
    """Those below a URL, by their paths from there. Raises FileNotFoundError, StoreAway, StoreRefused.

    By itself for file systems of which nothing is known but that they replace files whole.
    """

    def __init__(self, files: Any, root: str, url: str) -> None:
        self._files, self._root, self._url = files, root, url

    def place(self, path: str) -> str:
        """Where it lies, for people and for the file system."""
        return f"{self._root}/{path}" if path else self._root

    @asked
    def read(self, path: str) -> bytes:
        """All of a file, of one moment."""
        return bytes(self._files.cat_file(self.place(path)))

    @asked
    def exists(self, path: str) -> bool:
        return bool(self._files.exists(self.place(path)))

    @asked
    def head(self, path: str, size: int) -> bytes:
        """The first bytes of a file that has some; one request."""
        return bytes(self._files.cat_file(self.place(path), start=0, end=size))

    def is_there(self, path: str) -> bool:
        """As `exists`, of a file with something in it; one request, where that would be two."""
        try:
            self.head(path, 1)
        except FileNotFoundError:
            return False
        return True

    @asked
    def version(self, path: str) -> str:
        """Of a file: another one once it has been replaced."""
        about = self._files.info(self.place(path))
        known = {"ETag", "generation", "size", "mtime", "LastModified", "created"}
        return str(sorted((name, str(about[name])) for name in known & about.keys()))

    @asked
    def write(self, path: str, content: bytes, attempt: int = 0) -> None:
        """Replace a file. Raises Superseded where a later attempt wrote the one that is there, if that can
        be known.
        """
        self._files.makedirs(self.place(path).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self.place(path), content)

    @asked
    def create(self, path: str, content: bytes) -> bool:
        """Write a file that is not there yet: of several that do so at once, one does."""
        self._files.makedirs(self.place(path).rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(self.place(path), content, mode="create")
        except FileExistsError:
            return False
        return True

    @asked
    def open(self, path: str) -> BinaryIO:
        """To read: what replaces the file meanwhile does not disturb that."""
        copy = tempfile.TemporaryFile()  # noqa: SIM115  closed by whoever reads
        try:
            self._copy(self.place(path), copy)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return cast(BinaryIO, copy)

    def _copy(self, place: str, copy: Any) -> None:
        with self._files.open(place, "rb") as file:
            while file.tell() < file.size:
                copy.write(file.read(min(BLOCK_BYTES, file.size - file.tell())))

    @asked
    def take(self, path: str, file: Path) -> None:
        """Copy a file of this machine in."""
        self._files.makedirs(self.place(path).rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), self.place(path))

    @asked
    def remove(self, path: str) -> None:
        """Where it is there."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self.place(path))

    @asked
    def remove_all(self, path: str) -> None:
        """Whatever is below."""
        with suppress(FileNotFoundError):
            self._files.rm(self.place(path), recursive=True)

    @asked
    def move(self, path: str, to: str) -> None:
        """Not in one step, in an object store: a crash may leave both."""
        self._files.makedirs(self.place(to).rpartition("/")[0], exist_ok=True)
        self._files.mv(self.place(path), self.place(to))

    @asked
    def names(self, path: str) -> list[str]:
        """Of what lies in a folder; none where there is no such folder."""
        try:
            found = self._files.ls(self.place(path), detail=False)
        except FileNotFoundError:
            return []
        return [place.rstrip("/").rpartition("/")[2] for place in found]

    @asked
    def find(self, path: str = "") -> list[tuple[str, datetime]]:
        """Every file below, by its path, and when it was written."""
        found = []
        for place, about in self._files.find(self.place(path), detail=True).items():
            with suppress(FileNotFoundError):  # it has just been replaced, or removed
                found.append((place.removeprefix(f"{self._root}/"), self._written_at(place, about)))
        return found

    def _written_at(self, place: str, about: dict[str, Any]) -> datetime:
        written = about.get("LastModified") or about.get("mtime") or self._files.modified(place)
        if isinstance(written, int | float):
            return datetime.fromtimestamp(written, UTC)
        return cast(datetime, written).astimezone(UTC)

    @asked
    def end_unfinished(self, path: str) -> None:
        """Remove what those who were killed were writing below."""

    @asked
    def check(self) -> None:
        """Raises StoreAway, StoreRefused where files cannot be read there, for all that one look tells."""

    @asked
    def require(self) -> None:
        """Raises StoreAway, StoreRefused where files cannot be written and removed there."""

    def told(self, error: Exception) -> Exception:
        return error


class Folder(Files):
    """Of this machine, or mounted. Its own errors are what a disk says.

    Which attempt wrote a file is not known here: workers of one machine die with their driver.
    """

    def write(self, path: str, content: bytes, attempt: int = 0) -> None:
        write_whole(Path(self.place(path)), content)

    def open(self, path: str) -> BinaryIO:
        return Path(self.place(path)).open("rb")  # a replaced file stays what it was for who has it open

    def create(self, path: str, content: bytes) -> bool:
        place = Path(self.place(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with place.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def end_unfinished(self, path: str) -> None:
        for part in Path(self.place(path)).glob(f"*/*{PART}"):
            part.unlink(missing_ok=True)


def waits() -> Iterator[float]:
    """Seconds to wait before a store that is away is asked again; for PATIENCE_S in all."""
    until, wait_s = time.monotonic() + PATIENCE_S, 1.0
    while time.monotonic() < until:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def patiently(ask: Callable[[], T]) -> T:
    """Ask again while the store is away. Raises what `ask` does; StoreAway after PATIENCE_S."""
    for wait_s in waits():
        try:
            return ask()
        except StoreAway as error:
            log.warning("%s; asking again in %.0f s", error, wait_s)
        time.sleep(wait_s)
    return ask()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Among the processes of this machine that ask for this lock; the kernel frees that of a dead one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
