"""The laws of backups: one moment, whole or not there, and never mistaken for the original."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import get_storage
from optuna.trial import TrialState
from sqlalchemy import Engine, create_engine, event, make_url, select, text, update
from typer.testing import CliRunner

from service.backup import DATABASE, MANIFEST, make_backup, restore_backup
from service.cli import app
from service.copies import TABLES
from service.database import migrate, open_engine
from service.errors import CommandFailed, IncompatibleDatabase
from service.records import Records, SweepJournal
from service.revisions import OURS, VERSION_TABLE
from service.settings import Settings
from service.studies import open_storage
from service.tables import leases, sweeps
from tests.databases import PostgreSQL, settings_of
from tests.fakes import epoch_fields, spec
from trials.store import SUMS, CheckpointStore, unpack
from trials.studies import open_study
from trials.verification import Verification

OPEN, DONE, FAILED = 0, 1, 2
"""Trials of the sweep s1."""
STUDY = "s1-2"
"""Its study, once failed trials were tried again."""


class Service:
    """What a service with a running and a queued sweep has on disk, and its side of the database."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        url = settings.resolved_database_url
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        self.engine = open_engine(url)
        migrate(self.engine)
        self.records = Records(self.engine)
        self.storage = open_storage(url)
        self.store = CheckpointStore(settings.resolved_store_url)

    def run(self) -> None:
        self.records.claim(self.records.add_sweep("s1", spec()), fruitless=0, epochs_done=0)
        self.records.set_driver("s1", 1, {"pid": os.getpid(), "started": 0.0})
        self.records.switch_study("s1", 1, STUDY)
        self.records.hold_lease("controller", {"pid": 1}, timedelta(hours=1), lambda holder: False)
        self.records.add_sweep("s2", spec(name="κ"))
        self.journal = SweepJournal(self.records, "s1", 1)
        study = open_study(spec(), STUDY, get_storage(self.storage))
        for number in (OPEN, DONE, FAILED):
            trial = study.ask()
            trial.suggest_float("kappa", 0, 1)
            trial.report(99.5 + number, 1)
            trial.set_user_attr("checkpoint_sha256", self.save("best.tar", number, epoch=1))
            self.journal.record_epoch(number, 1, epoch_fields(number, 1))
        self.journal.record_verification(DONE, Verification("verified", "0f" * 32, valid_loss=4.5))
        study.tell(DONE, float("inf"))
        study.tell(FAILED, state=TrialState.FAIL)
        for number in (OPEN, FAILED):
            self.save("last.tar", number, epoch=1)
        corpus = self.settings.data_dir / "corpora" / "ptb" / "train.txt"
        corpus.parent.mkdir(parents=True)
        corpus.write_text("the text\n")

    def save(self, name: str, number: int, epoch: int) -> str:
        files = {"epoch": str(epoch).encode()}
        if name == "best.tar":
            return self.store.save_best("s1", number, files)
        self.store.save_last("s1", number, files)
        return ""

    def rows(self) -> dict[str, list[str]]:
        with self.engine.connect() as connection:
            return {table.name: sorted(map(repr, connection.execute(select(table)))) for table in TABLES}

    def close(self) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()
        self.engine.dispose()


@pytest.fixture
def service(url: str, tmp_path: Path) -> Iterator[Service]:
    made = Service(settings_for(url, tmp_path / "original"))
    made.run()
    yield made
    made.close()


def settings_for(url: str, data_dir: Path) -> Settings:
    """SQLite in the data directory, as by default, or the PostgreSQL database."""
    return Settings(data_dir=data_dir, **({} if url.startswith("sqlite") else {"database_url": url}))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    """One, where it is not the database that matters."""
    made = Service(settings_of(tmp_path / "original"))
    made.run()
    yield made
    made.close()


def quiet(done: int, total: int) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def epochs_in(backup: Path, number: int) -> dict[str, bytes]:
    """What each checkpoint of a trial was saved at, in a backup or in a data directory."""
    folder = backup / "checkpoints" / "s1" / f"t{number:05d}"
    return {path.name: unpack(path.read_bytes(), str(path))["epoch"] for path in folder.glob("*")}


# There and back.


def test_restored_service_has_every_row_and_file_but_knows_no_driver(
    service: Service, tmp_path: Path
) -> None:
    before = service.rows()
    make_backup(service.settings, tmp_path / "backup", quiet)
    made = restore_backup(tmp_path / "backup", settings_of(tmp_path / "new"), quiet)
    restored = Service(settings_of(tmp_path / "new"))
    after = restored.rows()
    assert (made.sweeps, made.checkpoints) == (2, 5)
    assert service.rows() == before, "a backup changes nothing"
    assert {name for name in before if before[name] != after[name]} == {"fraternal_sweeps"}
    record = restored.records.get_sweep("s1")
    assert (record.driver, record.lease_until, record.generation) == (None, None, 1)
    with restored.engine.connect() as connection:
        assert connection.execute(select(leases)).all() == []
    assert record.epochs_at_launch != restored.records.count_epochs("s1"), "its driver did not fail"
    assert 0 < record.running_s() == record.ran_s, "its clock stands still"
    names = ("driver", "lease_until", "epochs_at_launch", "ran_s", "running_since")
    with service.engine.begin() as connection:
        same = {name: getattr(record, name) for name in names}
        connection.execute(update(sweeps).where(sweeps.c.id == "s1").values(same))
    assert service.rows() == after
    kept = {name: held for name, held in contents(service.settings.data_dir).items() if ".db" not in name}
    found = {name: held for name, held in contents(tmp_path / "new").items() if ".db" not in name}
    assert found == kept
    restored.close()


@pytest.mark.sqlite_only("PostgreSQL keeps nothing in a column of JSON that is none")
def test_row_that_cannot_be_understood_is_copied_as_it_is(small: Service, tmp_path: Path) -> None:
    with small.engine.begin() as connection:
        connection.execute(text("""UPDATE fraternal_sweeps SET spec = '{"a": tru' WHERE id = 's2'"""))
    make_backup(small.settings, tmp_path / "backup", quiet)
    restore_backup(tmp_path / "backup", settings_of(tmp_path / "new"), quiet)
    engine = create_engine(f"sqlite:///{tmp_path / 'new' / DATABASE}")
    with engine.connect() as connection:
        written = connection.execute(text("SELECT spec FROM fraternal_sweeps WHERE id = 's2'")).scalar_one()
    assert written == '{"a": tru'
    engine.dispose()


@pytest.mark.slow
def test_backup_of_either_database_can_be_restored_to_postgresql_and_goes_on_there(
    service: Service, server: PostgreSQL, tmp_path: Path
) -> None:
    target = server.create_database()
    make_backup(service.settings, tmp_path / "backup", quiet)
    settings = Settings(data_dir=tmp_path / "new", database_url=target)
    restore_backup(tmp_path / "backup", settings, quiet)
    assert not (tmp_path / "new" / DATABASE).exists()
    restored = Service(settings)
    assert restored.records.get_sweep("s2") == service.records.get_sweep("s2")
    study = optuna.load_study(study_name=STUDY, storage=restored.storage)
    assert study.trials == optuna.load_study(study_name=STUDY, storage=service.storage).trials
    assert study.ask().number == 3, "numbers go on where they were"
    restored.records.add_sweep("s3", spec())
    assert [record.id for record in restored.records.list_sweeps()] == ["s1", "s2", "s3"]
    restored.close()
    with pytest.raises(CommandFailed, match="has sweeps already"):
        restore_backup(
            tmp_path / "backup", settings.model_copy(update={"data_dir": tmp_path / "newer"}), quiet
        )
    assert not (tmp_path / "newer").exists()


def test_checkpoints_go_from_any_store_to_any_other_but_never_over_those_of_a_sweep(tmp_path: Path) -> None:
    url = f"memory://{secrets.token_hex(5)}"
    service = Service(Settings(data_dir=tmp_path / "original", store_url=f"{url}/original"))
    service.run()
    make_backup(service.settings, tmp_path / "backup", quiet)
    settings = Settings(data_dir=tmp_path / "new", store_url=f"{url}/original")
    with pytest.raises(CommandFailed, match="FRATERNAL_STORE_URL has checkpoints of sweep s1"):
        restore_backup(tmp_path / "backup", settings, quiet)
    settings = Settings(data_dir=tmp_path / "new", store_url=f"{url}/copy")
    restore_backup(tmp_path / "backup", settings, quiet)
    for number in (OPEN, DONE, FAILED):
        copied = CheckpointStore(settings.resolved_store_url).best_sha256("s1", number)
        assert copied == service.store.best_sha256("s1", number)
    service.close()


def test_backup_checks_with_sha256sum(small: Service, tmp_path: Path) -> None:
    make_backup(small.settings, tmp_path / "backup", quiet)
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=tmp_path / "backup", check=True)
    named = {line.split("  ")[1] for line in (tmp_path / "backup" / SUMS).read_text().splitlines()}
    assert named | {SUMS} == contents(tmp_path / "backup").keys()


# One moment.


def test_open_trials_have_the_checkpoints_of_the_moment_however_late_they_are_read(
    small: Service, tmp_path: Path
) -> None:
    """A driver of the copy finds what a crash at that moment would have left."""
    sha256 = small.store.best_sha256("s1", OPEN)

    def go_on(done: int, total: int) -> None:
        small.save("best.tar", OPEN, epoch=2)
        small.save("last.tar", OPEN, epoch=2)
        small.store.discard_last("s1", OPEN)

    make_backup(small.settings, tmp_path / "backup", go_on)
    assert epochs_in(tmp_path / "backup", OPEN) == {"best.tar": b"1", "last.tar": b"1"}
    assert f"{sha256}  checkpoints/s1/t00000/best.tar" in (tmp_path / "backup" / SUMS).read_text()


@pytest.mark.sqlite("a backup is a file of SQLite")
def test_rows_are_those_of_one_moment_whatever_is_written_meanwhile(service: Service, tmp_path: Path) -> None:
    def write(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "FROM fraternal_events" in statement:  # the last table to be copied
            service.journal.record_epoch(OPEN, 1, epoch_fields(OPEN, 2))
            service.journal.record_event("too late")

    before = service.records.list_events("s1")
    event.listen(Engine, "before_cursor_execute", write)
    try:
        make_backup(service.settings, tmp_path / "backup", quiet)
    finally:
        event.remove(Engine, "before_cursor_execute", write)
    copied = Records(open_engine(f"sqlite:///{tmp_path / 'backup' / DATABASE}"))
    assert len(copied.curve("s1", OPEN)) == 1
    assert copied.list_events("s1") == before
    assert [event["kind"] for event in service.records.list_events("s1")][-1] == "too late"
    copied.engine.dispose()


# Whole or not there.


@pytest.mark.parametrize("moment", [0, 2])
def test_interrupted_backup_leaves_nothing(small: Service, tmp_path: Path, moment: int) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == moment:
            raise KeyboardInterrupt

    (tmp_path / "backups").mkdir()
    with pytest.raises(KeyboardInterrupt):
        make_backup(small.settings, tmp_path / "backups" / "one", interrupt)
    assert list((tmp_path / "backups").iterdir()) == []


def test_what_a_killed_backup_left_does_not_look_like_one_and_is_replaced(
    small: Service, tmp_path: Path
) -> None:
    left = tmp_path / ".backup.unfinished"
    make_backup(small.settings, left, quiet)
    (left / MANIFEST).unlink()
    with pytest.raises(CommandFailed, match="no backup"):
        restore_backup(left, settings_of(tmp_path / "new"), quiet)
    make_backup(small.settings, tmp_path / "backup", quiet)
    assert not left.exists()


def damages() -> dict[str, Callable[[Path], object]]:
    def change(path: Path) -> None:
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 1
        path.write_bytes(held)

    return {
        "changed": change,
        "cut short": lambda path: path.write_bytes(path.read_bytes()[:-2]),
        "gone": Path.unlink,
    }


@pytest.mark.parametrize("how", damages())
def test_damage_of_any_file_is_found_and_named_before_anything_is_written(
    small: Service, tmp_path: Path, how: str
) -> None:
    make_backup(small.settings, tmp_path / "backup", quiet)
    names = sorted(contents(tmp_path / "backup"))
    assert len(names) == 9
    for name in names:
        damaged = tmp_path / "damaged"
        shutil.copytree(tmp_path / "backup", damaged)
        damages()[how](damaged / name)
        with pytest.raises(CommandFailed, match=r"damaged|incomplete|no backup") as raised:
            restore_backup(damaged, settings_of(tmp_path / "new"), quiet)
        assert name == SUMS or str(damaged / name) in str(raised.value)
        assert not (tmp_path / "new").exists()
        shutil.rmtree(damaged)
    restore_backup(tmp_path / "backup", settings_of(tmp_path / "new"), quiet)


def test_folder_that_holds_something_is_neither_backed_up_nor_restored_to(
    small: Service, tmp_path: Path
) -> None:
    make_backup(small.settings, tmp_path / "backup", quiet)
    before = contents(tmp_path)
    with pytest.raises(CommandFailed, match="not empty"):
        make_backup(small.settings, tmp_path / "backup", quiet)
    with pytest.raises(CommandFailed, match="not empty"):
        restore_backup(tmp_path / "backup", small.settings, quiet)
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    restore_backup(tmp_path / "backup", settings_of(tmp_path / "empty"), quiet)


# Of other versions, and of what is not well.


def rewrite(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 1', '"format": 2', r"made by fraternal 9\.9, in a form"),
        (f'"revision": "{OURS.known()[0]}"', '"revision": "999"', r"made by fraternal 9\.9, .* revision 999"),
        ('"v3.2.0.a"', '"v9"', r"made by fraternal 9\.9, .*Optuna's tables: v9"),
    ],
)
def test_backup_of_a_newer_version_is_refused_by_the_versions_name(
    small: Service, tmp_path: Path, old: str, new: str, words: str
) -> None:
    make_backup(small.settings, tmp_path / "backup", quiet)
    rewrite(tmp_path / "backup" / MANIFEST, '"fraternal": "0.1.0"', '"fraternal": "9.9"')
    rewrite(tmp_path / "backup" / MANIFEST, old, new)
    with pytest.raises(CommandFailed, match=words):
        restore_backup(tmp_path / "backup", settings_of(tmp_path / "new"), quiet)
    assert not (tmp_path / "new").exists()


def test_database_of_another_version_is_not_backed_up(small: Service, tmp_path: Path) -> None:
    for revision, words in (("999", "newer than this program"), ("001", "revision 001")):
        with small.engine.begin() as connection:
            connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
        with pytest.raises(IncompatibleDatabase, match=words):
            make_backup(small.settings, tmp_path / "backup", quiet)
    assert not (tmp_path / "backup").exists()


def test_checkpoints_that_are_damaged_or_gone_are_said_and_left_out(small: Service, tmp_path: Path) -> None:
    folder = small.settings.data_dir / "checkpoints" / "s1"
    (folder / "t00001" / "best.tar").unlink()
    (folder / "t00002" / "last.tar").write_bytes(b"no archive")
    made = make_backup(small.settings, tmp_path / "backup", quiet)
    assert len(made.missing) == 2
    assert "best checkpoint of trial 1 of s1 is gone" in made.missing[0]
    assert "checkpoints/s1/t00002/last.tar" in made.missing[1]
    restore_backup(tmp_path / "backup", settings_of(tmp_path / "new"), quiet)
    assert epochs_in(tmp_path / "new", FAILED) == {"best.tar": b"1"}


# The commands.


def test_commands_say_what_they_made_and_how_to_go_on(small: Service, tmp_path: Path) -> None:
    backup, new = str(tmp_path / "backup"), str(tmp_path / "new")
    done = CliRunner().invoke(app, ["backup", backup, "--data-dir", str(small.settings.data_dir)])
    assert done.exit_code == 0
    assert f"{backup}  sweeps 2, checkpoints 5, " in done.stdout
    done = CliRunner().invoke(app, ["restore", backup, "--data-dir", new])
    assert done.exit_code == 0
    assert f"fraternal serve --data-dir {new}" in done.stdout


@pytest.mark.sqlite_only("its database is in there")
def test_data_directory_that_is_not_there_is_named_and_not_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["backup", str(tmp_path / "b"), "--data-dir", str(tmp_path / "no")])
    assert done.exit_code == 1
    assert (
        f"there is no database sqlite:///{tmp_path}/no/fraternal.db: name the service's --data-dir"
        in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_neither_backup_nor_output_holds_the_databases_password(
    server: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (
        make_url(server.create_database()).set(password="xyzzy-secret").render_as_string(hide_password=False)
    )
    monkeypatch.setenv("FRATERNAL_DATABASE_URL", url)
    service = Service(Settings(data_dir=tmp_path / "original"))
    service.run()
    for arguments, code in (
        (["backup", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "original")], 0),
        (["restore", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "new")], 1),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, done.output
        assert "xyzzy" not in done.output
    assert "has sweeps already" in done.output
    assert not [name for name, held in contents(tmp_path).items() if b"xyzzy" in held]
    service.close()


def test_checkpoints_that_were_removed_on_purpose_are_not_missed(small: Service, tmp_path: Path) -> None:
    with small.records.engine.begin() as connection:
        written = small.records.get_sweep("s1").written_spec
        sparing = {**written, "retention": {"bests_per_arm": 1}}
        connection.execute(update(sweeps).where(sweeps.c.id == "s1").values(spec=sparing))
    small.store.discard_best("s1", DONE)
    assert make_backup(small.settings, tmp_path / "backup", quiet).missing == []


def test_mount_point_is_refused_before_anything_is_written(
    small: Service, tmp_path: Path, small_disk: Path
) -> None:
    make_backup(small.settings, tmp_path / "backup", quiet)
    with pytest.raises(CommandFailed, match="a file system is mounted: name a folder below it"):
        restore_backup(tmp_path / "backup", Settings(data_dir=small_disk), quiet)
    assert list(small_disk.iterdir()) == []
    restore_backup(tmp_path / "backup", Settings(data_dir=small_disk / "below"), quiet)
    assert [path.name for path in small_disk.iterdir()] == ["below"], "as images have it"
