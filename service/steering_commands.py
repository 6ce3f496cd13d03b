"""`fraternal point` and `fraternal trial`: what is tried next, and what becomes of single trials."""

import json
from typing import Annotated

import typer

from service.errors import CommandFailed
from service.options import DEFAULT_URL, AsJson, SweepId, TokenFile, Url, open_client, parse_value

points = typer.Typer(
    name="point",
    help="Have values of your own tried before anything is sampled.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
trials = typer.Typer(
    name="trial",
    help="Look at single trials, end them, try them again, keep their checkpoints.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Number = Annotated[int, typer.Argument(metavar="TRIAL", min=0, help="Its number within the sweep.")]


@points.command("add")
def add_point(
    sweep_id: SweepId,
    values: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Of parameters of the sweep's space.")
    ],
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Have values tried as the next draw; what is left out is sampled.

    Example: `fraternal point add SWEEP kappa=0.15 batch_size=20`
    """
    params = {}
    for written in values:
        name, equals, value = written.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{written!r} is no NAME=VALUE, like kappa=0.15")
        params[name] = parse_value(value)
    with open_client(url, token_file) as client:
        point = client.add_point(sweep_id, params)
    print(point.model_dump_json(indent=2) if as_json else f"point {point.id} waits for the next draw")


@points.command("ls")
def list_points(
    sweep_id: SweepId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """List a sweep's points in the order in which they are tried.

    Example: `fraternal point ls SWEEP`
    """
    from rich.console import Console
    from rich.table import Table

    with open_client(url, token_file) as client:
        known = client.points(sweep_id)
    if as_json:
        print(json.dumps([point.model_dump(mode="json") for point in known], indent=2))
        return
    table = Table("point", "values", "draw")
    for point in known:
        values = " ".join(f"{name}={value}" for name, value in point.params.items())
        table.add_row(str(point.id), values, "waits" if point.draw is None else str(point.draw))
    Console().print(table)


@points.command("rm")
def remove_point(
    sweep_id: SweepId,
    point_id: Annotated[int, typer.Argument(metavar="POINT", help="`fraternal point ls` lists them.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Take back a point that is not tried yet.

    Example: `fraternal point rm SWEEP 3`
    """
    with open_client(url, token_file) as client:
        client.remove_point(sweep_id, point_id)
    print(f"point {point_id} is taken back")


@trials.command("ls")
def list_trials(
    sweep_id: SweepId,
    arm: Annotated[list[str] | None, typer.Option(help="Of this arm only; repeatable.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="RUNNING, WAITING, COMPLETE, PRUNED or FAIL; repeatable.")
    ] = None,
    order_by: Annotated[
        str, typer.Option(help="number, best_valid_perplexity or epochs_done; `-` first turns it round.")
    ] = "number",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """List a sweep's trials.

    Example: `fraternal trial ls SWEEP --arm fd --order-by best_valid_perplexity`
    """
    from rich.console import Console
    from rich.table import Table

    from service.progress import format_perplexity

    with open_client(url, token_file) as client:
        found = client.trials(sweep_id, arm=arm or [], state=state or [], order_by=order_by)
    if as_json:
        print(json.dumps([trial.model_dump(mode="json") for trial in found], indent=2))
        return
    table = Table("trial", "arm", "draw", "state", "epochs", "best perplexity", "values")
    for trial in found:
        best = "–" if trial.best_epoch is None else format_perplexity(trial.best_valid_perplexity)
        notes = [name for name in ("stopped", "pinned") if getattr(trial, name)]
        state_now = f"{trial.state} ({', '.join(notes)})" if notes else trial.state
        values = " ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in trial.params.items()
        )
        counts = (str(trial.number), trial.arm, str(trial.draw), state_now, str(trial.epochs_done))
        table.add_row(*counts, best, values)
    Console().print(table)


@trials.command()
def stop(sweep_id: SweepId, number: Number, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """End a trial now; it counts with its best epoch so far.

    Example: `fraternal trial stop SWEEP 3`
    """
    _ask(sweep_id, number, "stop", url, token_file)


@trials.command()
def retry(sweep_id: SweepId, number: Number, url: Url = DEFAULT_URL, token_file: TokenFile = None) -> None:
    """Try a failed trial again, in a sweep that rests.

    Example: `fraternal trial retry SWEEP 3`
    """
    _ask(sweep_id, number, "retry", url, token_file)


@trials.command()
def pin(
    sweep_id: SweepId,
    number: Number,
    off: Annotated[bool, typer.Option("--off", help="Leave it to the sweep's retention again.")] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Keep a trial's best checkpoint, whatever the sweep's retention says.

    Example: `fraternal trial pin SWEEP 3`
    """
    _ask(sweep_id, number, "unpin" if off else "pin", url, token_file)


def _ask(sweep_id: str, number: int, verb: str, url: str, token_file: TokenFile) -> None:
    with open_client(url, token_file) as client:
        client.ask_of_trial(sweep_id, number, verb)
        trial = client.trial(sweep_id, number)
    notes = "".join(f", {name}" for name in ("stopped", "pinned") if getattr(trial, name))
    print(f"trial {number} is {trial.state}{notes}")


def labels_of(written: list[str]) -> dict[str, str | None]:
    """`key=value` sets a label, `key-` removes one. Raises CommandFailed."""
    labels: dict[str, str | None] = {}
    for label in written:
        key, equals, value = label.partition("=")
        if equals:
            labels[key] = value
        elif label.endswith("-"):
            labels[label[:-1]] = None
        else:
            raise CommandFailed(
                f"{label!r} is neither KEY=VALUE, which sets a label, nor KEY-, which removes it"
            )
    return labels
