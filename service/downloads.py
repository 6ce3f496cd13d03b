"""One file over HTTP: strong ETag, digest, single byte ranges, conditional requests (RFC 9110, RFC 9530)."""

import base64
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from anyio import move_on_after
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from service.exports import Export
from service.problems import ProblemDocument, plain_problem, problem_response
from service.streams import drop
from service.sweeps import OpenCheckpoint

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
PATIENCE_S = 60.0
"""For a client to take a chunk: one of 5 KiB a second is served still."""


def _described(**headers: tuple[str, str]) -> dict[str, Any]:
    """OpenAPI's Header Objects; each of a description and an example."""
    return {
        name.replace("_", "-"): {
            "description": words,
            "required": True,
            "schema": {"type": "string"},
            "example": example,
        }
        for name, (words, example) in headers.items()
    }


_ETAG = _described(ETag=("Strong: the file's SHA-256.", '"9f86d081884c7d65"'))
_WHOLE_DIGEST = ("SHA-256 of the whole file (RFC 9530).", "sha-256=:n4bQgYhMfWWaL+qgxVrQFaO/TxsrC4I=:")
_LENGTH = ("Bytes that follow.", "1048576")
_WHOLE = _described(
    Repr_Digest=_WHOLE_DIGEST,
    Accept_Ranges=("Ranges of bytes can be asked for.", "bytes"),
    Content_Length=_LENGTH,
    Content_Disposition=("A name for the file.", 'attachment; filename="s3f09ab12cd-t00002-best.tar"'),
    Cache_Control=("The best changes while a sweep runs: ask again, with the ETag.", "no-cache"),
)
_RANGE = _described(Content_Range=("Which bytes, of how many.", "bytes 0-1023/1048576"))
_NOWHERE = _described(Content_Range=("How many bytes there are.", "bytes */1048576"))
_TAR = {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", **_TAR, "headers": {**_ETAG, **_WHOLE}},
    206: {
        "description": "The range of bytes that was asked for.",
        **_TAR,
        "headers": {**_ETAG, **_WHOLE, **_RANGE},
    },
    304: {"description": "The checkpoint is still the one whose ETag was sent.", "headers": _ETAG},
    416: {"description": "The range lies outside the file.", "model": ProblemDocument, "headers": _NOWHERE},
}
"""How a route that answers with `download` is described."""


WHOLE_FILE = _described(
    Repr_Digest=_WHOLE_DIGEST,
    Content_Length=_LENGTH,
    Content_Disposition=("A name for the file.", 'attachment; filename="s3f09ab12cd-trials.csv"'),
    Cache_Control=("The next one is of another moment.", "no-store"),
)
"""Headers of a file that is made to be sent once."""


class _FileStream(StreamingResponse):
    """Streams from a file and closes it, also when the client goes away, or takes nothing more."""

    def __init__(self, file: BinaryIO, length: int, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(_chunks(file, length), status, headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_patiently(message: Message) -> None:
            with move_on_after(PATIENCE_S):
                await send(message)
                return
            if not await drop(scope):
                raise TimeoutError("the client takes no more of the file")
            log.info("a client that takes no more of its file is dropped")

        try:
            await super().__call__(scope, receive, send_patiently)
        finally:
            self._file.close()


def send_file(made: Export, method: str) -> Response:
    """Answer a GET or HEAD with all of a file, which is closed in the end."""
    headers = {
        "content-type": made.media_type,
        "content-length": str(made.size),
        "content-disposition": f'attachment; filename="{made.filename}"',
        "repr-digest": _repr_digest(made.sha256),
        "cache-control": "no-store",
    }
    if method == "HEAD":
        made.file.close()
        return Response(headers=headers)
    return _FileStream(made.file, made.size, 200, headers)


def download(checkpoint: OpenCheckpoint, method: str, asked: Mapping[str, str], instance: str) -> Response:
    """Answer a GET or HEAD whose request headers are `asked`. In the end the checkpoint's file is closed."""
    headers = _headers_of(checkpoint)
    etag = headers["etag"]
    if _lists(asked.get("if-none-match", ""), etag):
        checkpoint.file.close()
        return Response(status_code=304, headers={"etag": etag})
    if method == "HEAD":
        checkpoint.file.close()
        return Response(headers=headers)
    try:
        part = _part_asked_for(asked, etag, checkpoint.size)
    except _Unsatisfiable:
        checkpoint.file.close()
        detail = f"range {asked['range']!r} is outside the file, which has {checkpoint.size} bytes"
        document = plain_problem(416, detail, instance)
        return problem_response(document, {"content-range": f"bytes */{checkpoint.size}"})
    if part is None:
        return _FileStream(checkpoint.file, checkpoint.size, 200, headers)
    checkpoint.file.seek(part.start)
    content_range = f"bytes {part.start}-{part.stop - 1}/{checkpoint.size}"
    partial = {**headers, "content-length": str(len(part)), "content-range": content_range}
    return _FileStream(checkpoint.file, len(part), 206, partial)


class _Unsatisfiable(Exception):
    """The range holds no byte of the file."""


def _headers_of(checkpoint: OpenCheckpoint) -> dict[str, str]:
    return {
        "etag": f'"{checkpoint.sha256}"',
        "repr-digest": _repr_digest(checkpoint.sha256),
        "accept-ranges": "bytes",
        "content-type": "application/x-tar",
        "content-length": str(checkpoint.size),
        "content-disposition": f'attachment; filename="{checkpoint.filename}"',
        "cache-control": "no-cache",  # the best changes while a sweep runs: ask again, with the ETag
    }


def _repr_digest(sha256: str) -> str:
    return f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"


def _lists(header: str, etag: str) -> bool:
    """Whether an If-None-Match names this entity; the comparison is the weak one."""
    return header.strip() == "*" or etag in {tag.strip().removeprefix("W/") for tag in header.split(",")}


def _part_asked_for(asked: Mapping[str, str], etag: str, size: int) -> range | None:
    """The bytes to send, None for all: no range, one for another version, or a form that we do not serve.

    Raises _Unsatisfiable.
    """
    single = re.fullmatch(
        r"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", asked.get("range", ""), re.IGNORECASE | re.ASCII
    )
    if single is None or single.groups() == ("", "") or asked.get("if-range", etag).strip() != etag:
        return None
    first, last = single.groups()
    if first and last and int(last) < int(first):
        return None  # RFC 9110, 14.1.1: invalid, hence ignored
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise _Unsatisfiable
    return range(start, stop)


def _chunks(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0:
        chunk = file.read(min(CHUNK_BYTES, length))
        if not chunk:
            raise OSError(f"the file ended {length} bytes early")
        length -= len(chunk)
        yield chunk
