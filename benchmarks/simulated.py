"""A service at scale without machines: the real controller, reconciler, ledgers, searchers, schedulers and
database, on a virtual clock, with workers that only say what a training would.

Nothing waits: each event happens at its virtual moment, and whatever the service does then is done for real,
and timed. So a virtual second takes as long as the work in it.
"""

import asyncio
import heapq
import itertools
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher
from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import Pool

import service.database
from service.app import create_app
from service.database import WRITING, open_engine
from service.launcher import Capacity
from service.live import Standing
from service.records import Records, SweepJournal
from service.schemas import SweepView
from service.settings import Settings
from service.studies import open_fenced_storage, study_to_go_on_with, write_down
from tests.fakes import epoch_fields, probe_of, verified
from trials.driver import BEAT_S
from trials.ledger import StudyLedger
from trials.search import LedgerScheduler, StudySearch
from trials.shares import Node
from trials.steps import Probe, ProbeOrder
from trials.store import CheckpointStore
from trials.tasks import Report, Task
from trials.verification import Verifier

LOOK_S = 0.5
"""Of the reconciler, and of the hubs behind the streams."""
ASK_S = 0.1
"""How often Tune asks for a trial, while it has nothing else to do."""
START_S = 5.0
"""From a driver's launch until it opens its study."""
GPUS_OF_A_NODE = 8
Step = Callable[[], None]


class Clock:
    """Virtual seconds, and what the service takes for the time."""

    def __init__(self) -> None:
        self.s = 0.0
        self._began = datetime.now(UTC)

    def now(self) -> datetime:
        return self._began + timedelta(seconds=self.s)


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Around what asks service.database.now: leases, beats and looks go by the clock then."""
    real = service.database.now
    places = [module for module in list(sys.modules.values()) if getattr(module, "now", None) is real]
    for module in places:
        module.now = clock.now  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in places:
            module.now = real  # type: ignore[attr-defined]


@dataclass
class Timed:
    """What one kind of work has taken."""

    seconds: list[float] = field(default_factory=list)
    """Of each time, by the clock on the wall: other work on the machine is in it."""
    cpu_s: float = 0.0
    """Of this process, all times together."""
    writing_s: float = 0.0
    """The same between the first write of each of its transactions and that one's end: on SQLite nobody else
    writes then."""
    reads: int = 0
    writes: int = 0
    """Transactions that write."""
    rows: int = 0
    """Written ones."""
    written: int = 0
    """Bytes to files; on PostgreSQL its server writes them, and this is none of it."""


class Meter:
    """Times work by its kind, and counts what it does to the database."""

    def __init__(self) -> None:
        self.kinds: dict[str, Timed] = {}
        self._doing: Timed | None = None
        self._process = psutil.Process()

    def clear(self) -> None:
        self.kinds = {}

    @contextmanager
    def timing(self, kind: str) -> Iterator[SimpleNamespace]:
        """Of a kind that may be named once it is known, as `kind` of what this gives."""
        found = SimpleNamespace(kind=kind)
        self._doing = doing = Timed()
        written = self._process.io_counters().write_chars
        began, cpu = time.perf_counter(), time.process_time()
        try:
            yield found
        finally:
            doing.cpu_s = time.process_time() - cpu
            took = time.perf_counter() - began
            self._doing = None
            of = self.kinds.setdefault(found.kind, Timed())
            of.seconds.append(took)
            of.written += self._process.io_counters().write_chars - written
            for name in ("cpu_s", "writing_s", "reads", "writes", "rows"):
                setattr(of, name, getattr(of, name) + getattr(doing, name))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While it counts statements, of every engine of this process."""
        listeners = [
            (Engine, "before_cursor_execute", self._begins),
            (Engine, "after_cursor_execute", self._is_done),
            (Pool, "checkin", self._is_over),
        ]
        for listener in listeners:
            event.listen(*listener)
        try:
            yield
        finally:
            for listener in listeners:
                event.remove(*listener)

    def _begins(self, connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith(WRITING):
            connection.info.setdefault("writes since", time.thread_time())

    def _is_done(self, _connection: Connection, cursor: Any, statement: str, *_rest: Any) -> None:
        if self._doing is None:
            return
        if statement.startswith(WRITING):
            self._doing.rows += max(0, cursor.rowcount)
        else:
            self._doing.reads += 1

    def _is_over(self, _connection: Any, record: Any) -> None:
        since = record.info.pop("writes since", None)
        if since is not None and self._doing is not None:
            self._doing.writing_s += time.thread_time() - since
            self._doing.writes += 1


@dataclass(frozen=True)
class Clients:
    """Who looks, and how often, as (how many, seconds from one look of each to its next)."""

    pages: tuple[int, float] = (20, 60.0)
    """That show all sweeps; between loads each follows the one stream that they share."""
    scripts: tuple[int, float] = (10, 10.0)
    """That list the sweeps."""
    watchers: tuple[int, float] = (20, 5.0)
    """Of one sweep each, whose stream of events they have, too."""
    scrapes: tuple[int, float] = (1, 15.0)


@dataclass(frozen=True)
class Training:
    """What the workers would have done."""

    epoch_s: float = 60.0
    spread: float = 0.3
    """Of the logarithm of an epoch's seconds; half of it is the trial's own."""
    lost: float = 0.0005
    """Workers that are lost, of all epochs."""


class Simulation:
    """Runs sweeps of a service over `settings`' database by simulated workers, one GPU each."""

    def __init__(
        self,
        settings: Settings,
        workers: int,
        seed: int,
        training: Training = Training(),  # it is frozen
        clients: Clients | None = None,
    ) -> None:
        self.settings, self.workers, self.training = settings, workers, training
        self.clock, self.meter = Clock(), Meter()
        self.random = random.Random(seed)
        self.seed = seed
        whole, rest = divmod(workers, GPUS_OF_A_NODE)
        sizes = [GPUS_OF_A_NODE] * whole + [rest] * (rest > 0)
        self.nodes = [Node(2.0 * size, float(size)) for size in sizes]
        self.idle = workers
        self.waiting: deque[Step] = deque()
        """Trials that were handed out before there was a worker for them: Ray has them wait."""
        self.launcher = SimulatedLauncher(self)
        self.app = create_app(settings, self.launcher)
        self.records = Records(open_engine(settings.resolved_database_url))
        self.store = CheckpointStore(settings.resolved_store_url)
        self.drivers: dict[str, Driver] = {}
        self.begun: Counter[tuple[str, int]] = Counter()
        """Attempts, by sweep and trial."""
        self.ended: list[str] = []
        """Sweeps, in the order of their ends."""
        self.most_at_work = 0
        self.most_promised = 0
        """Trials that all drivers together took for theirs, once each of them had heard of all others."""
        self.most_over_share = 0
        """Trials that a driver handed out beyond its share of the moment."""
        self.is_young = False
        """Whether epochs that begin now count as begun at any time before, so that reports do not all come at
        once."""
        self._steps: list[tuple[float, int, Step]] = []
        self._order = itertools.count()
        self._runner = asyncio.Runner()
        transport = httpx.ASGITransport(self.app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600)
        self._standings: Mapping[str, Standing] = {}
        self._cursors: dict[str, int] = {}
        self.are_looked_at = clients is not None
        """Whether the clients are there."""
        self.every(LOOK_S, self._reconcile)
        if clients is not None:
            self._let_look(clients)

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()
        for driver in self.drivers.values():
            driver.close()
        self.records.engine.dispose()
        controller = self.app.state.controller
        controller.records.engine.dispose()
        controller.storage._backend.engine.dispose()

    def at(self, after_s: float, step: Step) -> None:
        heapq.heappush(self._steps, (self.clock.s + after_s, next(self._order), step))

    def every(self, seconds: float, step: Step) -> None:
        def again() -> None:
            step()
            self.at(seconds, again)

        self.at(self.random.uniform(0, seconds), again)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Go on until that is so, which is asked after each event."""
        with virtual_time(self.clock), self.meter.listening():
            while not is_over():
                self.clock.s, _, step = heapq.heappop(self._steps)
                step()

    def run_for(self, seconds: float) -> None:
        until = self.clock.s + seconds
        self.run(lambda: self._steps[0][0] > until)

    def submit(self, spec: Mapping[str, Any]) -> str:
        with virtual_time(self.clock), self.meter.listening(), self.meter.timing("submit a sweep"):
            answer = self._runner.run(self._client.post("/v1/sweeps", json=dict(spec)))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def get(self, path: str) -> httpx.Response:
        answer = self._runner.run(self._client.get(path))
        assert answer.status_code == 200, answer.text
        return answer

    def take_worker(self, begin: Step) -> None:
        if self.idle:
            self.idle -= 1
            self.most_at_work = max(self.most_at_work, self.workers - self.idle)
            begin()
        else:
            self.waiting.append(begin)

    def give_worker(self) -> None:
        self.idle += 1
        if self.waiting:
            self.take_worker(self.waiting.popleft())

    def count_shares(self) -> None:
        at_it = [driver for driver in self.drivers.values() if driver.is_open]
        if all(self.clock.s - driver.opened_at > 2 * BEAT_S for driver in at_it):
            self.most_promised = max(self.most_promised, sum(driver.share for driver in at_it))

    def _reconcile(self) -> None:
        with self.meter.timing("reconciler: a look"):
            self.app.state.reconciler.reconcile()

    def _let_look(self, clients: Clients) -> None:
        def looks(of: tuple[int, float], kind: str, look: Step) -> None:
            def timed() -> None:
                if self.are_looked_at:
                    with self.meter.timing(kind):
                        look()

            for _ in range(of[0]):
                self.every(of[1], timed)

        looks(clients.pages, "GET / (home page)", partial(self.get, "/"))
        looks(clients.scripts, "GET /v1/sweeps", partial(self.get, "/v1/sweeps?page_size=100"))
        looks(clients.watchers, "GET /v1/sweeps/{id}", lambda: self.get(f"/v1/sweeps/{self._any()}") and None)
        looks(clients.scrapes, "GET /metrics", partial(self.get, "/metrics"))
        looks((1, LOOK_S), "stream of the list: a look", self._look_at_list)
        looks((clients.watchers[0], LOOK_S), "stream of a sweep: a look", self._look_at_events)

    def _any(self) -> str:
        return self.random.choice(list(self.drivers))

    def _look_at_list(self) -> None:
        """What service.live.ListHub does."""
        standings = self.app.state.live.standings()
        before, self._standings = self._standings, standings
        changed = [id for id, standing in standings.items() if before.get(id, standing) != standing]
        self.app.state.live.rows(changed, self._row)

    def _row(self, sweep: SweepView) -> str:
        return str(self.app.state.rows.row(sweep, may_write=True))

    def _look_at_events(self) -> None:
        sweep_id = self._any()
        log = self.app.state.events
        known = self._cursors.get(sweep_id)
        look = log.latest(sweep_id, 100) if known is None else log.after(sweep_id, known, 100)
        if look.events:
            self._cursors[sweep_id] = look.events[-1]["id"]


class SimulatedLauncher:
    """service.launcher.Launcher of drivers in this process."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def capacity(self) -> Capacity:
        nodes = tuple(self._simulation.nodes)
        return Capacity(max(node.cpus for node in nodes), max(node.gpus for node in nodes), nodes=nodes)

    async def probe(self, order: ProbeOrder) -> Probe:
        return probe_of(order)

    def launch(self, sweep_id: str, generation: int) -> dict[str, Any]:
        driver = Driver(self._simulation, sweep_id, generation)
        self._simulation.drivers[sweep_id] = driver
        self._simulation.at(START_S, driver.open)
        return {"sweep": sweep_id, "generation": generation}

    def is_alive(self, driver: dict[str, Any]) -> bool:
        if "sweep" not in driver:
            return True
        found = self._simulation.drivers.get(driver["sweep"])
        return found is not None and found.generation == driver["generation"]

    def is_stopped(self, driver: dict[str, Any]) -> bool:
        return False

    def identity(self) -> dict[str, Any]:
        return {"controller": "of the simulation"}

    def forget(self, sweep_id: str) -> None: ...

    def end(self, sweep_id: str) -> None:
        driver = self._simulation.drivers.pop(sweep_id, None)
        if driver is not None:
            driver.close()

    def log_tail(self, sweep_id: str) -> str:
        return ""


class Driver:
    """What service.drive and trials.driver do, in turns: open, beat, ask, take reports, end."""

    def __init__(self, simulation: Simulation, sweep_id: str, generation: int) -> None:
        self.sweep_id, self.generation = sweep_id, generation
        self._simulation = simulation
        self._meter = simulation.meter
        self._ids = itertools.count()
        self._open = False
        self.opened_at = math.inf

    def open(self) -> None:
        simulation = self._simulation
        records, url = simulation.records, simulation.settings.resolved_database_url
        with self._meter.timing("driver: opens its study"):
            self._spec = records.get_sweep(self.sweep_id).spec
            self._journal = SweepJournal(records, self.sweep_id, self.generation)
            self._storage = open_fenced_storage(url, self.sweep_id, self.generation)
            study = study_to_go_on_with(records, self._storage, self.sweep_id, self.generation)
            self.ledger = StudyLedger(
                self._spec, self.sweep_id, self._storage, self._journal, simulation.store, study
            )
        self.search = StudySearch(self.ledger, {}, lambda node, pid: None)
        self._scheduler = LedgerScheduler(self.ledger, self.search)
        self._open, self.opened_at = True, simulation.clock.s
        self._beat()
        self._ask_again()

    def close(self) -> None:
        if self._open:
            cast(Any, self._storage)._backend.engine.dispose()
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def share(self) -> int:
        return self.ledger._share or 0

    def _beat(self) -> None:
        if not self._open:
            return
        with self._meter.timing("driver: beat"):
            self.ledger.heed(self._journal.beat())
        with self._meter.timing("driver: share"):
            self.ledger.share(self._simulation.nodes)
        self._simulation.count_shares()
        self.search.end_stopped()
        self._simulation.at(BEAT_S, self._beat)

    def _ask_again(self) -> None:
        if self._open:
            self._ask()
            self._simulation.at(ASK_S, self._ask_again)

    def _ask(self) -> None:
        """As Tune does, until it is told that there is none now."""
        while self._open:
            if self.ledger.is_full and self.search.tasks:  # which is no work
                return
            trial_id = f"{self.sweep_id}-{next(self._ids)}"
            with self._meter.timing("driver: asked in vain") as timed:
                suggested = self.search.suggest(trial_id)
                if isinstance(suggested, dict):
                    timed.kind = "driver: begins a trial"
            if suggested == Searcher.FINISHED and not self.ledger.is_full:
                self._end()
            if not isinstance(suggested, dict):
                return
            task: Task = suggested["task"]
            self._simulation.begun[self.sweep_id, task.number] += 1
            over = len(self.search.tasks) - self.share
            self._simulation.most_over_share = max(self._simulation.most_over_share, over)
            self._simulation.take_worker(Worker(self._simulation, self, trial_id, task).begin)

    def _end(self) -> None:
        with self._meter.timing("driver: ends its sweep"):
            Verifier(self.ledger, verified).settle()
            write_down(self._simulation.records, self.sweep_id, self.generation, self.ledger)
        self._simulation.ended.append(self.sweep_id)
        self.close()

    def goes_on(self, trial_id: str, report: Report) -> bool:
        """Take a report, and see whether its trial goes on."""
        if not self._open:
            return False
        with self._meter.timing("driver: records an epoch") as timed:
            result = {"report": report, "pid": 1, "node": ""}
            if not report.finished:  # Tune shows the last one to nobody but the searcher
                trial = cast(Any, SimpleNamespace(trial_id=trial_id))
                said = self._scheduler.on_trial_result(cast(Any, None), trial, result)
                if said == TrialScheduler.CONTINUE:
                    return True
            timed.kind = "driver: records an epoch, the trial's last"
            self.search.on_trial_complete(trial_id, result)
        self._simulation.give_worker()
        self._ask()
        return False

    def lose(self, trial_id: str) -> None:
        if not self._open:
            return
        with self._meter.timing("driver: loses a worker"):
            self.search.on_trial_complete(trial_id, error=True)
        self._simulation.give_worker()
        self._ask()


class Worker:
    """One attempt at a trial: says after each of its epochs what trials.attempt would."""

    def __init__(self, simulation: Simulation, driver: Driver, trial_id: str, task: Task) -> None:
        self._simulation, self._driver, self._trial_id, self._task = simulation, driver, trial_id, task
        self._epoch = task.recorded_epochs
        self._random = random.Random(f"{simulation.seed} {task.seed} {task.arm} {task.attempt}")
        spread = simulation.training.spread / math.sqrt(2)
        self._epoch_s = simulation.training.epoch_s * self._random.lognormvariate(0, spread)
        self._spread = spread
        self._quality = random.Random(f"{simulation.seed} {task.seed} {task.arm}").gauss(0, 0.2)
        self._best, self._best_epoch = math.inf, task.best_epoch

    def begin(self) -> None:
        seconds = self._epoch_s * self._random.lognormvariate(0, self._spread)
        if self._simulation.is_young:
            seconds *= self._random.random()
        if self._random.random() < self._simulation.training.lost:
            self._simulation.at(seconds / 2, lambda: self._driver.lose(self._trial_id))
        else:
            self._simulation.at(seconds, self._report)

    def _report(self) -> None:
        self._epoch += 1
        loss = 4.3 + self._quality + 1.5 / math.sqrt(self._epoch) + self._random.gauss(0, 0.02)
        if loss < self._best:
            self._best, self._best_epoch = loss, self._epoch
        is_best = self._best_epoch == self._epoch
        losses = dict.fromkeys(("train_loss", "valid_loss", "raw_valid_loss", "optimised"), loss)
        said = Report(
            epoch={**epoch_fields(0, 1), **losses, "epoch": self._epoch, "is_best": is_best},
            finished=self._epoch >= self._task.config.training.epochs,
            best_epoch=self._best_epoch,
            best_valid_loss=self._best,
            checkpoint_sha256=f"{self._random.getrandbits(256):064x}" if is_best else None,
            device="NVIDIA H200",
            runtime="torch 2.13.0+cu130, cuDNN 9.10",
        )
        if self._driver.goes_on(self._trial_id, said):
            self.begin()


def sweep_spec(trials: int, epochs: int, seed: int, **changes: Any) -> dict[str, Any]:
    """Two arms over Penn Treebank's usual axes, pruned by successive halving from the first epoch on."""
    return {
        "name": f"scale {seed}",
        "corpus": {"name": "sotu"},
        "training": {"epochs": epochs},
        "arms": {"plain": {"regularizer": "none"}, "fd": {"regularizer": "fraternal"}},
        "space": {
            "lr": {"type": "log_uniform", "low": 1.0, "high": 60.0},
            "output_p": {"type": "uniform", "low": 0.0, "high": 0.6},
            "weight_p": {"type": "uniform", "low": 0.0, "high": 0.6},
        },
        "sampler": {"name": "random", "seed": seed},
        "pruner": {"name": "successive_halving", "min_epochs": 1, "reduction_factor": 3},
        "budget": {"trials": trials},
        "resources": {"cpus": 1, "gpus": 1},
        "retention": {"bests_per_arm": 10},  # else a disk would have to hold every trial's best
        **changes,
    }
