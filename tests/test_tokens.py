"""Tokens: what is kept of them, how long they are valid, and the commands that make and revoke them."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from typer.testing import CliRunner, Result

from service.backup import make_backup, restore_backup
from service.cli import app
from service.database import migrate, now, open_engine
from service.errors import CommandFailed, UnknownToken
from service.serve import _require_token_off_loopback
from service.settings import Settings
from service.studies import open_storage
from service.tables import sessions, tokens
from service.token_commands import parse_lasting
from service.tokens import SCOPES, SESSION_LASTS, Holders, Session, Token, Tokens
from tests.databases import settings_of

DAY = timedelta(days=1)


@pytest.fixture
def kept(url: str) -> Iterator[Tokens]:
    engine = open_engine(url)
    migrate(engine)
    with closing(Tokens(engine)) as tokens:
        yield tokens


def rows(kept: Tokens) -> str:
    """All that the two tables hold."""
    with kept._engine.connect() as connection:
        return repr([list(connection.execute(select(table))) for table in (tokens, sessions)])


# What a row tells, and whom it lets in.


def test_a_token_is_found_by_what_was_shown_and_by_nothing_else(kept: Tokens) -> None:
    token, written = kept.create("ci", "write", DAY)
    other, _ = kept.create("other", "read", None)
    holders = kept.holders()
    assert holders.find(written) == token
    _, token_id, secret = written.split("_", 2)
    for wrong in (
        "",
        "frt_",
        "frt__",
        secret,
        token_id,
        written[:-1],
        written + "x",
        written.upper(),
        f"frt_{other.id}_{secret}",
        f"frt_{secret}",
        f"frs_{token_id}_{secret}",
        f"frt_{token_id}_{token.secret_sha256}",
        f"frt_unknown_{secret}",
        "frt_unknown_" + "0" * 64,
        f"frt_{token_id}_é\ud800",
    ):
        assert holders.find(wrong) is None, wrong


def test_no_row_tells_a_secret(kept: Tokens) -> None:
    token, written = kept.create("ci", "admin", DAY)
    cookie = kept.open_session(token)
    for secret in (written, cookie):
        assert len(secret.split("_", 2)[2]) >= 43, "32 bytes, as base64 writes them"
        assert secret.split("_", 2)[2] not in rows(kept)
    assert token.secret_sha256 in rows(kept)
    assert token.secret_sha256 not in repr(token), "which a log may hold"


def test_no_two_tokens_are_equal(kept: Tokens) -> None:
    assert len({kept.create("same", "read", None)[1] for _ in range(20)}) == 20


def test_a_token_is_valid_until_it_expires(kept: Tokens) -> None:
    _, lasting = kept.create("lasting", "read", None)
    _, over = kept.create("over", "read", -timedelta(seconds=1))
    holders = kept.holders()
    assert (holders.find(lasting) is not None, holders.find(over)) == (True, None)
    assert [token.state for token in kept.list_tokens()] == ["valid", "expired"]


def test_a_revoked_token_lets_nobody_in_nor_any_browser_that_signed_in_with_it(kept: Tokens) -> None:
    token, written = kept.create("ci", "write", DAY)
    _, other = kept.create("other", "write", DAY)
    cookie = kept.open_session(token)
    revoked = kept.revoke(token.id)
    holders = kept.holders()
    assert (holders.find(written), holders.find_by_session(cookie)) == (None, None)
    assert holders.sessions == {}
    assert holders.find(other) is not None
    assert kept.revoke(token.id) == revoked, "once more changes nothing"
    with pytest.raises(UnknownToken, match="'none'"):
        kept.revoke("none")


def test_a_session_ends_after_twelve_hours_or_with_its_token(kept: Tokens) -> None:
    long, _ = kept.create("long", "read", None)
    short, _ = kept.create("short", "read", timedelta(hours=1))
    for token, ends_after in ((long, SESSION_LASTS), (short, timedelta(hours=1))):
        cookie = kept.open_session(token)
        found = kept.holders().find_session(cookie)
        assert found is not None
        assert abs(found.expires_at - now() - ends_after) < timedelta(seconds=30)


def test_a_session_that_is_over_or_whose_token_is_no_longer_valid_lets_nobody_in() -> None:
    kept = Token("t", "t", "read", "", now(), None, None)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", says FIPS 180
    for token, expires_at, admitted in (
        (kept, now() + DAY, True),
        (kept, now(), False),
        (Token("t", "t", "read", "", now(), now(), None), now() + DAY, False),
        (Token("t", "t", "read", "", now(), None, now()), now() + DAY, False),
    ):
        holders = Holders({"t": token}, {"s": Session("s", "t", digest, expires_at)})
        assert (holders.find_by_session("frs_s_abc") is not None) == admitted


def test_sessions_that_are_over_leave_no_rows(kept: Tokens) -> None:
    over, _ = kept.create("over", "read", -timedelta(seconds=1))
    lasting, _ = kept.create("lasting", "read", None)
    kept.open_session(over)
    kept.open_session(lasting)
    assert [session.token_id for session in kept.holders().sessions.values()] == [lasting.id]


def test_a_session_that_was_closed_lets_nobody_in(kept: Tokens) -> None:
    token, _ = kept.create("ci", "read", None)
    cookie, other = kept.open_session(token), kept.open_session(token)
    session = kept.holders().find_session(cookie)
    assert session is not None
    kept.close_session(session.id)
    holders = kept.holders()
    assert (holders.find_session(cookie), holders.find_session(other) is not None) == (None, True)


def test_each_scope_may_do_what_those_before_it_may(kept: Tokens) -> None:
    for number, scope in enumerate(SCOPES):
        token, _ = kept.create("ci", scope, None)
        assert [asked for asked in SCOPES if token.may(asked)] == list(SCOPES[: number + 1])


def test_a_backup_has_the_tokens_and_no_browsers_session(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "data")
    settings.data_dir.mkdir()
    open_storage(settings.resolved_database_url)
    with closing(Tokens(open_engine(settings.resolved_database_url))) as kept:
        migrate(kept._engine)
        token, written = kept.create("ci", "write", None)
        kept.open_session(token)
    make_backup(settings, tmp_path / "backup", lambda *_: None)
    restored = settings_of(tmp_path / "restored")
    restore_backup(tmp_path / "backup", restored, lambda *_: None)
    with closing(Tokens(open_engine(restored.resolved_database_url))) as kept:
        holders = kept.holders()
    assert holders.find(written) == token
    assert holders.sessions == {}


# The commands.


@pytest.fixture
def in_database(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands work on this database, and in a directory of their own."""
    monkeypatch.setenv("FRATERNAL_DATABASE_URL", url)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["token", *arguments])


def listed() -> list[dict[str, Any]]:
    return list(json.loads(run("ls", "--json").stdout))


@pytest.mark.usefixtures("in_database")
def test_a_token_is_shown_once_alone_on_standard_output(url: str) -> None:
    made = run("create", "--name", "ci", "--scope", "admin", "--expires", "30d")
    assert made.exit_code == 0, made.output
    assert re.fullmatch(r"frt_[0-9a-f]+_[\w-]{43}\n", made.stdout)
    secret = made.stdout.strip().split("_", 2)[2]
    for words in (made.stderr, run("ls").output, run("ls", "--json").output):
        assert secret not in words
    with closing(Tokens(open_engine(url))) as kept:
        token = kept.holders().find(made.stdout.strip())
    assert token is not None
    assert (token.name, token.scope) == ("ci", "admin")
    assert token.expires_at is not None
    assert abs(token.expires_at - now() - timedelta(days=30)) < timedelta(minutes=1)


@pytest.mark.usefixtures("in_database")
def test_a_token_is_printed_for_programs(url: str) -> None:
    made = json.loads(run("create", "--name", "ci", "--expires", "never", "--json").stdout)
    with closing(Tokens(open_engine(url))) as kept:
        assert kept.holders().find(made.pop("token")) is not None
    assert (made["scope"], made["state"], made["expires_at"]) == ("write", "valid", None)
    assert listed() == [made]


@pytest.mark.usefixtures("in_database")
@pytest.mark.parametrize("as_shown", [True, False])
def test_a_token_is_revoked_by_its_id_or_by_itself_which_no_answer_repeats(as_shown: bool) -> None:
    made = json.loads(run("create", "--name", "ci", "--json").stdout)
    run("create", "--name", "other")
    done = run("revoke", made["token"] if as_shown else made["id"])
    assert (done.exit_code, done.stdout) == (0, f"token {made['id']} is revoked; valid tokens left: 1\n")
    assert [token["state"] for token in listed()] == ["revoked", "valid"]
    wrong = run("revoke", "frt_abc_a-secret")
    assert (wrong.exit_code, "no token 'abc'" in wrong.stderr, "secret" in wrong.stderr) == (1, True, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", ""], "1 to 200 characters"),
        (["--name", "x" * 201], "1 to 200 characters"),
        (["--name", "a\nb"], "can be printed"),
        (["--name", "a\ud800b"], "can be printed"),
        (["--name", "ci", "--expires", "30"], "30m, 12h, 90d, 4w or never"),
        (["--name", "ci", "--expires", "0d"], "30m, 12h, 90d, 4w or never"),
        (["--name", "ci", "--expires", "-1d"], "30m, 12h, 90d, 4w or never"),
        (["--name", "ci", "--expires", "99999999w"], "30m, 12h, 90d, 4w or never"),
        (["--name", "ci", "--expires", "soon"], "30m, 12h, 90d, 4w or never"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused_and_nothing_is_made(arguments: list[str], words: str) -> None:
    done = run("create", *arguments)
    assert done.exit_code == 1
    assert words in done.stderr
    assert "no database" in run("ls").stderr or listed() == []


@pytest.mark.parametrize(
    ("written", "lasting"),
    [
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("90d", timedelta(days=90)),
        ("4w", timedelta(weeks=4)),
        ("never", None),
    ],
)
def test_a_time_is_written_as_a_number_and_a_unit(written: str, lasting: timedelta | None) -> None:
    assert parse_lasting(written) == lasting


@pytest.mark.sqlite_only("nobody makes another by connecting")
def test_to_list_or_revoke_makes_no_database(tmp_path: Path) -> None:
    for arguments in (["ls"], ["revoke", "abc"]):
        done = run(*arguments, "--data-dir", str(tmp_path / "data"))
        assert (done.exit_code, "there is no database" in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["create", "ls", "revoke"])
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    assert f"fraternal token {command}" in " ".join(run(command, "-h").stdout.split())


# Listening where other machines reach.


@pytest.fixture
def reachable(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", host="0.0.0.0")


@pytest.fixture
def prepared(reachable: Settings) -> Iterator[Tokens]:
    """The tokens of its database, which has all tables and no rows."""
    reachable.data_dir.mkdir()
    with closing(Tokens(open_engine(reachable.resolved_database_url))) as kept:
        migrate(kept._engine)
        yield kept


def assert_does_not_start(settings: Settings) -> None:
    with pytest.raises(CommandFailed, match=r"no valid token: make one with `fraternal token create"):
        _require_token_off_loopback(settings)


def test_a_service_that_others_can_reach_does_not_start_without_a_token(
    reachable: Settings, tmp_path: Path
) -> None:
    assert_does_not_start(reachable)
    assert list(tmp_path.iterdir()) == [], "nothing is made"


def test_a_service_that_others_can_reach_does_not_start_with_tokens_that_are_over(
    reachable: Settings, prepared: Tokens
) -> None:
    prepared.create("over", "admin", -DAY)
    prepared.revoke(prepared.create("revoked", "admin", None)[0].id)
    assert_does_not_start(reachable)


def test_a_database_of_an_earlier_version_has_no_tokens(reachable: Settings) -> None:
    reachable.data_dir.mkdir()
    migrate(open_engine(reachable.resolved_database_url), "003")
    assert_does_not_start(reachable)


def test_a_service_that_others_can_reach_starts_with_a_valid_token(
    reachable: Settings, prepared: Tokens
) -> None:
    prepared.create("valid", "read", DAY)
    _require_token_off_loopback(reachable)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_on_loopback_no_token_is_needed(host: str, tmp_path: Path) -> None:
    _require_token_off_loopback(Settings(data_dir=tmp_path / "data", host=host))


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1", "localhost.example", "127.0.0.1.example"])
def test_what_only_looks_like_loopback_needs_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="not loopback"):
        _require_token_off_loopback(Settings(data_dir=tmp_path / "data", host=host))
