"""`fraternal backup` and `fraternal restore`: database and checkpoints as they were at one moment.

A backup is a folder: the database, as a file of SQLite wherever it came from; the checkpoints of its trials;
corpora that were downloaded; a manifest; and the SHA-256 of each. It has its name once it is whole.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from pydantic import AwareDatetime, BaseModel, ConfigDict

from service.copies import (
    TrialInCopy,
    copy_database,
    count_sweeps,
    has_rows,
    open_to_copy,
    snapshot,
    trials_in,
)
from service.database import migrate, now
from service.errors import CommandFailed
from service.revisions import OPTUNAS, OURS, check_schema, shown
from service.settings import Settings
from trials.store import SUMS, CheckpointStore, CorruptCheckpoint, parse_sums, sha256_of, unpack, write_sums
from trials.version import own_version

DATABASE, CHECKPOINTS, CORPORA, MANIFEST = "fraternal.db", "checkpoints", "corpora", "backup.json"
FORMAT = 1
BYTES_AT_ONCE = 2**20

Progress = Callable[[int, int], None]
"""Is told how much is done, and of how much."""


class Manifest(BaseModel):
    """What a backup says of itself."""

    model_config = ConfigDict(frozen=True)

    format: int
    fraternal: str
    """Version of the program that made it."""
    created_at: AwareDatetime
    """The moment of which it is a copy."""
    revision: str
    optuna_revision: str
    sweeps: int
    checkpoints: int
    files: int
    """Those that SHA256SUMS names, this one left out."""
    size: int
    """Bytes of these files."""
    missing: list[str]
    """What is to be said of checkpoints that are gone or damaged where the backup was made."""


# Backup.


def make_backup(settings: Settings, target: Path, progress: Progress) -> Manifest:
    """Copy all that a service has, while it and its drivers go on. Raises CommandFailed.

    First the database, then the checkpoints, so that no file is behind its row: whoever goes on from the copy
    finds what a crash leaves. Those of open trials are opened at the moment of the copy, and read when their
    turn comes: a file that is replaced stays what it was for who has it open.
    """
    _require_empty(target)
    check_schema(settings.resolved_database_url, served=True)
    engine = open_to_copy(settings.resolved_database_url)
    store = CheckpointStore(settings.resolved_store_url)
    try:
        with _written_whole(target) as folder, ExitStack() as opened:
            part = _Part(folder)
            with snapshot(engine) as connection:
                sweeps, trials, moment = count_sweeps(connection), trials_in(connection), now()
                pinned = {
                    trial: [(name, opened.enter_context(file)) for name, file in _open(store, trial)]
                    for trial in trials
                    if not trial.finished
                }
                progress(0, len(trials))
                copy_database(connection, f"sqlite:///{folder / DATABASE}")
            part.sign(DATABASE)
            for done, trial in enumerate(trials):
                progress(done, len(trials))
                part.add_checkpoints(trial, pinned[trial] if trial in pinned else _open(store, trial))
            progress(len(trials), len(trials))
            for path in _corpora(settings.data_dir):
                with path.open("rb") as file:
                    part.add(f"{CORPORA}/{path.parent.name}/{path.name}", file)
            return part.finish(moment, sweeps)
    finally:
        engine.dispose()


def _open(store: CheckpointStore, trial: TrialInCopy) -> Iterator[tuple[str, BinaryIO]]:
    for name, file in store.open_all(trial.sweep_id, trial.number):
        yield f"{CHECKPOINTS}/{name}", file


def _corpora(data_dir: Path) -> list[Path]:
    """Files of corpora that were downloaded; not of one that is being downloaded, whose folder has a dot."""
    return sorted(path for path in (data_dir / CORPORA).glob("[!.]*/*") if path.is_file())


class _Part:
    """A backup that is being written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sums: dict[str, str] = {}
        self._missing: list[str] = []

    def add(self, name: str, source: BinaryIO) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as copy:
            shutil.copyfileobj(source, copy, BYTES_AT_ONCE)
        self.sign(name)
        return path

    def sign(self, name: str) -> None:
        self._sums[name] = sha256_of(self._folder / name)

    def add_checkpoints(self, trial: TrialInCopy, files: Iterable[tuple[str, BinaryIO]]) -> None:
        """Those of a trial that are sound. One that cannot be used here would be of no use elsewhere."""
        found = set()
        for name, file in files:
            with file:
                path = self.add(name, file)
            found.add(path.name)
            try:
                with path.open("rb") as copied:
                    unpack(copied, name)
            except CorruptCheckpoint as error:
                path.unlink()
                del self._sums[name]
                self._missing.append(str(error))
        if trial.has_best and "best.tar" not in found:
            self._missing.append(f"the best checkpoint of trial {trial.number} of {trial.sweep_id} is gone")

    def finish(self, moment: datetime, sweeps: int) -> Manifest:
        manifest = Manifest(
            format=FORMAT,
            fraternal=own_version(),
            created_at=moment,
            revision=OURS.known()[0],
            optuna_revision=OPTUNAS.known()[0],
            sweeps=sweeps,
            checkpoints=sum(name.startswith(f"{CHECKPOINTS}/") for name in self._sums),
            files=len(self._sums),
            size=sum((self._folder / name).stat().st_size for name in self._sums),
            missing=self._missing,
        )
        (self._folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
        self.sign(MANIFEST)
        (self._folder / SUMS).write_bytes(write_sums(self._sums))
        return manifest


# Restore.


def restore_backup(backup: Path, settings: Settings, progress: Progress) -> Manifest:
    """Make what a service goes on with. Raises CommandFailed.

    Nothing is written before all of the backup is found sound.
    """
    _require_empty(settings.data_dir)
    manifest = _read_manifest(backup)
    _require_known(manifest, backup)
    sums = _read_sums(backup, manifest)
    checkpoints = [name for name in sums if name.startswith(f"{CHECKPOINTS}/")]
    _require_unused(settings, {name.split("/")[1] for name in checkpoints})
    _verify(backup, sums, progress)
    with _written_whole(settings.data_dir) as folder:
        store = CheckpointStore(settings.model_copy(update={"data_dir": folder}).resolved_store_url)
        for name in checkpoints:
            store.put(name.removeprefix(f"{CHECKPOINTS}/"), backup / name)
        for name in sums:
            if name.startswith(f"{CORPORA}/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(backup / name, folder / name)
        _restore_database(backup / DATABASE, folder / DATABASE, settings)
    return manifest


def _restore_database(copy: Path, path: Path, settings: Settings) -> None:
    """Brought up to date, in the data directory, or in the database that the settings name."""
    shutil.copyfile(copy, path)
    engine = open_to_copy(f"sqlite:///{path}")
    migrate(engine)
    if settings.database_url is not None:
        with snapshot(engine) as connection:
            copy_database(connection, settings.resolved_database_url)
    engine.dispose()
    if settings.database_url is not None:
        path.unlink()


def _read_manifest(backup: Path) -> Manifest:
    path = backup / MANIFEST
    try:
        written = json.loads(path.read_text())
        if written["format"] > FORMAT:
            raise CommandFailed(
                f"{backup} was made by fraternal {written['fraternal']}, in a form that this version, "
                f"{own_version()}, does not know: restore it with {written['fraternal']} or a newer version"
            )
        return Manifest.model_validate(written)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CommandFailed(f"{backup} is no backup: there is no {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"the backup is damaged: {path} cannot be read; use another backup") from error


def _require_known(manifest: Manifest, backup: Path) -> None:
    ours, optunas = OURS.known(), OPTUNAS.known()
    if manifest.revision not in ours or manifest.optuna_revision != optunas[0]:
        raise CommandFailed(
            f"{backup} was made by fraternal {manifest.fraternal}, whose database is of revision "
            f"{manifest.revision} (Optuna's tables: {manifest.optuna_revision}); this is {own_version()}, "
            f"which knows {ours[-1]} to {ours[0]} (Optuna's: {optunas[0]}). Restore it with "
            f"{manifest.fraternal}"
        )


def _read_sums(backup: Path, manifest: Manifest) -> dict[str, str]:
    path = backup / SUMS
    try:
        sums = parse_sums(path.read_bytes(), str(backup))
    except FileNotFoundError as error:
        raise CommandFailed(f"the backup is incomplete: there is no {path}; use another backup") from error
    except CorruptCheckpoint as error:
        raise CommandFailed(f"the backup is damaged: {path} cannot be read; use another backup") from error
    outside = [name for name in sums if name.startswith("/") or ".." in name.split("/")]
    if outside or not {DATABASE, MANIFEST} <= set(sums) or len(sums) != manifest.files + 1:
        raise CommandFailed(f"the backup is damaged: {path} does not name all its files; use another backup")
    return sums


def _verify(backup: Path, sums: dict[str, str], progress: Progress) -> None:
    for done, (name, digest) in enumerate(sums.items()):
        progress(done, len(sums))
        path = backup / name
        try:
            found = sha256_of(path)
        except FileNotFoundError as error:
            raise CommandFailed(
                f"the backup is incomplete: there is no {path}; use another backup"
            ) from error
        if found != digest:
            raise CommandFailed(
                f"the backup is damaged: the SHA-256 of {path} is not the one in {SUMS}; use another backup"
            )
    progress(len(sums), len(sums))


def _require_unused(settings: Settings, sweep_ids: set[str]) -> None:
    """Where database or store are not in the new data directory, they may be those of the original."""
    if settings.database_url is not None:
        url = settings.resolved_database_url
        check_schema(url)
        if has_rows(url):
            raise CommandFailed(f"the database {shown(url)} has sweeps already: name one that is empty")
    if settings.store_url is not None:
        store = CheckpointStore(settings.resolved_store_url)
        for sweep_id in sorted(sweep_ids):
            if store.has_sweep(sweep_id):
                raise CommandFailed(
                    f"FRATERNAL_STORE_URL has checkpoints of sweep {sweep_id} already: name another store"
                )


# Both.


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandFailed(f"{folder} is not empty: name a folder that is not there yet")
    if os.path.ismount(folder):  # which no folder can be renamed to
        raise CommandFailed(f"{folder} is where a file system is mounted: name a folder below it")


@contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is on disk. What an interrupted one left is replaced."""
    folder = folder.resolve()
    part = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        os.sync()
        part.rename(folder)
        os.sync()
    finally:
        shutil.rmtree(part, ignore_errors=True)
