"""A small client of the API, and what can go wrong on the way to it."""

import base64
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast

import httpx
from pydantic import ValidationError

from service.errors import CommandFailed
from service.schemas import (
    Readiness,
    SweepDetail,
    SweepList,
    SweepView,
    TrialDetail,
    TrialList,
    TrialView,
    View,
)

TIMEOUT_S = 30.0

Answer = TypeVar("Answer", bound=View)


class ClientError(CommandFailed):
    """The service could not be asked, or did not do as it was asked."""


class ServiceUnreachable(ClientError):
    """Nothing answers at the service's URL."""


class CorruptDownload(ClientError):
    """A file did not arrive as the service has it."""


class ApiError(ClientError):
    """The service refused; the message is its problem document's text."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class FraternalClient:
    """The API of one service. Every method raises ServiceUnreachable and ApiError."""

    def __init__(self, base_url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.base_url = base_url.rstrip("/")
        # The service is on this machine or behind a tunnel: a proxy of the environment cannot reach it.
        self._http = httpx.Client(base_url=self.base_url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def create(self, body: dict[str, Any]) -> SweepDetail:
        return self._ask("POST", "/v1/sweeps", SweepDetail, json=body)

    def list_sweeps(self) -> list[SweepView]:
        """The newest first."""
        return self._ask("GET", "/v1/sweeps", SweepList).sweeps

    def get(self, sweep_id: str) -> SweepDetail:
        return self._ask("GET", _path(sweep_id), SweepDetail)

    def trials(self, sweep_id: str) -> list[TrialView]:
        return self._ask("GET", f"{_path(sweep_id)}/trials", TrialList).trials

    def trial(self, sweep_id: str, number: int) -> TrialDetail:
        return self._ask("GET", f"{_path(sweep_id)}/trials/{number}", TrialDetail)

    def ask(self, sweep_id: str, verb: str, body: dict[str, Any] | None = None) -> SweepView:
        """pause, resume, stop, cancel, extend or retry-failed."""
        return self._ask("POST", f"{_path(sweep_id)}:{verb}", SweepView, json=body)

    def cancel(self, sweep_id: str) -> SweepView:
        return self.ask(sweep_id, "cancel")

    def clone(self, sweep_id: str, changes: dict[str, Any]) -> SweepDetail:
        return self._ask("POST", f"{_path(sweep_id)}:clone", SweepDetail, json=changes)

    def delete(self, sweep_id: str) -> SweepView:
        return self._ask("DELETE", _path(sweep_id), SweepView)

    def best(self, sweep_id: str) -> TrialView:
        return self._ask("GET", f"{_path(sweep_id)}/best", TrialView)

    def check_ready(self) -> Readiness:
        """Raises ApiError with status 503 while something is missing."""
        return self._ask("GET", "/readyz", Readiness)

    def fetch(self, sweep_id: str, path: Path) -> str:
        """Download the best checkpoint to `path`, whole or not at all; returns its SHA-256.

        Raises CorruptDownload where the bytes are not those that the service announced.
        """
        with (
            self._reaching(),
            self._http.stream("GET", f"{_path(sweep_id)}/best/checkpoint") as response,
            _written_whole(path) as file,
        ):
            if response.is_error:
                response.read()
            _require_success(response)
            digest = hashlib.sha256()
            for chunk in response.iter_raw():
                digest.update(chunk)
                file.write(chunk)
            expected = f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
            if response.headers.get("repr-digest") != expected:
                raise CorruptDownload(
                    f"the checkpoint of {sweep_id} arrived damaged: its digest is {expected}, not "
                    f"{response.headers.get('repr-digest')}; nothing was saved, fetch it again"
                )
        return digest.hexdigest()

    def _ask(self, method: str, path: str, answer: type[Answer], **request: Any) -> Answer:
        with self._reaching():
            response = self._http.request(method, path, **request)
        _require_success(response)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise ClientError(
                f"{self.base_url} does not answer as a fraternal service of this version does"
            ) from error

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServiceUnreachable(
                f"no service at {self.base_url}; start one with `fraternal serve`"
            ) from error
        except httpx.TransportError as error:
            raise ServiceUnreachable(
                f"{self.base_url} broke off: {error or type(error).__name__}; "
                "what was asked for may have been done: look before you ask again"
            ) from error
        except httpx.InvalidURL as error:
            raise ClientError(
                f"{self.base_url!r} is no URL: {error}; one is http://127.0.0.1:8123"
            ) from error


def _path(sweep_id: str) -> str:
    if not sweep_id or not sweep_id.replace("-", "").replace("_", "").isalnum():
        raise ClientError(f"{sweep_id!r} is no sweep id: letters, digits, - and _; `fraternal ls` lists them")
    return f"/v1/sweeps/{sweep_id}"


def _require_success(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        problem = response.json()
        errors = "".join(
            f"\n  {error.get('parameter') or error['pointer'] or 'body'}: {error['message']}"
            for error in problem["errors"]
        )
        text = problem["title"] + errors if errors else problem["detail"]
        raise ApiError(response.status_code, problem["code"], text)
    except (ValueError, KeyError, TypeError) as error:
        text = f"{response.url} answered {response.status_code}, not as a fraternal service does"
        raise ApiError(response.status_code, "unknown", text) from error


@contextmanager
def _written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when the block ends well, and leaves nothing behind otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
