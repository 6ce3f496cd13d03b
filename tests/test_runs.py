"""Exports to TensorBoard and MLflow, read back by their own libraries."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from service.cli import app
from service.client import FraternalClient
from service.runs import tracking_uri
from service.schemas import TrialDetail
from tests.played_service import HELD, played_service, submit, wait_for, wait_for_an_epoch

MEASURED = {"train_loss", "valid_loss", "valid_perplexity", "raw_valid_loss", "averaged", "tokens", "seconds"}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with played_service(tmp_path_factory.mktemp("data")) as client:
        yield client


@pytest.fixture(scope="module")
def sweep(http: httpx.Client) -> str:
    """Of trials that fail and trials that complete, in turn."""
    sweep_id = submit(http, name="to take away", arms={"wild": {"clip": 13}, "tame": {}})
    wait_for(http, sweep_id, "succeeded")
    return sweep_id


@pytest.fixture
def trials(http: httpx.Client, sweep: str) -> list[TrialDetail]:
    with FraternalClient(str(http.base_url)) as client:
        return [client.trial(sweep, number) for number in range(6)]


def export(http: httpx.Client, sweep_id: str, *arguments: str) -> Any:
    url = str(http.base_url).rstrip("/")
    return CliRunner().invoke(app, ["export", sweep_id, *arguments, "--url", url])


@pytest.mark.parametrize(("form", "module"), [("tensorboard", "tensorboardX"), ("mlflow", "mlflow")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    http: httpx.Client, sweep: str, form: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    done = export(http, sweep, "--format", form, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert f"pip install 'fraternal[{form}]'" in done.stderr


# TensorBoard.


def read_events(run: Path) -> Any:
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard is not tested: pip install tensorboard",
    )
    read = module.EventAccumulator(str(run), size_guidance={"scalars": 0})
    read.Reload()
    return read


def test_tensorboard_reads_every_epoch_at_the_time_at_which_it_was_recorded(
    http: httpx.Client, sweep: str, trials: list[TrialDetail], tmp_path: Path
) -> None:
    for _ in range(2):  # the second time replaces the first
        done = export(http, sweep, "--format", "tensorboard", "--out", str(tmp_path))
        assert done.exit_code == 0, done.stderr
        assert done.stdout == f"6 runs in {tmp_path / sweep}\n"
    for trial in trials:
        read = read_events(tmp_path / sweep / f"t{trial.number:05d}-{trial.arm}")
        if not trial.curve:
            assert read.Tags()["scalars"] == []
            continue
        assert set(read.Tags()["scalars"]) >= MEASURED
        assert "lr" not in read.Tags()["scalars"], "it is not known"
        points = read.Scalars("valid_loss")
        assert [point.step for point in points] == [1, 2, 3]
        for point, epoch in zip(points, trial.curve, strict=True):
            assert point.value == pytest.approx(epoch.valid_loss)
            assert point.wall_time == pytest.approx(epoch.recorded_at.timestamp(), abs=1e-3)
        (best,) = read.Scalars("best_valid_perplexity")
        assert (best.step, best.value) == (3, pytest.approx(trial.best_valid_perplexity))


def test_tensorboards_hparams_plugin_finds_what_each_trial_was_trained_with(
    http: httpx.Client, sweep: str, trials: list[TrialDetail], tmp_path: Path
) -> None:
    export(http, sweep, "--format", "tensorboard", "--out", str(tmp_path))
    read = read_events(tmp_path / sweep / "t00001-tame")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    told = [
        plugin.HParamsPluginData.FromString(content)
        for content in read.summary_metadata and read.PluginTagToContent("hparams").values()
    ]
    (start,) = [found.session_start_info for found in told if found.HasField("session_start_info")]
    (about,) = [found.experiment for found in told if found.HasField("experiment")]
    values = start.hparams
    assert values["params.lr"].number_value == trials[1].params["lr"]
    assert values["training.clip"].number_value == trials[1].config["training"]["clip"]
    assert values["regularization.regularizer"].string_value == "none"
    assert values["model.tied"].bool_value is True
    assert [metric.name.tag for metric in about.metric_infos] == ["best_valid_perplexity"]


# MLflow.


@pytest.fixture
def mlflow() -> Any:
    return pytest.importorskip("mlflow", reason="MLflow is not tested: pip install mlflow-skinny")


IGNORED = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
"""MLflow's own, with SQLAlchemy 2.1."""


def runs_at(mlflow: Any, folder: Path) -> Any:
    client = mlflow.tracking.MlflowClient(tracking_uri=tracking_uri(str(folder))[0])
    (experiment,) = [found for found in client.search_experiments() if found.name != "Default"]
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.run_name"])
    return client, experiment, runs


@IGNORED
def test_mlflow_has_a_run_a_trial_however_often_it_is_told(
    http: httpx.Client,
    sweep: str,
    trials: list[TrialDetail],
    mlflow: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    log_batch = mlflow.tracking.MlflowClient.log_batch

    def counted(client: Any, run_id: str, metrics: Any = (), **others: Any) -> Any:
        sent.append(len(metrics))
        return log_batch(client, run_id, metrics=metrics, **others)

    monkeypatch.setattr(mlflow.tracking.MlflowClient, "log_batch", counted)
    for first in (True, False):
        sent.clear()
        done = export(http, sweep, "--format", "mlflow", "--out", str(tmp_path / "runs"))
        assert done.exit_code == 0, done.stderr
        assert done.stdout.startswith(f"6 runs of experiment 'to take away ({sweep})' at sqlite:///")
        assert (sum(sent) > 3 * 3 * len(MEASURED)) == first, "of those that it has, MLflow is told once"
    client, experiment, runs = runs_at(mlflow, tmp_path / "runs")
    assert experiment.tags["fraternal.sweep_id"] == sweep
    assert [run.data.tags["fraternal.trial"] for run in runs] == [f"{sweep}/{number}" for number in range(6)]
    assert [run.info.status for run in runs] == ["FAILED", "FINISHED"] * 3
    for run, trial in zip(runs, trials, strict=True):
        assert run.data.params["params.lr"] == str(trial.params["lr"])
        assert run.data.params["training.clip"] == str(trial.config["training"]["clip"])
        assert run.data.tags["fraternal.state"] == trial.state
        assert run.info.start_time == int(trial.started_at.timestamp() * 1000)  # type: ignore[union-attr]  # it began
        history = client.get_metric_history(run.info.run_id, "valid_loss")
        assert [(point.step, point.value, point.timestamp) for point in history] == [
            (epoch.epoch, epoch.valid_loss, int(epoch.recorded_at.timestamp() * 1000))
            for epoch in trial.curve
        ]
        if trial.curve:
            assert run.data.metrics["best_valid_perplexity"] == trial.best_valid_perplexity
    assert "the loss is nan" in runs[0].data.tags["fraternal.failure_message"]


@IGNORED
def test_a_run_that_goes_on_gets_the_epochs_that_it_lacks(
    http: httpx.Client, mlflow: Any, tmp_path: Path
) -> None:
    sweep_id = submit(http, name=HELD)
    wait_for_an_epoch(http, sweep_id)
    export(http, sweep_id, "--format", "mlflow", "--out", str(tmp_path))
    client, _, (run,) = runs_at(mlflow, tmp_path)
    assert (run.info.status, run.data.tags["fraternal.epochs"]) == ("RUNNING", "1")
    client.set_tag(run.info.run_id, "mine", "kept")
    http.post(f"/v1/sweeps/{sweep_id}:cancel")
    wait_for(http, sweep_id, "cancelled")
    export(http, sweep_id, "--format", "mlflow", "--out", str(tmp_path))
    _, _, (ended,) = runs_at(mlflow, tmp_path)
    assert (ended.info.run_id, ended.info.status) == (run.info.run_id, "FAILED")
    assert ended.data.tags["mine"] == "kept"
    assert len(client.get_metric_history(run.info.run_id, "valid_loss")) == 1


def test_a_place_for_mlflow_is_a_folder_or_a_uri(tmp_path: Path) -> None:
    assert tracking_uri(str(tmp_path / "here")) == (
        f"sqlite:///{tmp_path / 'here' / 'mlflow.db'}",
        f"file://{tmp_path / 'here' / 'artifacts'}",
    )
    for uri in ("http://127.0.0.1:5000", "sqlite:///runs.db", "databricks://profile"):
        assert tracking_uri(uri) == (uri, None)
