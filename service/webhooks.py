"""Webhooks: who wants to be told of what, and the messages on their way, which a thread sends in order.

A message is written with its event (service.event_log) and deleted once its receiver has taken it: it may
come twice, and is never lost, short of being in vain for a day.
"""

import base64
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Connection, Engine, RowMapping, delete, func, insert, select, update

from service.database import aware, naive, now, one_at_a_time
from service.errors import InvalidWebhook, Problem, WebhookNotFound
from service.event_log import find_sweep
from service.events import encode_message
from service.schemas import View
from service.sending import Message, RefusedAddress, Undeliverable, parse_url, resolve, send
from service.tables import deliveries, sweeps, webhooks
from service.webhook_schemas import NewWebhook, TestedWebhook, WebhookRequest, WebhookView

log = logging.getLogger(__name__)

MOST_WEBHOOKS = 100
TRIED_FOR = timedelta(days=1)
"""Since a message's event; what has been in vain for so long is dropped."""
LONGEST_PAUSE_S = 3600.0
PERIOD_S = 0.5
TIDY_EVERY_S = 60.0
AT_ONCE = 32
"""Receivers that are sent to at the same time: each may take ten seconds and delays no other."""
SECONDS_TO_STOP = 2.0
GONE = 410


@dataclass(frozen=True)
class Delivery:
    """The next message of a webhook."""

    id: int
    webhook_id: str
    url: str
    secret: str
    message: Message
    attempts: int
    """In vain, of this webhook, since the last one that was not."""
    created_at: datetime


class Webhooks:
    """The tables of webhooks and deliveries. Every method is one transaction."""

    def __init__(self, engine: Engine, *, to_private: bool) -> None:
        self._engine = engine
        self._to_private = to_private

    def create(
        self, request: WebhookRequest, within: Callable[[Connection, View], None] | None = None
    ) -> NewWebhook:
        """Raises InvalidWebhook. The secret is told here and never again.

        `within` is done in the same transaction, with the answer.
        """
        url = self._checked_url(request.url)
        secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        values = {
            "id": f"w{secrets.token_hex(5)}",
            "url": url,
            "secret": secret,
            "kinds": sorted(set(request.kinds)) if request.kinds is not None else None,
            "sweep_id": request.sweep_id,
            "created_at": naive(now()),
            "attempts": 0,
            "dropped": 0,
        }
        with one_at_a_time(self._engine) as connection:  # they are counted first
            if request.sweep_id is not None and not find_sweep(connection, request.sweep_id):
                raise _refused("/sweep_id", "no_such_sweep", f"there is no sweep {request.sweep_id!r}")
            if connection.execute(select(func.count()).select_from(webhooks)).scalar_one() >= MOST_WEBHOOKS:
                raise _refused("", "too_many_webhooks", f"there are {MOST_WEBHOOKS} already: delete one")
            connection.execute(insert(webhooks).values(values))
            row = connection.execute(_with_pending().where(webhooks.c.id == values["id"])).mappings().one()
            created = NewWebhook(**dict(_view(row)), secret=secret)
            if within is not None:
                within(connection, created)
        return created

    def _checked_url(self, written: str) -> str:
        try:
            url = parse_url(written)
            if not self._to_private:
                resolve(url.host, url.port or 443, to_private=False)
        except Undeliverable as error:
            code = "refused_address" if isinstance(error, RefusedAddress) else "unknown_host"
            raise _refused("/url", code, str(error)) from error
        return str(url)

    def list_webhooks(self) -> list[WebhookView]:
        """The oldest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(
                _with_pending().order_by(webhooks.c.created_at, webhooks.c.id)
            ).mappings()
            return [_view(row) for row in rows]

    def get(self, webhook_id: str) -> WebhookView:
        """Raises WebhookNotFound."""
        return _view(self._row(webhook_id))

    def remove(self, webhook_id: str) -> None:
        """With what was to be sent to it. Raises WebhookNotFound."""
        with self._engine.begin() as connection:
            if not connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id)).rowcount:
                raise _unknown(webhook_id)

    def test(self, webhook_id: str) -> TestedWebhook:
        """Send a `ping` now, and say what came of it. One that was disabled and takes it is enabled again."""
        row = self._row(webhook_id)
        data = to_json({"webhook_id": webhook_id})
        message = Message(f"ping-{secrets.token_hex(8)}", encode_message("ping", naive(now()), data))
        began = time.monotonic()
        status, error = self._attempt(row["url"], row["secret"], message)
        if error is None and row["disabled_at"] is not None:
            with self._engine.begin() as connection:
                enabled = {"disabled_at": None, "failure": None, "attempts": 0, "due_at": None}
                connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(enabled))
        ms = round((time.monotonic() - began) * 1000, 1)
        return TestedWebhook(delivered=error is None, status=status, error=error, ms=ms)

    def due(self) -> list[str]:
        """Ids of the webhooks that something is to be sent to now."""
        ready = webhooks.c.due_at.is_(None) | (webhooks.c.due_at <= naive(now()))
        query = select(webhooks.c.id).where(
            ready & webhooks.c.disabled_at.is_(None) & webhooks.c.id.in_(select(deliveries.c.webhook_id))
        )
        with self._engine.connect() as connection:
            return list(connection.execute(query).scalars())

    def find_next(self, webhook_id: str) -> Delivery | None:
        """The first message of those that wait."""
        query = (
            select(deliveries, webhooks.c.url, webhooks.c.secret, webhooks.c.attempts)
            .join(webhooks, webhooks.c.id == deliveries.c.webhook_id)
            .where((webhooks.c.id == webhook_id) & webhooks.c.disabled_at.is_(None))
            .order_by(deliveries.c.id)
            .limit(1)
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            return None
        fields = {name: row[name] for name in ("id", "webhook_id", "url", "secret", "attempts", "created_at")}
        return Delivery(**fields, message=Message(row["message_id"], row["body"]))

    def deliver(self, delivery: Delivery) -> bool:
        """Send a message and write down what came of it; whether the next one may follow at once."""
        status, error = self._attempt(delivery.url, delivery.secret, delivery.message)
        of_webhook, at = webhooks.c.id == delivery.webhook_id, naive(now())
        waiting = deliveries.c.webhook_id == delivery.webhook_id
        with self._engine.begin() as connection:  # the webhook first, as who deletes one does
            if error is None:
                taken = {"attempts": 0, "due_at": None, "delivered_at": at, "failure": None}
                connection.execute(update(webhooks).where(of_webhook).values(taken))
                connection.execute(delete(deliveries).where(deliveries.c.id == delivery.id))
                return True
            changes = {
                "attempts": delivery.attempts + 1,
                "due_at": at + timedelta(seconds=_pause_s(delivery.attempts)),
                "failed_at": at,
                "failure": error,
                **({"disabled_at": at} if status == GONE else {}),
            }
            connection.execute(update(webhooks).where(of_webhook).values(changes))
            given_up = waiting if status == GONE else waiting & (deliveries.c.created_at < at - TRIED_FOR)
            dropped = connection.execute(delete(deliveries).where(given_up)).rowcount
            counted = {"dropped": webhooks.c.dropped + dropped}
            connection.execute(update(webhooks).where(of_webhook).values(counted))
        return False

    def tidy(self) -> None:
        """Remove webhooks of sweeps that are no more, once all has been sent to them."""
        left = webhooks.c.sweep_id.is_not(None) & webhooks.c.sweep_id.not_in(select(sweeps.c.id))
        with self._engine.begin() as connection:
            connection.execute(
                delete(webhooks).where(left & webhooks.c.id.not_in(select(deliveries.c.webhook_id)))
            )

    def _attempt(self, url: str, secret: str, message: Message) -> tuple[int | None, str | None]:
        """The answer's status, and what is wrong with it, or why there is none."""
        try:
            status = send(url, secret, message, to_private=self._to_private)
        except Undeliverable as error:
            return None, str(error)
        if status == GONE:
            return status, "it answered 410, Gone: it is sent nothing more, until a test of it succeeds"
        if 300 <= status < 400:
            return status, f"it answered {status}: redirects are not followed, give the URL that they lead to"
        return status, None if 200 <= status < 300 else f"it answered {status}"

    def _row(self, webhook_id: str) -> RowMapping:
        with self._engine.connect() as connection:
            query = _with_pending().where(webhooks.c.id == webhook_id)
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise _unknown(webhook_id)
        return row


class Deliverer:
    """A thread that has what is due sent, each webhook's messages in order and by a thread of their own."""

    def __init__(self, webhooks: Webhooks, acts: Callable[[], bool]) -> None:
        """`acts` says whether this service is the one, of those at one database, that sends."""
        self._webhooks = webhooks
        self._acts = acts
        self._stopped = threading.Event()
        self._sending: dict[str, threading.Thread] = {}
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What is on its way then is sent again by the next service: nobody waits for a slow receiver."""
        self._stopped.set()
        until = time.monotonic() + SECONDS_TO_STOP
        self._thread.join(max(0.0, until - time.monotonic()))  # first: it may start one more of the others
        for thread in list(self._sending.values()):
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        tidied_at = 0.0
        while not self._stopped.wait(PERIOD_S):
            try:
                if not self._acts():
                    continue
                self.send_what_is_due()
                if time.monotonic() - tidied_at > TIDY_EVERY_S:
                    tidied_at = time.monotonic()
                    self._webhooks.tidy()
            except Exception:  # whatever it is, the next look may find it gone
                log.exception("what is due to webhooks could not be looked for")

    def send_what_is_due(self) -> None:
        self._sending = {of: thread for of, thread in self._sending.items() if thread.is_alive()}
        for webhook_id in self._webhooks.due():
            if webhook_id not in self._sending and len(self._sending) < AT_ONCE:
                thread = threading.Thread(
                    target=self._send_to, args=[webhook_id], name=webhook_id, daemon=True
                )
                self._sending[webhook_id] = thread
                thread.start()

    def _send_to(self, webhook_id: str) -> None:
        try:
            while not self._stopped.is_set() and self._acts():
                delivery = self._webhooks.find_next(webhook_id)
                if delivery is None or not self._webhooks.deliver(delivery):
                    return
        except Exception:
            log.exception("webhook %s could not be served", webhook_id)


def _pause_s(attempts: int) -> float:
    """Before the next attempt, after so many in vain and one more: a second, doubled up to an hour, about."""
    return float(min(LONGEST_PAUSE_S, 2.0 ** min(attempts, 20)) * random.uniform(0.8, 1.2))


def _with_pending() -> Any:
    pending = (
        select(func.count())
        .where(deliveries.c.webhook_id == webhooks.c.id)
        .scalar_subquery()
        .label("pending")
    )
    return select(webhooks, pending)


def _view(row: RowMapping) -> WebhookView:
    state = "disabled" if row["disabled_at"] is not None else "failing" if row["attempts"] else "active"
    times = ("created_at", "delivered_at", "failed_at", "disabled_at")
    return WebhookView(
        state=state,
        **{
            name: row[name]
            for name in ("id", "url", "kinds", "sweep_id", "pending", "attempts", "dropped", "failure")
        },
        **{name: aware(row[name]) for name in times},
        next_attempt_at=aware(row["due_at"]) if row["pending"] else None,
    )


def _refused(pointer: str, code: str, words: str) -> InvalidWebhook:
    return InvalidWebhook([Problem(pointer, code, words)])


def _unknown(webhook_id: str) -> WebhookNotFound:
    return WebhookNotFound(f"there is no webhook {webhook_id!r}; GET /v1/webhooks lists them")
