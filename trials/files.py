"""Files by URL: a folder, or a bucket of an object store by fsspec, asked in the same words. No torch.

What is written is there whole or not at all. An object store's client has errors of its own kind, which here
become OSErrors that say whether waiting helps; none of them repeats a credential.
"""

import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn

log = logging.getLogger(__name__)

PART = ".part"
"""Ends the name of a file that is being written in a folder."""
PART_BYTES = 32 * 2**20
"""Of an upload in parts: what is smaller is sent in one request."""
BLOCK_BYTES = 16 * 2**20
"""That are read of an object at a time."""
CHECK_S = 8.0
"""For an object store to say that it is there."""
PATIENCE_S = 600.0
"""For an object store that is away; a driver waits as long for its database."""
LONGEST_WAIT_S = 15.0
RACES = 5
"""Times that something is done again because somebody else was faster."""
ATTEMPT = "fraternal-attempt"
"""Of an object's metadata: which attempt at its trial wrote it."""
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {  # by default it may take a quarter of an hour to say that nobody answers
            "connect_timeout": 3,
            "read_timeout": 30,
            "retries": {"mode": "standard", "total_max_attempts": 3},
        },
    },
    "gs": {"use_listings_cache": False, "consistency": "md5"},
}
"""What file systems are opened with, where fsspec's own configuration says nothing else of it."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""The optional dependencies that have a protocol's client."""

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


def _asked(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Around whatever asks a file system: what it raises is in our words."""

    @wraps(method)
    def ask(self: F, /, *given: P.args, **named: P.kwargs) -> T:
        try:
            return method(self, *given, **named)
        except OURS:
            raise
        except Exception as error:
            told = self._told(error)
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

    @_asked
    def read(self, path: str) -> bytes:
        """All of a file, of one moment."""
        return bytes(self._files.cat_file(self.place(path)))

    @_asked
    def exists(self, path: str) -> bool:
        return bool(self._files.exists(self.place(path)))

    @_asked
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

    @_asked
    def version(self, path: str) -> str:
        """Of a file: another one once it has been replaced."""
        about = self._files.info(self.place(path))
        known = {"ETag", "generation", "size", "mtime", "LastModified", "created"}
        return str(sorted((name, str(about[name])) for name in known & about.keys()))

    @_asked
    def write(self, path: str, content: bytes, attempt: int = 0) -> None:
        """Replace a file. Raises Superseded where a later attempt wrote the one that is there, if that can
        be known.
        """
        self._files.makedirs(self.place(path).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self.place(path), content)

    @_asked
    def create(self, path: str, content: bytes) -> bool:
        """Write a file that is not there yet: of several that do so at once, one does."""
        self._files.makedirs(self.place(path).rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(self.place(path), content, mode="create")
        except FileExistsError:
            return False
        return True

    @_asked
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

    @_asked
    def take(self, path: str, file: Path) -> None:
        """Copy a file of this machine in."""
        self._files.makedirs(self.place(path).rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), self.place(path))

    @_asked
    def remove(self, path: str) -> None:
        """Where it is there."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self.place(path))

    @_asked
    def remove_all(self, path: str) -> None:
        """Whatever is below."""
        with suppress(FileNotFoundError):
            self._files.rm(self.place(path), recursive=True)

    @_asked
    def move(self, path: str, to: str) -> None:
        """Not in one step, in an object store: a crash may leave both."""
        self._files.makedirs(self.place(to).rpartition("/")[0], exist_ok=True)
        self._files.mv(self.place(path), self.place(to))

    @_asked
    def names(self, path: str) -> list[str]:
        """Of what lies in a folder; none where there is no such folder."""
        try:
            found = self._files.ls(self.place(path), detail=False)
        except FileNotFoundError:
            return []
        return [place.rstrip("/").rpartition("/")[2] for place in found]

    @_asked
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

    @_asked
    def end_unfinished(self, path: str) -> None:
        """Remove what those who were killed were writing below."""

    @_asked
    def check(self) -> None:
        """Raises StoreAway, StoreRefused where files cannot be read there, for all that one look tells."""

    @_asked
    def require(self) -> None:
        """Raises StoreAway, StoreRefused where files cannot be written and removed there."""

    def _told(self, error: Exception) -> Exception:
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


class Bucket(Files):
    """Of an object store that is reached over a network."""

    way_out = "give credentials that may list, read, write and delete there"

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return error  # of this machine, which was to have a copy
        if isinstance(error, PermissionError) or self._needs_somebody(error):
            return StoreRefused(
                f"the store {self._url} refuses what it is asked ({_kind(error)}): {self.way_out}"
            )
        return StoreAway(
            f"the store {self._url} does not answer as it should ({_kind(error)}): see that it is "
            "up, and can be reached from here"
        )

    def _needs_somebody(self, error: Exception) -> bool:
        return False

    def _no_bucket(self) -> StoreRefused:
        bucket = self._root.partition("/")[0]
        return StoreRefused(
            f"the store {self._url} cannot be used: there is no bucket {bucket!r}; make it, or name another"
        )

    @_asked
    def check(self) -> None:
        bucket = self._root.partition("/")[0]
        try:
            fsspec.asyn.sync(self._files.loop, self._files._info, bucket, timeout=CHECK_S)
        except FileNotFoundError as error:
            raise self._no_bucket() from error

    @_asked
    def require(self) -> None:
        self.check()
        name = f"written-by-{os.getpid()}-{time.time_ns()}"
        try:
            keeps_conditions = self.create(name, b"a check") and not self.create(name, b"another")
        finally:
            self.remove(name)
        if not keeps_conditions:
            log.warning(
                "the store %s takes no conditions on writes: a worker that was given up for dead "
                "may still replace its successor's checkpoint once",
                self._url,
            )

    @_asked
    def create(self, path: str, content: bytes) -> bool:
        try:
            self._files.pipe_file(self.place(path), content, mode="create")
        except FileNotFoundError as error:
            raise self._no_bucket() from error
        except OSError as error:
            if not _lost_a_race(error):
                raise
            return False
        return True

    @_asked
    def remove_all(self, path: str) -> None:
        super().remove_all(path)
        self.end_unfinished(path)
        if left := self._files.find(self.place(path)):  # the client does not say which it could not remove
            raise StoreAway(f"{len(left)} objects below {self._url}/{path} could not be removed")


class S3Bucket(Bucket):
    """By s3fs. Each request's content has a CRC that S3 verifies, as each part's of what comes in parts."""

    way_out = (
        "give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), or the "
        "machine's role, that may list, read, write and delete there"
    )

    def _needs_somebody(self, error: Exception) -> bool:
        from botocore import exceptions as botos

        return isinstance(
            error,
            botos.NoCredentialsError
            | botos.PartialCredentialsError
            | botos.ProfileNotFound
            | botos.ConfigParseError
            | botos.ParamValidationError
            | botos.ValidationError
            | botos.NoRegionError,
        )

    @_asked
    def read(self, path: str) -> bytes:
        return self._undisturbed(lambda: self._read(path))

    def _read(self, path: str) -> bytes:
        # Every range is asked of the version that was there first; fsspec's cat_file would mix them.
        with self._files.open(self.place(path), "rb", cache_type="none") as file:
            return b"".join(file.read(BLOCK_BYTES) for _ in range(0, file.size, BLOCK_BYTES))

    def _copy(self, place: str, copy: Any) -> None:
        def begin_anew() -> None:
            copy.seek(0)
            copy.truncate()
            super(S3Bucket, self)._copy(place, copy)

        self._undisturbed(begin_anew)

    def _undisturbed(self, read: Callable[[], T]) -> T:
        from s3fs.utils import FileExpired

        for _ in range(RACES - 1):
            with suppress(FileExpired):
                return read()
        return read()

    @_asked
    def write(self, path: str, content: bytes, attempt: int = 0) -> None:
        """Over what was looked at, and nothing else: an attempt that has a successor overwrites nothing of
        that, whatever either of them does in the meantime.
        """
        for _ in range(RACES):
            found = self._find_version(path)
            if found is not None and found[1] > attempt:
                raise Superseded(
                    f"attempt {found[1]} at this trial has written {path.rpartition('/')[2]}, and this is "
                    f"attempt {attempt}: it ends"
                )
            condition = {"IfNoneMatch": "*"} if found is None else {"IfMatch": found[0]}
            try:
                self._upload(self.place(path), content, Metadata={ATTEMPT: str(attempt)}, **condition)
                return
            except FileNotFoundError as error:
                if found is None:
                    raise self._no_bucket() from error
            except OSError as error:
                if not _lost_a_race(error):
                    raise
        raise StoreAway(f"others write {self._url}/{path} again and again")

    def _find_version(self, path: str) -> tuple[str, int] | None:
        """ETag of an object, and which attempt wrote it."""
        bucket, key, _ = self._files.split_path(self.place(path))
        try:
            found = self._files.call_s3("head_object", Bucket=bucket, Key=key)
        except FileNotFoundError:
            return None
        attempt = found.get("Metadata", {}).get(ATTEMPT, "0")
        return found["ETag"], int(attempt) if attempt.isdecimal() else 0

    def _upload(self, place: str, content: bytes, **asked: Any) -> None:
        """In one request, or in parts that become an object with the last one."""
        file = self._files.open(place, "wb", block_size=PART_BYTES, **asked)
        try:
            view = memoryview(content)
            for start in range(0, len(content), PART_BYTES):
                file.write(view[start : start + PART_BYTES])
            file.close()
        except BaseException:
            file.closed = True  # or it would be completed as it is, once nobody refers to it
            with suppress(Exception):
                file.discard()
            raise

    @_asked
    def end_unfinished(self, path: str) -> None:
        """Where the store is away, a rule of the bucket's, or the sweep's removal, does it later."""
        bucket, prefix, _ = self._files.split_path(self.place(path) + "/")
        try:
            while found := self._uploads(bucket, prefix):
                for upload in found:
                    with suppress(FileNotFoundError):
                        self._files.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        except Exception as error:
            log.warning("uploads that were broken off could not be ended: %s", self._told(error))

    def _uploads(self, bucket: str, prefix: str) -> list[dict[str, Any]]:
        said = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        return [upload for upload in said.get("Uploads", []) if upload["Key"].startswith(prefix)]


class GoogleBucket(Bucket):
    """By gcsfs, which has no other condition than that a file is not there yet: between looking who wrote a
    file and replacing it, somebody may have come in between.
    """

    way_out = (
        "give credentials by GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the "
        "machine's service account, that may list, read, write and delete there"
    )

    def _needs_somebody(self, error: Exception) -> bool:
        from google.auth.exceptions import DefaultCredentialsError

        return isinstance(error, DefaultCredentialsError) or getattr(error, "code", None) in (401, 403)

    @_asked
    def write(self, path: str, content: bytes, attempt: int = 0) -> None:
        by = self._attempt_of(path)
        if by > attempt:
            raise Superseded(f"attempt {by} at this trial has written {path}, and this is attempt {attempt}")
        try:
            self._files.pipe_file(self.place(path), content, metadata={ATTEMPT: str(attempt)})
        except FileNotFoundError as error:
            raise self._no_bucket() from error

    def _attempt_of(self, path: str) -> int:
        try:
            about = self._files.info(self.place(path))
        except FileNotFoundError:
            return 0
        attempt = (about.get("metadata") or {}).get(ATTEMPT, "0")
        return int(attempt) if attempt.isdecimal() else 0


KINDS: dict[str, type[Files]] = {
    "file": Folder,
    "local": Folder,
    "s3": S3Bucket,
    "s3a": S3Bucket,
    "gs": GoogleBucket,
    "gcs": GoogleBucket,
}


def open_files(url: str) -> Files:
    """Asks nothing of anybody yet. Raises StoreRefused where the URL is of a kind that is not known here."""
    protocol = urlsplit(url).scheme or "file"
    ours = OPTIONS.get(EXTRAS.get(protocol, protocol), {})
    given = fsspec.config.conf.get(protocol, {})
    try:
        files, root = fsspec.core.url_to_fs(url, **{key: ours[key] for key in ours.keys() - given.keys()})
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        by = f"pip install 'fraternal[{extra}]'" if extra else str(error)
        raise StoreRefused(f"the store {url} needs a client that is not installed: {by}") from error
    except ValueError as error:
        raise StoreRefused(
            f"the store {url} cannot be opened: {error}; it is a folder, or s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX, or another URL of fsspec"
        ) from error
    return KINDS.get(protocol, Files)(files, root, url)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:  # the disk is full, or `path` is a folder
        part.unlink(missing_ok=True)
        raise
    _fsync_directory(path.parent)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lost_a_race(error: OSError) -> bool:
    """Whether it says that a condition on what is there does not hold."""
    said = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
    return isinstance(error, FileExistsError) or _code(error) in said


def _code(error: BaseException | None) -> str | None:
    """Of an S3 server's answer, which s3fs's errors have as their cause."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, dict):
            return str(answer.get("Error", {}).get("Code"))
        error = error.__cause__
    return None


def _kind(error: Exception) -> str:
    """What kind of error, without what it was asked: no key, no signature, and alike for all trials."""
    return _code(error) or " ".join([type(error).__name__, str(getattr(error, "code", ""))]).strip()
