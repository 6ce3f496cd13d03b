"""A real S3 server as a process: moto's, with what it knows kept on disk, so that it can be killed.

Beyond moto it refuses, as Amazon's does, content that has not the checksum that came with it, keys that
nobody was given, and an upload in parts on a condition that does not hold. And it can be told to fail.

    python -m tests.object_store FOLDER [PORT [HOST]]
"""

import base64
import hashlib
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

BUCKET = "checkpoints"
KEY, SECRET = "AKIAFRATERNALTEST", "planted-secret-of-the-store"


class S3Server:
    """Its data lies in a folder; `faults/NAME` there, of an error's code, has it answer with that."""

    def __init__(self, folder: Path, port: int = 0, host: str = "127.0.0.1") -> None:
        self.folder, self.port, self._host = folder, port, host
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "requests").touch()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        where = (str(self.folder), str(self.port), self._host)
        command = [sys.executable, "-m", "tests.object_store", *where]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **self.environment}
            )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert said.isdecimal(), (self.folder / "log").read_text()[-3000:]
        self.port = int(said)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Of who uses it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(self.folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / "none"),
        }

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.communicate()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def failing(self, code: str, status: int, methods: str = "GET HEAD PUT POST DELETE") -> Iterator[None]:
        """Answer every request of these methods with an error."""
        fault = self.folder / "fault"
        fault.with_name("fault.new").write_text(f"{code} {status} {methods}")
        fault.with_name("fault.new").rename(fault)
        try:
            yield
        finally:
            fault.unlink()

    @contextmanager
    def flipping_bits(self) -> Iterator[None]:
        """Of all that it is sent, as a bad network does."""
        with self.failing("Flip", 0, "PUT"):
            yield

    def requests(self) -> list[str]:
        """Method, path, query and names of checksums of all that it was asked, in order."""
        return (self.folder / "requests").read_text().splitlines()


@contextmanager
def reached(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By this process, whose s3fs keeps what it once knew of servers."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    yield
    S3FileSystem.clear_instance_cache()


# The server's side.


class Kept:
    """moto's application, whose state is on disk before it answers."""

    def __init__(self, application: Any, folder: Path) -> None:
        from moto.s3.models import s3_backends

        self._application, self._folder = application, folder
        self._state, self._turn = folder / "state", threading.Lock()
        self._backend = s3_backends["123456789012"]["aws"]
        if self._state.exists():
            self._backend.buckets.update(pickle.loads(self._state.read_bytes()))
        else:
            self._backend.create_bucket(BUCKET, "us-east-1")

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        with self._turn:
            with (self._folder / "requests").open("a") as said:
                sums = " ".join(sorted(name for name in environ if name.startswith("HTTP_X_AMZ_CHECKSUM_")))
                said.write(f"{method} {environ['PATH_INFO']}?{environ['QUERY_STRING']} {sums}\n")
            body = _body_of(environ)
            fault = self._fault(method)
            if fault == ("Flip", 0):
                body, fault = bytes([body[0] ^ 1]) + body[1:], None
            refusal = fault or _stranger(environ) or _damaged(environ, body) or self._overtaken(environ)
            if refusal is not None:
                return _refuse(refusal, method, start_response)
            environ["wsgi.input"] = io.BytesIO(body)
            environ["CONTENT_LENGTH"] = str(len(body))
            environ.pop("HTTP_TRANSFER_ENCODING", None)
            answer = list(self._application(environ, start_response))
            if method != "GET" and method != "HEAD":
                self._keep()
            return answer

    def _keep(self) -> None:
        part = self._state.with_suffix(".part")
        part.write_bytes(pickle.dumps(dict(self._backend.buckets)))
        part.rename(self._state)

    def _fault(self, method: str) -> tuple[str, int] | None:
        try:
            code, status, *methods = (self._folder / "fault").read_text().split()
        except FileNotFoundError:
            return None
        return (code, int(status)) if method in methods else None

    def _overtaken(self, environ: dict[str, Any]) -> tuple[str, int] | None:
        """What moto looks at only of what comes in one request."""
        if environ["REQUEST_METHOD"] != "POST" or "HTTP_IF_MATCH" not in environ:
            return None
        _, bucket, key = environ["PATH_INFO"].split("/", 2)
        there = self._backend.buckets[bucket].keys.get(key)
        same = there is not None and there.etag == environ["HTTP_IF_MATCH"]
        return None if same else ("PreconditionFailed", 412)


def _body_of(environ: dict[str, Any]) -> bytes:
    return bytes(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))


def _stranger(environ: dict[str, Any]) -> tuple[str, int] | None:
    found = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    if found is None:
        return "AccessDenied", 403
    return None if found[1] == KEY else ("InvalidAccessKeyId", 403)


def _damaged(environ: dict[str, Any], body: bytes) -> tuple[str, int] | None:
    """As S3 refuses it: moto believes the checksum that it is told."""
    signed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if len(signed) == 64 and hashlib.sha256(body).hexdigest() != signed:
        return "XAmzContentSHA256Mismatch", 400
    crc32 = environ.get("HTTP_X_AMZ_CHECKSUM_CRC32")
    if crc32 is not None and base64.b64decode(crc32) != zlib.crc32(body).to_bytes(4, "big"):
        return "BadDigest", 400
    return None


def _refuse(refusal: tuple[str, int], method: str, start_response: Any) -> list[bytes]:
    code, status = refusal
    said = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(said)))]
    start_response(f"{status} {code}", headers)
    return [] if method == "HEAD" else [said]


def main(folder: Path, port: int, host: str) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = Kept(DomainDispatcherApplication(create_backend_app), folder)
    server = make_server(host, port, application, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    folder, port, host = [*sys.argv[1:], *("0", "127.0.0.1")[len(sys.argv) - 2 :]]
    main(Path(folder), int(port), host)
