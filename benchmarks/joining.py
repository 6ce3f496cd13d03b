"""How soon a sweep uses a node that joins the Ray cluster.

    .venv/bin/python -m benchmarks.joining --rounds 5

A Ray cluster of our own on this machine, a service, and a sweep of which one trial runs on the only node that
there is, while others wait. In turn a node of one CPU is started, and killed once a trial there has reported.
Prints Markdown: seconds from `ray start` until the cluster has the node, until a worker of the sweep runs
there, and until the first epoch of a trial there is recorded.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from service.errors import INTERRUPTED
from service.running import Interrupted, Signals
from tests.clusters import RayCluster, ray_cluster
from tests.service_process import ServiceProcess, running_service, small_spec, workers_of, write_corpus

LOOK_S = 0.1
PATIENCE_S = 120.0
EPOCHS = 100_000
"""Of a trial: none ends in between."""


@dataclass(frozen=True)
class Joined:
    """Seconds from `ray start`, each."""

    registered: float
    worker: float
    epoch: float


class Sweep:
    """One that could use more nodes than there are."""

    def __init__(
        self, ray: RayCluster, service: ServiceProcess, signals: Signals, text: Path, rounds: int
    ) -> None:
        self._ray, self._service, self._signals = ray, service, signals
        ray.add_node()
        ray.wait_for(nodes=2, cpus=1)
        spec = small_spec(text, budget={"trials": 2}, retry={"max_failures": rounds})
        spec["training"]["epochs"] = EPOCHS
        self._id = service.submit(spec)
        service.wait_for_epochs(self._id, 2)

    def use(self) -> Joined:
        """A node that joins, and is killed then."""
        began = time.time()
        node = self._ray.add_node()
        registered = self._when(lambda: self._cpus() == 2, "the cluster has the node")
        worker = self._when(lambda: any(map(node.runs, workers_of(self._id))), "a worker runs there")
        self._when(lambda: len(self._epochs_after(worker)) == 2, "a trial there has an epoch")
        moments = [registered, worker, max(self._epochs_after(worker))]
        node.kill()
        self._when(lambda: self._cpus() == 1 and len(workers_of(self._id)) == 1, "the node is gone")
        return Joined(*(moment - began for moment in moments))

    def end(self) -> None:
        self._service.cancel(self._id)
        self._service.wait_for_end(self._id)

    def _when(self, is_so: Callable[[], bool], what: str) -> float:
        """On the clock on the wall, about."""
        last = time.time() + PATIENCE_S
        while not is_so():
            if time.time() > last:
                raise SystemExit(f"waited {PATIENCE_S:g} s in vain until {what}\n{self._service.describe()}")
            self._signals.pause(LOOK_S)
        return time.time()

    def _cpus(self) -> float:
        from trials.cluster import list_nodes  # Ray looks for the cluster's token when it is loaded

        return sum(node.cpus for node in list_nodes(self._ray.address))

    def _epochs_after(self, at: float) -> list[float]:
        """When the first one since was recorded, of each trial that has one: each node runs one of the two.

        Which one the new node runs is not told; its attempt may have begun before, and waited for a place.
        """
        told = [event for event in self._service.events(self._id) if _at(event) > at]
        firsts: dict[int, float] = {}
        for event in told:
            if event["kind"] == "epoch_finished":
                firsts.setdefault(event["detail"]["number"], _at(event))
        return list(firsts.values())


def _at(event: dict[str, Any]) -> float:
    moment: datetime = event["at"]
    return moment.replace(tzinfo=UTC).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        signals = stack.enter_context(Signals())
        ray = stack.enter_context(ray_cluster())
        os.environ.update(ray.environment)  # for us, who ask it what it has
        own = {"FRATERNAL_RAY_ADDRESS": ray.address}
        service = stack.enter_context(running_service(folder / "data", own))
        sweep = Sweep(ray, service, signals, write_corpus(folder / "text"), given.rounds)
        for number in range(given.rounds):
            found.append(sweep.use())
            print(number, found[-1], file=sys.stderr, flush=True)
        sweep.end()
    print(f"seconds from `ray start`, of {given.rounds} nodes: median (range)\n")
    print("| the cluster has it | a worker runs there | the first epoch there is recorded |\n|---|---|---|")
    columns = list(zip(*map(astuple, found), strict=True))
    cells = [f"{median(column):.1f} ({min(column):.1f}–{max(column):.1f})" for column in columns]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        main()
    except Interrupted:
        sys.exit(INTERRUPTED)
