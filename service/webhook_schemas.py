"""What is asked of webhooks and answered about them."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from service.events import EventKind
from service.schemas import View


class WebhookRequest(View):
    """What is to be sent where."""

    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    """http or https; a public address, unless the service is set to send to private ones."""
    kinds: Annotated[list[EventKind], Field(min_length=1)] | None = None
    """Of events; null: all, those to come in later versions, too."""
    sweep_id: str | None = None
    """The only sweep whose events are sent; null: all sweeps'."""


class WebhookView(View):
    id: str
    url: str
    kinds: list[str] | None
    sweep_id: str | None
    state: Literal["active", "failing", "disabled"]
    pending: int
    """Messages that wait."""
    attempts: int
    """In vain, since the last one that was not."""
    next_attempt_at: datetime | None
    failure: str | None
    """What was wrong with the latest attempt."""
    dropped: int
    """Messages that were given up."""
    created_at: datetime
    delivered_at: datetime | None
    """When the latest message was taken."""
    failed_at: datetime | None
    disabled_at: datetime | None


class NewWebhook(WebhookView):
    secret: str
    """What its messages are signed with; told only once."""


class WebhookList(View):
    webhooks: list[WebhookView]


class TestedWebhook(View):
    """What came of a message."""

    delivered: bool
    status: int | None
    """Of the answer; null where there was none."""
    error: str | None
    ms: float
    """Milliseconds from the first step to the answer."""
