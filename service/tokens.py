"""Tokens and signed-in browsers as rows. A row knows a secret's digest; what it was, nobody can tell."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar, get_args

from sqlalchemy import Engine, RowMapping, delete, insert, inspect, select, update

from service.database import aware, naive, now, one_at_a_time
from service.errors import CommandFailed, UnknownToken
from service.tables import sessions, tokens

Scope = Literal["read", "write", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Each may do what those before it may."""
SESSION_LASTS = timedelta(hours=12)
"""A browser signs in again after so long, or when its token ends, if that is sooner."""
LONGEST_NAME = 200
TOKEN, SESSION = "frt", "frs"
"""What a token and a session begin with, so that people and scanners of secrets know what they see."""
WRITTEN = re.compile(rf"{TOKEN}_([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43,}})")
"""How a token is written: its id, and a secret of 256 random bits or more in whatever alphabet."""
FROM_SETTINGS = "FRATERNAL_ADMIN_TOKEN"
"""Name of the token that the settings give."""
NOBODYS_DIGEST = "0" * 64
"""What a secret of an unknown id is compared with: that takes as long as the comparison with a real one."""


@dataclass(frozen=True)
class Token:
    """A token's row."""

    id: str
    name: str
    scope: Scope
    secret_sha256: str = field(repr=False)
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @property
    def state(self) -> Literal["valid", "expired", "revoked"]:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now() else "valid"

    def may(self, scope: Scope) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


@dataclass(frozen=True)
class Session:
    """A browser's row."""

    id: str
    token_id: str
    secret_sha256: str = field(repr=False)
    expires_at: datetime


Row = TypeVar("Row", Token, Session)


@dataclass(frozen=True)
class Holders:
    """Everybody who may ask, as the tables had it at one moment."""

    tokens: Mapping[str, Token]
    """By id; those that are no longer valid, too."""
    sessions: Mapping[str, Session]

    def find(self, written: str) -> Token | None:
        """The token that was shown so, if it is still valid."""
        known = _if_secret_fits(self.tokens.get(_id_in(written, TOKEN)), written)
        return self._find_valid(known.id) if known is not None else None

    def find_session(self, written: str) -> Session | None:
        """The session of a browser whose cookie has this, while it and its token are valid."""
        known = _if_secret_fits(self.sessions.get(_id_in(written, SESSION)), written)
        if known is None or known.expires_at <= now() or self._find_valid(known.token_id) is None:
            return None
        return known

    def find_by_session(self, written: str) -> Token | None:
        """The token that a browser has signed in with."""
        session = self.find_session(written)
        return self._find_valid(session.token_id) if session is not None else None

    def _find_valid(self, token_id: str) -> Token | None:
        known = self.tokens.get(token_id)
        return known if known is not None and known.state == "valid" else None


class Tokens:
    """Reads and writes the tables of tokens and sessions. Every method is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        """Of an engine that nobody else has."""
        self._engine.dispose()

    def create(self, name: str, scope: Scope, lasting: timedelta | None) -> tuple[Token, str]:
        """A token, and how it is written: this once, since only its digest is kept."""
        token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        created_at = now()
        expires_at = created_at + lasting if lasting is not None else None
        token = Token(token_id, name, scope, _digest(secret), created_at, expires_at, None)
        values = {name: _stored(value) for name, value in asdict(token).items()}
        with self._engine.begin() as connection:
            connection.execute(insert(tokens).values(values))
        return token, f"{TOKEN}_{token_id}_{secret}"

    def keep_given(self, written: str) -> Token:
        """The settings' token, and no other that they gave before. One that was revoked stays so.

        Raises CommandFailed where its id is another token's.
        """
        token_id, secret = parse_token(written)
        given = Token(token_id, FROM_SETTINGS, "admin", _digest(secret), now(), None, None)
        values = {name: _stored(value) for name, value in asdict(given).items()}
        with one_at_a_time(self._engine) as connection:  # services may be given it at once
            replaced = (tokens.c.name == FROM_SETTINGS) & (tokens.c.id != token_id)
            revoked = replaced & tokens.c.revoked_at.is_(None)
            over = select(tokens.c.id).where(replaced)
            connection.execute(delete(sessions).where(sessions.c.token_id.in_(over)))
            connection.execute(update(tokens).where(revoked).values(revoked_at=naive(now())))
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).mappings().one_or_none()
            if row is None:
                connection.execute(insert(tokens).values(values))
                return given
            if row["secret_sha256"] != given.secret_sha256:
                raise CommandFailed(
                    f"{FROM_SETTINGS}: another token has the id {token_id!r}; take other random digits"
                )
            return _token(row)

    def list_tokens(self) -> list[Token]:
        """In the order in which they were made; those that are no longer valid, too."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.created_at, tokens.c.id)).mappings()
            return [_token(row) for row in rows]

    def revoke(self, token_id: str) -> Token:
        """It is valid no more, nor is any browser that signed in with it. Raises UnknownToken."""
        same = tokens.c.id == token_id
        with self._engine.begin() as connection:
            revoked = same & tokens.c.revoked_at.is_(None)
            connection.execute(update(tokens).where(revoked).values(revoked_at=naive(now())))
            connection.execute(delete(sessions).where(sessions.c.token_id == token_id))
            row = connection.execute(select(tokens).where(same)).mappings().one_or_none()
        if row is None:
            raise UnknownToken(f"there is no token {token_id!r}; `fraternal token ls` lists them")
        return _token(row)

    def remove(self, token_id: str) -> None:
        """As if it had never been made: of a token that was made for one command."""
        with self._engine.begin() as connection:
            connection.execute(delete(tokens).where(tokens.c.id == token_id))

    def open_session(self, token: Token) -> str:
        """What a browser's cookie is to have. Sessions that are over are removed on the way."""
        session_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        created_at = now()
        expires_at = min(created_at + SESSION_LASTS, token.expires_at or datetime.max.replace(tzinfo=UTC))
        values = {
            "id": session_id,
            "token_id": token.id,
            "secret_sha256": _digest(secret),
            "created_at": naive(created_at),
            "expires_at": naive(expires_at),
        }
        with self._engine.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= naive(created_at)))
            connection.execute(insert(sessions).values(values))
        return f"{SESSION}_{session_id}_{secret}"

    def close_session(self, session_id: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.id == session_id))

    def holders(self) -> Holders:
        with self._engine.connect() as connection:
            found = [_token(row) for row in connection.execute(select(tokens)).mappings()]
            browsers = [_session(row) for row in connection.execute(select(sessions)).mappings()]
        return Holders({token.id: token for token in found}, {browser.id: browser for browser in browsers})


def parse_token(written: str) -> tuple[str, str]:
    """Its id and its secret. Raises ValueError, which does not repeat it."""
    found = WRITTEN.fullmatch(written)
    if found is None:
        raise ValueError(
            f"it is no token; a shell makes one by {TOKEN}_$(openssl rand -hex 6)_$(openssl rand -hex 32)"
        )
    return found[1], found[2]


def has_valid_token(engine: Engine) -> bool:
    """Whether anybody could sign in; also where the tables are not there yet, or not all of them."""
    if not inspect(engine).has_table(tokens.name):
        return False
    return any(token.state == "valid" for token in Tokens(engine).list_tokens())


def _id_in(written: str, kind: str) -> str:
    """Empty where it is not of that kind."""
    beginning, _, rest = written.partition("_")
    return rest.partition("_")[0] if beginning == kind else ""


def _if_secret_fits(known: Row | None, written: str) -> Row | None:
    """In the same time whether it does or not, and whether anybody is known at all."""
    digest = _digest(written.split("_", 2)[-1])
    fits = hmac.compare_digest(digest, known.secret_sha256 if known is not None else NOBODYS_DIGEST)
    return known if fits else None


def _digest(secret: str) -> str:
    """A secret of 256 random bits cannot be guessed from its digest, however quickly that is computed."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _stored(value: Any) -> Any:
    return naive(value) if isinstance(value, datetime) else value


def _token(row: RowMapping) -> Token:
    times = {name: aware(row[name]) for name in ("created_at", "expires_at", "revoked_at")}
    return Token(**{**row, **times})


def _session(row: RowMapping) -> Session:
    return Session(row["id"], row["token_id"], row["secret_sha256"], row["expires_at"].replace(tzinfo=UTC))
