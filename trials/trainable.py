"""What Ray Tune runs: an attempt, one epoch a step. A module of its own, so that Ray pickles it by name.

The driver names this class, too, and has no use for torch: so it is loaded where a trial runs.
"""

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune

from trials.store import CheckpointStore
from trials.tasks import Report


class LanguageModelTrial(tune.Trainable):
    """Runs attempts, one after another in the same process: loading torch anew costs seconds a trial."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(max(1, int(config["cpus"])))
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        import torch

        self._reports.close()  # the earlier attempt may have been pruned in the middle
        torch.cuda.empty_cache()  # what it held of a GPU is for the trials beside this one, too
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        from trials.attempt import run_attempt

        Path(self.logdir).rmdir()  # which Tune has just made, and nobody uses
        task, store = config["task"], CheckpointStore(config["store_url"])
        self._reports: Generator[Report] = run_attempt(
            task,
            store,
            Path(config["data_dir"]),
            Path(config["scratch"]),
            partial(store.pause_is_asked, task.sweep_id, config["driver"]),
        )

    def step(self) -> dict[str, Any]:
        report = next(self._reports)
        return {"report": report, "done": report.finished}
