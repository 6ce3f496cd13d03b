"""Runs the ledger's tasks with Ray Tune. The only file that knows Tuner; to load it takes seconds."""

from pathlib import Path

import torch
from ray import tune
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, TuneConfig, Tuner

from trials.ledger import StudyLedger
from trials.search import LedgerScheduler, StudySearch
from trials.spec import Resources
from trials.trainable import LanguageModelTrial


def run_tasks(
    ledger: StudyLedger,
    resources: Resources,
    max_concurrent: int,
    *,
    store_url: str,
    data_dir: Path,
    scratch: Path,
) -> None:
    """Returns when no trial is open."""
    search = StudySearch(
        ledger,
        max_concurrent=max_concurrent,
        shared={"store_url": store_url, "data_dir": str(data_dir), "cpus": resources.cpus},
    )
    tuner = Tuner(
        tune.with_resources(LanguageModelTrial, {"cpu": resources.cpus, "gpu": resources.gpus}),
        tune_config=TuneConfig(
            num_samples=-1,  # the ledger knows when to end
            search_alg=search,
            scheduler=LedgerScheduler(ledger, search),
            reuse_actors=True,
            trial_dirname_creator=lambda trial: str(trial.trial_id),  # by default it is a task, spelt out
        ),
        run_config=RunConfig(
            name="tune",
            storage_path=str(scratch),
            failure_config=FailureConfig(max_failures=0),  # the ledger owns retries
            checkpoint_config=CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            verbose=0,
        ),
    )
    tuner.fit()


def require_gpu(gpus: float) -> None:
    """Raises RuntimeError where torch cannot use one."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"resources.gpus is {gpus:g}, but torch {torch.__version__} finds no CUDA device: "
            "install its CUDA build and NVIDIA's driver, or submit with resources.gpus 0"
        )
