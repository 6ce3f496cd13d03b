"""Secrets planted in a real service, with a real driver and Ray, and looked for wherever they might be.

Planted are the database's password, tokens that are valid, revoked, wrong or in somebody's environment, a
browser's session, and a secret of the store. They are looked for while a sweep runs, and afterwards.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import MetaData, select

from service.access import COOKIE
from service.database import migrate, open_engine
from service.launcher import MARK, marked_processes
from service.settings import Settings
from service.tokens import Tokens
from tests.databases import PostgreSQL
from tests.object_store import BUCKET, S3Server
from tests.service_process import (
    ServiceProcess,
    running_service,
    scratches_of,
    small_spec,
    write_corpus,
)

pytestmark = pytest.mark.slow

PASSWORD = "planted-xyzzy-password"
IN_ENVIRONMENT = {
    "FRATERNAL_TOKEN": "frt_0123456789ab_planted-xyzzy-clients-own",
    "AWS_SECRET_ACCESS_KEY": "planted-xyzzy-store",
    "FRATERNAL_ADMIN_TOKEN": "frt_ba9876543210_planted-xyzzy-given-with-the-settings-of-it",
    "FRATERNAL_DATABASE_PASSWORD": PASSWORD,
}
WRONG = "frt_0123456789ab_planted-xyzzy-wrong"
PATHS = (
    "/v1/sweeps",
    "/openapi.json",
    "/healthz",
    "/readyz",
    "/docs",
    "/sign-in",
    "/api/studies",
    "/metrics",
)


@dataclass(frozen=True)
class Planted:
    """A running service, and what must be found nowhere."""

    service: ServiceProcess
    database_url: str
    secrets: frozenset[bytes]

    def found_in(self, places: Iterator[tuple[str, bytes]]) -> list[str]:
        return [
            f"{secret.decode()} in {place}"
            for place, content in places
            for secret in self.secrets
            if secret in content
        ]


@pytest.fixture(scope="module")
def planted(
    server: PostgreSQL, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planted]:
    url = server.create_database()
    engine = open_engine(url)
    migrate(engine)
    tokens = Tokens(engine)
    (_, written), (revoked, gone) = (tokens.create(name, "admin", None) for name in ("valid", "revoked"))
    tokens.revoke(revoked.id)
    engine.dispose()
    environment = {
        **s3_server.environment,
        **IN_ENVIRONMENT,
        "FRATERNAL_DATABASE_URL": url,
        "FRATERNAL_STORE_URL": f"s3://{BUCKET}/secrets",
    }
    with running_service(tmp_path_factory.mktemp("secrets") / "data", environment) as service:
        cookie = signed_in(service, written)
        service._http.headers["authorization"] = f"Bearer {written}"
        secrets = [
            WRONG,
            *IN_ENVIRONMENT.values(),
            *(one.split("_", 2)[2] for one in (written, gone, cookie)),
        ]
        yield Planted(service, url, frozenset(secret.encode() for secret in secrets))


def signed_in(service: ServiceProcess, written: str) -> str:
    response = httpx.post(f"{service.url}/sign-in", data={"token": written}, trust_env=False)
    return response.cookies[COOKIE]


def answers(service: ServiceProcess, sweep_id: str) -> Iterator[tuple[str, bytes]]:
    """Bodies and headers, of what is refused too."""
    of_sweep = ("", "/trials", "/trials/0", "/best", "/none")
    token = service._http.headers["authorization"]
    asked: list[tuple[str, str, dict[str, str], Any]] = [
        *(("GET", path, {"authorization": token}, None) for path in PATHS),
        *(("GET", f"/v1/sweeps/{sweep_id}{path}", {"authorization": token}, None) for path in of_sweep),
        ("GET", "/v1/sweeps", {"authorization": f"Bearer {WRONG}"}, None),
        ("GET", "/v1/sweeps", {"authorization": f"Basic {WRONG}"}, None),
        ("POST", "/v1/sweeps", {"authorization": token}, {"corpus": {"name": "brown"}}),
        ("POST", f"/v1/sweeps/{sweep_id}:resume", {"authorization": token}, None),
        ("POST", "/sign-in", {"content-type": "application/x-www-form-urlencoded"}, None),
    ]
    for method, path, headers, body in asked:
        response = httpx.request(method, service.url + path, headers=headers, json=body, trust_env=False)
        assert response.status_code < 500, response.text
        yield f"the answer to {method} {path}", repr(response.headers.raw).encode() + response.content


def command_lines() -> Iterator[tuple[str, bytes]]:
    for process in psutil.process_iter():
        try:
            yield f"the command line of {process}", Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:  # gone
            continue


def files_below(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                if path.is_file():
                    yield str(path), path.read_bytes()
            except OSError:  # gone
                continue


def rows_of(url: str) -> Iterator[tuple[str, bytes]]:
    engine = open_engine(url)
    tables = MetaData()
    tables.reflect(engine)
    with engine.connect() as connection:
        for table in tables.sorted_tables:
            yield f"table {table.name}", repr(connection.execute(select(table)).all()).encode()
    engine.dispose()


def test_no_secret_is_found_anywhere_while_a_sweep_runs_or_afterwards(
    planted: Planted, s3_server: S3Server, tmp_path: Path
) -> None:
    service = planted.service
    sweep_id = service.submit(small_spec(write_corpus(tmp_path / "corpus"), budget={"trials": 4}))
    service.wait_for_epochs(sweep_id, 2)
    scratch = scratches_of(sweep_id)
    (driver,) = [one for one in marked_processes(MARK, sweep_id) if "service.drive" in one.cmdline()]
    planted = replace(planted, secrets=planted.secrets | {driver.environ()["RAY_AUTH_TOKEN"].encode()})
    assert len(list(files_below(*scratch))) > 10, "Ray's files can be read"
    assert planted.found_in(files_below(*scratch)) == []
    assert planted.found_in(command_lines()) == []
    assert planted.found_in(answers(service, sweep_id)) == []
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    assert planted.found_in(answers(service, sweep_id)) == []
    kept = list(files_below(service.data_dir, s3_server.folder))
    assert {Path(place).suffix for place, _ in kept} >= {".log", ".lock"}
    assert any(b"model.safetensors" in content for _, content in kept), "the store's objects are among them"
    assert planted.found_in(iter(kept)) == []
    assert planted.found_in(rows_of(planted.database_url)) == []


def test_no_process_of_ray_has_the_databases_password_or_a_clients_token(
    planted: Planted, tmp_path: Path
) -> None:
    service = planted.service
    sweep_id = service.submit(small_spec(write_corpus(tmp_path / "corpus"), budget={"trials": 2}))
    service.wait_for_epochs(sweep_id, 1)
    processes = [
        process for process in marked_processes(MARK, sweep_id) if "service.drive" not in process.cmdline()
    ]
    assert len(processes) > 3
    for process in processes:
        environment = repr(process.environ())
        assert PASSWORD not in environment, process.cmdline()
        for name in ("FRATERNAL_TOKEN", "FRATERNAL_ADMIN_TOKEN"):
            assert IN_ENVIRONMENT[name] not in environment, process.cmdline()
    service.wait_for_end(sweep_id)


def test_a_database_that_does_not_let_us_in_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql+psycopg://fraternal:{PASSWORD}@127.0.0.1:1/fraternal"
    service = ServiceProcess(tmp_path / "data", {"FRATERNAL_DATABASE_URL": url, **IN_ENVIRONMENT})
    assert not service.try_to_start()
    service.stop()
    service.close()
    said = service._log()
    assert re.search("database cannot be used", said), said
    assert "planted" not in said


def test_settings_do_not_tell_the_databases_password(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url=f"postgresql+psycopg://a:{PASSWORD}@127.0.0.1/b")
    assert PASSWORD not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
