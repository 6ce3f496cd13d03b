"""What nobody refers to any more: put aside first, removed for good a week later.

Everything is removed where it comes to its end: `last` with its trial, a sweep's files with the sweep. What
is found here is what a crash between two steps left.
"""

import logging
from datetime import timedelta
from functools import cache, partial

from optuna.storages import BaseStorage

from service.database import now
from service.errors import SweepNotFound
from service.lifecycle import MOVING
from service.records import Records
from trials.store import CheckpointStore
from trials.studies import ENDED_WELL, find_rows

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
    known = {record.id for record in records.list_sweeps()}
    of_others: dict[int | None, set[str]] | None = {} if store_is_ours else None
    in_use = cache(partial(_names_in_use, records=records, storage=storage))
    found = []
    for file in store.files():
        if now() - file.written_at < LEFT_ALONE:
            continue
        names = in_use(file.sweep_id) if file.sweep_id in known else of_others
        if names is None or file.name in names.get(file.number, ()):
            continue
        store.put_aside(file, now())
        words = "put aside %s: nothing refers to it"
        log.warning(words, file.path, extra={"sweep_id": file.sweep_id})
        found.append(file.path)
    return found


def _names_in_use(
    sweep_id: str, *, records: Records, storage: BaseStorage
) -> dict[int | None, set[str]] | None:
    """Of each trial's files; None where the sweep does not rest. What failed or waits may need its `last`."""
    try:
        before = records.get_sweep(sweep_id)
        storage.get_study_id_from_name(before.study)
        rows = find_rows(before.study, storage)
        after = records.get_sweep(sweep_id)
    except (SweepNotFound, KeyError, ValueError):  # without readable rows, nothing is known of its files
        return None
    # A sweep that has just been woken may have another study by now, and this one no rows.
    if before.state in MOVING or (before.generation, before.state) != (after.generation, after.state):
        return None
    return {row.number: {"best.tar"} if row.state in ENDED_WELL else {"best.tar", "last.tar"} for row in rows}
