"""Settings of the service, from `FRATERNAL_*` environment variables and the command line."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from service.errors import CommandFailed


class Settings(BaseSettings):
    """Where a service keeps its things and how much it runs at once."""

    model_config = SettingsConfigDict(env_prefix="FRATERNAL_", frozen=True, use_attribute_docstrings=True)

    data_dir: Path = Path("fraternal-data")
    """Database, checkpoints, corpora and driver logs, unless said otherwise below."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL, PostgreSQL or an SQLite file, of one service; default: SQLite in the data directory."""
    store_url: str | None = None
    """fsspec URL of the checkpoint store; default: `checkpoints` in the data directory."""
    running_sweeps: int = Field(default=1, ge=1)
    """Sweeps that run at once; the others wait in the order in which they came."""
    stop_drivers: bool = False
    """Whether the service, when it stops, also stops the drivers that it started; by default they go on."""
    log_format: Literal["text", "json"] = "text"
    """`text` is for people, `json` an object a line for programs; both go to standard error."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """What is logged at least; `info` has a line a request. Default: `warning` as text, `info` as JSON."""
    host: str = "127.0.0.1"
    port: int = Field(default=8123, ge=0, le=65_535)

    @model_validator(mode="after")
    def _loopback_only(self) -> Self:
        if self.host not in {"127.0.0.1", "::1", "localhost"}:
            raise ValueError(
                f"host {self.host!r} is not loopback: this version has no sign-in, so it listens on "
                "127.0.0.1 only; reach it from elsewhere through an SSH tunnel"
            )
        return self

    @model_validator(mode="after")
    def _database_that_processes_share(self) -> Self:
        url = make_url(self.resolved_database_url)
        if url.get_backend_name() not in {"sqlite", "postgresql"} or url.database in {None, "", ":memory:"}:
            raise ValueError(
                f"database {url.render_as_string()} cannot be used: it must be a file of SQLite, "
                "sqlite:////srv/fraternal.db, or a database of PostgreSQL, postgresql+psycopg://host/name"
            )
        return self

    @property
    def resolved_database_url(self) -> str:
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir.resolve() / 'fraternal.db'}"

    @property
    def resolved_store_url(self) -> str:
        if self.store_url is None:
            return (self.data_dir.resolve() / "checkpoints").as_uri()
        # Workers run in folders of their own: what is relative here is not there.
        return self.store_url if "://" in self.store_url else Path(self.store_url).resolve().as_uri()


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
                "put the URL into FRATERNAL_DATABASE_URL"
            )
        given["database_url"] = database_url
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "settings"
        raise CommandFailed(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
