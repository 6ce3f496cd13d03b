"""Webhooks over HTTP."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from service.routes import BAD_SPEC, KEYED, Carrying, _problems
from service.turns import looks
from service.webhook_schemas import NewWebhook, TestedWebhook, WebhookList, WebhookRequest, WebhookView
from service.webhooks import Webhooks

WebhookId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Identity of a webhook.")]
NO_SUCH = _problems({404: "There is no such webhook."})


async def _webhooks(request: Request) -> Webhooks:
    webhooks: Webhooks = request.app.state.webhooks
    return webhooks


def _place(webhook: NewWebhook) -> dict[str, str]:
    return {"location": f"/v1/webhooks/{webhook.id}"}


Known = Annotated[Webhooks, Depends(_webhooks)]

webhooks = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


@webhooks.post("", status_code=201, response_model=NewWebhook, responses={**KEYED, **BAD_SPEC})
def create_webhook(request: WebhookRequest, known: Known, once: Carrying) -> Response:
    """Have events sent to a URL as they happen, signed as Standard Webhooks have it.

    The answer has the secret that they are signed with: it is told only here. A message is tried again until
    its receiver answers with 2xx, for a day; one that answers 410 is sent nothing more.
    """
    return once(partial(known.create, request), 201, _place)


@webhooks.get("")
@looks
def list_webhooks(known: Known) -> WebhookList:
    """All webhooks, the oldest first."""
    return WebhookList(webhooks=known.list_webhooks())


@webhooks.get("/{webhook_id}", responses=NO_SUCH)
@looks
def get_webhook(webhook_id: WebhookId, known: Known) -> WebhookView:
    """A webhook, and how it fares."""
    return known.get(webhook_id)


@webhooks.post("/{webhook_id}:test", responses=NO_SUCH)
def test_webhook(webhook_id: WebhookId, known: Known) -> TestedWebhook:
    """Send a `ping` now, and say what came of it; one that was disabled and takes it is enabled again."""
    return known.test(webhook_id)


@webhooks.delete("/{webhook_id}", status_code=204, responses=NO_SUCH)
def delete_webhook(webhook_id: WebhookId, known: Known) -> None:
    """Send nothing more to a webhook, nor what waits for it."""
    known.remove(webhook_id)
