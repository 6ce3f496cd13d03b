"""What grows while one driver runs thousands of trials.

    .venv/bin/python -m tests.leaks --trials 2000

The real service, driver and Ray run a sweep whose trials train next to nothing, and the processes are looked
at now and then. The law: after the first 200 trials nothing grows. Growth is the median slope (Theil and Sen)
from there to the end, times the trials in between. Allowed are 4 MiB of a group of processes, and 3 files,
threads or processes; of the driver and the API 12 KiB a trial, too, since Optuna keeps a study's rows in
memory; of Ray's folder its logs. Prints Markdown; exits with 1 where something did grow.
"""

import argparse
import stat
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from service.launcher import MARK, marked_processes
from tests.service_process import ServiceProcess, running_service, traces, wait_until, write_corpus

WARM_UP = 200
"""Trials after which all is loaded, cached and pooled."""
ROLES = {
    "service.drive": "driver",
    "ray::DashboardAgent": "agents",
    "ray::RuntimeEnvAgent": "agents",
    "ray::": "workers",
    "raylet/raylet": "raylet",
    "gcs_server": "GCS",
    "default_worker.py": "workers",
}
ALLOWED = {"MiB": 4.0, "KiB": 1024.0, "CPU-s": float("inf")}
"""Growth from the warm-up to the end, by unit; of anything that is counted, 3."""
ALLOWED_A_TRIAL = {"driver, MiB": 12 / 1024, "API, MiB": 12 / 1024, "scratch, KiB": 1.0}


@dataclass(frozen=True)
class Sample:
    trials: int
    """That had ended."""
    found: Mapping[str, float]
    scratch: frozenset[Path] = frozenset()
    """Ray's and Tune's files."""


def no_op_spec(corpus: Path, trials: int) -> dict[str, Any]:
    return {
        "corpus": {"path": str(corpus), "train_tokens": 40, "valid_tokens": 20, "test_tokens": 20},
        "model": {"embedding_size": 4, "hidden_size": 4, "layers": 1},
        "training": {"epochs": 1, "batch_size": 2, "bptt": 20},
        "space": {"kappa": {"type": "uniform", "low": 0.0, "high": 0.3}},
        "budget": {"trials": trials},
    }


def watch(service: ServiceProcess, sweep_id: str, every: int) -> Iterator[Sample]:
    """A sample about every so many trials, till just before the driver begins to end."""
    due = every
    while not service.has_ended(sweep_id):
        trials = service.sweep(sweep_id)["trials"]
        done = trials["complete"]
        if due <= done < trials["budget"] - 10:
            yield look(service, sweep_id, done)
            due = done - done % every + every
        time.sleep(0.3)


def look(service: ServiceProcess, sweep_id: str, trials: int) -> Sample:
    found: defaultdict[str, float] = defaultdict(float)
    for process in [*marked_processes(MARK, sweep_id), psutil.Process(service.pid)]:
        role = "API" if process.pid == service.pid else _role(process)
        with process.oneshot():
            found[f"{role}, processes"] += 1
            found[f"{role}, MiB"] += process.memory_info().rss / 2**20
            found[f"{role}, files"] += process.num_fds()
            found[f"{role}, threads"] += process.num_threads()
            found[f"{role}, CPU-s"] += sum(process.cpu_times()[:2])
    files = frozenset(Path(tempfile.gettempdir()).glob(f"fraternal-{sweep_id}*/**/*"))
    found["scratch, files"] = len(files)
    found["scratch, KiB"] = sum(map(_size, files)) / 1024
    return Sample(trials, dict(found), files)


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:  # just now removed
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _role(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((role for part, role in ROLES.items() if part in words), "agents")


def growth(samples: Sequence[Sample], name: str) -> float:
    """From the warm-up to the end, whatever single samples say."""
    at = [(sample.trials, sample.found.get(name, 0.0)) for sample in samples if sample.trials >= WARM_UP]
    slope = median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(at, 2))
    return slope * (at[-1][0] - at[0][0])


def allowed(samples: Sequence[Sample], name: str) -> float:
    trials = samples[-1].trials - WARM_UP
    return ALLOWED.get(name.rpartition(" ")[2], 3.0) + trials * ALLOWED_A_TRIAL.get(name, 0.0)


def grown(samples: Sequence[Sample]) -> list[str]:
    """What breaks the law; of files, their names, too."""
    breaches = [
        f"{name}: {growth(samples, name):+.1f}, where {allowed(samples, name):.1f} are allowed"
        for name in sorted(samples[-1].found)
        if growth(samples, name) > allowed(samples, name)
    ]
    warm = next(sample for sample in samples if sample.trials >= WARM_UP)
    new = sorted(map(str, samples[-1].scratch - warm.scratch)) if breaches else []
    return [*breaches, *(f"new: {path}" for path in new)]


def table(samples: Sequence[Sample]) -> str:
    warm = [sample for sample in samples if sample.trials >= WARM_UP]
    shown = [warm[0], warm[len(warm) // 2], warm[-1]]
    counted = " | ".join(f"after {sample.trials}" for sample in shown)
    rows = [f"|  | {counted} | growth | allowed |\n|---|---|---|---|---|---|"]
    for name in sorted(warm[-1].found):
        values = " | ".join(f"{sample.found.get(name, 0):,.1f}".removesuffix(".0") for sample in shown)
        bound = f"{allowed(samples, name):.1f}".replace("inf", "–")
        rows.append(f"| {name} | {values} | {growth(samples, name):+.1f} | {bound} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="trials from one look to the next")
    given = parser.parse_args()
    samples = []
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder, "data")) as service:
        sweep_id = service.submit(no_op_spec(write_corpus(Path(folder, "corpus")), given.trials))
        began = time.monotonic()
        for sample in watch(service, sweep_id, given.every):
            samples.append(sample)
            print(f"{sample.trials} trials, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        assert service.sweep(sweep_id)["state"] == "succeeded"
        wait_until(lambda: not traces(service.data_dir, sweep_id), "nothing of the sweep is left")
    print(table(samples))
    breaches = grown(samples)
    print("\n".join(["", *(f"- {breach}" for breach in breaches or ["nothing grows"])]))
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
