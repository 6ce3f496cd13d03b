"""Secrets that a service is given as files: the database's password, and the token that it begins with."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

import service.settings
from service.database import migrate, open_engine
from service.errors import CommandFailed
from service.settings import Settings, read_settings
from service.tokens import Tokens
from tests.databases import PostgreSQL, environment_of

PASSWORD = "p@ss:w/rd %20 #?"
"""Which no URL may have as it stands."""
URL = "postgresql+psycopg://fraternal@database/fraternal"


def new_token() -> str:
    """As the README has a shell make one."""
    return f"frt_{secrets.token_hex(6)}_{secrets.token_hex(32)}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of secrets."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    monkeypatch.setenv("FRATERNAL_SECRETS_DIR", str(folder))
    return folder


# Settings out of files.


def test_a_setting_may_be_a_file_and_the_environment_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "fraternal_database_url").write_text("sqlite:////srv/file.db\n")
    (folder / "fraternal_port").write_text("8200\n")
    (folder / "POSTGRES_PASSWORD").write_text("not ours")
    settings = read_settings(None)
    assert (settings.resolved_database_url, settings.port) == ("sqlite:////srv/file.db", 8200)
    monkeypatch.setenv("FRATERNAL_PORT", "8300")
    assert read_settings(None).port == 8300
    assert read_settings(None, port=8400).port == 8400


def test_containers_have_their_secrets_where_no_variable_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FRATERNAL_SECRETS_DIR")
    (folder / "fraternal_port").write_text("8200")
    monkeypatch.setattr(service.settings, "USUAL_SECRETS_DIR", folder)
    assert Settings().port == 8200
    monkeypatch.setenv("FRATERNAL_SECRETS_DIR", "")
    assert Settings().port == 8123
    monkeypatch.setattr(service.settings, "USUAL_SECRETS_DIR", folder / "none")
    monkeypatch.delenv("FRATERNAL_SECRETS_DIR")
    assert Settings().port == 8123


def test_kubernetes_has_secrets_as_links_to_what_it_replaces_whole(folder: Path) -> None:
    for day, port in (("monday", 8200), ("tuesday", 8300)):
        (folder / f"..{day}").mkdir()
        (folder / f"..{day}" / "fraternal_port").write_text(str(port))
        (folder / "..new").symlink_to(f"..{day}")
        (folder / "..new").rename(folder / "..data")
        if day == "monday":
            (folder / "fraternal_port").symlink_to("..data/fraternal_port")
        assert Settings().port == port


def test_a_folder_of_secrets_that_is_not_there_is_named(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(CommandFailed, match="secrets', which is no folder"):
        read_settings(None)


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who may read no more than others may, as containers have it."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(10001)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_a_secret_that_this_user_may_not_read_is_named(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as made:  # whose parents all may enter
        folder, written = Path(made), Path(made, "fraternal_database_password")
        folder.chmod(0o755)
        written.write_text(PASSWORD)
        shut = written if closed == "file" else folder
        shut.chmod(0)
        monkeypatch.setenv("FRATERNAL_SECRETS_DIR", str(folder))
        with without_rights(), pytest.raises(CommandFailed, match=f"{shut} cannot be read: Perm") as error:
            read_settings(None)
        assert str(error.value).endswith("has to be let")
        assert not service.settings.is_closed_off_from_secrets()
        monkeypatch.delenv("FRATERNAL_SECRETS_DIR")
        monkeypatch.setattr(service.settings, "USUAL_SECRETS_DIR", folder)
        with without_rights():
            assert service.settings.is_closed_off_from_secrets() == (closed == "folder")
        folder.chmod(0o755)


def test_the_password_goes_into_a_url_that_has_none(folder: Path) -> None:
    (folder / "fraternal_database_password").write_text(PASSWORD + "\n")
    settings = Settings(database_url=URL)
    assert create_engine(settings.resolved_database_url).url.password == PASSWORD
    assert PASSWORD not in f"{settings!r} {settings.model_dump_json()}"
    assert Settings(database_url=settings.resolved_database_url).resolved_database_url == (
        settings.resolved_database_url
    ), "as a driver has it"
    for scheme in ("postgresql:", "postgres:"):
        short = Settings(database_url=URL.replace("postgresql+psycopg:", scheme))
        assert short.resolved_database_url == settings.resolved_database_url
    own = URL.replace("fraternal@", "fraternal:own@")
    assert Settings(database_url=own).resolved_database_url == own
    assert "p@ss" not in Settings(database_url="sqlite:////srv/a.db").resolved_database_url
    assert "p@ss" not in Settings().resolved_database_url


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "secret-xyzzy",
        "frt_0123456789ab_secret-xyzzy",
        "frt_0123456789AB_" + "x" * 64,
        "frt_0123456789ab_" + "x" * 42,
        "frt_0123456789ab_" + "x" * 64 + " é",
        "frs_0123456789ab_" + "x" * 64,
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(folder: Path, wrong: str) -> None:
    (folder / "fraternal_admin_token").write_text(wrong)
    with pytest.raises(
        CommandFailed, match=r"admin_token: it is no token; a shell makes one by frt_"
    ) as error:
        read_settings(None)
    assert "xyzzy" not in str(error.value)
    assert "x" * 20 not in str(error.value)


# The token that the settings give.


@pytest.fixture
def kept(url: str) -> Iterator[Tokens]:
    engine = open_engine(url)
    migrate(engine)
    with closing(Tokens(engine)) as tokens:
        yield tokens


def test_the_given_token_is_kept_once_however_often_it_is_given(kept: Tokens) -> None:
    written = new_token()
    first = kept.keep_given(written)
    assert kept.keep_given(written) == first
    assert kept.list_tokens() == [first]
    assert kept.holders().find(written) == first
    assert (first.scope, first.state, first.expires_at) == ("admin", "valid", None)


def test_another_given_token_takes_the_place_of_the_one_before_it_and_of_no_other(kept: Tokens) -> None:
    before, after = new_token(), new_token()
    _, clients = kept.create("ci", "write", timedelta(days=1))
    given = kept.keep_given(before)
    cookie, clients_cookie = kept.open_session(given), kept.open_session(kept.list_tokens()[0])
    kept.keep_given(after)
    holders = kept.holders()
    assert (holders.find(before), holders.find_by_session(cookie)) == (None, None)
    assert set(holders.sessions) == {clients_cookie.split("_")[1]}
    assert holders.find(after) is not None
    assert holders.find(clients) is not None


def test_a_given_token_that_was_revoked_stays_revoked(kept: Tokens) -> None:
    written = new_token()
    kept.revoke(kept.keep_given(written).id)
    assert kept.keep_given(written).state == "revoked"
    assert kept.holders().find(written) is None


def test_a_given_token_with_the_id_of_another_is_refused_and_changes_nothing(kept: Tokens) -> None:
    token, written = kept.create("ci", "read", None)
    with pytest.raises(CommandFailed, match="other random digits"):
        kept.keep_given(f"frt_{token.id}_{secrets.token_hex(32)}")
    assert kept.list_tokens() == [token]
    assert kept.holders().find(written) == token


# A service of its own.


class Served:
    """`fraternal serve` off loopback, as a container starts it."""

    def __init__(self, data_dir: Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", "--stop-drivers"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **environment_of(data_dir),
                "FRATERNAL_HOST": "0.0.0.0",
                "FRATERNAL_PORT": "0",
                "FRATERNAL_DATA_DIR": str(data_dir),
                "FRATERNAL_LOG_LEVEL": "debug",
                **environment,
            },
            text=True,
        )
        assert self._process.stdout is not None
        self.said = ""
        for line in self._process.stdout:
            self.said += line
            if line.startswith("access"):
                break
        found = re.search(r"http://0\.0\.0\.0:(\d+)", self.said)
        self.url = f"http://127.0.0.1:{found[1]}" if found else None

    def status(self, token: str | None = None) -> int:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.get(f"{self.url}/v1/sweeps", headers=headers, trust_env=False).status_code

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        self.said += self._process.communicate()[0]
        return self._process.returncode


@pytest.mark.slow
def test_a_service_off_loopback_begins_with_the_token_of_a_file(folder: Path, tmp_path: Path) -> None:
    """Also where there is no database yet, and at every start again; what it is stands in no log."""
    first, second = new_token(), new_token()
    said = ""
    for given, statuses in ((first, (401, 200, 401)), (first, (401, 200, 401)), (second, (401, 401, 200))):
        (folder / "fraternal_admin_token").write_text(given + "\n")
        served = Served(tmp_path / "data")
        assert served.url is not None, served.said
        assert (served.status(), served.status(first), served.status(second)) == statuses
        assert served.stop() == 0
        said += served.said
    assert "stopped; the drivers are stopped too" in said
    assert not [token for token in (first, second) if token.split("_")[2] in said]


@pytest.mark.slow
def test_a_service_off_loopback_does_not_begin_with_a_token_that_was_revoked(
    folder: Path, tmp_path: Path
) -> None:
    given = new_token()
    (folder / "fraternal_admin_token").write_text(given)
    settings = Settings(data_dir=tmp_path / "data")
    settings.data_dir.mkdir()
    with closing(Tokens(open_engine(settings.resolved_database_url))) as kept:
        migrate(kept._engine)
        kept.revoke(kept.keep_given(given).id)
    served = Served(settings.data_dir)
    assert (served.stop(), served.url) == (1, None)
    assert "there is no valid token" in served.said


@pytest.mark.slow
def test_a_service_signs_in_to_postgresql_with_the_password_of_a_file(
    server: PostgreSQL, folder: Path, tmp_path: Path
) -> None:
    url = server.create_database_with_password(PASSWORD)
    engine = create_engine(url)
    with pytest.raises(OperationalError, match="password"), engine.connect():
        pass
    given = new_token()
    (folder / "fraternal_admin_token").write_text(given)
    (folder / "fraternal_database_password").write_text("another")
    served = Served(tmp_path / "data", FRATERNAL_DATABASE_URL=url)
    assert (served.stop(), served.url) == (1, None)
    assert "password authentication failed" in served.said
    (folder / "fraternal_database_password").write_text(PASSWORD + "\n")
    served = Served(tmp_path / "data", FRATERNAL_DATABASE_URL=url)
    assert served.url is not None, served.said
    assert (served.status(), served.status(given)) == (401, 200)
    assert served.stop() == 0
    assert "p@ss" not in served.said
    assert not list((tmp_path / "data").glob("*.db"))
