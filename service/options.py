"""What the commands of the command line share: options, and how they speak."""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.errors import CommandFailed

if TYPE_CHECKING:
    from service.client import FraternalClient

DEFAULT_URL = "http://127.0.0.1:8123"

Url = Annotated[str, typer.Option(envvar="FRATERNAL_URL", help="Where the service is.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="FRATERNAL_TOKEN_FILE",
        help="File with the token that the service asks for; else set FRATERNAL_TOKEN.",
    ),
]
SweepId = Annotated[str, typer.Argument(metavar="SWEEP", help="Id of the sweep; `fraternal ls` lists them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DataDir = Annotated[
    Path, typer.Option(envvar="FRATERNAL_DATA_DIR", help="Where corpora and checkpoints are kept.")
]
DatabaseUrl = Annotated[
    str | None, typer.Option(help="SQLAlchemy URL without a password; else set FRATERNAL_DATABASE_URL.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes a GPU where there is one.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=JSON", help="Replace a value, say `training.epochs=3`; repeatable."),
]
Test = Annotated[
    bool,
    typer.Option(
        "--test",
        help="Evaluate the test split, too; it is logged in `test-evaluations.jsonl` of the data directory.",
    ),
]
DEFAULT_DATA_DIR = Path("fraternal-data")


def open_client(url: str, token_file: Path | None) -> "FraternalClient":
    from service.client import FraternalClient, read_token

    return FraternalClient(url, token=read_token(token_file, os.environ))


def require_usable(path: Path, force: bool, checkpoint: Path | None = None) -> None:
    """Whether a result may and can be written there, found before any work is done.

    A device is never replaced, nor is the checkpoint that the result is made of.
    """
    if path.is_dir():
        raise CommandFailed(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise CommandFailed(f"{path} is no file that can be replaced; name another")
    if checkpoint is not None and path.exists() and path.samefile(checkpoint):
        raise CommandFailed(f"{path} is the checkpoint itself; name another file by --out")
    if path.exists() and not force:
        raise CommandFailed(f"{path} exists; name another file, or replace it with --force")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written, {error.strerror}: name another file") from error


def parse_value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written


def say(line: str, as_json: bool) -> None:
    """A line for people: not in the way of JSON."""
    print(line, file=sys.stderr if as_json else sys.stdout)


def complain(message: str) -> None:
    print(f"fraternal: {message}", file=sys.stderr)
