"""`python -m service.drive SWEEP GENERATION SCRATCH`: a driver's process. Joins records to trials.driver."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from service.database import open_engine
from service.errors import IncompatibleDatabase
from service.launcher import findable
from service.records import Records, SweepJournal
from service.revisions import check_schema
from service.settings import Settings
from service.studies import open_fenced_storage, study_to_go_on_with, write_down
from trials.driver import BEAT_S, EXIT_FENCED, drive
from trials.ledger import Fenced, JournalAway, StudyLedger
from trials.store import CheckpointStore

EXIT_INCOMPATIBLE = 78  # EX_CONFIG


def main(sweep_id: str, generation: int, scratch: Path, settings: Settings) -> int:
    try:
        check_schema(settings.resolved_database_url, served=True)
    except IncompatibleDatabase as error:  # the program was replaced, or the database, while the service runs
        print(error, file=sys.stderr)
        return EXIT_INCOMPATIBLE
    records = Records(open_engine(settings.resolved_database_url))
    spec = records.get_sweep(sweep_id).spec
    journal = SweepJournal(records, sweep_id, generation)
    try:
        journal.beat()
        # Also by ourselves: the service may have died before it could, and would never clean up after us.
        records.set_driver(sweep_id, generation, findable(os.getpid()))
        store = CheckpointStore(settings.resolved_store_url)
        with _beating(journal):  # a study of many trials is not opened in a moment
            storage = open_fenced_storage(settings.resolved_database_url, sweep_id, generation)
            study = study_to_go_on_with(records, storage, sweep_id, generation)
            ledger = StudyLedger(spec, sweep_id, storage, journal, store, study)
        drive(
            ledger,
            journal,
            spec,
            store_url=settings.resolved_store_url,
            data_dir=settings.data_dir,
            scratch=scratch,
            end=partial(write_down, records, sweep_id, generation, ledger),
            ray_address=settings.ray_address,
        )
    except Fenced:
        return EXIT_FENCED
    except Exception:
        if _is_fenced(journal):  # Tune raises something of its own for what its searcher raised
            return EXIT_FENCED
        raise
    return 0


@contextmanager
def _beating(journal: SweepJournal) -> Iterator[None]:
    """Renew the lease meanwhile. Who has lost it learns that from its next write."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(JournalAway, Fenced):
                journal.beat()

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_fenced(journal: SweepJournal) -> bool:
    try:
        journal.beat()
    except Fenced:
        return True
    except JournalAway:
        pass
    return False


if __name__ == "__main__":
    from_environment = Settings()
    # Ray's processes inherit the environment; none of them has anything to do with the database.
    os.environ.pop("FRATERNAL_DATABASE_URL", None)
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), from_environment))
