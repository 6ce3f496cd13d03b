"""A sweep for TensorBoard or MLflow, by their own libraries: a run a trial, made of what the API answers."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import CommandFailed
from service.schemas import EpochView, SweepView, TrialDetail, flat

if TYPE_CHECKING:
    pass

NO_CURVES = {"epoch", "attempt", "recorded_at"}
OBJECTIVE = "best_valid_perplexity"
MOST_AT_ONCE = 900
"""Metrics in one request to MLflow, which takes a thousand, and a hundred params."""
LONGEST_TAG = 5000
STATUS = {"COMPLETE": "FINISHED", "PRUNED": "KILLED", "FAIL": "FAILED"}
"""MLflow's, by ours; of others RUNNING."""
Told = Callable[[int], None]
"""Hears how many trials are written."""


def curves(epoch: EpochView) -> Iterator[tuple[str, float]]:
    """What of an epoch is a number."""
    for name, value in epoch:
        if name not in NO_CURVES and value is not None:
            yield name, float(value)


def hyperparameters(trial: TrialDetail) -> dict[str, Any]:
    """All that a trial trains with, and what it was sampled as."""
    params = {f"params.{name}": value for name, value in trial.params.items()}
    return {"arm": trial.arm, "draw": trial.draw, "seed": trial.seed, **params, **dict(flat(trial.config))}


def run_name(trial: TrialDetail) -> str:
    return f"t{trial.number:05d}-{trial.arm}"


def to_tensorboard(sweep: SweepView, trials: Iterable[TrialDetail], folder: Path) -> int:
    """A folder a trial, below one of the sweep's; what an earlier export wrote there is replaced.

    Returns how many. Raises CommandFailed where tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams
    except ImportError as error:
        raise missing_extra("tensorboard", "tensorboardX") from error
    count = 0
    for trial in trials:
        run = folder / sweep.id / run_name(trial)
        for left in run.glob("events.out.tfevents.*"):
            left.unlink()
        values = {name: _plain(value) for name, value in hyperparameters(trial).items()}
        with SummaryWriter(logdir=str(run)) as writer:
            for told in hparams(values, {OBJECTIVE: None}):
                writer.file_writer.add_summary(told, walltime=_seconds(trial.started_at))
            for epoch in trial.curve:
                at = epoch.recorded_at.timestamp()
                for name, value in curves(epoch):
                    writer.add_scalar(name, value, epoch.epoch, walltime=at)
            if trial.best_valid_perplexity is not None:
                best = {"global_step": trial.best_epoch, "walltime": _seconds(trial.finished_at)}
                writer.add_scalar(OBJECTIVE, trial.best_valid_perplexity, **best)
        count += 1
    return count


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _seconds(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None


class MlflowRuns:
    """The experiment of a sweep at an MLflow tracking server or in a database of MLflow's.

    A trial has one run there, told by the tag `fraternal.trial`: one that is there already is brought up to
    date by the epochs that it lacks, so an export may be made again, also while the sweep runs.
    """

    def __init__(self, where: str, sweep: SweepView) -> None:
        """Raises CommandFailed where MLflow is not installed, or cannot be reached."""
        self._sweep = sweep
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing_extra("mlflow", "MLflow") from error
        self._entities = mlflow.entities
        self._failure: type[Exception] = mlflow.exceptions.MlflowException
        self.uri, artifacts = tracking_uri(where)
        self._client: MlflowClient = MlflowClient(tracking_uri=self.uri)
        self.experiment = f"{sweep.name} ({sweep.id})" if sweep.name else sweep.id
        try:
            self._experiment_id = self._find_experiment(artifacts)
        except self._failure as error:
            raise CommandFailed(f"MLflow at {self.uri}: {str(error).partition(chr(10))[0]}") from error

    def _find_experiment(self, artifacts: str | None) -> str:
        tag = f"tags.`fraternal.sweep_id` = '{self._sweep.id}'"
        found = self._client.search_experiments(filter_string=tag)  # also under the name that it had before
        if found:
            self.experiment = found[0].name
            return str(found[0].experiment_id)
        tags = {"fraternal.sweep_id": self._sweep.id}
        return str(self._client.create_experiment(self.experiment, artifacts, tags))

    def write(self, trials: Iterable[TrialDetail]) -> int:
        """Returns how many trials there are. Raises CommandFailed."""
        try:
            known = {run.data.tags["fraternal.trial"]: run for run in self._runs()}
            count = 0
            for trial in trials:
                self._write(trial, known.get(self._key(trial)))
                count += 1
        except self._failure as error:
            raise CommandFailed(f"MLflow at {self.uri}: {str(error).partition(chr(10))[0]}") from error
        return count

    def _runs(self) -> Iterator[Any]:
        token = None
        while True:
            of_ours = f"tags.`fraternal.trial` LIKE '{self._sweep.id}/%'"
            page = self._client.search_runs([self._experiment_id], of_ours, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _key(self, trial: TrialDetail) -> str:
        return f"{self._sweep.id}/{trial.number}"

    def _write(self, trial: TrialDetail, run: Any) -> None:
        if run is None:
            began = _milliseconds(trial.started_at)
            tags = {"fraternal.trial": self._key(trial)}
            run = self._client.create_run(self._experiment_id, began, tags, run_name(trial))
        run_id, done = run.info.run_id, int(run.data.tags.get("fraternal.epochs", 0))
        metrics = [
            self._entities.Metric(name, value, _milliseconds(epoch.recorded_at), epoch.epoch)
            for epoch in trial.curve
            if epoch.epoch > done
            for name, value in curves(epoch)
        ]
        if trial.best_valid_perplexity is not None:
            best, at = trial.best_valid_perplexity, _milliseconds(trial.finished_at or trial.started_at)
            metrics.append(self._entities.Metric(OBJECTIVE, best, at, trial.best_epoch or 0))
        params = [
            self._entities.Param(name, str(value))
            for name, value in hyperparameters(trial).items()
            if name not in run.data.params
        ]
        for start in range(0, len(metrics), MOST_AT_ONCE):
            self._client.log_batch(run_id, metrics=metrics[start : start + MOST_AT_ONCE])
        said = [self._entities.RunTag(name, value[:LONGEST_TAG]) for name, value in _tags(trial).items()]
        self._client.log_batch(run_id, params=params, tags=said)
        status = STATUS.get(trial.state, "RUNNING")
        if status == "RUNNING":
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, _milliseconds(trial.finished_at))


def _tags(trial: TrialDetail) -> dict[str, str]:
    """What there is to say of a trial. The epochs last: they are there by then."""
    said = {
        "state": trial.state,
        "attempt": trial.attempt,
        "device": trial.device,
        "runtime": trial.runtime,
        "checkpoint_sha256": trial.checkpoint_sha256,
        "failure_class": trial.failure and trial.failure.failure_class,
        "failure_message": trial.failure and trial.failure.message,
        "epochs": trial.epochs_done,
    }
    return {f"fraternal.{name}": str(value) for name, value in said.items() if value is not None}


def tracking_uri(where: str) -> tuple[str, str | None]:
    """MLflow's URI of a place, and where artifacts go, where that is for us to say.

    A folder has a database `mlflow.db`: MLflow has given up its own folders.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:", where):
        return where, None
    folder = Path(where).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def _milliseconds(at: datetime | None) -> int:
    return math.floor(at.timestamp() * 1000) if at is not None else 0


def missing_extra(extra: str, library: str) -> CommandFailed:
    return CommandFailed(f"this needs {library}: pip install 'fraternal[{extra}]'")
