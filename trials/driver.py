"""One process per running sweep: a Ray of its own, the ledger's tasks run on it, watch kept over both.

Crash-only: nothing here needs to happen before the process dies. A new driver finds all it needs in the study
and in the checkpoint store; whatever this one leaves in Tune's folder is never read.
"""

import logging
import os
import threading
from pathlib import Path

import psutil
import ray

from trials.ledger import Fenced, Journal, StudyLedger
from trials.spec import Resources

log = logging.getLogger(__name__)

BEAT_S = 2.0
EXIT_FENCED = 0
EXIT_RAY_DIED = 75  # EX_TEMPFAIL: start another driver


def drive(
    ledger: StudyLedger,
    journal: Journal,
    resources: Resources,
    *,
    store_url: str,
    data_dir: Path,
    scratch: Path,
) -> None:
    """Run every task of the ledger; returns when no trial is open. `scratch` may be deleted afterwards."""
    if ledger.exhausted:
        return
    if resources.gpus:
        from trials.tuning import require_gpu

        require_gpu(resources.gpus)
    ray_is_up, done = threading.Event(), threading.Event()
    threading.Thread(target=_keep_watch, args=(journal, ray_is_up, done), daemon=True).start()
    start_ray(scratch)
    ray_is_up.set()
    max_concurrent = resources.max_concurrent or room_for(resources)
    if not resources.gpus:  # which processes see which GPU is not settled yet
        for _ in range(min(max_concurrent, os.cpu_count() or 1)):
            _load_what_trials_need.remote()
    from trials.tuning import run_tasks  # only here, while the workers load the same: it takes seconds

    run_tasks(ledger, resources, max_concurrent, store_url=store_url, data_dir=data_dir, scratch=scratch)
    done.set()  # from here on Ray may go
    ray.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def _load_what_trials_need() -> None:
    """In a process that Ray will run trials in."""
    import trials.trainable  # noqa: F401


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
