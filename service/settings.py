"""Settings of the service: from the command line, `FRATERNAL_*` environment variables, files of secrets."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from service.errors import CommandFailed
from service.hosts import hostname, is_loopback
from service.rates import parse_rate_limit
from service.tokens import parse_token

SECRETS_DIR = "FRATERNAL_SECRETS_DIR"
"""Variable: folder of files that are settings, `fraternal_database_password` say; empty: there is none."""
USUAL_SECRETS_DIR = Path("/run/secrets")
"""Where containers have them."""


class Settings(BaseSettings):
    """Where a service keeps its things and how much it runs at once."""

    model_config = SettingsConfigDict(env_prefix="FRATERNAL_", frozen=True, use_attribute_docstrings=True)

    data_dir: Path = Path("fraternal-data")
    """Database, checkpoints, corpora and driver logs, unless said otherwise below."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL, PostgreSQL or an SQLite file, of one service; default: SQLite in the data directory."""
    database_password: SecretStr | None = None
    """Of a PostgreSQL whose URL has none, so that the same file can be its server's; SQLite needs none."""
    admin_token: SecretStr | None = None
    """A token of scope admin that is valid from the first start on, `frt_`, 12 hexadecimal digits, `_`, 43
    random characters or more; another one at a later start takes its place."""
    store_url: str | None = None
    """fsspec URL of the checkpoint store; default: `checkpoints` in the data directory."""
    ray_address: str | None = None
    """`host:port` of a Ray cluster whose nodes run the trials; default: this machine, by its own Ray."""
    ray_grows: bool = False
    """Whether that cluster adds nodes by itself: nothing is refused then for what it does not have now."""
    running_sweeps: int = Field(default=1, ge=1)
    """Sweeps that run at once, and share the machines by priority; the others wait."""
    stop_drivers: bool = False
    """Whether the service, when it stops, also stops the drivers that it started; by default they go on."""
    max_streams: int = Field(default=2000, ge=0)
    """Streams of events that may be open at once; each is a connection."""
    webhooks_to_private: bool = False
    """Whether webhooks may be on this machine or in its networks, which their creator may see nothing of."""
    log_format: Literal["text", "json"] = "text"
    """`text` is for people, `json` an object a line for programs; both go to standard error."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """What is logged at least; `info` has a line a request but for probes. Default: `warning` as text, `info`
    as JSON."""
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs a token."""
    port: int = Field(default=8123, ge=0, le=65_535)

    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Names, separated by commas, of the service besides localhost; off loopback, by default any."""
    rate_limit: str = "1000/second"
    """Requests of each token, or of each address without one, as `limits` writes it; `off` for none."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Raises CommandFailed where the folder of secrets that is named is none."""
        folder = find_secrets_dir()
        if folder is None:
            return init_settings, env_settings
        return init_settings, env_settings, SecretsSettingsSource(settings_cls, folder)

    @field_validator("ray_address")
    @classmethod
    def _host_and_port(cls, address: str | None) -> str | None:
        if address is None or not address:
            return None
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
            raise ValueError(
                f"{address!r} is no address of a Ray cluster's head: one is ray-head:6379, as `ray start "
                "--head` says it"
            )
        return address

    @field_validator("admin_token")
    @classmethod
    def _of_our_form(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            parse_token(token.get_secret_value())
        return token

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _separated_by_commas(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        return tuple(name.strip() for name in given.split(",") if name.strip())

    @field_validator("allowed_hosts")
    @classmethod
    def _names_of_hosts(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        """Without their ports."""
        if wrong := [name for name in given if not hostname(name)]:
            raise ValueError(f"{wrong[0]!r} is no name of a host; one is fraternal.example")
        return tuple(hostname(name) for name in given)

    @field_validator("rate_limit")
    @classmethod
    def _in_the_librarys_grammar(cls, limit: str) -> str:
        parse_rate_limit(limit)
        return limit

    @field_validator("store_url")
    @classmethod
    def _without_a_password(cls, url: str | None) -> str | None:
        """Every worker is told the store's URL, and Ray keeps what workers are told."""
        if url is not None and urlsplit(url).password:
            raise ValueError(
                "a password in it would be seen in files of Ray: give it by fsspec's configuration, FSSPEC_* "
                "environment variables or ~/.config/fsspec, and leave it out of the URL"
            )
        return url

    @model_validator(mode="after")
    def _database_that_processes_share(self) -> Self:
        try:
            url = make_url(self.resolved_database_url)
        except ArgumentError as error:  # which repeats it, with its password
            raise ValueError("database_url is no URL; one is sqlite:////srv/fraternal.db") from error
        if url.get_backend_name() not in {"sqlite", "postgresql"} or url.database in {None, "", ":memory:"}:
            raise ValueError(
                f"database {url.render_as_string()} cannot be used: it must be a file of SQLite, "
                "sqlite:////srv/fraternal.db, or a database of PostgreSQL, postgresql://host/name"
            )
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def resolved_database_url(self) -> str:
        """With its password, and the driver of PostgreSQL that our extra brings."""
        if self.database_url is None:
            return own_database_url(self.data_dir)
        written = self.database_url.get_secret_value()
        url = given = make_url(written)
        if url.drivername in {"postgresql", "postgres"}:  # by which SQLAlchemy means psycopg2, or nothing
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() == "postgresql" and self.database_password is not None and not url.password:
            url = url.set(password=self.database_password.get_secret_value())
        return written if url is given else url.render_as_string(hide_password=False)

    @property
    def resolved_store_url(self) -> str:
        if self.store_url is None:
            return (self.data_dir.resolve() / "checkpoints").as_uri()
        # Workers run in folders of their own: what is relative here is not there.
        return self.store_url if "://" in self.store_url else Path(self.store_url).resolve().as_uri()


def find_secrets_dir() -> Path | None:
    """Raises CommandFailed where one is named that is not there."""
    named = os.environ.get(SECRETS_DIR)
    if named is None:
        enters = os.access(USUAL_SECRETS_DIR, os.R_OK | os.X_OK, effective_ids=True)
        return USUAL_SECRETS_DIR if enters else None
    if named and not Path(named).is_dir():
        raise CommandFailed(f"{SECRETS_DIR} is {named!r}, which is no folder: name one, or unset it")
    return Path(named) if named else None


def is_closed_off_from_secrets() -> bool:
    """Whether they are where containers have them, in a folder that this user cannot enter."""
    return SECRETS_DIR not in os.environ and USUAL_SECRETS_DIR.is_dir() and find_secrets_dir() is None


def own_database_url(data_dir: Path) -> str:
    """Of the database that a service has where none is named."""
    return f"sqlite:///{data_dir.resolve() / 'fraternal.db'}"


def read_settings(database_url: str | None, **given: Any) -> Settings:
    """Settings from the command line over the environment's. Raises CommandFailed."""
    if database_url is not None:
        try:
            parsed = make_url(database_url)
        except ArgumentError as error:
            raise CommandFailed(
                f"{database_url!r} is no database URL; one is sqlite:////srv/fraternal.db"
            ) from error
        if parsed.password is not None:
            raise CommandFailed(
                "a password on the command line can be seen by everybody on the machine; "
                "put the URL into FRATERNAL_DATABASE_URL, or the password into a file (README, Settings)"
            )
        given["database_url"] = database_url
    try:
        return Settings(**given)
    except (SettingsError, OSError) as error:
        cause = error.__cause__ or error
        if not isinstance(cause, OSError):
            raise CommandFailed(f"{error}: {cause}") from error
        raise CommandFailed(
            f"{cause.filename} cannot be read: {cause.strerror}; the user of id {os.geteuid()} has to be let"
        ) from error
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "settings"
        raise CommandFailed(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
