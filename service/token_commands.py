"""`fraternal token`: tokens made, listed and revoked, in the database itself and not over HTTP."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.errors import CommandFailed
from service.options import DEFAULT_DATA_DIR, AsJson, DatabaseUrl

if TYPE_CHECKING:
    from service.tokens import Token, Tokens

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
NEVER = "never"
LONGEST = timedelta(days=36_500)

commands = typer.Typer(
    name="token",
    help="Make, list and revoke the tokens that a service asks for.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


class ScopeName(StrEnum):
    """service.tokens.Scope, for the help."""

    read = "read"
    write = "write"
    admin = "admin"


DataDir = Annotated[Path, typer.Option(envvar="FRATERNAL_DATA_DIR", help="The service's data directory.")]


@commands.command()
def create(
    name: Annotated[str, typer.Option(help="Whose it is, or what it is for.")],
    scope: Annotated[
        ScopeName, typer.Option(help="read: look; write: run sweeps, too; admin: all.")
    ] = ScopeName.write,
    expires: Annotated[
        str, typer.Option(metavar="IN", help="30m, 12h, 90d, 4w from now, or `never`.")
    ] = "90d",
    as_json: AsJson = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a token and show it, this once. With the first one, the service begins to ask everybody for one.

    Example: `fraternal token create --name ci --scope write --expires 30d`
    """
    name, lasting = _checked_name(name), parse_lasting(expires)
    with _tokens(data_dir, database_url, make=True) as tokens:
        token, written = tokens.create(name, scope.value, lasting)
    if as_json:
        print(json.dumps({**_to_json(token), "token": written}, indent=2))
        return
    what = f"token {token.id} for {token.name!r}, scope {token.scope}, {_until(token.expires_at)}"
    use = "it is not shown again; clients take it from FRATERNAL_TOKEN or --token-file"
    print(f"{what}: {use}", file=sys.stderr)
    print(written)


@commands.command("ls")
def list_tokens(
    as_json: AsJson = False, data_dir: DataDir = DEFAULT_DATA_DIR, database_url: DatabaseUrl = None
) -> None:
    """List the tokens, those that are no longer valid, too; never what they are.

    Example: `fraternal token ls`
    """
    from rich.console import Console
    from rich.table import Table

    with _tokens(data_dir, database_url) as tokens:
        found = tokens.list_tokens()
    if as_json:
        print(json.dumps([_to_json(token) for token in found], indent=2))
        return
    table = Table("token", "name", "scope", "state", "created", "expires")
    for token in found:
        created, expires = _minute(token.created_at), _minute(token.expires_at) if token.expires_at else NEVER
        table.add_row(token.id, token.name, token.scope, token.state, created, expires)
    Console().print(table)


@commands.command()
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="TOKEN", help="Its id; `fraternal token ls` lists them.")
    ],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a token invalid for good; a service refuses it, and browsers signed in with it, within seconds.

    Example: `fraternal token revoke TOKEN`
    """
    identity = token_id.removeprefix("frt_").partition("_")[0]  # who gives all of it means it, too
    with _tokens(data_dir, database_url) as tokens:
        token = tokens.revoke(identity)
        left = sum(found.state == "valid" for found in tokens.list_tokens())
    print(f"token {token.id} is revoked; valid tokens left: {left}")


@contextmanager
def _tokens(data_dir: Path, database_url: str | None, *, make: bool = False) -> Iterator["Tokens"]:
    """Of a database that is there; or is made, or migrated, where that is asked for. Raises CommandFailed."""
    from service.database import migrate, open_engine
    from service.revisions import check_schema, database_errors
    from service.settings import read_settings
    from service.tokens import Tokens

    settings = read_settings(database_url, data_dir=data_dir)
    with database_errors():
        check_schema(settings.resolved_database_url, served=not make)
        if make:
            settings.data_dir.mkdir(parents=True, exist_ok=True)
        engine = open_engine(settings.resolved_database_url)
        with closing(Tokens(engine)) as tokens:
            if make:
                migrate(engine)
            yield tokens


def parse_lasting(written: str) -> timedelta | None:
    """`30d` as a time; None for `never`. Raises CommandFailed."""
    if written == NEVER:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,7})([mhdw])", written)
    lasting = timedelta(**{UNITS[found[2]]: int(found[1])}) if found else None
    if lasting is None or lasting > LONGEST:
        raise CommandFailed(f"--expires {written!r} is no time; one is 30m, 12h, 90d, 4w or {NEVER}")
    return lasting


def _checked_name(name: str) -> str:
    from service.tokens import LONGEST_NAME

    name = name.strip()
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise CommandFailed(
            f"--name {name[:40]!r} is no name: 1 to {LONGEST_NAME} characters that can be printed, say ci"
        )
    return name


def _to_json(token: "Token") -> dict[str, Any]:
    times = {"created_at": token.created_at, "expires_at": token.expires_at, "revoked_at": token.revoked_at}
    written = {what: at.isoformat() if at is not None else None for what, at in times.items()}
    return {"id": token.id, "name": token.name, "scope": token.scope, "state": token.state, **written}


def _until(at: datetime | None) -> str:
    return f"until {_minute(at)}" if at is not None else "for ever"


def _minute(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
