"""What nobody refers to any more: put aside first, removed for good a week later.

Everything is removed where it comes to its end: `last` with its trial, a sweep's files with the sweep. What
is found here is what a crash between two steps left.
"""

import logging
from collections.abc import Iterator
from datetime import timedelta

from optuna.storages import BaseStorage
from optuna.trial import TrialState

from service.lifecycle import MOVING
from service.records import Records, SweepRecord, now
from trials.ledger import find_rows
from trials.store import CheckpointStore, StoredFile

log = logging.getLogger(__name__)

LEFT_ALONE = timedelta(hours=1)
"""Since a file was written: it may be that somebody is about to refer to it."""
KEPT_ASIDE = timedelta(days=7)


def collect_orphans(
    records: Records, storage: BaseStorage, store: CheckpointStore, *, store_is_ours: bool
) -> list[str]:
    """Put aside what no sweep at rest refers to, and remove what was put aside long ago; returns their paths.

    Whole sweeps that are not in the database are put aside only where the store is this service's alone.
    """
    store.empty_quarantine(now() - KEPT_ASIDE)
    known = {record.id: record for record in records.list_sweeps()}
    found = []
    for file in store.files():
        record = known.get(file.sweep_id)
        if now() - file.written_at < LEFT_ALONE:
            continue
        if store_is_ours if record is None else _is_orphan(file, record, storage):
            store.put_aside(file, now())
            log.warning("put aside %s: nothing refers to it", file.path)
            found.append(file.path)
    return found


def _is_orphan(file: StoredFile, record: SweepRecord, storage: BaseStorage) -> bool:
    if record.state in MOVING:
        return False
    return file.name not in set(_names_in_use(file.number, record, storage))


def _names_in_use(number: int | None, record: SweepRecord, storage: BaseStorage) -> Iterator[str]:
    """Of a trial's files: what failed or waits may go on from its `last`."""
    rows = find_rows(record.study, storage)
    if number is None or number >= len(rows):
        return
    yield "best.tar"
    if rows[number].state not in {TrialState.COMPLETE, TrialState.PRUNED}:
        yield "last.tar"
