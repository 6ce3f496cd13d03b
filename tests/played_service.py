"""The real service over real HTTP, with sweeps that are played, not trained: no torch, no Ray, no waiting."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from service.app import create_app
from service.database import open_engine
from service.launcher import Capacity
from service.records import Records, SweepJournal
from service.serve import _PatientServer, server_config
from service.settings import Settings
from service.streams import Abortable
from service.studies import open_storage, study_to_go_on_with, write_down
from tests.fakes import checkpoint_files, probe_of, verified
from trials.ledger import StudyLedger
from trials.spec import SweepSpec
from trials.steps import Probe, ProbeOrder
from trials.store import CheckpointStore
from trials.tasks import Failure, Report, Task
from trials.verification import Verifier

HELD = "held"
"""A sweep of this name stays after the first epoch of its first trial until it is cancelled."""
PATIENCE_S = 120.0
"""Until a sweep that does not get on is given up: a few epochs take a second, or twenty beside others."""
SPEC: dict[str, Any] = {
    "corpus": {"name": "sotu"},
    "training": {"epochs": 3},
    "space": {"lr": {"type": "uniform", "low": 1, "high": 30}},
    "budget": {"trials": 6},
}


class PlayingLauncher:
    """A Launcher whose driver is a function: it writes down what a driver would, and is done at once."""

    def __init__(self, settings: Settings) -> None:
        self.records = Records(open_engine(settings.resolved_database_url))
        self.storage = open_storage(settings.resolved_database_url)
        self._store = CheckpointStore(settings.resolved_store_url)
        self._ended: set[str] = set()
        self.forgotten: list[str] = []

    def close(self) -> None:
        self.records.engine.dispose()
        self.storage.engine.dispose()

    def capacity(self) -> Capacity:
        return Capacity(cpus=2, gpus=0)

    async def probe(self, order: ProbeOrder) -> Probe:
        return probe_of(order)

    def launch(self, sweep_id: str, generation: int) -> dict[str, Any]:
        self._ended.discard(sweep_id)  # the reconciler has what was there before ended
        spec = self.records.get_sweep(sweep_id).spec
        journal = SweepJournal(self.records, sweep_id, generation)
        study = study_to_go_on_with(self.records, self.storage, sweep_id, generation)
        ledger = StudyLedger(spec, sweep_id, self.storage, journal, self._store, study)
        if spec.name == HELD:
            self._play(ledger, spec, epochs=1)
        else:
            while self._play(ledger, spec, epochs=spec.training.epochs):
                pass
            Verifier(ledger, verified).settle()
            write_down(self.records, sweep_id, generation, ledger)
        return {"sweep": sweep_id}

    def is_alive(self, driver: dict[str, Any]) -> bool:
        return driver["sweep"] not in self._ended

    def is_stopped(self, driver: dict[str, Any]) -> bool:
        return False

    def end(self, sweep_id: str) -> None:
        self._ended.add(sweep_id)

    def identity(self) -> dict[str, Any]:
        return {"sweep": "none: the service itself"}

    def forget(self, sweep_id: str) -> None:
        self.forgotten.append(sweep_id)

    def log_tail(self, sweep_id: str) -> str:
        return ""

    def _play(self, ledger: StudyLedger, spec: SweepSpec, epochs: int) -> bool:
        """One trial, better with every epoch and with its number; one with a `clip` of 13 diverges."""
        task = ledger.next_task()
        if task is None:
            return False
        if task.config.training.clip == 13:
            ledger.record(
                task, Report(None, True, Failure("diverged", "the loss is nan at step 1 of epoch 1"))
            )
            return True
        for epoch in range(1, epochs + 1):
            finished = epoch == spec.training.epochs
            if not ledger.record(task, self._report(task, epoch, finished)):
                break
        return True

    def _report(self, task: Task, epoch: int, finished: bool) -> Report:
        loss = 6 - 0.5 * epoch - 0.01 * task.number
        files = checkpoint_files(task, epoch, loss)
        sha256 = self._store.save_best(task.sweep_id, task.number, files)
        losses = dict.fromkeys(("train_loss", "valid_loss", "raw_valid_loss", "optimised"), loss)
        others = dict.fromkeys(("penalty", "ar", "tar", "gradient_norm", "seconds"), 0.0)
        result = {"epoch": epoch, "averaged": False, "tokens": 100, "is_best": True, **losses, **others}
        return Report(result, finished, None, epoch, loss, sha256, "cpu")


class PlayedDriver:
    """The driver of one sweep, of a service that lets all others wait: each trial ends when it is told to."""

    def __init__(self, data_dir: Path, sweep_id: str) -> None:
        self._launcher = PlayingLauncher(Settings(data_dir=data_dir))
        records, storage = self._launcher.records, self._launcher.storage
        records.claim(records.get_sweep(sweep_id), fruitless=0, epochs_done=0)
        self._spec = records.get_sweep(sweep_id).spec
        journal = SweepJournal(records, sweep_id, 1)
        study = study_to_go_on_with(records, storage, sweep_id, 1)
        self._ledger = StudyLedger(self._spec, sweep_id, storage, journal, self._launcher._store, study)

    def play(self) -> None:
        """The next trial, to its end."""
        assert self._launcher._play(self._ledger, self._spec, self._spec.training.epochs)

    def verify(self) -> None:
        """The best checkpoint, as before a sweep ends."""
        Verifier(self._ledger, verified).settle()

    def close(self) -> None:
        self._launcher.close()


class _Server(_PatientServer):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the test run's."""
        yield


@contextmanager
def played_service(data_dir: Path, *, plays: bool = True, **given: Any) -> Iterator[httpx.Client]:
    """A client of a service that runs in this process; unless it plays, its sweeps stay queued.

    What is given are settings; it listens on loopback, whatever `host` they have.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = Settings(data_dir=data_dir, **{"port": 0, **given})
    launcher = PlayingLauncher(settings)
    app = create_app(settings, launcher)
    server = _Server(
        server_config(
            Abortable(app),
            port=settings.port,
            lifespan="on" if plays else "off",
            timeout_keep_alive=60,  # a busy machine may let a test wait for longer than by default
        ),
        app.state.streams,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        launcher.close()
        close_databases(app)


def close_databases(app: FastAPI) -> None:
    """Both pools of an application: nobody else would, before the process ends."""
    controller = app.state.controller
    controller.records.engine.dispose()
    controller.storage._backend.engine.dispose()


def submit(client: httpx.Client, **changes: Any) -> str:
    response = client.post("/v1/sweeps", json={**SPEC, **changes})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def wait_for(client: httpx.Client, sweep_id: str, *states: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (sweep := client.get(f"/v1/sweeps/{sweep_id}").json())["state"] not in states:
        assert time.monotonic() < deadline, sweep
        time.sleep(0.05)
    return sweep


def wait_for_an_epoch(client: httpx.Client, sweep_id: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not client.get(f"/v1/sweeps/{sweep_id}").json()["epochs_done"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
