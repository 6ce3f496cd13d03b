"""A whole sweep in an object store: what is killed, the store among it, costs no trial and no bit."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.databases import environment_of
from tests.object_store import BUCKET, SECRET, S3Server
from tests.service_process import (
    ServiceProcess,
    assert_exactly_the_budget,
    assert_nothing_left,
    kill_process,
    running_service,
    small_spec,
    wait_until,
)
from trials.store import CheckpointStore

pytestmark = pytest.mark.slow


@pytest.fixture
def in_s3(own_s3: S3Server, tmp_path: Path) -> Iterator[ServiceProcess]:
    environment = {**own_s3.environment, "FRATERNAL_STORE_URL": f"s3://{BUCKET}/of/mine"}
    with running_service(tmp_path / "data", environment) as running:
        yield running


def test_a_sweep_whose_worker_and_store_are_killed_ends_as_its_twin_in_a_folder(
    in_s3: ServiceProcess, own_s3: S3Server, corpus: Path, undisturbed: dict[int, str]
) -> None:
    sweep_id = in_s3.submit(small_spec(corpus, retry={"checkpoint_every_s": 0.01}))
    in_s3.wait_for_epochs(sweep_id, 3)
    kill_process(sweep_id, "ray::ResourceTrainable.train")
    in_s3.wait_for_epochs(sweep_id, 6)
    own_s3.kill()
    wait_until(lambda: not in_s3.is_ready(), "the service says that its store is away")
    said = httpx.get(f"{in_s3.url}/readyz", trust_env=False).json()["not_ready"]
    assert len(said) == 1
    assert said[0].startswith(f"the store s3://{BUCKET}/of/mine does not answer as it should (")
    refusal = httpx.get(f"{in_s3.url}/v1/sweeps/{sweep_id}/trials/0/checkpoint", trust_env=False)
    if refusal.status_code != 404:  # that trial may have no epoch yet
        assert (refusal.status_code, refusal.json()["code"]) == (503, "checkpoints_away")
    own_s3.start()
    wait_until(in_s3.is_ready, "the service is ready again")
    in_s3.ask(sweep_id, "pause")
    in_s3.wait_for_state(sweep_id, "paused")
    store = CheckpointStore(f"s3://{BUCKET}/of/mine")
    waiting = {trial["number"] for trial in in_s3.trials(sweep_id) if trial["state"] == "WAITING"}
    ended = {trial["number"] for trial in in_s3.trials(sweep_id) if trial["state"] == "COMPLETE"}
    lasts = set(store.numbers_with_last(sweep_id))
    assert lasts & waiting
    assert lasts <= waiting | ended, "of one that ended while the store was away the next driver removes it"
    in_s3.ask(sweep_id, "resume")
    ended = in_s3.wait_for_end(sweep_id)
    assert (ended["state"], ended["best"]["verification"]["outcome"]) == ("succeeded", "verified")
    assert_exactly_the_budget(in_s3, sweep_id)
    assert in_s3.checkpoints(sweep_id) == undisturbed
    assert {number: store.best_sha256(sweep_id, number) for number in range(6)} == undisturbed
    assert store.numbers_with_last(sweep_id) == []
    assert_nothing_left(in_s3, sweep_id)
    assert_is_fetched_by_ranges(f"{in_s3.url}/v1/sweeps/{sweep_id}/best/checkpoint")
    in_s3.delete(sweep_id)
    assert list(store.files()) == []
    for file in in_s3.data_dir.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def assert_is_fetched_by_ranges(url: str) -> None:
    whole = httpx.get(url, trust_env=False)
    assert whole.status_code == 200
    assert whole.headers["etag"] == f'"{hashlib.sha256(whole.content).hexdigest()}"'
    ranges = ("bytes=0-999", "bytes=1000-")
    parts = [httpx.get(url, headers={"range": asked}, trust_env=False) for asked in ranges]
    assert [part.status_code for part in parts] == [206, 206]
    assert b"".join(part.content for part in parts) == whole.content


@pytest.mark.parametrize(
    ("url", "changed", "words"),
    [
        (f"s3://{BUCKET}x/y", {}, f"there is no bucket '{BUCKET}x'; make it, or name another"),
        (f"s3://{BUCKET}/y", {"AWS_ACCESS_KEY_ID": "AKIAWRONG"}, "(403): give credentials by AWS_ACCESS_KEY"),
        ("s4://bucket", {}, "it is a folder, or s3://BUCKET/PREFIX"),
    ],
)
def test_a_service_does_not_begin_with_a_store_that_somebody_must_see_to(
    s3: S3Server, tmp_path: Path, url: str, changed: dict[str, str], words: str
) -> None:
    environment = {**s3.environment, **changed, **environment_of(tmp_path / "data")}
    said = subprocess.run(
        [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")],
        env={**environment, "FRATERNAL_STORE_URL": url, "PATH": "/usr/bin", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 1
    assert words in " ".join(said.stderr.split())
    assert SECRET not in said.stdout + said.stderr
    assert "Traceback" not in said.stderr
