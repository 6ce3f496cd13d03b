"""The ledger's tasks run by Ray Tune. The only file that knows Tuner.

Loaded once Ray is up: Tune takes a second or two, in which Ray's first worker loads what it needs.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray.air._internal.usage
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, TuneConfig, Tuner
from ray.tune.execution.class_cache import DEFAULT_ENV_VARS, ENV_VARS_TO_PROPAGATE

from trials import cluster
from trials.ledger import StudyLedger
from trials.search import LedgerScheduler, NoProgress, StudySearch, end_here
from trials.shares import Node, room_on
from trials.spec import Resources
from trials.trainable import runnable

STORES_SECRETS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN"}
MOST_WORKERS = 10_000
"""Of one sweep, at once: more than there will be machines."""


def build_search(ledger: StudyLedger, shared: dict[str, Any], *, in_cluster: bool = False) -> StudySearch:
    end_process = cluster.end_process if in_cluster else end_here
    return StudySearch(ledger, shared, end_process, waits_for_nodes=in_cluster)


def run(
    ledger: StudyLedger, search: StudySearch, resources: Resources, scratch: Path, *, in_cluster: bool = False
) -> None:
    """Until no task is left, on the Ray that this process has started or joined."""
    hand_on(in_cluster=in_cluster)
    for turn in itertools.count():
        nodes = cluster.joined_nodes()
        ledger.share(nodes)
        if ledger.exhausted:
            return
        if ledger.is_full:
            ledger.say_why_it_waits(why_full(resources, nodes))
            time.sleep(1.0)
        else:
            ledger.say_why_it_waits(None)
            with callbacks_uncounted():
                _tuner(ledger, search, resources, scratch, turn).fit()


@contextmanager
def callbacks_uncounted() -> Iterator[None]:
    """For usage statistics, which are off, Tune would load the clients of MLflow and others, where they are
    installed: more than a second before the first worker starts."""
    with mock.patch.object(ray.air._internal.usage, "tag_callbacks"):
        yield


def why_full(resources: Resources, nodes: Sequence[Node]) -> str:
    """What keeps a sweep's trials, none of which runs, from beginning."""
    if room_on(resources, nodes):
        return (
            "sweeps of a higher priority, or earlier ones, have all the machines: raise its priority, or wait"
        )
    takes = f"{resources.cpus:g} cpus" + (f" and {resources.gpus:g} of a GPU" if resources.gpus else "")
    labels = ", ".join(f"{name}={value}" for name, value in resources.labels.items())
    which = f" on a machine labelled {labels}" if labels else ""
    return f"no machine has room for a trial now, which takes {takes}{which}: one that joins is used at once"


def _tuner(ledger: StudyLedger, search: StudySearch, resources: Resources, scratch: Path, turn: int) -> Tuner:
    return Tuner(
        runnable(resources),
        tune_config=TuneConfig(
            num_samples=-1,  # the ledger knows when to end
            # Tune starts as many workers at once; else one after another, and a short trial's end would have
            # it take the worker that is there, and throw away the one that is being started. How many of them
            # may work is the ledger's, which hears of changes.
            max_concurrent_trials=MOST_WORKERS,
            search_alg=search,
            scheduler=LedgerScheduler(ledger, search),
            reuse_actors=True,
            trial_dirname_creator=lambda trial: str(trial.trial_id),  # by default it is a task, spelt out
        ),
        run_config=RunConfig(
            name=f"tune-{turn}",
            storage_path=str(scratch),
            failure_config=FailureConfig(max_failures=0),  # the ledger owns retries
            checkpoint_config=CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            callbacks=[NoProgress()],
            verbose=0,
        ),
    )


def hand_on(*, in_cluster: bool) -> None:
    """Settle what Tune hands on to workers of this process's environment.

    Ours inherit all of it; those of a cluster have the service's secrets from nobody. What Tune hands over is
    a runtime environment, which Ray writes into a log; and each worker that has one is set up by another
    process, and starts seconds later.
    """
    ENV_VARS_TO_PROPAGATE.difference_update(STORES_SECRETS)
    if not in_cluster:
        ENV_VARS_TO_PROPAGATE.clear()
        DEFAULT_ENV_VARS.clear()
