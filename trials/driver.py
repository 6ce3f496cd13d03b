"""One process per running sweep: runs the ledger's tasks with Ray Tune. The only file that knows Tuner.

It loads no torch, unless a GPU is asked for: a sweep's first epoch waits for the workers to load it, already.

Crash-only: nothing here needs to happen before the process dies. A new driver finds all it needs in the study
and in the checkpoint store; whatever this one leaves in Tune's folder is never read.
"""

import logging
import os
import threading
from pathlib import Path
from typing import cast

import psutil
import ray
from ray import tune
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, TuneConfig, Tuner

from models.config import Precision
from trials.ledger import Fenced, Journal, StudyLedger
from trials.search import LedgerScheduler, NoProgress, StudySearch
from trials.spec import Resources, SweepSpec
from trials.trainable import LanguageModelTrial

log = logging.getLogger(__name__)

BEAT_S = 2.0
EXIT_FENCED = 0
EXIT_RAY_DIED = 75  # EX_TEMPFAIL: start another driver


def drive(
    ledger: StudyLedger,
    journal: Journal,
    spec: SweepSpec,
    *,
    store_url: str,
    data_dir: Path,
    scratch: Path,
) -> None:
    """Run every task of the ledger; returns when no trial is open. `scratch` may be deleted afterwards.

    Raises RuntimeError, or UnsupportedPrecision, where the GPUs are not what the sweep asks for.
    """
    if ledger.exhausted:
        return
    ray_is_up, done = threading.Event(), threading.Event()
    threading.Thread(target=_keep_watch, args=(journal, ray_is_up, done), daemon=True).start()
    try:
        if spec.resources.gpus:
            require_gpu(spec)
        start_ray(scratch)
        ray_is_up.set()
        _run(ledger, spec.resources, store_url, data_dir, scratch)
    finally:
        done.set()  # from here on Ray may go
    ray.shutdown()


def _run(ledger: StudyLedger, resources: Resources, store_url: str, data_dir: Path, scratch: Path) -> None:
    room = room_for(resources)
    search = StudySearch(
        ledger,
        shared={
            "store_url": store_url,
            "data_dir": str(data_dir),
            "cpus": resources.cpus,
            "scratch": str(scratch / "corpora"),
        },
    )
    tuner = Tuner(
        tune.with_resources(LanguageModelTrial, {"cpu": resources.cpus, "gpu": resources.gpus}),
        tune_config=TuneConfig(
            num_samples=-1,  # the ledger knows when to end
            # Tune starts as many workers at once; else one after another, and a short trial's end would have
            # it take the worker that is there, and throw away the one that is being started.
            max_concurrent_trials=min(resources.max_concurrent or room, room),
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
            callbacks=[NoProgress()],
            verbose=0,
        ),
    )
    tuner.fit()


def require_gpu(spec: SweepSpec) -> None:
    """Ask torch, which takes seconds to load, whether its GPU computes what the sweep wants."""
    import torch

    from models.precision import require_precision

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"resources.gpus is {spec.resources.gpus:g}, but torch {torch.__version__} finds no CUDA device: "
            "install its CUDA build and NVIDIA's driver, or submit with resources.gpus 0"
        )
    for _, precision in spec.written("precision"):
        require_precision(cast("Precision", precision), torch.device("cuda"))


def start_ray(scratch: Path) -> None:
    """Start a small Ray of our own: a bare init would join what others left running."""
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=str(scratch),
    )


def room_for(resources: Resources) -> int:
    """How many trials the cluster has room for; at least one, so that a cluster that grows later is used."""
    cluster: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    by_cpu = cluster.get("CPU", 0) / resources.cpus
    # A trial's share is of one GPU: what is left of several makes up no other.
    by_gpu = int(cluster.get("GPU", 0)) * int(1 / resources.gpus) if resources.gpus else by_cpu
    return max(1, int(min(by_cpu, by_gpu)))


def _keep_watch(journal: Journal, ray_is_up: threading.Event, done: threading.Event) -> None:
    """Renew the lease; end the process when another driver has the sweep, or when our Ray is gone.

    Without its raylet, fit() would loop for ever.
    """
    while not done.wait(BEAT_S):
        if ray_is_up.is_set() and not _ray_is_alive() and not done.is_set():
            os._exit(EXIT_RAY_DIED)
        try:
            journal.beat()
        except Fenced:
            os._exit(EXIT_FENCED)
        except Exception:  # the database is away: the lease outlasts several beats
            log.exception("the lease could not be renewed")


def _ray_is_alive() -> bool:
    names = {_name(child) for child in psutil.Process().children()}
    return {"raylet", "gcs_server"} <= names


def _name(process: psutil.Process) -> str | None:
    try:
        return process.name() if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None
