"""Requests that are carried out once, however often they are sent: by their Idempotency-Key.

The answer is written in the transaction that carries the request out. So whoever hears nothing may ask again:
either nothing was done, or what was done is told again, word by word.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Connection, Engine, delete, insert, select
from sqlalchemy.exc import IntegrityError

from service.database import naive, now
from service.errors import KeyReused, ServiceError, StillCarriedOut
from service.schemas import View
from service.tables import answers

KEPT = timedelta(days=1)
"""How long an answer can be asked for again."""


@dataclass(frozen=True)
class KeyedRequest:
    owner: str
    """Id of the token that it came with, or nothing: what one client has asked for is told to no other."""
    key: str
    sha256: str
    """Of all that was asked: method, path, query and body."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: str
    replayed: bool = False


class Idempotency:
    """Carries requests out once. Any number of services may share the database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._in_flight: set[tuple[str, str]] = set()

    def once(
        self,
        request: KeyedRequest,
        act: Callable[[Callable[[Connection, View], None]], View],
        answer: Callable[[View], Answer],
    ) -> Answer:
        """What `act` comes to, now or when it was done. It is handed what writes its answer down.

        Raises KeyReused, StillCarriedOut, and what `act` raises, of which nothing is remembered.
        """
        with self._alone(request):
            found = self._find(request)
            if found is not None:
                return found
            written: list[Answer] = []

            def write(connection: Connection, view: View) -> None:
                written.append(answer(view))
                _write(connection, request, written[-1])

            try:
                act(write)
            except (IntegrityError, ServiceError):
                found = self._find(request)  # another service may just have carried it out
                if found is None:
                    raise
                return found
            return written[-1]

    @contextmanager
    def _alone(self, request: KeyedRequest) -> Iterator[None]:
        name = (request.owner, request.key)
        with self._lock:
            if name in self._in_flight:
                raise StillCarriedOut("the request with this Idempotency-Key is being carried out: ask again")
            self._in_flight.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight.discard(name)

    def _find(self, request: KeyedRequest) -> Answer | None:
        mine = (answers.c.owner == request.owner) & (answers.c.key == request.key)
        with self._engine.connect() as connection:
            row = connection.execute(select(answers).where(mine)).one_or_none()
        if row is None:
            return None
        if row.request_sha256 != request.sha256:
            raise KeyReused(
                "this Idempotency-Key came with another request before: give each request a key of its own"
            )
        return Answer(row.status, row.headers, row.body, replayed=True)


def _write(connection: Connection, request: KeyedRequest, answer: Answer) -> None:
    connection.execute(delete(answers).where(answers.c.created_at < naive(now() - KEPT)))
    connection.execute(
        insert(answers).values(
            owner=request.owner,
            key=request.key,
            request_sha256=request.sha256,
            status=answer.status,
            headers=dict(answer.headers),
            body=answer.body,
            created_at=naive(now()),
        )
    )
