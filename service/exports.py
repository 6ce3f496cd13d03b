"""A sweep as a file to take elsewhere: as it was at one moment, whatever is written meanwhile.

The file is made whole before the first byte of it is sent, a page of rows at a time. So the database is read
for as long as that takes and not for as long as somebody downloads, what goes wrong is an error and no file
that breaks off, and its length and digest are known. It has no name by then: it is gone when it is closed,
and when this process dies.
"""

import errno
import hashlib
import math
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from sqlalchemy import Connection, Row, bindparam, select

from service.copies import snapshot
from service.database import now
from service.errors import BadParameter, DiskFull
from service.fitting import find_little_room
from service.records import SweepRecord, latest_epochs_where, pinned_in, sweep_in, verifications_in
from service.schemas import Environment, EpochView, SweepDetail, TrialDetail, TrialView, flat
from service.sweeps import SweepController
from service.tables import epochs
from service.views import (
    Progress,
    SweepViews,
    best_of,
    environment_of,
    epoch_view,
    find_spec,
    reading,
    trial_view,
)
from trials.rows import read_pages, read_study_attributes

TRIALS_AT_ONCE = 200
EPOCHS_AT_ONCE = 2000
NO_CURVE: tuple[float, Iterator[dict[str, Any]]] = math.inf, iter(())
"""Of a number that no trial has."""
PREFIX = ".export-"
"""Of folders in the data directory that a process which died may have left."""


class Format(StrEnum):
    csv = "csv"
    json = "json"
    parquet = "parquet"
    optuna = "optuna"


class Table(StrEnum):
    """A row a trial, or a row an epoch."""

    trials = "trials"
    epochs = "epochs"


MEDIA_TYPES = {
    Format.csv: "text/csv; charset=utf-8; header=present",
    Format.json: "application/json",
    Format.parquet: "application/vnd.apache.parquet",
    Format.optuna: "application/vnd.sqlite3",
}
SUFFIXES = {Format.csv: "csv", Format.json: "json", Format.parquet: "parquet", Format.optuna: "db"}
OF_ONE_TABLE = {Format.csv, Format.parquet}


@dataclass(frozen=True)
class Export:
    """A file without a name, open for reading; whoever asked for it closes it."""

    file: BinaryIO
    size: int
    sha256: str
    filename: str
    media_type: str


@dataclass
class Survey:
    """What a first look over all trials finds: what there is to write, and how the sweep stands."""

    params: dict[str, set[type]] = field(default_factory=dict)
    """What the values of each are, None left out, by name."""
    config: dict[str, set[type]] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    epochs_done: int = 0
    best: TrialView | None = None
    devices: set[str | None] = field(default_factory=set)
    runtimes: set[str | None] = field(default_factory=set)

    def add(self, trial: TrialView, config: dict[str, Any]) -> None:
        for columns, values in ((self.params, trial.params), (self.config, dict(flat(config)))):
            for name, value in values.items():
                columns.setdefault(name, set()).update(set() if value is None else {_kind(value)})
        self.states[trial.state] = self.states.get(trial.state, 0) + 1
        self.epochs_done += trial.epochs_done
        self.best = best_of([trial] if self.best is None else [self.best, trial])
        self.devices.add(trial.device)
        self.runtimes.add(trial.runtime)

    @property
    def progress(self) -> Progress:
        return Progress(self.states, self.epochs_done, self.best, None)


def _kind(value: Any) -> type:
    """Its type; text of a whole number that takes more than 64 bits, since no table has those."""
    return str if type(value) is int and not -(2**63) <= value < 2**63 else type(value)


class Moment:
    """A sweep at one moment, read through a connection of `snapshot`.

    Raises SweepNotFound, and whoever reads its trials UnreadableStudy.
    """

    def __init__(
        self, connection: Connection, sweep_id: str, views: SweepViews, go_on: Callable[[], None]
    ) -> None:
        self.connection, self._views, self.go_on = connection, views, go_on
        """`go_on` is called before each page of rows, and raises where no more is to be made."""
        self.at: datetime = now()
        self.record: SweepRecord = sweep_in(connection, sweep_id)
        self._pinned = pinned_in(connection, sweep_id)
        self._verified = verifications_in(connection, sweep_id)

    def trials(self) -> Iterator[tuple[TrialView, dict[str, Any]]]:
        """Each with every value that it trains with, by number."""
        spec = find_spec(self.record)
        if self.record.generation == 0:  # it has had no driver, hence no study
            return
        with reading(self.record):
            for page in read_pages(self.connection, self.record.study, TRIALS_AT_ONCE):
                self.go_on()
                latest = self._latest(page[0][0].number, page[-1][0].number)
                for row, config in page:
                    pinned, verified = row.number in self._pinned, self._verified.get(row.number)
                    yield trial_view(self.record, spec, row, latest.get(row.number), pinned, verified), config

    def _latest(self, first: int, last: int) -> dict[int, dict[str, Any]]:
        asked = {"sweep_id": self.record.id, "first": first, "last": last}
        rows = self.connection.execute(_LATEST, asked)
        return {row.number: {"epoch": row.epoch, "valid_loss": row.valid_loss} for row in rows}

    def pages_of_epochs(self) -> Generator[list[Row[Any]]]:
        """Rows of our table, by number and epoch."""
        query = _EPOCHS.execution_options(yield_per=EPOCHS_AT_ONCE)
        with self.connection.execute(query, {"sweep_id": self.record.id}) as found:
            for page in found.partitions():
                self.go_on()
                yield list(page)

    def details(self) -> Iterator[TrialDetail]:
        """Every trial with its curve."""
        with reading(self.record), closing(self.pages_of_epochs()) as pages:
            rows = (dict(row._mapping) for row in chain.from_iterable(pages))
            curves = groupby(rows, itemgetter("number"))
            number, curve = next(curves, NO_CURVE)
            for trial, config in self.trials():
                told: list[EpochView] = []
                while number <= trial.number:
                    told = [epoch_view(epoch) for epoch in curve] if number == trial.number else []
                    number, curve = next(curves, NO_CURVE)
                yield TrialDetail(**dict(trial), config=config, curve=told)

    def detail(self, found: Survey) -> SweepDetail:
        """Raises UnreadableSpec."""
        return self._views.detail(self.record, found.progress)

    def survey(self) -> Survey:
        found = Survey()
        for trial, config in self.trials():
            found.add(trial, config)
        return found

    def environment(self, found: Survey) -> Environment:
        with reading(self.record):
            of_study = read_study_attributes(self.connection, self.record.study)
            return environment_of(self.record, of_study, found.devices, found.runtimes)


# Built once: to build a statement takes longer than SQLite does to run it.
_EPOCHS = (
    select(epochs).where(epochs.c.sweep_id == bindparam("sweep_id")).order_by(epochs.c.number, epochs.c.epoch)
)
_LATEST = latest_epochs_where(epochs.c.number.between(bindparam("first"), bindparam("last")))

Write = Callable[[Moment, BinaryIO], None]


def make_export(
    controller: SweepController,
    sweep_id: str,
    form: Format,
    table: Table | None = None,
    may_go_on: Callable[[], None] = lambda: None,
) -> Export:
    """Make the file, on the disk of the data directory, page by page as long as `may_go_on` does not raise.

    Raises SweepNotFound, UnreadableStudy, UnreadableSpec, DiskFull, and BadParameter for a `table` of what
    has both.
    """
    if table is not None and form not in OF_ONE_TABLE:
        words = f"{form} has trials and epochs in one file: leave `table` out, or ask for csv or parquet"
        raise BadParameter("table", "no_single_table", words)
    folder = controller.data_dir

    def go_on() -> None:
        may_go_on()
        if little := find_little_room(folder):  # what it has left is the database's
            raise DiskFull(f"the export was not made: {little}, and ask again")

    go_on()
    with _room_on(folder), snapshot(controller.records.engine) as connection:
        moment = Moment(connection, sweep_id, controller.views, go_on)
        if form is Format.optuna:
            file = _study_file(moment, folder)
        else:
            file = _file(moment, folder, _writer(form, table or Table.trials))
    sha256 = hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
    size = file.tell()
    file.seek(0)
    which = f"-{table or Table.trials}" if form in OF_ONE_TABLE else ""
    name = f"{sweep_id}{which}-{moment.at:%Y%m%dT%H%M%SZ}.{SUFFIXES[form]}"
    return Export(file, size, sha256, name, MEDIA_TYPES[form])


@contextmanager
def _room_on(folder: Path) -> Iterator[None]:
    """Raises DiskFull in place of whatever says that a file in this folder could not grow."""
    try:
        yield
    except Exception as error:
        if not _says_full(error):
            raise
        free = shutil.disk_usage(folder).free / 2**20
        raise DiskFull(
            f"the export was not made: a file in {folder} could not grow, with {free:.0f} MiB left on its "
            "disk; free some, or allow more where there is a quota, and ask again"
        ) from error


def _says_full(error: BaseException | None) -> bool:
    """Itself, or what it was raised from: SQLAlchemy and Optuna wrap what SQLite raises."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def _file(moment: Moment, folder: Path, write: Write) -> BinaryIO:
    with ExitStack() as undoing:
        file = undoing.enter_context(tempfile.TemporaryFile(dir=folder))
        write(moment, file)
        file.seek(0)
        undoing.pop_all()
    return file


def _writer(form: Format, table: Table) -> Write:
    if form is Format.parquet:  # which takes a moment and some memory to load
        from service.parquet import write_parquet

        return lambda moment, file: write_parquet(moment, table, file)
    from service.export_texts import write_csv, write_json

    if form is Format.csv:
        return lambda moment, file: write_csv(moment, table, file)
    return write_json


def _study_file(moment: Moment, folder: Path) -> BinaryIO:
    """SQLite needs names, for its journal too: the folder is removed as soon as the file is open."""
    from service.export_study import write_study

    for left in folder.glob(f"{PREFIX}*"):  # one is made at a time: whoever made this is dead
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as made:
        path = Path(made) / "study.db"
        with reading(moment.record):
            write_study(moment, path)
        return path.open("rb")
