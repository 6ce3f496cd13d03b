"""A sweep's life with real processes: pauses, limits, what freezes or is damaged, two services at once."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from sqlalchemy import update

from service.database import open_engine
from service.launcher import MARK, marked_processes
from service.local import read_checkpoint
from service.records import Records
from service.tables import sweeps
from tests import databases
from tests.service_process import (
    ServiceProcess,
    assert_exactly_the_budget,
    assert_nothing_left,
    find_process,
    running_service,
    small_spec,
    wait_until,
    workers_of,
    write_corpus,
)
from trials.store import unpack

pytestmark = pytest.mark.slow


def lasts(service: ServiceProcess, sweep_id: str) -> dict[int, float]:
    """When each trial's `last` was written, by number."""
    folder = service.data_dir / "checkpoints" / sweep_id
    return {int(file.parent.name[1:]): file.stat().st_mtime for file in folder.glob("*/last.tar")}


def timestamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def open_trials(service: ServiceProcess, sweep_id: str) -> list[int]:
    return [trial["number"] for trial in service.trials(sweep_id) if trial["state"] in {"RUNNING", "WAITING"}]


def test_paused_sweep_holds_fresh_states_and_no_resources_and_goes_on_to_the_same_end(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    never_by_itself = {"checkpoint_every_s": 600}
    sweep_id = service.submit(small_spec(corpus, retry=never_by_itself))
    service.wait_for_epochs(sweep_id, 3)
    paused_at = time.time()
    service.ask(sweep_id, "pause")
    paused = service.wait_for_state(sweep_id, "paused")
    assert_nothing_left(service, sweep_id)
    waiting = open_trials(service, sweep_id)
    assert waiting
    assert paused["trials"]["waiting"] == len(waiting)
    assert paused["trials"]["running"] == 0
    saved_at = lasts(service, sweep_id)
    for number in waiting:
        # An epoch's end that the sweep heard of while it paused was saved just before that was said.
        heard_at = [timestamp(epoch["recorded_at"]) for epoch in service.curve(sweep_id, number)]
        assert max([saved_at.get(number, 0), *heard_at]) >= paused_at or not heard_at
    assert [*(service.data_dir / "checkpoints" / sweep_id).glob("pause-*")] == []
    service.ask(sweep_id, "resume")
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    assert_exactly_the_budget(service, sweep_id)
    assert service.checkpoints(sweep_id) == undisturbed
    assert {trial["attempt"] for trial in service.trials(sweep_id)} == {1, 2}
    assert lasts(service, sweep_id) == {}


def test_stopped_sweep_is_extended_cancelled_retried_and_deleted(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    sweep_id = service.submit(small_spec(corpus))
    service.wait_for_epochs(sweep_id, 2)
    service.ask(sweep_id, "stop")
    stopped = service.wait_for_end(sweep_id)
    assert stopped["state"] == "succeeded"
    assert "stopped on request" in stopped["state_reason"]
    done = service.trials(sweep_id)
    assert {trial["state"] for trial in done} == {"COMPLETE"}
    assert len(done) < 6
    service.ask(sweep_id, "extend", {"trials": 1})
    service.wait_for_epochs(sweep_id, 4 * len(done) + 1)
    service.cancel(sweep_id)
    service.wait_for_state(sweep_id, "cancelled")
    failed = [trial for trial in service.trials(sweep_id) if trial["state"] == "FAIL"]
    assert failed
    service.ask(sweep_id, "retry-failed")
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    trials = service.trials(sweep_id)
    assert [trial["number"] for trial in trials] == list(range(7))
    assert {trial["state"] for trial in trials} == {"COMPLETE"}
    assert undisturbed.items() <= service.checkpoints(sweep_id).items()
    service.delete(sweep_id)
    assert not (service.data_dir / "checkpoints" / sweep_id).exists()
    assert not (service.data_dir / "drivers" / f"{sweep_id}.log").exists()
    assert_nothing_left(service, sweep_id)


@pytest.mark.parametrize("limit", ["wall_s", "target", "max_failed"])
def test_within_ten_seconds_of_a_limit_no_trial_runs_and_all_that_began_have_ended(
    service: ServiceProcess, corpus: Path, limit: str
) -> None:
    arms = {"fd": {"regularizer": "fraternal"}, "wild": {"regularizer": "fraternal", "kappa": 1e9}}
    spec = small_spec(
        corpus,
        arms=arms if limit == "max_failed" else {"fd": arms["fd"]},
        training={"epochs": 400, "batch_size": 4, "bptt": 15},
        budget={"trials": 50, limit: {"wall_s": 15, "target": 55, "max_failed": 0}[limit]},
    )
    sweep_id = service.submit(spec)
    ended = service.wait_for_end(sweep_id)
    trials = service.trials(sweep_id)
    if limit == "wall_s":
        began = timestamp(ended["started_at"])
        assert all(15 <= timestamp(trial["finished_at"]) - began < 25 for trial in trials)
        assert ended["ran_s"] >= 15
    assert f"budget.{limit}" in ended["state_reason"]
    states = {trial["state"] for trial in trials}
    assert states <= {"COMPLETE", "FAIL"}
    assert ended["state"] == ("succeeded" if "COMPLETE" in states and limit == "target" else "failed")
    assert_nothing_left(service, sweep_id)
    if any(trial["best_epoch"] for trial in trials):
        best = service.get(f"/v1/sweeps/{sweep_id}/best")
        assert best["verification"]["outcome"] == "verified"


def test_best_is_verified_when_its_sweep_ends_and_fetched_with_how_that_came_out(
    service: ServiceProcess, corpus: Path, tmp_path: Path
) -> None:
    sweep_id = service.submit(small_spec(corpus, budget={"trials": 2}))
    best = service.wait_for_end(sweep_id)["best"]
    found = best["verification"]
    assert (found["outcome"], found["checkpoint_sha256"]) == ("verified", best["checkpoint_sha256"])
    assert abs(found["valid_loss"] - best["best_valid_loss"]) <= 1e-6
    assert found["device"] == best["device"]
    command = ["curl", "-fsS", "-OJ", f"{service.url}/v1/sweeps/{sweep_id}/best/checkpoint"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (file,) = tmp_path.iterdir()
    files = unpack(file.read_bytes(), file.name)
    assert json.loads(files["metrics.json"])["verification"] == found
    assert json.loads(files["provenance.json"])["sweep"]["id"] == sweep_id
    assert read_checkpoint(file).metrics["valid_loss"] == best["best_valid_loss"]
    assert [event["kind"] for event in service.events(sweep_id)][-2:] == [
        "checkpoint_checked",
        "sweep_succeeded",
    ]


def test_trials_that_fail_alike_pause_the_sweep_with_their_traceback(
    service: ServiceProcess, tmp_path: Path
) -> None:
    """The text goes away while the sweep runs; it is put back, and the failed ones are tried again."""
    corpus = write_corpus(tmp_path / "corpus", tokens=2_000)
    sweep_id = service.submit(small_spec(corpus, budget={"trials": 20}))
    service.wait_for_epochs(sweep_id, 1)
    (corpus / "train.txt").rename(corpus / "away.txt")
    paused = service.wait_for_state(sweep_id, "paused")
    assert "3 trials in a row failed alike (user_error)" in paused["state_reason"]
    assert "train.txt" in paused["state_reason"]
    assert paused["trials"]["failed"] >= 3
    (corpus / "away.txt").rename(corpus / "train.txt")
    service.ask(sweep_id, "retry-failed")
    service.ask(sweep_id, "resume")
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    assert_exactly_the_budget(service, sweep_id)


def test_hung_worker_is_ended_and_its_trial_goes_on_elsewhere(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    retry = {"checkpoint_every_s": 0.2, "hang_s": 6}
    sweep_id = service.submit(small_spec(corpus, retry=retry))
    service.wait_for_epochs(sweep_id, 2)
    freeze(sweep_id, "ray::ResourceTrainable.train")
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    assert_exactly_the_budget(service, sweep_id)
    assert service.checkpoints(sweep_id) == undisturbed
    assert {trial["attempt"] for trial in service.trials(sweep_id)} == {1, 2}
    assert any("retry.hang_s" in str(event) for event in service.events(sweep_id))


def freeze(sweep_id: str, words: str) -> psutil.Process:
    found: list[psutil.Process] = []

    def stop() -> bool:
        process = find_process(sweep_id, words)
        if process is not None:
            process.suspend()
            found.append(process)
        return process is not None

    wait_until(stop, f"{words!r} runs for sweep {sweep_id}")
    return found[0]


def dump(service: ServiceProcess) -> list[str]:
    """Every row of the database, but for the service's own lease."""
    return [line for line in databases.dump(service.data_dir) if not line.startswith("fraternal_leases")]


def test_driver_that_wakes_after_another_has_begun_changes_nothing_and_leaves_nothing(
    service: ServiceProcess, corpus: Path
) -> None:
    """Another one of another machine: on this one, what is frozen would have been killed."""
    sweep_id = service.submit(small_spec(corpus, budget={"trials": 50}))
    service.wait_for_epochs(sweep_id, 2)
    service.kill()
    driver = freeze(sweep_id, "service.drive")
    records = Records(open_engine(service.database_url))
    try:
        assert records.claim(records.get_sweep(sweep_id), fruitless=0, epochs_done=0) == 2
        time.sleep(5)  # its workers have something to tell by now
        before = dump(service)
        driver.resume()
        wait_until(lambda: not marked_processes(MARK, sweep_id), "the driver and all it started are gone")
        assert dump(service) == before
        log = (service.data_dir / "drivers" / f"{sweep_id}.log").read_text()
        assert "Traceback" not in log
    finally:
        records.engine.dispose()
        with suppress(psutil.NoSuchProcess):
            driver.kill()
        service.start()
    service.cancel(sweep_id)
    service.wait_for_end(sweep_id)


def test_of_two_services_at_one_database_one_acts_and_the_other_takes_over(
    tmp_path: Path, corpus: Path
) -> None:
    shared = {
        "FRATERNAL_DATABASE_URL": databases.database_of(tmp_path),
        "FRATERNAL_STORE_URL": (tmp_path / "store").as_uri(),
    }
    with (
        running_service(tmp_path / "a", shared) as first,
        running_service(tmp_path / "b", shared) as second,
    ):
        sweep_ids = [service.submit(small_spec(corpus)) for service in (second, first)]
        first.wait_for_epochs(sweep_ids[0], 2)
        assert (tmp_path / "a" / "drivers").exists()
        assert not (tmp_path / "b" / "drivers").exists()
        first.kill()
        for sweep_id in sweep_ids:
            assert second.wait_for_end(sweep_id)["state"] == "succeeded"
            assert second.sweep(sweep_id)["driver_generation"] == 1, "the first one's driver was adopted"
            assert_exactly_the_budget(second, sweep_id)
        assert (tmp_path / "b" / "drivers" / f"{sweep_ids[1]}.log").exists()
        first.start()
        assert first.sweep(sweep_ids[1])["state"] == "succeeded"


def test_raylet_or_gcs_that_dies_with_tunes_folder_gone_costs_nothing(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    sweep_id = service.submit(small_spec(corpus))
    service.wait_for_epochs(sweep_id, 3)
    driver = find_process(sweep_id, "service.drive")
    assert driver is not None
    scratch = Path(driver.cmdline()[-1])
    for file in (scratch / "tune").rglob("*"):
        with suppress(OSError):
            file.unlink()
    gcs = find_process(sweep_id, "gcs_server")
    assert gcs is not None
    os.kill(gcs.pid, signal.SIGKILL)
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    assert_exactly_the_budget(service, sweep_id)
    assert service.checkpoints(sweep_id) == undisturbed


def test_driver_waits_while_another_process_holds_the_database(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    sweep_id = service.submit(small_spec(corpus))
    service.wait_for_epochs(sweep_id, 2)
    with databases.held(service.data_dir):
        time.sleep(25)  # longer than a lease
    sweep = service.wait_for_end(sweep_id)
    assert (sweep["state"], sweep["driver_generation"]) == ("succeeded", 1)
    assert_exactly_the_budget(service, sweep_id)
    assert service.checkpoints(sweep_id) == undisturbed


def test_damaged_last_checkpoint_costs_time_and_nothing_else(
    service: ServiceProcess, corpus: Path, undisturbed: dict[int, str]
) -> None:
    sweep_id = service.submit(small_spec(corpus))
    service.wait_for_epochs(sweep_id, 3)
    service.ask(sweep_id, "pause")
    service.wait_for_state(sweep_id, "paused")
    damaged = [*(service.data_dir / "checkpoints" / sweep_id).glob("*/last.tar")]
    assert damaged
    for file in damaged:
        file.write_bytes(file.read_bytes()[:3000] + b"\0" * 500)
    service.ask(sweep_id, "resume")
    assert service.wait_for_end(sweep_id)["state"] == "succeeded"
    assert_exactly_the_budget(service, sweep_id)
    assert service.checkpoints(sweep_id) == undisturbed


def test_damaged_row_of_a_sweep_ends_that_sweep_and_no_other(service: ServiceProcess, corpus: Path) -> None:
    damaged = service.submit(small_spec(corpus, budget={"trials": 50}))
    service.wait_for_epochs(damaged, 1)
    service.ask(damaged, "pause")
    service.wait_for_state(damaged, "paused")
    spec = {"corpus": {"name": "sotu"}, "budget": {"trials": 50}, "lost": 1}
    with databases.opened(service.data_dir) as engine, engine.begin() as connection:
        connection.execute(update(sweeps).where(sweeps.c.id == damaged).values(spec=spec))
    service.ask(damaged, "resume")
    whole = service.submit(small_spec(corpus, budget={"trials": 1}))
    assert service.wait_for_end(whole)["state"] == "succeeded"
    listed = service.sweeps()[damaged]
    assert listed["state"] == "failed"
    assert "cannot be read" in listed["state_reason"]
    assert open_trials(service, damaged) == []
    service.delete(damaged)


def test_full_disk_pauses_the_sweep_and_when_there_is_room_again_it_goes_on_to_the_same_end(
    tmp_path: Path, corpus: Path, undisturbed: dict[int, str], small_disk: Path
) -> None:
    with running_service(tmp_path / "data", {"FRATERNAL_STORE_URL": small_disk.as_uri()}) as service:
        sweep_id = service.submit(small_spec(corpus))
        service.wait_for_epochs(sweep_id, 2)
        filler = small_disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        paused = service.wait_for_state(sweep_id, "paused")
        assert "no room for a checkpoint" in paused["state_reason"]
        assert "No space left on device" in paused["state_reason"]
        assert {trial["state"] for trial in service.trials(sweep_id)} <= {"WAITING", "COMPLETE"}
        assert [*small_disk.rglob("*.part")] == []
        filler.unlink()
        service.ask(sweep_id, "resume")
        assert service.wait_for_end(sweep_id)["state"] == "succeeded"
        assert_exactly_the_budget(service, sweep_id)
        assert service.checkpoints(sweep_id) == undisturbed


def test_a_worker_trains_one_trial_after_another(service: ServiceProcess, corpus: Path) -> None:
    """Loading torch anew costs seconds a trial."""
    sweep_id = service.submit(small_spec(corpus, resources={"max_concurrent": 1}))
    workers = set()
    while not service.has_ended(sweep_id):
        workers.update(workers_of(sweep_id))
        time.sleep(0.1)
    assert len(workers) == 1
    assert_exactly_the_budget(service, sweep_id)


def test_number_of_trials_at_once_follows_what_is_wished_for_while_the_sweep_runs(
    service: ServiceProcess, corpus: Path
) -> None:
    long = {"epochs": 400, "batch_size": 4, "bptt": 15}
    spec = small_spec(corpus, training=long, resources={"max_concurrent": 1}, budget={"trials": 4})
    sweep_id = service.submit(spec)
    service.wait_for_epochs(sweep_id, 3)
    assert [trial["state"] for trial in service.trials(sweep_id)] == ["RUNNING"]
    service.change(sweep_id, {"max_concurrent": 2})
    wait_until(lambda: running(service, sweep_id) == [0, 1], "two trials have begun to run")
    service.change(sweep_id, {"max_concurrent": 1})
    service.ask_of_trial(sweep_id, 0, "stop")
    wait_until(lambda: running(service, sweep_id) == [1], "one trial runs")
    time.sleep(6)
    assert [trial["number"] for trial in service.trials(sweep_id)] == [0, 1], "none has taken its place"
    service.cancel(sweep_id)
    service.wait_for_state(sweep_id, "cancelled")


def test_trial_that_is_stopped_ends_in_seconds_and_counts_as_it_stands(
    service: ServiceProcess, corpus: Path
) -> None:
    slow = small_spec(corpus, training={"epochs": 4000, "batch_size": 4, "bptt": 15}, budget={"trials": 2})
    sweep_id = service.submit(slow)
    wait_until(lambda: len(with_epochs(service, sweep_id)) == 2, "both trials have finished an epoch")
    service.ask_of_trial(sweep_id, 1, "stop")
    at = time.monotonic()
    wait_until(lambda: running(service, sweep_id) == [0], "trial 1 has ended")
    assert time.monotonic() - at < 15
    stopped = service.trials(sweep_id)[1]
    assert (stopped["state"], stopped["stopped"], stopped["failure"]) == ("PRUNED", True, None)
    assert stopped["best_valid_loss"] is not None
    service.ask_of_trial(sweep_id, 0, "stop")
    assert service.wait_for_end(sweep_id)["trials"]["pruned"] == 2
    assert lasts(service, sweep_id) == {}
    assert_nothing_left(service, sweep_id)


def running(service: ServiceProcess, sweep_id: str) -> list[int]:
    return [trial["number"] for trial in service.trials(sweep_id) if trial["state"] == "RUNNING"]


def with_epochs(service: ServiceProcess, sweep_id: str) -> list[int]:
    return [trial["number"] for trial in service.trials(sweep_id) if trial["epochs_done"]]
