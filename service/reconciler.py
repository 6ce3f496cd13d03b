"""Drives what is towards what is wished for: the only one that starts or ends drivers."""

import logging
import threading
from datetime import datetime, timedelta

from optuna.storages import BaseStorage

from service.launcher import Launcher
from service.records import Records, SweepRecord, now
from trials.ledger import Failure, close_open_trials

log = logging.getLogger(__name__)

PERIOD_S = 0.5
TIME_TO_END = timedelta(seconds=20)
"""For a driver, once it has written its sweep's end."""
MOST_FRUITLESS_LAUNCHES = 5
"""Drivers in a row that died before an epoch was recorded, until a sweep is given up."""


class Reconciler:
    """Looks at every open sweep twice a second, in a thread of its own."""

    def __init__(
        self, records: Records, storage: BaseStorage, launcher: Launcher, running_sweeps: int
    ) -> None:
        self._records = records
        self._storage = storage
        self._launcher = launcher
        self._running_sweeps = running_sweeps
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, stop_drivers: bool) -> None:
        """Stop looking. Drivers go on by themselves, or stop too until the next start."""
        self._stopped.set()
        self._thread.join()
        if stop_drivers:
            for record in self._records.list_sweeps("running"):
                self._launcher.end(record.id)
                self._records.release(record)
            for record in self._records.list_left_behind():
                self._launcher.end(record.id)
                self._records.set_driver(record.id, record.generation, None)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                self.reconcile()
            except Exception:  # whatever it is, the next look may find it gone
                log.exception("the reconciler could not finish its round")

    def reconcile(self) -> None:
        """One look at every sweep that is open or has left something: trouble with one delays no other."""
        records = self._records.list_sweeps("running", "queued")
        room = self._running_sweeps - sum(record.state == "running" for record in records)
        for record in [*records, *self._records.list_left_behind()]:
            waits = record.state == "queued" and record.desired_state == "running"
            if waits and room <= 0:
                continue
            room -= waits
            try:
                self._look_at(record)
            except Exception:
                log.exception("sweep %s could not be brought to what is wished for", record.id)

    def _look_at(self, record: SweepRecord) -> None:
        if record.finished_at is not None:
            self._clean_up(record, record.finished_at)
        elif record.desired_state == "cancelled":
            self._cancel(record)
        elif record.state == "queued" or self._needs_driver(record):
            self._start_driver(record)

    def _clean_up(self, record: SweepRecord, finished_at: datetime) -> None:
        """Remove what a driver that has done its work left; one that does not end by itself, too."""
        alive = record.driver is not None and self._launcher.is_alive(record.driver)
        if alive and now() - finished_at < TIME_TO_END:
            return
        self._launcher.end(record.id)
        self._records.set_driver(record.id, record.generation, None)

    def _needs_driver(self, record: SweepRecord) -> bool:
        if record.driver is None:  # being started, or lost before it was written down
            return record.lease_expired
        return record.lease_expired or not self._launcher.is_alive(record.driver)

    def _start_driver(self, record: SweepRecord) -> None:
        epochs_done = self._records.count_epochs(record.id)
        fruitless = 0
        if record.generation > 0 and epochs_done == record.epochs_at_launch:
            fruitless = record.fruitless_launches + 1
        if fruitless >= MOST_FRUITLESS_LAUNCHES:
            self._give_up(record, fruitless)
            return
        generation = self._records.claim(record, fruitless=fruitless, epochs_done=epochs_done)
        if generation is None:  # it has just ended, or another controller was faster
            return
        self._launcher.end(record.id)
        driver = self._launcher.launch(record.id, generation)
        self._records.set_driver(record.id, generation, driver)
        log.info("sweep %s: started driver generation %d", record.id, generation)

    def _give_up(self, record: SweepRecord, fruitless: int) -> None:
        words = self._launcher.log_tail(record.id)
        reason = (
            f"{fruitless} drivers in a row died before an epoch was done; the last one's log ends: {words}"
        )
        self._close(record, "failed", reason, Failure("infrastructure", "the sweep's drivers kept dying"))

    def _cancel(self, record: SweepRecord) -> None:
        self._close(record, "cancelled", None, Failure("cancelled", "the sweep was cancelled"))

    def _close(self, record: SweepRecord, state: str, reason: str | None, failure: Failure) -> None:
        """End a sweep from outside: fence its driver off, end it, and write what it can no longer write."""
        generation = self._records.fence(record)
        if generation is None:
            return
        self._launcher.end(record.id)
        close_open_trials(record.id, self._storage, failure)
        self._records.finish(record.id, generation, state, reason)
