"""`fraternal webhook`: events sent to a URL."""

import json
from typing import Annotated

import typer

from service.options import DEFAULT_URL, AsJson, TokenFile, Url, open_client

commands = typer.Typer(
    name="webhook",
    help="Have events sent to a URL as they happen.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id; `fraternal webhook ls` lists them.")]


@commands.command("create")
def create_webhook(
    to: Annotated[str, typer.Argument(metavar="URL", help="http or https, at a public address.")],
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help="Of events, repeatable; by default all.")
    ] = None,
    sweep: Annotated[str | None, typer.Option("--sweep", help="Events of this sweep only.")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Have events sent to a URL; prints the secret that they are signed with, which is told only once.

    Example: `fraternal webhook create https://example.org/hook --kind sweep_succeeded --kind sweep_failed`
    """
    with open_client(url, token_file) as client:
        created = client.create_webhook({"url": to, "kinds": kinds or None, "sweep_id": sweep})
    if as_json:
        print(created.model_dump_json(indent=2))
    else:
        print(f"webhook {created.id}\nsecret  {created.secret}\ntry it: fraternal webhook test {created.id}")


@commands.command("ls")
def list_webhooks(as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """List the webhooks and how they fare.

    Example: `fraternal webhook ls --json`
    """
    from rich.console import Console
    from rich.table import Column, Table

    with open_client(url, token_file) as client:
        known = client.list_webhooks()
    if as_json:
        print(json.dumps([found.model_dump(mode="json") for found in known], indent=2))
        return
    table = Table(Column("webhook", no_wrap=True), Column("url", overflow="fold"), "is sent", "state")
    for found in known:
        kinds = "all events" if found.kinds is None else ", ".join(found.kinds)
        sent = f"{kinds} of {found.sweep_id or 'all sweeps'}"
        state = f"{found.state}, {found.pending} waiting, {found.dropped} dropped"
        table.add_row(found.id, found.url, sent, f"{state}: {found.failure}" if found.failure else state)
    Console().print(table)


@commands.command("test")
def try_webhook(
    webhook_id: WebhookId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """Send a `ping` now and say what came of it; exits with 1 where it was not taken.

    Example: `fraternal webhook test WEBHOOK`
    """
    with open_client(url, token_file) as client:
        result = client.test_webhook(webhook_id)
    if as_json:
        print(result.model_dump_json(indent=2))
    else:
        print(f"{'taken' if result.delivered else result.error} ({result.ms:.0f} ms)")
    if not result.delivered:
        raise typer.Exit(1)


@commands.command("rm")
def remove_webhook(webhook_id: WebhookId, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Send nothing more to a webhook, nor what waits for it.

    Example: `fraternal webhook rm WEBHOOK`
    """
    with open_client(url, token_file) as client:
        client.delete_webhook(webhook_id)
    print(f"webhook {webhook_id} is removed")
