"""What Ray Tune runs: an attempt, one epoch a step. A module of its own, so that Ray pickles it by name.

The driver names this class, too, and has no use for torch: so it is loaded where a trial runs.
"""

import os
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import PlacementGroupFactory

from trials.encoded import ENCODED, node_dir
from trials.gpus import VISIBLE, answering
from trials.memory import give_back_gpu
from trials.parts import Part, take_part
from trials.shares import as_ray_reads
from trials.spec import Resources
from trials.store import CheckpointStore
from trials.tasks import Failure, Report
from trials.version import own_version

ASK_AGAIN_S = 2.0
"""For a part of a GPU, where others have them all."""


class LanguageModelTrial(tune.Trainable):
    """Runs attempts, one after another in the same process: loading torch anew costs seconds a trial."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(max(1, int(config["cpus"])))
        self._node = ray.get_runtime_context().get_node_id()
        self._part: Part | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._reports.close()  # the earlier attempt may have been pruned in the middle
        give_back_gpu()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        from trials.attempt import run_attempt

        Path(self.logdir).rmdir()  # which Tune has just made, and nobody uses
        task, store = config["task"], CheckpointStore(config["store_url"])
        driver, data_dir, shared = config["driver"], config["data_dir"], config["scratch"]
        if data_dir is None:
            data_dir = node_dir()
            shared = data_dir / ENCODED
            if words := why_not_here(config["version"], store, task.sweep_id, driver):
                self._reports: Generator[Report] = failed(words)
                return
        self._reports = run_attempt(
            task, store, Path(data_dir), Path(shared), partial(store.pause_is_asked, task.sweep_id, driver)
        )
        if config["gpus"] is not None:
            self._reports = self._on_its_gpu(config["gpus"], task.gpu_share, self._reports)

    def _on_its_gpu(
        self, uuids: Sequence[str], share: float, reports: Generator[Report]
    ) -> Generator[Report]:
        """Ray's choice of a GPU is its driver's alone: this process computes on one that has so much left by
        all drivers' counts. It keeps that for its other trials, to which Ray gives as much."""
        while self._part is None:
            # One that fell off its bus is always free: it would have one trial after another.
            self._part = take_part(answering(uuids), share)
            if self._part is None:
                yield Report(epoch=None)
                time.sleep(ASK_AGAIN_S)
            else:
                os.environ[VISIBLE] = self._part.uuid  # CUDA reads it when it is first asked for something
        yield from reports

    def step(self) -> dict[str, Any]:
        report = next(self._reports)
        return {"report": report, "done": report.finished, "node": self._node}


def place_of(resources: Resources, config: Mapping[str, Any]) -> PlacementGroupFactory:
    """What a worker asks Ray for, by what its first task needs; Tune gives it others that need the same."""
    bundle = {"CPU": resources.cpus} | ({"GPU": config["task"].gpu_share} if resources.gpus else {})
    labels = as_ray_reads(resources.labels)
    selector: dict[str, Any] = {"bundle_label_selector": [labels]} if labels else {}
    return PlacementGroupFactory([bundle], **selector)


def runnable(resources: Resources) -> Any:
    """What Tune runs, a class of its own making. Workers load whatever it names: no module with Optuna."""
    return tune.with_resources(LanguageModelTrial, partial(place_of, resources))


def why_not_here(version: str, store: CheckpointStore, sweep_id: str, driver: str) -> str | None:
    """In words, where this machine is none for the driver's trials."""
    here = f"node {socket.gethostname()}"
    if version != own_version():
        return f"{here} has fraternal {own_version()}, and the service {version}: install the same on both"
    if not store.is_announced(sweep_id, driver):
        return (
            f"{here} has another store than the service at the URL {store.url}: set FRATERNAL_STORE_URL to a "
            "store that all nodes see, s3://bucket/path say, or mount the same folder on all of them"
        )
    return None


def failed(words: str) -> Generator[Report]:
    yield Report(epoch=None, finished=True, failure=Failure("user_error", words))
