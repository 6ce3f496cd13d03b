"""A sweep as a file: what pandas, Optuna and its dashboard read back is what the API says."""

import io
import json
import math
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import optuna
import pandas
import pyarrow.parquet
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, distribution_to_json
from optuna.storages import RDBStorage, get_storage
from optuna.storages._rdb.models import TrialParamModel
from optuna.trial import TrialState, create_trial
from sqlalchemy import event, insert, update
from typer.testing import CliRunner

from service.cli import app
from service.database import migrate, naive, now, open_engine, utc
from service.errors import DiskFull, UnreadableStudy
from service.exports import PREFIX, Format, Moment, Table, make_export
from service.records import Records
from service.schemas import SweepExport, flat
from service.settings import Settings
from service.studies import open_storage
from service.sweeps import SweepController, build_controller
from service.tables import epochs, sweeps
from tests.fakes import MemoryLauncher, spec
from tests.played_service import played_service, submit, wait_for
from tests.service_process import wait_until
from tests.stock_dashboard import stock_dashboard
from trials.studies import open_study

SWEEP = "s0123456789"
HOSTILE = "=cmd|' /C calc'!A0\r\n\"quoted\", and, commas\t“ünïcode”"
DISTRIBUTIONS = {
    "kappa": FloatDistribution(0.0, 0.3),
    "batch_size": CategoricalDistribution((10, 20, 30)),
    "windows": CategoricalDistribution(("random", "-1+1")),
}
TRIALS: list[tuple[TrialState, int]] = [
    (TrialState.COMPLETE, 3),
    (TrialState.PRUNED, 1),
    (TrialState.FAIL, 0),
    (TrialState.RUNNING, 2),
    (TrialState.RUNNING, 0),
]
"""Each with so many epochs; of the last one nothing more is known than that it has begun."""


def a_trial(number: int, state: TrialState, curve: int) -> Any:
    if number == len(TRIALS) - 1:
        return create_trial(state=state)
    attributes: dict[str, Any] = {
        "attempt": 1,
        "config": {"training": {"lr": 30.0 + number, "windows": "random"}, "model": {"layers": 1}},
        "device": "cpu: +AVX",
    }
    if curve:
        best = loss(number, curve)
        attributes |= {"best_epoch": curve, "best_valid_loss": best, "checkpoint_sha256": "0f" * 32}
    if state == TrialState.FAIL:
        attributes |= {"failure_class": "user_error", "failure_message": HOSTILE}
    return create_trial(
        state=state,
        value=math.exp(loss(number, curve)) if state == TrialState.COMPLETE else None,
        params={
            "kappa": 0.3 / (number + 3),
            "batch_size": (10, 20, 30)[number % 3],
            "windows": ["random", "-1+1"][number % 2],
        },
        distributions=DISTRIBUTIONS,
        intermediate_values={epoch: math.exp(loss(number, epoch)) for epoch in range(1, curve + 1)},
        user_attrs=attributes,
    )


def loss(number: int, epoch: int) -> float:
    return 5.0 - 0.1 * epoch - number / 7


def an_epoch(number: int, epoch: int) -> dict[str, Any]:
    measured = dict.fromkeys(("train_loss", "valid_loss", "raw_valid_loss", "optimised"), loss(number, epoch))
    others = dict.fromkeys(("penalty", "ar", "tar", "gradient_norm", "seconds"), 1 / 3)
    key = {"sweep_id": SWEEP, "number": number, "epoch": epoch, "attempt": 1}
    at = naive(now()) + timedelta(seconds=epoch)
    flags = {"averaged": epoch > 1, "tokens": 100, "is_best": True, "lr": None if epoch == 1 else 30.0}
    return {**key, **measured, **others, **flags, "recorded_at": at}


@pytest.fixture
def controller(url: str, tmp_path: Path) -> Iterator[SweepController]:
    """Of a service with one sweep, whose trials stand in every way that one can."""
    engine = open_engine(url)
    migrate(engine)
    Records(engine).add_sweep(SWEEP, spec(name="=HYPERLINK(1)", budget={"trials": len(TRIALS)}))
    database = open_storage(url)
    storage = get_storage(database)
    study = open_study(spec(name="=HYPERLINK(1)"), SWEEP, storage)
    study.set_user_attr("corpus_sha256", {"train": "ab"})
    for number, (state, curve) in enumerate(TRIALS):
        storage.create_new_trial(study._study_id, template_trial=a_trial(number, state, curve))
    rows = [an_epoch(n, epoch) for n, (_, curve) in enumerate(TRIALS) for epoch in range(1, curve + 1)]
    with engine.begin() as connection:
        connection.execute(insert(epochs), rows)
        running = {"state": "running", "generation": 1, "started_at": naive(now())}
        connection.execute(update(sweeps).values(running))
    database.remove_session()
    database.engine.dispose()
    engine.dispose()
    built = build_controller(Settings(data_dir=tmp_path / "data", database_url=url), MemoryLauncher())
    yield built
    built.records.engine.dispose()
    built.storage._backend.engine.dispose()  # type: ignore[attr-defined]  # Optuna's cache has no name for it


def made(controller: SweepController, form: Format, table: Table | None = None) -> bytes:
    export = make_export(controller, SWEEP, form, table)
    with closing(export.file):
        content = export.file.read()
    assert len(content) == export.size
    return content


def expected_trials(controller: SweepController) -> list[dict[str, Any]]:
    """What the API says of each trial, as a row."""
    rows = []
    for view in controller.trials(SWEEP):
        row = dict(view)
        params, failure = row.pop("params"), row.pop("failure")
        row |= {f"params.{name}": value for name, value in params.items()}
        row |= {f"config.{name}": value for name, value in flat(controller.trial(SWEEP, view.number).config)}
        row["failure_class"] = failure and failure.failure_class
        row["failure_message"] = failure and failure.message
        rows.append(row)
    return rows


def expected_epochs(controller: SweepController) -> list[dict[str, Any]]:
    return [
        {"number": number, **dict(epoch)}
        for number in range(len(TRIALS))
        for epoch in controller.trial(SWEEP, number).curve
    ]


def expected(controller: SweepController, table: Table) -> list[dict[str, Any]]:
    return expected_trials(controller) if table is Table.trials else expected_epochs(controller)


def assert_equal(frame: pandas.DataFrame, rows: list[dict[str, Any]]) -> None:
    """Value by value; what one row has not, another may have."""
    assert len(frame) == len(rows)
    assert set(frame.columns) == {"sweep_id", "exported_at", *(name for row in rows for name in row)}
    assert set(frame.sweep_id) == {SWEEP}
    for place, row in enumerate(rows):
        for name in frame.columns.drop(["sweep_id", "exported_at"]):
            found, value = frame[name].iloc[place], row.get(name)
            if value is None:
                assert pandas.isna(found), (place, name, found)
            else:
                assert found == value, (place, name)


UTC_TIME = "timestamp[us, tz=UTC]"
TYPES = {
    Table.trials: {
        "exported_at": UTC_TIME,
        "number": "int64",
        "best_epoch": "int64",
        "params.batch_size": "int64",
        "started_at": UTC_TIME,
        "stopped": "bool",
        "best_valid_loss": "double",
        "runtime": "string",
    },
    Table.epochs: {
        "exported_at": UTC_TIME,
        "epoch": "int64",
        "lr": "double",
        "averaged": "bool",
        "recorded_at": UTC_TIME,
    },
}


@pytest.mark.parametrize("table", Table)
def test_parquet_gives_back_what_the_api_says(controller: SweepController, table: Table) -> None:
    content = made(controller, Format.parquet, table)
    assert_equal(pandas.read_parquet(io.BytesIO(content)), expected(controller, table))
    schema = pyarrow.parquet.read_schema(io.BytesIO(content))
    types = dict(zip(schema.names, map(str, schema.types), strict=True))
    typed = TYPES[table]
    assert {name: types[name] for name in typed} == typed
    assert schema.metadata[b"fraternal.sweep_id"] == SWEEP.encode()


def test_a_column_with_a_number_beyond_64_bits_is_text(controller: SweepController) -> None:
    large = [10**30, -(2**63), 2**63 - 1]
    written = json.dumps({"training": {"lr_patience": large[0], "low": large[1], "high": large[2]}})
    wide = CategoricalDistribution((10**30, 20, 30))
    with controller.records.engine.begin() as connection:
        connection.exec_driver_sql(damage_attribute("config", written))
        params = update(TrialParamModel).where(TrialParamModel.param_name == "batch_size")
        connection.execute(params.values(distribution_json=distribution_to_json(wide)))
    frame = pandas.read_parquet(io.BytesIO(made(controller, Format.parquet)))
    assert frame["config.training.lr_patience"][0] == str(10**30)
    assert [frame[f"config.training.{name}"][0] for name in ("low", "high")] == large[1:]
    assert list(frame["params.batch_size"][:3]) == [str(10**30), "20", "30"]
    text = pandas.read_csv(io.BytesIO(made(controller, Format.csv)), dtype=str)
    assert list(text["params.batch_size"][:3]) == [str(10**30), "20", "30"]


TIMES = ("exported_at", "started_at", "finished_at", "recorded_at")


@pytest.mark.parametrize("table", Table)
def test_csv_gives_back_what_the_api_says_with_all_digits(controller: SweepController, table: Table) -> None:
    content = made(controller, Format.csv, table)
    text = pandas.read_csv(io.BytesIO(content))
    for name in text.columns.intersection(TIMES):
        text[name] = pandas.to_datetime(text[name])
    rows = expected(controller, table)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str) and value[0] in "=+-@":
                row[name] = f"'{value}"
    assert_equal(text, rows)
    head, *_, last = content.split(b"\r\n")
    assert (head[:28], last) == (b"sweep_id,exported_at,number,", b"")


def test_text_that_a_spreadsheet_would_run_is_made_harmless_and_numbers_are_not_touched(
    controller: SweepController,
) -> None:
    frame = pandas.read_csv(io.BytesIO(made(controller, Format.csv)), dtype=str)
    assert frame["failure_message"][2] == f"'{HOSTILE}"
    assert frame["params.windows"][1] == "'-1+1"
    begins = {cell[0] for column in frame for cell in frame[column].dropna()}
    assert not begins & set("=+-@\t\r\n")
    with controller.records.engine.begin() as connection:
        connection.execute(update(epochs).values(train_loss=-1.5))
    table = pandas.read_csv(io.BytesIO(made(controller, Format.csv, Table.epochs)))
    assert set(table["train_loss"]) == {-1.5}


def test_what_is_no_finite_number_is_read_back_as_such(controller: SweepController, url: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite keeps no NaN")
    with controller.records.engine.begin() as connection:
        odd = {"train_loss": math.nan, "ar": -math.inf}
        connection.execute(update(epochs).where(epochs.c.epoch == 1).values(odd))
    for frame in (
        pandas.read_csv(io.BytesIO(made(controller, Format.csv, Table.epochs))),
        pandas.read_parquet(io.BytesIO(made(controller, Format.parquet, Table.epochs))),
    ):
        first = frame[frame.epoch == 1]
        assert first["train_loss"].isna().all()
        assert set(first["ar"]) == {-math.inf}


def test_json_has_spec_environment_trials_and_curves(controller: SweepController) -> None:
    content = made(controller, Format.json)
    export = SweepExport.model_validate_json(content)
    assert export.trials == [controller.trial(SWEEP, number) for number in range(len(TRIALS))]
    assert export.sweep.spec == controller.get(SWEEP).spec
    assert export.sweep.trials == controller.get(SWEEP).trials
    assert export.sweep.best == controller.best(SWEEP)
    assert export.environment == controller.views.environment(
        controller.records.get_sweep(SWEEP), controller.trials(SWEEP)
    )
    assert export.environment.corpus_sha256 == {"train": "ab"}
    curves = pandas.json_normalize(json.loads(content)["trials"], "curve", ["number"])
    assert list(curves["number"]) == [0, 0, 0, 1, 3, 3]


FILE = pytest.mark.sqlite("what is exported is a file of SQLite")


def opened(content: bytes, folder: Path) -> optuna.Study:
    path = folder / "taken.db"
    path.write_bytes(content)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{path}")
    return study


@FILE
def test_optunas_own_library_reads_the_same_study(controller: SweepController, tmp_path: Path) -> None:
    taken = opened(made(controller, Format.optuna), tmp_path)
    ours = optuna.load_study(study_name=SWEEP, storage=controller.storage)
    assert taken.study_name == f"=HYPERLINK(1) ({SWEEP})"
    assert (taken.direction, taken.metric_names) == (ours.direction, ["valid_perplexity"])
    assert taken.user_attrs.items() > ours.user_attrs.items()
    assert abs(datetime.fromisoformat(taken.user_attrs["exported_at"]) - now()) < timedelta(minutes=1)
    for one, other in zip(taken.trials, ours.trials, strict=True):
        assert one._trial_id == one.number + 1
        other._trial_id = one._trial_id
        assert one == other
    assert [trial.state for trial in taken.trials] == [state for state, _ in TRIALS], "running stays running"
    assert taken.best_trial.params == ours.best_trial.params


def test_the_optuna_file_is_one_file_and_nothing_is_left_behind(
    controller: SweepController, tmp_path: Path
) -> None:
    left = controller.data_dir / f"{PREFIX}of-one-that-died"
    left.mkdir()
    (left / "study.db").touch()
    content = made(controller, Format.optuna)
    assert content.startswith(b"SQLite format 3\0")
    assert content[18:20] == b"\x01\x01", "no write-ahead log, which would be a second file"
    for form in Format:
        made(controller, form)
    assert [path for path in controller.data_dir.iterdir() if path.name.startswith(".")] == []


TABULAR = (Format.csv, Format.parquet, Format.json)


def damage_attribute(name: str, written: str) -> str:
    return f"UPDATE trial_user_attributes SET value_json = '{written}' WHERE key = '{name}'"


@pytest.mark.parametrize(
    ("damage", "forms"),
    [
        (damage_attribute("config", "{dam"), TABULAR),
        (damage_attribute("config", '"x"'), TABULAR),
        (damage_attribute("best_valid_loss", '"x"'), TABULAR),
        (damage_attribute("best_epoch", "[1]"), TABULAR),
        ("UPDATE trials SET state = 'BROKEN' WHERE number = 1", Format),
    ],
)
def test_what_cannot_be_written_is_told_and_leaves_nothing_behind(
    controller: SweepController, url: str, damage: str, forms: Iterable[Format]
) -> None:
    if "BROKEN" in damage and not url.startswith("sqlite"):
        pytest.skip("PostgreSQL takes no state that there is not")
    with controller.records.engine.begin() as connection:
        connection.exec_driver_sql(damage)
    before = set(os.listdir("/proc/self/fd"))
    for form in forms:
        with pytest.raises(UnreadableStudy, match=SWEEP):
            make_export(controller, SWEEP, form)
    assert set(os.listdir("/proc/self/fd")) == before
    assert [path for path in controller.data_dir.iterdir() if path.name.startswith(".")] == []


def nothing_is_left(controller: SweepController) -> bool:
    return not [path for path in controller.data_dir.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("form", Format)
def test_what_is_left_of_an_almost_full_disk_is_the_databases(
    controller: SweepController, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it becomes full while the file is made."""
    for looks_before in (0, 1):
        free = iter([2**40] * looks_before)
        usage = type("Usage", (), {"total": 2**40})

        def disk_usage(_: Path, usage: Any = usage, free: Any = free) -> Any:
            usage.free = next(free, 7 * 2**20)
            return usage

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        with pytest.raises(DiskFull, match="only 7 MiB left: free some"):
            make_export(controller, SWEEP, form)
        assert nothing_is_left(controller)


@pytest.mark.parametrize("form", TABULAR)
def test_a_disk_that_is_full_at_last_is_told_of(
    controller: SweepController, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir: os.fdopen(os.open("/dev/full", os.O_RDWR), "w+b")
    )
    with pytest.raises(DiskFull, match=r"MiB left on its disk; free some"):
        make_export(controller, SWEEP, form)


def test_a_study_that_its_disk_does_not_take_is_told_of(
    controller: SweepController, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_without_room(storage: RDBStorage, **named: Any) -> optuna.Study:
        study = optuna.create_study(storage=storage, **named)
        storage.engine.dispose()
        no_larger = "PRAGMA max_page_count = 1"  # than it is
        event.listen(storage.engine, "connect", lambda connection, _: connection.execute(no_larger))
        return study

    with controller.records.engine.begin() as connection:
        connection.exec_driver_sql(damage_attribute("config", json.dumps("x" * 100_000)))
    monkeypatch.setattr("service.export_study.create_study", create_without_room)
    with pytest.raises(DiskFull, match=r"MiB left on its disk; free some"):
        make_export(controller, SWEEP, Format.optuna)
    assert nothing_is_left(controller)


def test_it_is_of_one_moment_whatever_is_written_meanwhile(
    controller: SweepController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another row comes in between the look over all trials and the writing of the file."""
    survey = Moment.survey

    def disturbed(moment: Moment) -> Any:
        found = survey(moment)
        with controller.records.engine.begin() as connection:
            connection.execute(insert(epochs), an_epoch(4, 1))
            connection.execute(update(epochs).values(valid_loss=1.0))
        return found

    monkeypatch.setattr(Moment, "survey", disturbed)
    export = SweepExport.model_validate_json(made(controller, Format.json))
    assert [len(trial.curve) for trial in export.trials] == [curve for _, curve in TRIALS]
    assert {epoch.valid_loss for trial in export.trials for epoch in trial.curve} != {1.0}
    assert export.exported_at < now()


def test_a_file_says_of_which_moment_it_is(controller: SweepController) -> None:
    began = now()
    frame = pandas.read_parquet(io.BytesIO(made(controller, Format.parquet)))
    assert began <= frame.exported_at[0] <= now()
    assert frame.exported_at.nunique() == 1
    assert utc(naive(began)) == began


# Over HTTP.


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


CSV = "text/csv; charset=utf-8; header=present"


@pytest.mark.parametrize(
    ("query", "media_type", "name"),
    [
        ({}, "application/json", r"[0-9TZ]+\.json"),
        ({"format": "csv"}, CSV, r"trials-[0-9TZ]+\.csv"),
        (
            {"format": "csv", "table": "epochs"},
            CSV,
            r"epochs-[0-9TZ]+\.csv",
        ),
        ({"format": "parquet"}, "application/vnd.apache.parquet", r"trials-[0-9TZ]+\.parquet"),
        ({"format": "optuna"}, "application/vnd.sqlite3", r"[0-9TZ]+\.db"),
    ],
)
def test_each_format_is_served_under_its_name(
    client: httpx.Client, ended: str, query: dict[str, str], media_type: str, name: str
) -> None:
    path = f"/v1/sweeps/{ended}/export"
    answer = client.get(path, params=query)
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    said = answer.headers["content-disposition"]
    assert re.fullmatch(rf'attachment; filename="{ended}-{name}"', said)
    head = client.head(path, params=query)
    assert head.content == b""
    assert head.headers["content-type"] == media_type
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("query", "parameter", "words"),
    [
        ("format=xls", "format", "'csv', 'json', 'parquet' or 'optuna'"),
        ("format=csv&table=events", "table", "'trials' or 'epochs'"),
        ("table=epochs", "table", "leave `table` out"),
        ("format=optuna&table=trials", "table", "leave `table` out"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    client: httpx.Client, ended: str, query: str, parameter: str, words: str
) -> None:
    answer = client.get(f"/v1/sweeps/{ended}/export?{query}")
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["parameter"] == parameter
    assert words in error["message"]


@FILE
def test_a_sweep_that_is_not_there_or_has_not_begun(client: httpx.Client, tmp_path: Path) -> None:
    assert client.get("/v1/sweeps/none/export").json()["code"] == "sweep_not_found"
    with played_service(tmp_path, plays=False) as idle:
        path = f"/v1/sweeps/{submit(idle)}/export"
        for table in Table:
            content = idle.get(path, params={"format": "csv", "table": table}).content
            assert len(pandas.read_csv(io.BytesIO(content))) == 0
            content = idle.get(path, params={"format": "parquet", "table": table}).content
            assert len(pandas.read_parquet(io.BytesIO(content))) == 0
        assert SweepExport.model_validate_json(idle.get(path).content).trials == []
        assert opened(idle.get(path, params={"format": "optuna"}).content, tmp_path).trials == []


def test_others_are_answered_while_a_file_is_made(
    client: httpx.Client, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are made at once wait for each other, and nobody else for them."""
    making, go_on, at_once = threading.Event(), threading.Event(), []
    writing: list[str] = []

    def write_slowly(*_: Any) -> None:
        writing.append("one")
        at_once.append(len(writing))
        making.set()
        assert go_on.wait(20)
        writing.pop()

    monkeypatch.setattr("service.export_texts.write_json", write_slowly)
    asking = [threading.Thread(target=client.get, args=(f"/v1/sweeps/{ended}/export",)) for _ in range(2)]
    for thread in asking:
        thread.start()
    assert making.wait(20)
    assert client.get(f"/v1/sweeps/{ended}/trials").status_code == 200
    go_on.set()
    for thread in asking:
        thread.join()
    assert at_once == [1, 1]


@pytest.mark.parametrize("form", ["json", "csv"])
def test_who_hangs_up_leaves_nothing_behind(
    client: httpx.Client, ended: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of more than a connection's buffers take."""
    written: list[Any] = []

    def write_much(moment: Moment, *others: Any) -> None:
        written.append(others[-1])
        others[-1].write(bytes(64 * 2**20))

    monkeypatch.setattr(f"service.export_texts.write_{form}", write_much)
    with client.stream("GET", f"/v1/sweeps/{ended}/export", params={"format": form}) as answer:
        chunks = answer.iter_raw(1)
        assert next(chunks) == b"\0"
        assert not written[0].closed
    wait_until(lambda: written[0].closed, "the file is closed")


def test_one_export_too_many_is_asked_to_come_later(
    client: httpx.Client, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not read holds a file."""
    monkeypatch.setattr("service.export_routes.MOST_OPEN", 1)
    monkeypatch.setattr("service.export_texts.write_json", lambda moment, file: file.write(bytes(64 * 2**20)))
    path = f"/v1/sweeps/{ended}/export"
    with client.stream("GET", path) as unread:
        assert unread.status_code == 200
        refused = client.get(path)
        assert (refused.status_code, refused.json()["code"]) == (503, "too_many_exports")
        assert int(refused.headers["retry-after"]) > 0
    wait_until(lambda: client.head(path).status_code == 200, "there is room again")


def test_who_takes_no_more_of_a_file_is_dropped(
    client: httpx.Client, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def write_much(moment: Moment, file: Any) -> None:
        written.append(file)
        file.write(bytes(64 * 2**20))

    monkeypatch.setattr("service.downloads.PATIENCE_S", 0.2)
    monkeypatch.setattr("service.export_texts.write_json", write_much)
    with client.stream("GET", f"/v1/sweeps/{ended}/export") as unread:
        wait_until(lambda: written[0].closed, "the file is closed")
        with pytest.raises(httpx.TransportError):
            unread.read()


def test_no_export_is_made_once_the_service_stops(
    client: httpx.Client, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.streams.Streams.is_closing", True)
    for form in Format:
        refused = client.get(f"/v1/sweeps/{ended}/export", params={"format": form})
        assert (refused.status_code, refused.json()["code"]) == (503, "stopping")


# By the command line.


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_saves_each_format_verified_and_replaces_nothing_unasked(
    client: httpx.Client, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = ["--url", str(client.base_url).rstrip("/")]
    names = {"csv": "-trials.csv", "json": ".json", "parquet": "-trials.parquet", "optuna": ".db"}
    for form, name in names.items():
        done = run("export", ended, "--format", form, *url)
        assert done.exit_code == 0, done.stderr
        assert done.stdout.startswith(f"{ended}{name}  sha256 ")
    done = run("export", ended, "--table", "epochs", "--out", "e.csv", *url)
    assert len(pandas.read_csv("e.csv")) == 18
    again = run("export", ended, "--out", "e.csv", *url)
    assert (again.exit_code, "--force" in again.stderr) == (1, True)
    assert len(pandas.read_csv("e.csv")) == 18
    assert run("export", ended, "--out", "e.csv", "--force", *url).exit_code == 0
    assert len(pandas.read_csv("e.csv")) == 6
    refused = run("export", ended, "--format", "json", "--table", "epochs", *url)
    assert (refused.exit_code, "leave out --table epochs" in refused.stderr) == (2, True)


# In the dashboard.


@FILE
@pytest.mark.slow
def test_stock_optuna_dashboard_opens_the_file(client: httpx.Client, tmp_path: Path) -> None:
    """The program itself, as a process of its own."""
    sweep_id = submit(client, name="to the dashboard", arms={"wild": {"clip": 13}, "tame": {}})
    wait_for(client, sweep_id, "succeeded")
    path = tmp_path / "taken.db"
    path.write_bytes(client.get(f"/v1/sweeps/{sweep_id}/export", params={"format": "optuna"}).content)
    with stock_dashboard(path) as dashboard:
        (summary,) = dashboard.get("/api/studies").json()["study_summaries"]
        assert summary["study_name"] == f"to the dashboard ({sweep_id})"
        study = dashboard.get(f"/api/studies/{summary['study_id']}").json()
    assert (study["directions"], study["objective_names"]) == (["minimize"], ["valid_perplexity"])
    assert [trial["state"] for trial in study["trials"]] == ["Fail", "Complete"] * 3
    assert [len(trial["intermediate_values"]) for trial in study["trials"]] == [0, 3] * 3
    assert sweep_id in study["note"]["body"]
