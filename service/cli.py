"""The `fraternal` command. A command imports what it needs: help is quick, and only training loads torch."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from service import export_commands, gpu_commands, steering_commands, token_commands, webhook_commands
from service.errors import INTERRUPTED, CommandFailed
from service.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_URL,
    AsJson,
    DatabaseUrl,
    DataDir,
    Device,
    Force,
    Overrides,
    SweepId,
    Test,
    TokenFile,
    Url,
    complain,
    open_client,
    parse_value,
    require_usable,
    say,
)

if TYPE_CHECKING:
    from service.client import FraternalClient
    from trials.presets import Preset

# Read when torch is loaded. OpenMP threads that wait by spinning make training ten times slower where another
# process, a second training say, has a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HELP = """Search hyperparameters of regularized LSTM language models.

Start a service with `fraternal serve`, give it a sweep with `fraternal submit`, and follow it with
`fraternal watch`; `fraternal quickstart` does all of it once.

Exit codes: 0 all went well; 1 an error, or a sweep that did not succeed; 2 wrong usage; 130 interrupted.
"""


class Commands(TyperGroup):
    """Expected errors end a command with a line or two on standard error and the exit code of their kind."""

    def invoke(self, ctx: Any) -> Any:
        _print_whatever_there_is()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # nobody reads on: not ours to report
            raise typer.Exit(1) from None
        except CommandFailed as error:
            complain(str(error))
            raise typer.Exit(1) from error
        except OSError as error:
            complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
            raise typer.Exit(1) from error


def _print_whatever_there_is() -> None:
    """Signs that a terminal does not have are escaped, as on standard error: no command ends for them."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


app = typer.Typer(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(gpu_commands.gpus)
app.add_typer(steering_commands.points)
app.add_typer(steering_commands.trials)
app.add_typer(webhook_commands.commands)
app.add_typer(token_commands.commands)
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@app.command()
def serve(
    host: Annotated[
        str,
        typer.Option(
            envvar="FRATERNAL_HOST", help="Address to listen on; one that is not loopback needs a token."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="FRATERNAL_PORT", help="Port; 0 takes a free one.")] = 8123,
    data_dir: Annotated[
        Path, typer.Option(envvar="FRATERNAL_DATA_DIR", help="Database, checkpoints, logs.")
    ] = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
    stop_drivers: Annotated[
        bool,
        typer.Option(
            "--stop-drivers", help="On exit, also stop running sweeps' drivers. By default they go on."
        ),
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option(envvar="FRATERNAL_LOG_FORMAT", help="For people, or an object a line.")
    ] = "text",
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            envvar="FRATERNAL_LOG_LEVEL",
            help="Logged at least; info has a line a request. Default: warning as text, info as JSON.",
        ),
    ] = None,
) -> None:
    """Run the service: API, dashboard and the sweeps themselves.

    Example: `fraternal serve --port 8123 --data-dir ./fraternal-data`
    """
    from service.serve import serve_until_stopped

    serve_until_stopped(
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        stop_drivers=stop_drivers,
        log_format=log_format,
        log_level=log_level,
    )


@app.command()
def submit(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="JSON file with a spec; `-` reads standard input.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from this preset; `fraternal presets` lists them.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006  # typer's way to say "repeatable"; never changed
    watch: Annotated[bool, typer.Option("--watch", help="Follow the sweep to its end.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Have it checked and forecast, and print the whole spec; nothing is queued.",
        ),
    ] = False,
    forecast: Annotated[
        bool, typer.Option(help="With --dry-run: measure how long it will take, in some 20 seconds.")
    ] = True,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Ask for a sweep.

    Examples: `fraternal submit --preset quickstart --set budget.trials=6 --watch`,
    `fraternal submit spec.json --dry-run`
    """
    body = build_spec(file, preset, overrides)
    with open_client(url, token_file) as client:
        if dry_run:
            _try_dry(client, body, forecast=forecast, as_json=as_json)
            return
        sweep = client.create(body)
        if as_json and not watch:
            print(sweep.model_dump_json(indent=2))
        else:
            say(f"sweep {sweep.id} is {sweep.state}", as_json)
            say(f"dashboard: {client.base_url}{sweep.dashboard_url or '/dashboard'}", as_json)
        if watch:
            _watch_to_the_end(client, sweep.id, as_json)
        elif not as_json:
            print(f"follow it: fraternal watch {sweep.id}")


def _try_dry(client: "FraternalClient", body: dict[str, Any], *, forecast: bool, as_json: bool) -> None:
    """The spec goes to standard output, as it can be submitted, unless JSON of it all is asked for."""
    from rich.console import Console

    from service.forecast_texts import show

    console = Console(stderr=True)
    if forecast:
        with console.status("measuring a few steps of training; some 20 seconds"):
            checked = client.validate(body)
    else:
        checked = client.validate(body, forecast=False)
    if as_json:
        print(checked.model_dump_json(indent=2))
        return
    if checked.forecast is not None:
        show(checked.forecast, console)
    print(checked.spec.model_dump_json(indent=2))


@app.command()
def ls(
    state: Annotated[list[str] | None, typer.Option(help="Of this state only; repeatable.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY[=VALUE]", help="With this label; repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="With this in the name.")] = None,
    order_by: Annotated[
        str, typer.Option(help="created_at, name, priority or state_since; `-` first turns it round.")
    ] = "-created_at",
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """List the sweeps, the newest first.

    Example: `fraternal ls --state running --label team=nlp`
    """
    from rich.console import Console
    from rich.table import Table

    from service.progress import format_perplexity

    with open_client(url, token_file) as client:
        query = {"state": state or [], "label": label or [], "order_by": order_by}
        sweeps = client.list_sweeps(**query, **({} if name is None else {"name": name}))
    if as_json:
        print(json.dumps([sweep.model_dump(mode="json") for sweep in sweeps], indent=2))
        return
    table = Table("sweep", "name", "state", "trials", "best perplexity", "created")
    for sweep in sweeps:
        best = format_perplexity(sweep.best.best_valid_perplexity) if sweep.best else "–"
        done = f"{sweep.trials.done}/{sweep.trials.budget}"
        table.add_row(sweep.id, sweep.name, sweep.state, done, best, f"{sweep.created_at:%Y-%m-%d %H:%M} UTC")
    Console().print(table)


@app.command()
def watch(
    sweep_id: SweepId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """Follow a sweep to its end. Interrupting this leaves the sweep alone.

    Example: `fraternal watch SWEEP`
    """
    with open_client(url, token_file) as client:
        _watch_to_the_end(client, sweep_id, as_json)


@app.command()
def events(
    sweep_id: SweepId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the sweep is over.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only those that follow the event of this id.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an event a line.")] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """What has happened in a sweep, the earliest first.

    Example: `fraternal events SWEEP --follow`
    """
    from service.progress import event_line

    with open_client(url, token_file) as client:
        for event in client.events(sweep_id, after) if follow else client.events_so_far(sweep_id, after):
            print(event.model_dump_json() if as_json else event_line(event), flush=follow)


@app.command()
def report(
    sweep_id: SweepId,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[
        bool, typer.Option("--html", help="Print one HTML page with pictures, which needs no network.")
    ] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Compare a sweep's arms: best, means of the best, how many beat the baseline, and what that proves.

    Example: `fraternal report SWEEP --html > report.html`
    """
    from rich.console import Console

    from service.report_texts import to_rich

    if markdown + html + as_json > 1:
        raise CommandFailed("a report is printed in one form: give one of --markdown, --html and --json")
    with open_client(url, token_file) as client:
        if markdown or html:
            written = client.written_report(sweep_id, "text/html" if html else "text/markdown")
            typer.echo(written.encode(), nl=False)  # UTF-8, as the page says, whatever the locale
            return
        result = client.report(sweep_id)
    if as_json:
        print(json.dumps(result.model_dump(mode="json"), indent=2))
    else:
        Console().print(to_rich(result), soft_wrap=True)


@app.command()
def plot(
    sweep_id: SweepId,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .png, .svg or .pdf; default `SWEEP.svg`.")
    ] = None,
    force: Force = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Draw how a sweep's trials learn: losses, penalty, activations, variance of the predictions, speed.

    Example: `fraternal plot SWEEP --out curves.png`
    """
    from service.plots import plot_dynamics

    path = out or Path(f"{sweep_id}.svg")
    require_usable(path, force)
    with open_client(url, token_file) as client:
        sweep = client.get(sweep_id)
        trials = [client.trial(sweep_id, trial.number) for trial in client.trials(sweep_id)]
    plot_dynamics(sweep.name or sweep.id, trials, path)
    print(path)


@app.command()
def fetch(
    sweep_id: SweepId,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default `best-SWEEP.tar`.")
    ] = None,
    force: Force = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Download a sweep's best checkpoint, its digest checked, written whole; also while the sweep runs.

    It says how the checkpoint came out when the service evaluated it again, by a fresh process.

    Example: `fraternal fetch SWEEP --out best.tar`
    """
    from service.archives import verification_in

    path = out or Path(f"best-{sweep_id}.tar")
    require_usable(path, force)
    with open_client(url, token_file) as client:
        digest = client.fetch(sweep_id, path)
    print(f"{path}  sha256 {digest}")
    print(f"evaluated again by the service: {verification_in(path)}")


app.command()(export_commands.export)
app.command()(export_commands.compare)


@app.command()
def pause(
    sweep_id: SweepId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """Have running trials save their state and give their resources back, until `fraternal resume`.

    Example: `fraternal pause SWEEP`
    """
    _ask(sweep_id, "pause", url, token_file, as_json=as_json)


@app.command()
def resume(
    sweep_id: SweepId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """Go on after a pause, or take a `fraternal stop` back.

    Example: `fraternal resume SWEEP`
    """
    _ask(sweep_id, "resume", url, token_file, as_json=as_json)


@app.command()
def stop(
    sweep_id: SweepId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """Let running trials come to their ends, and begin no other.

    Example: `fraternal stop SWEEP`
    """
    _ask(sweep_id, "stop", url, token_file, as_json=as_json)


@app.command()
def cancel(
    sweep_id: SweepId, as_json: AsJson = False, url: Url = DEFAULT_URL, token_file: TokenFile = None
) -> None:
    """End a sweep now; what its trials have reached is kept.

    Example: `fraternal cancel SWEEP`
    """
    _ask(sweep_id, "cancel", url, token_file, as_json=as_json)


@app.command()
def extend(
    sweep_id: SweepId,
    trials: Annotated[int, typer.Option(help="So many trials more.")] = 0,
    wall_s: Annotated[float, typer.Option(help="Seconds more, where the budget has wall_s.")] = 0,
    max_failed: Annotated[int, typer.Option(help="So many more may fail, where the budget says.")] = 0,
    target: Annotated[float | None, typer.Option(help="Another validation perplexity to reach.")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Raise a sweep's budget; one that has ended goes on.

    Example: `fraternal extend SWEEP --trials 10`
    """
    by = {"trials": trials, "wall_s": wall_s, "max_failed": max_failed, "target": target}
    limits = {name: value for name, value in by.items() if value}
    _ask(sweep_id, "extend", url, token_file, limits, as_json=as_json)


@app.command()
def retry_failed(
    sweep_id: SweepId,
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", help="Of failures, repeatable; by default all but diverged."),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Try failed trials again under their own numbers, from their latest checkpoints.

    Example: `fraternal retry-failed SWEEP --class out_of_memory`
    """
    body = {"classes": classes} if classes else {}
    _ask(sweep_id, "retry-failed", url, token_file, body, as_json=as_json)


@app.command()
def clone(
    sweep_id: SweepId,
    overrides: Overrides = [],  # noqa: B006  # typer's way to say "repeatable"; never changed
    watch: Annotated[bool, typer.Option("--watch", help="Follow the new sweep to its end.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Ask for a new sweep with the spec of another one.

    Example: `fraternal clone SWEEP --set sampler.seed=2`
    """
    with open_client(url, token_file) as client:
        sweep = client.create(with_overrides(client.get(sweep_id).spec.model_dump(mode="json"), overrides))
        if as_json and not watch:
            print(sweep.model_dump_json(indent=2))
        else:
            say(f"sweep {sweep.id} is {sweep.state}", as_json)
        if watch:
            _watch_to_the_end(client, sweep.id, as_json)


@app.command("set")
def change(
    sweep_id: SweepId,
    name: Annotated[str | None, typer.Option(help="What people call it.")] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="KEY- removes one; repeatable.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="In the queue, the highest first.")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=0, help="Trials at once; 0: as many as there is room for.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Of the budget, over all arms.")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Change a sweep's name, labels, priority, trials at once or budget, while it waits or runs.

    Example: `fraternal set SWEEP --priority 5 --max-concurrent 1 --label team=nlp`
    """
    given: dict[str, Any] = {"name": name, "priority": priority}
    changes = {key: value for key, value in given.items() if value is not None}
    if labels:
        changes["labels"] = steering_commands.labels_of(labels)
    if max_concurrent is not None:
        changes["max_concurrent"] = max_concurrent or None
    if trials is not None:
        changes["budget"] = {"trials": trials}
    if not changes:
        raise typer.BadParameter("say what is to change: `fraternal set --help` lists it")
    with open_client(url, token_file) as client:
        sweep = client.change(sweep_id, changes)
    print(sweep.model_dump_json(indent=2) if as_json else f"sweep {sweep.id} is changed")


@app.command()
def delete(
    sweep_id: SweepId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Remove a sweep that does not run, with its trials, curves and checkpoints.

    Example: `fraternal delete SWEEP --yes`
    """
    with open_client(url, token_file) as client:
        if not yes:
            trials = len(client.trials(sweep_id))
            typer.confirm(f"remove sweep {sweep_id}, its {trials} trials and their checkpoints?", abort=True)
        sweep = client.delete(sweep_id)
    print(sweep.model_dump_json(indent=2) if as_json else f"sweep {sweep.id} is {sweep.state}")


def _ask(
    sweep_id: str,
    verb: str,
    url: str,
    token_file: Path | None,
    body: dict[str, Any] | None = None,
    *,
    as_json: bool = False,
) -> None:
    with open_client(url, token_file) as client:
        sweep = client.ask(sweep_id, verb, body)
    print(sweep.model_dump_json(indent=2) if as_json else f"sweep {sweep.id} is {sweep.state}")


@app.command()
def evaluate(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="A best checkpoint.")],
    split: Annotated[
        str,
        typer.Option(help="train, valid or test; each look at a test split is logged in the data directory."),
    ] = "valid",
    corpus: Annotated[
        str | None,
        typer.Option(
            help="Another corpus than the checkpoint's own, or where its text is on this machine: a name, a "
            "directory that holds SPLIT.txt, or JSON."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail unless the validation loss is the recorded one, to 1e-5.")
    ] = False,
    mc: Annotated[
        int | None,
        typer.Option(
            "--mc",
            min=1,
            metavar="K",
            help="MC-eval: the mean of the probabilities under K samples of the masks, each held throughout.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the masks of --mc.")] = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Loss and perplexity of a checkpoint, rebuilt from the file alone; no service is needed.

    A test split is looked at only by `--split test`. That goes into `test-evaluations.jsonl` in the data
    directory before it is shown, and is shown with how often that split was looked at before.

    Example: `fraternal evaluate best.tar --check`
    """
    if check and mc:
        raise typer.BadParameter("--check compares with the loss without dropout; leave out --mc")
    if check and split != "valid":
        raise typer.BadParameter(f"--check compares the validation loss; leave out --split {split}")
    from service.local import check_recorded_loss, evaluate_file

    result = evaluate_file(
        file,
        split,
        parse_corpus(corpus) if corpus is not None else None,
        data_dir,
        mc_masks=mc,
        seed=seed,
        device=device,
    )
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        print(result.line())
    if result.test_look:
        say(result.test_look.line(), as_json)
    if check:
        say(check_recorded_loss(result), as_json)


@app.command()
def train(
    corpus: Annotated[
        str | None, typer.Option(help="sotu, ptb, wikitext2, a directory, or JSON; else the preset's.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from this preset's values; `fraternal presets` lists them.")
    ] = None,
    arm: Annotated[
        str | None, typer.Option(help="Which of the preset's arms; needed where it has several.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the best checkpoint goes.")] = Path(
        "best.tar"
    ),
    regularizer: Annotated[str | None, typer.Option(help="none, fraternal, expectation_linear, ...")] = None,
    kappa: Annotated[float | None, typer.Option(help="Factor of the penalty.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training split.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Columns of a batch.")] = None,
    bptt: Annotated[int | None, typer.Option(help="Base length of a window.")] = None,
    embedding_size: Annotated[int | None, typer.Option(help="Width of the embeddings.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width of the LSTM layers.")] = None,
    layers: Annotated[int | None, typer.Option(help="LSTM layers.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides initial weights, windows and masks.")] = 0,
    overrides: Overrides = [],  # noqa: B006
    test: Test = False,
    device: Device = "auto",
    force: Force = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Train one configuration without the service; interrupting it keeps the best weights so far.

    Example: `fraternal train --corpus sotu --regularizer fraternal --epochs 3 --embedding-size 64 --layers 1`
    """
    from service.local import train_and_save

    require_usable(out, force)
    sections: dict[str, dict[str, Any]] = {
        "regularization": {"regularizer": regularizer, "kappa": kappa},
        "training": {"epochs": epochs, "batch_size": batch_size, "bptt": bptt},
        "model": {"embedding_size": embedding_size, "hidden_size": hidden_size, "layers": layers},
    }
    given: dict[str, Any] = {
        section: {name: value for name, value in options.items() if value is not None}
        for section, options in sections.items()
    }
    if corpus is not None:
        given["corpus"] = parse_corpus(corpus)
    values = with_overrides(_laid_over_preset(preset, arm, given), overrides)
    if "corpus" not in values:
        raise typer.BadParameter("give --corpus, or a --preset that has one")
    train_and_save(values, values.pop("corpus"), seed, device, out, data_dir, test=test)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the presets, or every value of one of them with its source.

    Example: `fraternal presets fraternal-ptb`
    """
    from rich.console import Console
    from rich.table import Column, Table

    if name is None:
        from trials.presets import DECLARED

        columns, rows = (
            ("name", "what", "corpus"),
            [(found.name, found.what, found.spec["corpus"]["name"]) for found in DECLARED.values()],
        )
    else:
        columns, rows = ("field", "value", "source"), list(_preset(name).written)
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
        return
    table = Table(Column(columns[0], no_wrap=True), *columns[1:])  # a field is to be pasted
    for first, second, third in rows:
        table.add_row(first, second if name is None else json.dumps(second), third)
    Console().print(table)


@app.command()
def finetune(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="A best checkpoint.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the fine-tuned checkpoint goes.")] = Path(
        "finetuned.tar"
    ),
    times: Annotated[int, typer.Option(min=1, help="How often in a row; the paper's table has 1 and 2.")] = 1,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Decides windows and masks; by default the checkpoint's."),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="Where the checkpoint's text is on this machine: a directory, or a name."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    test: Test = False,
    device: Device = "auto",
    force: Force = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Go on from a checkpoint with averaging from the first step until it converges; never ends up worse.

    It needs the file and the text of the training run, and no service.

    Example: `fraternal finetune best.tar --out finetuned.tar --times 2`
    """
    from service.local import finetune_and_save

    require_usable(out, force)
    options: dict[str, Any] = {
        "other_corpus": parse_corpus(corpus) if corpus is not None else None,
        "test": test,
    }
    finetune_and_save(file, with_overrides({}, overrides), times, seed, device, out, data_dir, **options)


@app.command()
def generate(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="A best checkpoint.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with; by default a new line.")] = "",
    words: Annotated[int, typer.Option(min=1, help="How many words to add.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1 nearer to the likeliest word, which 0 always takes.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Draw among the K likeliest words only.")
    ] = None,
    unk: Annotated[bool, typer.Option("--unk/--no-unk", help="Whether `<unk>` may be drawn.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides what is drawn.")] = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Let a trained model write: words drawn one after another, from the checkpoint alone, as they come.

    Equal options and seeds give equal texts on one kind of device. A prompt stands at the start of a line.

    Example: `fraternal generate best.tar --prompt "the people of" --temperature 0.8 --no-unk`
    """
    from service.local import generate_text

    if not math.isfinite(temperature):
        raise typer.BadParameter(f"a temperature is a number; found {temperature}")
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "unk": unk, "seed": seed}
    written = generate_text(file, prompt, words, **options, device=device)
    if written.unknown:
        said = (
            f"{word} (but it has {known!r})" if known else word for word, known in written.unknown.items()
        )
        complain(f"not in the vocabulary, so read as <unk>: {', '.join(said)}")
    if as_json:
        told = {"prompt": prompt, "words": list(written.words), "unknown": list(written.unknown)}
        print(json.dumps({**told, **options}))
        return
    for piece in written.pieces(prompt):
        print(piece, end="", flush=True)


@app.command()
def corpus(
    source: Annotated[
        str, typer.Argument(metavar="CORPUS", help="sotu, ptb, wikitext2, a directory, or JSON.")
    ],
    as_json: AsJson = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """What a corpus holds: tokens, vocabulary, how much of each split is `<unk>`, and digests.

    Example: `fraternal corpus sotu`
    """
    from rich.console import Console

    from service.texts import describe, to_json, to_rich

    described = describe(parse_corpus(source), data_dir)
    if as_json:
        print(json.dumps(to_json(described), indent=2))
    else:
        Console().print(to_rich(described))


@app.command()
def quickstart(
    file: Annotated[
        str | None, typer.Option("--spec", metavar="FILE", help="Run this spec instead of the preset.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Everything once: start a service, run a small sweep, report, fetch and check the best model, stop.

    Example: `fraternal quickstart --set budget.trials=6`
    """
    from service.quickstart import run_quickstart

    raise typer.Exit(run_quickstart(build_spec(file, None if file else "quickstart", overrides), data_dir))


@app.command()
def reproduce(
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="Leave it out to list them.")] = None,
    scale: Annotated[
        str, typer.Option(help="tiny (minutes), small (hours) or paper (GPU-days and more).")
    ] = "tiny",
    corpus: Annotated[
        str | None, typer.Option(help="Another corpus than the scale's: a name, a directory, or JSON.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Draws of each arm.")] = None,
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder; default `reproductions/TABLE-SCALE`.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The service's own folder; default `data` in the output folder.")
    ] = None,
) -> None:
    """Make a table or figure of the paper again, at a scale; given once more, it goes on where it stopped.

    Example: `fraternal reproduce seeds --scale tiny`
    """
    from service.reproduce import get_scale, get_table
    from service.reproduce import reproduce as run_reproduction
    from trials.tables import build_spec

    if table is None:
        _list_tables()
        return
    declared, size = get_table(table), get_scale(scale)
    body = build_spec(declared, size, parse_corpus(corpus) if corpus is not None else None, seeds)
    folder = out or Path("reproductions") / f"{declared.name}-{size}"
    raise typer.Exit(run_reproduction(declared, size, with_overrides(body, overrides), folder, data_dir))


def _list_tables() -> None:
    from rich.console import Console
    from rich.table import Table

    from trials.tables import TABLES

    listing = Table("table", "in the paper", "compares")
    for declared in TABLES.values():
        listing.add_row(declared.name, declared.where, declared.compares)
    Console().print(listing)


@app.command()
def backup(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the backup goes: one that is not there yet.")
    ],
    data_dir: Annotated[
        Path, typer.Option(envvar="FRATERNAL_DATA_DIR", help="The service's data directory.")
    ] = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
) -> None:
    """Copy database and checkpoints as they are at one moment, while the service and its sweeps go on.

    Example: `fraternal backup backups/monday`
    """
    from service.backup import make_backup
    from service.revisions import database_errors
    from service.settings import read_settings

    settings = read_settings(database_url, data_dir=data_dir)
    with database_errors(), _progress("backing up", "trials") as progress:
        made = make_backup(settings, folder, progress)
    for words in made.missing:
        complain(f"not in the backup: {words}")
    print(f"{folder}  sweeps {made.sweeps}, checkpoints {made.checkpoints}, {made.size / 1e6:,.1f} MB")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(metavar="BACKUP", help="A folder that `fraternal backup` made.")],
    data_dir: Annotated[
        Path, typer.Option(envvar="FRATERNAL_DATA_DIR", help="The data directory to make.")
    ] = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a data directory from a backup; its sweeps go on, once it is served, from where they were.

    Example: `fraternal restore backups/monday --data-dir restored`
    """
    from service.backup import restore_backup
    from service.revisions import database_errors
    from service.settings import read_settings

    settings = read_settings(database_url, data_dir=data_dir)
    with database_errors(), _progress("checking", "files") as progress:
        made = restore_backup(folder, settings, progress)
    print(f"{data_dir}  sweeps {made.sweeps}, as of {made.created_at:%Y-%m-%d %H:%M:%S} UTC")
    print(f"go on with: fraternal serve --data-dir {data_dir}")


@contextmanager
def _progress(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console

    from service.progress import ProgressDisplay, Snapshot

    began = time.monotonic()
    with ProgressDisplay(Console(stderr=True)) as display:
        yield lambda done, total: display.show(
            Snapshot(title, done, total, unit, (), time.monotonic() - began, None)
        )


# Specs on the command line.


def build_spec(file: str | None, preset: str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The body of POST /v1/sweeps from a file or a preset, with values replaced."""
    if (file is None) == (preset is None):
        raise typer.BadParameter("give either a FILE (or -) or --preset NAME")
    body = _read_json(file) if file is not None else {"preset": preset}
    return with_overrides(_with_preset_written_out(body), overrides)


def with_overrides(spec: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set `dotted.key=json` values in place; what is no JSON is taken as text."""
    for override in overrides:
        key, equals, written = override.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--set {override!r} is no KEY=JSON, like training.epochs=3")
        *parents, last = key.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise typer.BadParameter(f"--set {override!r}: {parent} holds a value, not an object")
        place[last] = parse_value(written)
    return spec


def _preset(name: str) -> "Preset":
    from trials.presets import DECLARED

    if name not in DECLARED:
        raise CommandFailed(f"unknown preset {name!r}; known: {', '.join(sorted(DECLARED))}")
    return DECLARED[name]


def _laid_over_preset(preset: str | None, arm: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What one training run needs of a preset and one of its arms, under the values that are given."""
    from trials.spec import SECTION_OF, merged

    if preset is None:
        if arm is not None:
            raise typer.BadParameter("--arm names one of a preset's arms: give --preset, too")
        return given
    base = _preset(preset).spec
    needed = ("corpus", "model", "training", "regularization")
    values = {section: base[section] for section in needed if section in base}
    for name, value in _arm_of(preset, base["arms"], arm).items():
        section = SECTION_OF[name]
        values[section] = {**values.get(section, {}), name: value}
    return merged(values, given)


def _arm_of(preset: str, arms: dict[str, dict[str, Any]], arm: str | None) -> dict[str, Any]:
    """What the arm that is asked for fixes, or the only one."""
    if arm in arms:
        return arms[arm]
    if arm is None and len(arms) == 1:
        return next(iter(arms.values()))
    what = "has several arms" if arm is None else f"has no arm {arm!r}"
    raise typer.BadParameter(f"preset {preset} {what}: give --arm {' or '.join(arms)}")


def parse_corpus(written: str) -> dict[str, Any]:
    """A corpus from JSON, from a known name, or from a directory."""
    if written.lstrip().startswith("{"):
        value = parse_value(written)
        if not isinstance(value, dict):
            raise typer.BadParameter(f"corpus {written!r} is no JSON object")
        return value
    return {"name": written} if written in {"sotu", "ptb", "wikitext2"} else {"path": written}


def _with_preset_written_out(body: dict[str, Any]) -> dict[str, Any]:
    """The preset's values in their places, so that `--set` changes one of them and keeps its neighbours."""
    from copy import deepcopy

    from trials.presets import PRESETS
    from trials.spec import merged

    preset = body.get("preset")
    return merged(deepcopy(PRESETS[preset]), body) if isinstance(preset, str) and preset in PRESETS else body


def _read_json(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CommandFailed(f"{file} is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise CommandFailed(f'{file} holds no JSON object; a spec is one, like {{"preset": "quickstart"}}')
    return body


# Watching.


def _watch_to_the_end(client: "FraternalClient", sweep_id: str, as_json: bool) -> None:
    """Exits with 1 unless the sweep succeeds."""
    from rich.console import Console

    from service.progress import follow

    try:
        sweep = follow(client, sweep_id, Console(stderr=as_json))
    except KeyboardInterrupt:
        complain(
            f"interrupted; the sweep goes on: `fraternal watch {sweep_id}`, `fraternal cancel {sweep_id}`"
        )
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(client.get(sweep_id).model_dump_json(indent=2))
    else:
        print(f"sweep {sweep.id} {sweep.state}" + (f": {sweep.state_reason}" if sweep.state_reason else ""))
    if sweep.state != "succeeded":
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
