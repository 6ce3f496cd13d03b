"""Which part of the service is busy first, with a hundred sweeps on a thousand GPUs.

    .venv/bin/python -m benchmarks.scale --database sqlite
    .venv/bin/python -m benchmarks.scale --database postgresql

Sweeps with their tables as they are late in their lives, simulated workers, a virtual clock, and all else
real (benchmarks/simulated.py). Prints Markdown: what each kind of work costs, measured over some virtual
seconds; how often there is of it in a second of the whole run, which follows; and how busy that keeps whom.
"""

import argparse
import itertools
import logging
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
import psutil
from pydantic import SecretStr
from sqlalchemy import create_engine, text

from benchmarks.filling import count_on, fill
from benchmarks.simulated import LOOK_S, Clients, Simulation, Timed, Training, sweep_spec
from service.errors import INTERRUPTED
from service.running import Interrupted, Signals
from service.settings import Settings
from tests.databases import PostgreSQL
from trials.driver import BEAT_S
from trials.pruners import rungs_of
from trials.spec import SweepSpec

TEMPLATE_TRIALS = 20
"""Of the sweep whose rows are copied; it really runs."""
TEMPLATE_EPOCHS = 20
SECONDS_TO_START = 15.0
DAY_S = 86_400
Kinds = dict[str, Timed]
Rates = dict[str, float]
ONCE = ("submit a sweep", "driver: opens its study")
"""Kinds of work of which there is one a sweep, before anything is measured of the others."""


@dataclass(frozen=True)
class Load:
    """What a whole run asks for in a second, on the average."""

    sweeps: int
    trials: int
    """Of all sweeps."""
    epochs_of_a_trial: float
    epochs: float
    """A second, of all workers."""

    @property
    def begun(self) -> float:
        """Trials a second."""
        return self.epochs / self.epochs_of_a_trial

    @property
    def seconds(self) -> float:
        """That the whole run takes."""
        return self.trials / self.begun

    def rates(self, clients: Clients) -> dict[str, float]:
        """Of each kind of work, how often there is of it."""
        once = self.sweeps / self.seconds
        return {
            "driver: beat": self.sweeps / BEAT_S,
            "driver: share": self.sweeps / BEAT_S,
            "driver: begins a trial": self.begun,
            "driver: records an epoch": self.epochs - self.begun,
            "driver: records an epoch, the trial's last": self.begun,
            "driver: opens its study": once,
            "submit a sweep": once,
            "reconciler: a look": 1 / LOOK_S,
            "GET / (home page)": clients.pages[0] / clients.pages[1],
            "GET /v1/sweeps": clients.scripts[0] / clients.scripts[1],
            "GET /v1/sweeps/{id}": clients.watchers[0] / clients.watchers[1],
            "GET /metrics": clients.scrapes[0] / clients.scrapes[1],
            "stream of the list: a look": 1 / LOOK_S,
            "stream of a sweep: a look": clients.watchers[0] / LOOK_S,
        }


def load_of(spec: SweepSpec, sweeps: int, workers: int, epoch_s: float) -> Load:
    """Successive halving lets one in so many pass each rung."""
    factor = getattr(spec.pruner, "reduction_factor", 1)
    ends = [0, *sorted(rungs_of(spec, 0)), spec.training.epochs]
    epochs = sum((after - before) / factor**i for i, (before, after) in enumerate(itertools.pairwise(ends)))
    return Load(sweeps, sweeps * spec.budget.trials, epochs, workers / epoch_s)


class Server:
    """Of a database, what its own processes do; of SQLite there is none."""

    def __init__(self, url: str, processes: Callable[[], list[psutil.Process]]) -> None:
        self._engine = create_engine(url)
        self._processes = processes
        self.is_sqlite = self._engine.dialect.name == "sqlite"

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(of.user + of.system for of in times)

    def log_bytes(self) -> float:
        """Written ahead, so far."""
        return 0.0 if self.is_sqlite else self._ask("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")

    def size(self) -> float:
        if self.is_sqlite:
            return self._ask("PRAGMA page_count") * self._ask("PRAGMA page_size")
        return self._ask("SELECT pg_database_size(current_database())")

    def connections(self) -> float:
        return self._ask("SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL")

    def rows(self, table: str) -> int:
        return int(self._ask(f"SELECT count(*) FROM {table}"))

    def _ask(self, question: str) -> float:
        with self._engine.connect() as connection:
            return float(connection.execute(text(question)).scalar_one())


TABLES = (
    "trials", "trial_user_attributes", "trial_params", "trial_values", "trial_intermediate_values",
    "fraternal_epochs", "fraternal_events",
)  # fmt: skip


@contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[Settings, Server]]:
    """Settings over an empty one, its server."""
    data_dir = folder / "data"
    data_dir.mkdir()
    many = {"data_dir": data_dir, "running_sweeps": 1000}
    if kind == "sqlite":
        settings = Settings(**many)
        yield settings, Server(settings.resolved_database_url, list)
        return
    with tempfile.TemporaryDirectory(prefix="pg") as place:
        Path(place).chmod(0o755)
        postgresql = PostgreSQL(Path(place))
        try:
            allow_connections(postgresql, 1000)
            assert postgresql.url is not None
            settings = Settings(database_url=SecretStr(postgresql.url), **many)
            yield settings, Server(postgresql.url, lambda: family_of(postgresql))
        finally:
            postgresql.close()


def allow_connections(postgresql: PostgreSQL, most: int) -> None:
    """All drivers are in one process here; what they would have in theirs is as many."""
    assert postgresql.url is not None
    admin = create_engine(postgresql.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"ALTER SYSTEM SET max_connections = {most}")
    admin.dispose()
    postgresql.take_away()
    postgresql.give_back()


def family_of(postgresql: PostgreSQL) -> list[psutil.Process]:
    postmaster = psutil.Process(postgresql._server.get_pid())
    return [postmaster, *postmaster.children(recursive=True)]


def measure(given: argparse.Namespace, folder: Path, signals: Signals) -> None:
    clients = Clients()
    with database(given.database, folder) as (settings, server):
        simulation = Simulation(settings, given.workers, given.seed, clients=clients)
        spec = SweepSpec.model_validate(sweep_spec(given.trials, given.epochs, given.seed))
        load = load_of(spec, given.sweeps, given.workers, given.epoch_seconds)
        simulation.every(LOOK_S, lambda: signals.pause(0))
        sweep_ids = fill_tables(simulation, given, signals)
        said("the drivers start")
        simulation.are_looked_at = True
        simulation.training = Training(epoch_s=given.epoch_seconds)
        simulation.is_young = True
        simulation.run_for(SECONDS_TO_START)
        simulation.is_young = False
        size, began = server.size(), simulation.clock.s
        cpu_s, log_bytes = server.cpu_s(), server.log_bytes()
        start = simulation.meter.kinds
        simulation.meter.clear()
        said(f"{simulation.most_at_work} workers are at work; {given.seconds:g} virtual seconds are measured")
        simulation.run_for(given.seconds)
        took = simulation.clock.s - began
        kinds = {**{kind: start[kind] for kind in ONCE}, **simulation.meter.kinds}
        print_rows(server, load, size)
        print_table(kinds, load.rates(clients), took)
        print_busy(kinds, load, load.rates(clients), server)
        if not server.is_sqlite:  # its work goes by the transactions that write
            writes = sum(timed.writes for timed in simulation.meter.kinds.values())
            a_second = per_second(kinds, load.rates(clients), lambda timed: timed.writes) / writes
            busy, logged = server.cpu_s() - cpu_s, server.log_bytes() - log_bytes
            print_server(server, load, busy * a_second, logged * a_second)
        states = Counter(simulation.records.get_sweep(sweep_id).state for sweep_id in sweep_ids)
        print(f"\n{states['running']} sweeps run, on at most {simulation.most_at_work} workers at once")
        simulation.close()


def fill_tables(simulation: Simulation, given: argparse.Namespace, signals: Signals) -> list[str]:
    """A sweep that runs, and all others with as many copies of its trials as they are to have already."""
    simulation.are_looked_at = False
    simulation.training = Training(epoch_s=0.5)
    template = simulation.submit(sweep_spec(TEMPLATE_TRIALS, TEMPLATE_EPOCHS, given.seed))
    simulation.run(lambda: template in simulation.ended)
    sweep_ids = [
        simulation.submit(sweep_spec(given.trials, given.epochs, given.seed + number))
        for number in range(given.sweeps)
    ]
    copies = int(given.trials * given.filled) // TEMPLATE_TRIALS
    said(f"{given.sweeps * copies * TEMPLATE_TRIALS:,} trials are copied into the tables")
    storage = simulation.app.state.controller.storage
    for sweep_id in sweep_ids:
        signals.pause(0)
        fill(simulation.records, storage, template, sweep_id, copies)
    count_on(simulation.records.engine)
    return sweep_ids


def print_rows(server: Server, load: Load, size: float) -> None:
    counts = {table: server.rows(table) for table in TABLES}
    trials, rows = counts["trials"], sum(counts.values())
    print(f"\n{size / 1e9:.2f} GB: " + ", ".join(f"{table} {count:,}" for table, count in counts.items()))
    print(
        f"{size / trials / 1000:.1f} KB and {rows / trials:.1f} rows a trial, "
        f"of {counts['fraternal_epochs'] / trials:.1f} epochs"
    )
    a_day = load.begun * DAY_S
    print(
        f"the whole run: {load.trials:,} trials of {load.epochs_of_a_trial:.1f} epochs in "
        f"{load.seconds / 3600:.1f} hours; a day of it: {a_day:,.0f} trials, "
        f"{a_day * rows / trials / 1e6:.1f} million rows, {a_day * size / trials / 1e9:.2f} GB"
    )


def print_table(kinds: Kinds, rates: Rates, took: float) -> None:
    print("\n| work | measured | a second | CPU, ms | p95, ms | p99, ms | writes | rows | KB | busy |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind, timed in sorted(kinds.items()):
        count = len(timed.seconds)
        p95, p99 = (1000 * float(np.percentile(timed.seconds, of)) for of in (95, 99))
        rate = rates.get(kind, count / took)
        cpu_s = timed.cpu_s / count
        print(
            f"| {kind} | {count:,} | {rate:.3g} | {1000 * cpu_s:.1f} | {p95:.0f} | {p99:.0f} | "
            f"{timed.writes / count:.1f} | {timed.rows / count:.1f} | {timed.written / count / 1000:.0f} | "
            f"{rate * cpu_s:.3f} |"
        )


def per_second(kinds: Kinds, rates: Rates, value: Callable[[Timed], float], *of: str) -> float:
    """Of these kinds together, in a second of the whole run."""
    return math.fsum(
        rates.get(kind, 0.0) * value(timed) / len(timed.seconds)
        for kind, timed in kinds.items()
        if kind.startswith(of or "")
    )


def print_busy(kinds: Kinds, load: Load, rates: Rates, server: Server) -> None:
    def busy(*of: str) -> float:
        return per_second(kinds, rates, lambda timed: timed.cpu_s, *of)

    writes = per_second(kinds, rates, lambda timed: timed.writes)
    rows = per_second(kinds, rates, lambda timed: timed.rows)
    requests = sum(rate for kind, rate in rates.items() if kind.startswith(("GET", "submit")))
    print(f"\n{writes:.0f} transactions that write, {rows:.0f} rows, {requests:.1f} requests a second")
    written = per_second(kinds, rates, lambda timed: timed.written)
    if server.is_sqlite:
        print(f"{written / 1e6:.1f} MB a second to SQLite's files, {written * DAY_S / 1e9:.0f} GB a day")
    print("\n| who | busy |\n|---|---:|")
    if server.is_sqlite:
        print(f"| SQLite's one writer | {per_second(kinds, rates, lambda timed: timed.writing_s):.2f} |")
    print(f"| a driver, of {load.sweeps} | {busy('driver') / load.sweeps:.3f} |")
    print(f"| all drivers, in cores | {busy('driver'):.2f} |")
    print(f"| the reconciler | {busy('reconciler'):.2f} |")
    print(f"| the web process, with the reconciler | {busy('GET', 'stream', 'submit', 'reconciler'):.2f} |")


def print_server(server: Server, load: Load, busy: float, logged: float) -> None:
    """Its work in a second of the whole run: processors, bytes."""
    print(f"| PostgreSQL's server, in cores | {busy:.2f} |")
    print(f"\n{logged / 1e6:.2f} MB a second written ahead, {logged * DAY_S / 1e9:.0f} GB a day;", end=" ")
    print(f"{server.connections():.0f} connections, of {load.sweeps} drivers and the service in one process")


def said(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sweeps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1000, help="GPUs, eight a node")
    parser.add_argument("--trials", type=int, default=1000, help="of each sweep")
    parser.add_argument("--epochs", type=int, default=500, help="of a trial that no rung ends")
    parser.add_argument("--epoch-seconds", type=float, default=60.0, help="the median; lognormal")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--filled", type=float, default=0.9, help="of the trials, that have ended before")
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual ones, that are measured")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, Signals() as signals:
        measure(given, Path(folder), signals)


if __name__ == "__main__":
    try:
        main()
    except Interrupted:
        sys.exit(INTERRUPTED)
