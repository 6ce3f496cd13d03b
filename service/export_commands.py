"""`fraternal export` and `fraternal compare`: what a sweep says, or a model, taken elsewhere; two sweeps
held against each other."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from service.errors import CommandFailed
from service.options import DEFAULT_URL, AsJson, Force, TokenFile, Url, open_client, require_usable


class FormatName(StrEnum):
    """service.exports.Format, for the help, what is written here by libraries of their own, and models."""

    csv = "csv"
    json = "json"
    parquet = "parquet"
    optuna = "optuna"
    tensorboard = "tensorboard"
    mlflow = "mlflow"
    onnx = "onnx"
    state_dict = "state-dict"


class TableName(StrEnum):
    """service.exports.Table, for the help."""

    trials = "trials"
    epochs = "epochs"


SUFFIX = {"optuna": "db"}
OF_ONE_TABLE = {FormatName.csv, FormatName.parquet}
WRITTEN_HERE = {FormatName.tensorboard, FormatName.mlflow}
OF_A_MODEL = {FormatName.onnx, FormatName.state_dict}


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP|FILE.tar",
            help="Id of a sweep; of onnx and state-dict a best checkpoint's file, and no service is needed.",
        ),
    ],
    form: Annotated[
        FormatName | None,
        typer.Option("--format", "-f", help="What to write; of a sweep by default csv."),
    ] = None,
    table: Annotated[
        TableName | None,
        typer.Option(help="Of csv and parquet: a row a trial, which is the default, or a row an epoch."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write; of tensorboard a folder, of mlflow a folder or a tracking URI. Default: "
            "named by the sweep, or the checkpoint.",
        ),
    ] = None,
    force: Force = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Take a sweep elsewhere, as it is at this moment, also while it runs; or a checkpoint's model.

    Of a sweep: csv, parquet: a table. json: spec, environment, trials, curves. optuna: a SQLite file for
    `optuna-dashboard sqlite:///FILE`. tensorboard, mlflow: a run a trial, by their own libraries
    (`pip install 'fraternal[tensorboard,mlflow]'`).

    Of a checkpoint, `FILE.tar`: onnx: one graph with free T and B, and the vocabulary in its metadata
    (`pip install 'fraternal[onnx]'`). state-dict: `FILE.pt` for `torch.load(weights_only=True)`, with
    `FILE.json` beside it. Either is held against the model before it is written. docs/checkpoint.md shows how
    to use them without fraternal.

    Example: `fraternal export SWEEP --format parquet --table epochs --out epochs.parquet`

    Example: `fraternal export best.tar --format onnx --out best.onnx`
    """
    if form in OF_A_MODEL:
        _export_model(source, form, table, out, force)
        return
    if Path(source).is_file():
        raise typer.BadParameter(
            f"{source} is a file: of a checkpoint, give --format {' or '.join(sorted(OF_A_MODEL))}"
        )
    sweep_id, form = source, form or FormatName.csv
    if table is not None and form not in OF_ONE_TABLE:
        raise typer.BadParameter(f"{form} has trials and epochs in one: leave out --table {table}")
    if form in WRITTEN_HERE:
        print(_write_runs(sweep_id, form, out, url, token_file))
        return
    of_table = f"-{table or TableName.trials}" if form in OF_ONE_TABLE else ""
    path = Path(out or f"{sweep_id}{of_table}.{SUFFIX.get(form, form)}")
    require_usable(path, force)
    query = {"format": form.value, **({} if table is None else {"table": table.value})}
    with open_client(url, token_file) as client:
        digest = client.export(sweep_id, path, **query)
    print(f"{path}  sha256 {digest}")


def _export_model(
    source: str, form: FormatName, table: TableName | None, out: str | None, force: bool
) -> None:
    if table is not None:
        raise typer.BadParameter(f"{form} is a model: leave out --table {table}")
    file = Path(source)
    if not file.exists():
        raise CommandFailed(
            f"{source} is no file here: --format {form} is of a checkpoint, FILE.tar; "
            "`fraternal fetch SWEEP` gets a sweep's best one"
        )
    from service.portable import export_onnx, export_state_dict, sidecar

    if form is FormatName.onnx:
        path = Path(out or f"{file.stem}.onnx")
        require_usable(path, force, file)
        said = export_onnx(file, path)
    else:
        path = Path(out or f"{file.stem}.pt")
        if path == sidecar(path):
            raise typer.BadParameter(f"{path} is where the vocabulary goes: name the state_dict otherwise")
        for each in (path, sidecar(path)):
            require_usable(each, force, file)
        said = export_state_dict(file, path)
    print(said)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A sweep, or SWEEP:NUMBER, a trial of it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Two sweeps, or two trials: how their specs, environments, results and curves differ.

    Example: `fraternal compare SWEEP:3 OTHER:7`
    """
    from rich.console import Console

    from service.comparison_tables import to_rich

    with open_client(url, token_file) as client:
        found = client.compare(a, b)
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        Console().print(to_rich(found), soft_wrap=True)


def _write_runs(sweep_id: str, form: FormatName, out: str | None, url: str, token_file: Path | None) -> str:
    """Trials one by one, so that a large sweep need not fit into memory. What was written, in words."""
    from service.runs import MlflowRuns, to_tensorboard

    with open_client(url, token_file) as client:
        sweep = client.get(sweep_id)
        trials = (client.trial(sweep_id, trial.number) for trial in client.trials(sweep_id))
        if form is FormatName.tensorboard:
            folder = Path(out or "tensorboard")
            return f"{to_tensorboard(sweep, trials, folder)} runs in {folder / sweep_id}"
        runs = MlflowRuns(out or "mlflow", sweep)
        return f"{runs.write(trials)} runs of experiment {runs.experiment!r} at {runs.uri}"
