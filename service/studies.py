"""Optuna's storage in our database, and what a driver does to a study before and after its trials."""

from collections.abc import Iterator
from contextlib import contextmanager

from optuna.storages import BaseStorage, RDBStorage, get_storage

from service.database import bare_engine, connecting, is_sqlite, one_at_a_time, tune
from service.lifecycle import Verb
from service.records import Records, fence_writes
from trials.ledger import StudyLedger
from trials.studies import delete_study, reopen_failed, studies_of


def open_storage(url: str) -> RDBStorage:
    """Optuna's tables, made where they are missing; connected to as ours are."""
    pool = {"pool_size": 40} if is_sqlite(url) else {"pool_pre_ping": True}
    with _nobody_else_making_tables(url):
        storage = RDBStorage(url, engine_kwargs={**connecting(url), **pool})
    tune(storage.engine)
    return storage


@contextmanager
def _nobody_else_making_tables(url: str) -> Iterator[None]:
    """Optuna looks whether they are there, and makes them then. SQLite's own are one service's, as a rule."""
    if is_sqlite(url):  # where Optuna could not write while we do
        yield
    else:
        with one_at_a_time(bare_engine(url)):
            yield


def open_fenced_storage(url: str, sweep_id: str, generation: int) -> BaseStorage:
    """For a driver: nothing is written through it once another generation of the sweep has begun."""
    storage = open_storage(url)
    fence_writes(storage.engine, sweep_id, generation)
    return get_storage(storage)


@contextmanager
def open_closing_storage(url: str, sweep_id: str, generation: int) -> Iterator[BaseStorage]:
    """For who closes a sweep from outside: nothing is written once it is of another generation."""
    storage = open_storage(url)
    fence_writes(storage.engine, sweep_id, generation, of_driver=False)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def study_to_go_on_with(records: Records, storage: BaseStorage, sweep_id: str, generation: int) -> str:
    """The sweep's study; a copy in which failed trials are open again where a client has asked for that."""
    record = records.get_sweep(sweep_id)
    study = record.study
    if record.retry_numbers is not None:
        study = f"{sweep_id}~{generation}"
        reopen_failed(record.study, study, record.spec, storage, record.retry_numbers)
        records.switch_study(sweep_id, generation, study)
    for left in set(studies_of(sweep_id, storage)) - {study}:
        delete_study(left, storage)
    return study


def write_down(records: Records, sweep_id: str, generation: int, ledger: StudyLedger) -> None:
    """How a sweep stands whose driver has no more to do: it has ended, or waits for another one."""
    written = False
    while not written:  # until nobody has wished for something else in the meantime
        orders = ledger.refreshed_orders()
        verb: Verb = "park"
        reason = None
        if ledger.done:
            verb, reason = ledger.outcome()
        written = records.finish(sweep_id, generation, verb, reason, under=orders)
