"""Buckets of object stores, what they do that folders do not, and any store by its URL. No torch."""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn

from trials.files import BLOCK_BYTES, Files, Folder, StoreAway, StoreRefused, Superseded, asked

log = logging.getLogger(__name__)

PART_BYTES = 32 * 2**20
"""Of an upload in parts: what is smaller is sent in one request."""
CHECK_S = 8.0
"""For an object store to say that it is there."""
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
WILD = frozenset("*?[")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""The optional dependencies that have a protocol's client."""

RENEW = "its credentials are none any more: give others, or ones that renew themselves, as a role's do"
ELSEWHERE = (
    "the bucket is in another region, or at another endpoint: set AWS_DEFAULT_REGION, AWS_ENDPOINT_URL"
)
S3_WAYS_OUT = {
    "ExpiredToken": RENEW,
    "InvalidToken": RENEW,
    "TokenRefreshRequired": RENEW,
    "RequestTimeTooSkewed": "set this machine's clock, which is too far from the store's",
    "PermanentRedirect": ELSEWHERE,
    "301": ELSEWHERE,
    "AuthorizationHeaderMalformed": ELSEWHERE,
    "IllegalLocationConstraintException": ELSEWHERE,
    "400": "its answer has no reason with it; credentials that have expired are one, and another region",
    "InvalidBucketName": "name a bucket as S3's rules are: s3://BUCKET/PREFIX",
}
"""By the code of an answer; those without letters are of answers without a body."""
GOOGLE_SAYS = {"Forbidden", "Bad Request"}
"""How gcsfs begins what it says of 403 and 400, for which it has no class, nor a code."""

T = TypeVar("T")


class Bucket(Files):
    """Of an object store that is reached over a network."""

    way_out = "give credentials that may list, read, write and delete there"

    def told(self, error: Exception) -> Exception:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return error  # of this machine, which was to have a copy
        if (way_out := self._way_out_of(error)) is not None:
            return StoreRefused(f"the store {self._url} refuses what it is asked ({_kind(error)}): {way_out}")
        return StoreAway(
            f"the store {self._url} does not answer as it should ({_kind(error)}): see that it is "
            "up, and can be reached from here"
        )

    def _way_out_of(self, error: Exception) -> str | None:
        """Of what waiting does not end."""
        return self.way_out if isinstance(error, PermissionError) else None

    def _no_bucket(self) -> StoreRefused:
        bucket = self._root.partition("/")[0]
        return StoreRefused(
            f"the store {self._url} cannot be used: there is no bucket {bucket!r}; make it, or name another"
        )

    @asked
    def check(self) -> None:
        bucket = self._root.partition("/")[0]
        try:
            fsspec.asyn.sync(self._files.loop, self._files._info, bucket, timeout=CHECK_S)
        except FileNotFoundError as error:
            raise self._no_bucket() from error

    @asked
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

    @asked
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

    @asked
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

    def _way_out_of(self, error: Exception) -> str | None:
        from botocore import exceptions as botos

        if (by_code := S3_WAYS_OUT.get(_code(error) or "")) is not None:
            return by_code
        of_the_client = isinstance(
            error,
            botos.NoCredentialsError
            | botos.PartialCredentialsError
            | botos.ProfileNotFound
            | botos.ConfigParseError
            | botos.ParamValidationError
            | botos.ValidationError
            | botos.NoRegionError,
        )
        return self.way_out if of_the_client else super()._way_out_of(error)

    @asked
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

    @asked
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

    @asked
    def end_unfinished(self, path: str) -> None:
        """Where the store is away, a rule of the bucket's, or the sweep's removal, does it later."""
        bucket, prefix, _ = self._files.split_path(self.place(path) + "/")
        ended: set[str] = set()
        try:
            # A thousand at a time; some stores still list for a while what was ended.
            while found := [each for each in self._uploads(bucket, prefix) if each["UploadId"] not in ended]:
                for upload in found:
                    ended.add(upload["UploadId"])
                    with suppress(FileNotFoundError):
                        self._files.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        except Exception as error:
            log.warning("uploads that were broken off could not be ended: %s", self.told(error))

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

    def _way_out_of(self, error: Exception) -> str | None:
        from google.auth.exceptions import DefaultCredentialsError, RefreshError

        if isinstance(error, DefaultCredentialsError | RefreshError):
            return self.way_out
        if getattr(error, "code", None) in (401, 403) or _kind(error) == "Forbidden":
            return self.way_out
        if _kind(error) == "Bad Request":
            return "name a bucket and a prefix as Google's rules are: gs://BUCKET/PREFIX"
        return super()._way_out_of(error)

    @asked
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
    kind = KINDS.get(protocol, Files)
    if kind is not Folder and not WILD.isdisjoint(root):
        raise StoreRefused(
            f"the store {url} has one of *?[ in it, by which its client would find, and remove, the files of "
            "others: choose another prefix"
        )
    return kind(files, root, url)


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
    if (code := _code(error)) is not None:
        return code
    if (told := str(error).partition(": ")[0]) in GOOGLE_SAYS:
        return told
    return " ".join([type(error).__name__, str(getattr(error, "code", ""))]).strip()
