"""A small client of the API, and what can go wrong on the way to it."""

import base64
import contextlib
import hashlib
import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeVar, cast

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import ValidationError

from service.comparison_schemas import SideBySide
from service.errors import CommandFailed
from service.events import AnyEvent, AnyEventPage, read_event
from service.forecast_schemas import Validation
from service.report_schemas import ReportView
from service.schemas import (
    PageView,
    PointList,
    PointView,
    Readiness,
    SweepDetail,
    SweepList,
    SweepView,
    TrialDetail,
    TrialList,
    TrialView,
    View,
)
from service.webhook_schemas import NewWebhook, TestedWebhook, WebhookList, WebhookView

TIMEOUT_S = 30.0
REPORT_TIMEOUT_S = 120.0
"""Pictures of thousands of curves are not drawn in a moment."""
FORECAST_TIMEOUT_S = 600.0
"""Of the times that a forecast needs, one at a time is measured."""
UNREACHABLE_S = 60.0
"""How long a watcher waits for a service that is gone, say because it is being restarted."""
PAUSE_S = 0.5
"""Before a stream that was cut off is asked for again."""
SILENCE_S = 45.0
"""Three heartbeats of a stream; then it is taken for dead."""
EXPORT_S = 600.0
"""An export is made whole before its first byte is sent, one after another."""
AGAIN_AFTER_S = (0.2, 1.0)
"""Seconds to wait before a request, of which nothing was heard, is sent again."""

Answer = TypeVar("Answer", bound=View)
Page = TypeVar("Page", bound=PageView)


class ClientError(CommandFailed):
    """The service could not be asked, or did not do as it was asked."""


class ServiceUnreachable(ClientError):
    """Nothing answers at the service's URL."""


class AnswerLost(ServiceUnreachable):
    """The service was asked, and nothing was heard of it: what was asked for may have been done."""


class CorruptDownload(ClientError):
    """A file did not arrive as the service has it."""


class ApiError(ClientError):
    """The service refused; the message is its problem document's text."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class FraternalClient:
    """The API of one service, asked with a token where there is one; no error tells it.

    Every method raises ServiceUnreachable and ApiError.
    """

    def __init__(self, base_url: str, timeout_s: float = TIMEOUT_S, token: str | None = None) -> None:
        """Raises ClientError where the token cannot be one."""
        self.base_url = re.sub(r"(?<=//)[^/@]*@", "", base_url).rstrip("/")  # as errors may show it
        self._token = token
        headers = {"authorization": f"Bearer {_sendable(token)}"} if token is not None else {}
        # The service is on this machine or behind a tunnel: a proxy of the environment cannot reach it.
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def create(self, body: dict[str, Any]) -> SweepDetail:
        return self._ask_once("/v1/sweeps", SweepDetail, body)

    def validate(self, body: dict[str, Any], *, forecast: bool = True) -> Validation:
        """The spec as it would be written down, and how long it would take; nothing is queued."""
        path = f"/v1/sweeps?validate_only=true&forecast={'true' if forecast else 'false'}"
        return self._ask("POST", path, Validation, json=body, timeout=FORECAST_TIMEOUT_S)

    def list_sweeps(self, **query: Any) -> list[SweepView]:
        """The newest first, unless `order_by` says otherwise; `state`, `label` and `name` choose some."""
        return [sweep for page in self._pages("/v1/sweeps", SweepList, query) for sweep in page.sweeps]

    def get(self, sweep_id: str) -> SweepDetail:
        return self._ask("GET", _path(sweep_id), SweepDetail)

    def trials(self, sweep_id: str, **query: Any) -> list[TrialView]:
        """By number, unless `order_by` says otherwise; `state` and `arm` choose some."""
        pages = self._pages(f"{_path(sweep_id)}/trials", TrialList, query)
        return [trial for page in pages for trial in page.trials]

    def report(self, sweep_id: str) -> ReportView:
        """What the trials so far say about the arms."""
        return self._ask("GET", f"{_path(sweep_id)}/report", ReportView, timeout=REPORT_TIMEOUT_S)

    def written_report(self, sweep_id: str, media_type: Literal["text/markdown", "text/html"]) -> str:
        """The report as it is to be read."""
        with self._reaching():
            response = self._http.get(
                f"{_path(sweep_id)}/report", headers={"accept": media_type}, timeout=REPORT_TIMEOUT_S
            )
            self._require_success(response)
        return response.text

    def trial(self, sweep_id: str, number: int) -> TrialDetail:
        return self._ask("GET", f"{_path(sweep_id)}/trials/{number}", TrialDetail)

    def ask(self, sweep_id: str, verb: str, body: dict[str, Any] | None = None) -> SweepView:
        """pause, resume, stop, cancel, extend or retry-failed."""
        return self._ask_once(f"{_path(sweep_id)}:{verb}", SweepView, body)

    def cancel(self, sweep_id: str) -> SweepView:
        return self.ask(sweep_id, "cancel")

    def clone(self, sweep_id: str, changes: dict[str, Any]) -> SweepDetail:
        return self._ask_once(f"{_path(sweep_id)}:clone", SweepDetail, changes)

    def change(self, sweep_id: str, changes: dict[str, Any], revision: int | None = None) -> SweepDetail:
        """Change name, labels, priority, max_concurrent or budget, if the sweep still has this revision."""
        wanted = {"if-match": "*" if revision is None else f'"{revision}"'}
        return self._ask("PATCH", _path(sweep_id), SweepDetail, json=changes, headers=wanted)

    def ask_of_trial(self, sweep_id: str, number: int, verb: str) -> None:
        """stop, retry, pin or unpin."""
        self._ask_once(f"{_path(sweep_id)}/trials/{number}:{verb}", View)

    def add_point(self, sweep_id: str, params: dict[str, Any]) -> PointView:
        return self._ask_once(f"{_path(sweep_id)}/points", PointView, {"params": params})

    def remove_point(self, sweep_id: str, point_id: int) -> None:
        with self._reaching():
            self._require_success(self._http.delete(f"{_path(sweep_id)}/points/{point_id}"))

    def points(self, sweep_id: str) -> list[PointView]:
        return self._ask("GET", f"{_path(sweep_id)}/points", PointList).points

    def delete(self, sweep_id: str) -> SweepView:
        return self._ask("DELETE", _path(sweep_id), SweepView)

    def compare(self, a: str, b: str) -> SideBySide:
        """Two sweeps, or two trials, each written `SWEEP:NUMBER`."""
        return self._ask("GET", "/v1/compare", SideBySide, params={"a": a, "b": b})

    def best(self, sweep_id: str) -> TrialView:
        return self._ask("GET", f"{_path(sweep_id)}/best", TrialView)

    def event_page(self, sweep_id: str, after: int = 0, limit: int = 1000) -> AnyEventPage:
        """What has happened in a sweep after an event, the earliest first."""
        return self._ask(
            "GET",
            f"{_path(sweep_id)}/events",
            AnyEventPage,
            params={"after": after, "limit": limit},
            headers={"accept": "application/json"},
        )

    def events_so_far(self, sweep_id: str, after: int = 0) -> Iterator[AnyEvent]:
        page = self.event_page(sweep_id, after)
        yield from page.events
        while page.has_more:
            page = self.event_page(sweep_id, page.next_after)
            yield from page.events

    def events(self, sweep_id: str, after: int | Literal["newest"] = 0) -> Iterator[AnyEvent]:
        """What happens in a sweep after an event, as it comes, until the sweep is over or deleted.

        A service that goes away is waited for, and nothing is missed or told twice. Raises ServiceUnreachable
        where it does not return within a minute, or never was.
        """
        cursor, answered_at = str(after), -math.inf
        while True:
            try:
                with self._reaching(), self._open_stream(sweep_id, cursor) as response:
                    for told in self._stream_of(response):
                        answered_at, cursor = time.monotonic(), told.id
                        if told.event in {"end", "deleted"}:
                            return
                        if told.data:
                            yield read_event(told.data)
                    if response.status_code == 204:  # it is over, and was all told
                        return
            except (ServiceUnreachable, ApiError) as error:
                patient = isinstance(error, ServiceUnreachable) or error.status == 503
                if not patient or time.monotonic() - answered_at > UNREACHABLE_S:
                    raise
            time.sleep(PAUSE_S)

    def _open_stream(self, sweep_id: str, cursor: str) -> AbstractContextManager[httpx.Response]:
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_S)
        accept = {"accept": "text/event-stream"}
        path = f"{_path(sweep_id)}/events"
        return self._http.stream("GET", path, params={"after": cursor}, headers=accept, timeout=timeout)

    def _stream_of(self, response: httpx.Response) -> Iterator[ServerSentEvent]:
        if response.is_error:
            response.read()
        self._require_success(response)
        if response.status_code != 204:
            yield from EventSource(response).iter_sse()

    def create_webhook(self, body: dict[str, Any]) -> NewWebhook:
        return self._ask_once("/v1/webhooks", NewWebhook, body)

    def list_webhooks(self) -> list[WebhookView]:
        """The oldest first."""
        return self._ask("GET", "/v1/webhooks", WebhookList).webhooks

    def test_webhook(self, webhook_id: str) -> TestedWebhook:
        return self._ask("POST", f"{_webhook_path(webhook_id)}:test", TestedWebhook)

    def delete_webhook(self, webhook_id: str) -> None:
        with self._reaching():
            self._require_success(self._http.delete(_webhook_path(webhook_id)))

    def check_ready(self) -> Readiness:
        """Raises ApiError with status 503 while something is missing."""
        return self._ask("GET", "/readyz", Readiness)

    def fetch(self, sweep_id: str, path: Path) -> str:
        """Download the best checkpoint to `path`, whole or not at all; returns its SHA-256.

        Raises CorruptDownload where the bytes are not those that the service announced.
        """
        return self._download(f"{_path(sweep_id)}/best/checkpoint", path, f"the checkpoint of {sweep_id}")

    def export(self, sweep_id: str, path: Path, **query: str) -> str:
        """Download a sweep as a file of a `format`, say, as `fetch` does."""
        timeout = httpx.Timeout(self._http.timeout.connect, read=EXPORT_S)
        where = f"{_path(sweep_id)}/export"
        return self._download(where, path, f"the export of {sweep_id}", params=query, timeout=timeout)

    def _download(self, where: str, path: Path, what: str, **request: Any) -> str:
        with (
            self._reaching(),
            self._http.stream("GET", where, **request) as response,
            _written_whole(path) as file,
        ):
            if response.is_error:
                response.read()
            self._require_success(response)
            digest = hashlib.sha256()
            for chunk in response.iter_raw():
                digest.update(chunk)
                file.write(chunk)
            expected = f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
            if response.headers.get("repr-digest") != expected:
                raise CorruptDownload(
                    f"{what} arrived damaged: its digest is {expected}, not "
                    f"{response.headers.get('repr-digest')}; nothing was saved, fetch it again"
                )
        return digest.hexdigest()

    def _pages(self, path: str, answer: type[Page], query: dict[str, Any]) -> Iterator[Page]:
        token: dict[str, str] = {}
        while True:
            page = self._ask("GET", path, answer, params={**query, **token})
            yield page
            if page.next_page_token is None:
                return
            token = {"page_token": page.next_page_token}

    def _ask_once(self, path: str, answer: type[Answer], body: Any = None) -> Answer:
        """POST; where nothing is heard of it, or it is still under way, again: it is carried out once."""
        key = {"idempotency-key": secrets.token_urlsafe(18)}
        for pause_s in AGAIN_AFTER_S:
            try:
                return self._ask("POST", path, answer, json=body, headers=key)
            except AnswerLost:
                pass
            except ApiError as error:
                if error.code != "request_in_flight":
                    raise
            time.sleep(pause_s)
        return self._ask("POST", path, answer, json=body, headers=key)

    def _ask(self, method: str, path: str, answer: type[Answer], **request: Any) -> Answer:
        with self._reaching():
            response = self._http.request(method, path, **request)
        self._require_success(response)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise ClientError(
                f"{self.base_url} does not answer as a fraternal service of this version does"
            ) from error

    def _require_success(self, response: httpx.Response) -> None:
        """Raises ApiError, whose words a service may have made of what it was sent."""
        if response.is_success:
            return
        try:
            problem = response.json()
            errors = "".join(f"\n  {_placed(error)}" for error in problem["errors"])
            text = problem["title"] + errors if errors else problem["detail"]
            raise ApiError(response.status_code, problem["code"], self._without_token(text))
        except (ValueError, KeyError, TypeError) as error:
            where = f"{self.base_url}{response.url.path}"
            text = f"{where} answered {response.status_code}, not as a fraternal service does"
            raise ApiError(response.status_code, "unknown", text) from error

    def _without_token(self, text: str) -> str:
        return text.replace(self._token, "TOKEN") if self._token else text

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServiceUnreachable(
                f"no service at {self.base_url}; start one with `fraternal serve`"
            ) from error
        except httpx.TransportError as error:
            raise AnswerLost(
                f"{self.base_url} broke off: {error or type(error).__name__}; "
                "what was asked for may have been done: look before you ask again"
            ) from error
        except httpx.InvalidURL as error:
            raise ClientError(
                f"{self.base_url!r} is no URL: {error}; one is http://127.0.0.1:8123"
            ) from error


def read_token(token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """A client's token: a file's, or the environment's; never the command line's, which everybody can see.

    Raises ClientError.
    """
    if token_file is None:
        return environment.get("FRATERNAL_TOKEN", "").strip() or None
    try:
        written = token_file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ClientError(f"{token_file} holds no token: it is no text") from error
    if not written:
        raise ClientError(f"{token_file} holds no token: it is empty")
    return written


def _placed(error: dict[str, Any]) -> str:
    """What is wrong, after where."""
    return f"{error.get('parameter') or error['pointer'] or 'body'}: {error['message']}"


def _sendable(token: str) -> str:
    """Raises ClientError without the token in it: as a header, httpx would name it."""
    if not (token.isascii() and token.isprintable() and token and " " not in token):
        raise ClientError("the token given is none: one is a single word that begins with frt_")
    return token


def _path(sweep_id: str) -> str:
    if not sweep_id or not sweep_id.replace("-", "").replace("_", "").isalnum():
        raise ClientError(f"{sweep_id!r} is no sweep id: letters, digits, - and _; `fraternal ls` lists them")
    return f"/v1/sweeps/{sweep_id}"


def _webhook_path(webhook_id: str) -> str:
    if not webhook_id.isalnum():
        raise ClientError(f"{webhook_id!r} is no webhook's id; `fraternal webhook ls` lists them")
    return f"/v1/webhooks/{webhook_id}"


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
