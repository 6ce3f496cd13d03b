"""Drives what is towards what is wished for: the only one that starts or ends drivers."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from typing import Any

from optuna.storages import BaseStorage
from sqlalchemy.exc import OperationalError

from service.database import now
from service.errors import UnreadableSpec
from service.launcher import Launcher
from service.lifecycle import MOVING, WITH_DRIVER, Verb
from service.records import LEASE, Records, SweepRecord
from trials.ledger import Fenced, told_of_end
from trials.store import CheckpointStore
from trials.studies import close_open_trials, delete_study, find_rows, studies_of
from trials.tasks import Failure

log = logging.getLogger(__name__)

LEASE_NAME = "controller"
PERIOD_S = 0.5
COLLECT_EVERY_S = 600.0
TIME_TO_END = timedelta(seconds=20)
"""For a driver, once it has written that its sweep has ended, or rests."""
TIME_TO_PAUSE = timedelta(minutes=5)
"""For running trials, to save what they need to go on; a validation may have to be finished first."""
CONTROLLER_LEASE = timedelta(seconds=15)
"""How long a controller may be silent before another one of the same database takes over."""
LONG_BETWEEN_LOOKS = timedelta(seconds=5)
"""The database was away, or the machine asleep."""
LONG_LIFE_S = 600.0
"""Of a driver that was not fruitless, even without an epoch: its trials have saved what they did."""
MOST_FRUITLESS_LAUNCHES = 5
"""Drivers in a row that died before an epoch was recorded, until a sweep is given up."""


class Reconciler:
    """Looks at every open sweep twice a second, in a thread of its own."""

    def __init__(
        self,
        records: Records,
        storage: BaseStorage,
        store: CheckpointStore,
        launcher: Launcher,
        running_sweeps: int,
        collect: Callable[[], Any] = list,
        closing: Callable[[str, int], AbstractContextManager[BaseStorage]] | None = None,
    ) -> None:
        """`collect` puts aside what nobody refers to, now and then; `closing` opens the storage for who ends
        the trials of a sweep of some generation."""
        self._records = records
        self._storage = storage
        self._store = store
        self._launcher = launcher
        self._running_sweeps = running_sweeps
        self._stopped = threading.Event()
        self._collect = collect
        self._closing = closing or (lambda sweep_id, generation: nullcontext(storage))
        self._holds_lease = False
        self._looked_at: datetime | None = None
        self._lenient_until = now()
        """Until then no driver is given up for its silence: it could not be heard, or could not speak."""
        self._threads = [
            threading.Thread(target=self._run, name="reconciler", daemon=True),
            threading.Thread(target=self._run_collecting, name="retention", daemon=True),
        ]

    @property
    def holds_lease(self) -> bool:
        """Whether this controller was the one that acts when it last looked."""
        return self._holds_lease

    @property
    def looked_at(self) -> datetime | None:
        """When its latest look began; None before the first."""
        return self._looked_at

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, *, stop_drivers: bool) -> None:
        """Stop looking. Drivers go on by themselves, or stop too until the next start."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if not self._acts():
            return
        if stop_drivers:
            for record in self._records.list_sweeps(*WITH_DRIVER):
                self._launcher.end(record.id)
                self._records.release(record)
            for record in self._records.list_left_behind():
                self._launcher.end(record.id)
                self._records.set_driver(record.id, record.generation, None)
        self._records.give_lease_up(LEASE_NAME, self._launcher.identity())

    def _acts(self) -> bool:
        """Whether this controller is the one that acts: of several at one database, one does."""
        launcher = self._launcher
        return self._records.hold_lease(
            LEASE_NAME, launcher.identity(), CONTROLLER_LEASE, lambda holder: not launcher.is_alive(holder)
        )

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                self.reconcile()
            except OperationalError:
                log.exception("the database does not let the reconciler work")
                self._end_sleepers()
            except Exception:  # whatever it is, the next look may find it gone
                log.exception("the reconciler could not finish its round")

    def _end_sleepers(self) -> None:
        """Kill drivers that are frozen: in the middle of a write, one keeps everybody else from SQLite."""
        if not self._holds_lease:
            return
        try:
            for record in self._records.list_sweeps(*WITH_DRIVER):
                if (
                    record.driver is not None
                    and record.lease_expired
                    and self._launcher.is_stopped(record.driver)
                ):
                    self._launcher.end(record.id)
        except Exception:
            log.exception("drivers that are silent could not be ended")

    def _run_collecting(self) -> None:
        """In a thread of its own: a large store is not listed in a moment."""
        while not self._stopped.wait(COLLECT_EVERY_S):
            try:
                if self._holds_lease:
                    self._collect()
            except Exception:
                log.exception("what nobody refers to could not be put aside")

    def reconcile(self) -> None:
        """One look at every sweep to be moved, or that left something. Trouble with one delays no other."""
        self._holds_lease = self._acts()
        if self._looked_at is not None and now() - self._looked_at > LONG_BETWEEN_LOOKS:
            self._lenient_until = now() + LEASE
        self._looked_at = now()
        if not self._holds_lease:
            return
        records = self._records.list_sweeps(*(MOVING - {"queued"}))
        room = self._running_sweeps - sum(record.state in WITH_DRIVER for record in records)
        following = self._records.first_in_queue(max(0, room))  # however many wait
        for record in [*records, *following, *self._records.list_left_behind()]:
            try:
                if self._is_as_wished(record):
                    continue
                if not self._acts():  # this round has taken so long that another controller has taken over
                    return
                self._bring_along(record)
            except Exception:
                words = "sweep %s could not be brought to what is wished for"
                log.exception(words, record.id, extra={"sweep_id": record.id})

    def _is_as_wished(self, record: SweepRecord) -> bool:
        """Whether there is nothing to do but wait. Changes nothing: it may be asked without the lease."""
        match record.state:
            case "queued" | "cancelling" | "deleting":
                return False
            case "running" | "stopping":
                return self._has_driver(record)
            case "pausing":
                return self._has_driver(record) and now() - record.state_since <= TIME_TO_PAUSE
            case _:  # a driver that has done its work may end by itself
                alive = record.driver is not None and self._launcher.is_alive(record.driver)
                return alive and now() - record.state_since < TIME_TO_END

    def _bring_along(self, record: SweepRecord) -> None:
        match record.state:
            case "queued" | "running" | "stopping":
                self._start_driver(record)
            case "pausing":
                self._close(record, "park")
            case "cancelling":
                self._close(record, "close", failure=Failure("cancelled", "the sweep was cancelled"))
            case "deleting":
                self._delete(record)
            case _:
                self._clean_up(record)

    def _clean_up(self, record: SweepRecord) -> None:
        """Remove what a driver that has done its work left; one that does not end by itself, too."""
        self._launcher.end(record.id)
        self._records.set_driver(record.id, record.generation, None)

    def _has_driver(self, record: SweepRecord) -> bool:
        if record.driver is None:  # being started, or lost before it was written down
            return not record.lease_expired
        silent = record.lease_expired and now() > self._lenient_until
        return not silent and self._launcher.is_alive(record.driver)

    def _start_driver(self, record: SweepRecord) -> None:
        try:
            _ = record.spec
        except UnreadableSpec as error:
            self._close(record, "give_up", str(error), Failure("infrastructure", str(error)))
            return
        epochs_done = self._records.count_epochs(record.id)
        fruitless = 0
        lived_long = record.driver_lived_s > LONG_LIFE_S
        if record.generation > 0 and epochs_done == record.epochs_at_launch and not lived_long:
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
        words = "sweep %s: started driver generation %d"
        log.info(words, record.id, generation, extra={"sweep_id": record.id})

    def _give_up(self, record: SweepRecord, fruitless: int) -> None:
        words = self._launcher.log_tail(record.id)
        reason = (
            f"{fruitless} drivers in a row died before an epoch was done; the last one's log ends: {words}"
        )
        self._close(record, "give_up", reason, Failure("infrastructure", "the sweep's drivers kept dying"))

    def _close(
        self, record: SweepRecord, verb: Verb, reason: str | None = None, failure: Failure | None = None
    ) -> None:
        """Move a sweep from outside: fence its driver off, end it, and write what it can no longer write."""
        generation = self._records.fence(record)
        if generation is None:
            return
        self._launcher.end(record.id)
        if failure is not None:
            try:
                self._close_trials(record.id, generation, failure)
            except Fenced:
                return
            except (ValueError, LookupError, TypeError) as error:  # damaged rows keep no sweep from its end
                log.exception("the open trials of sweep %s could not be closed", record.id)
                damaged = f"its open trials could not be closed: {type(error).__name__}: {error}"
                reason = damaged if reason is None else f"{reason}; {damaged}"
        if not self._records.finish(record.id, generation, verb, reason):
            self._have_looked_at_anew(record.id, generation)

    def _have_looked_at_anew(self, sweep_id: str, generation: int) -> None:
        """A client was quicker, and trials were closed under the state that it gave the sweep."""
        moved = self._records.get_sweep(sweep_id)
        if moved.generation == generation:
            self._records.fence(moved)

    def _close_trials(self, sweep_id: str, generation: int, failure: Failure) -> None:
        study = self._records.get_sweep(sweep_id).study  # the driver may have changed it until now
        with self._closing(sweep_id, generation) as storage:
            close_open_trials(study, storage, failure)
            for left in set(studies_of(sweep_id, storage)) - {study}:
                delete_study(left, storage)
        rows = find_rows(study, self._storage)
        self._records.tell_of_ends(sweep_id, [told_of_end(row) for row in rows if row.state.is_finished()])

    def _delete(self, record: SweepRecord) -> None:
        """Remove all that a sweep has. Its row goes last: the next look makes a crash on the way good."""
        self._launcher.end(record.id)
        self._launcher.forget(record.id)
        self._store.remove_sweep(record.id)
        for study in studies_of(record.id, self._storage):
            delete_study(study, self._storage)
        self._records.remove_sweep(record.id)
