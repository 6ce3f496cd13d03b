"""The real service as a process, with real drivers and a real Ray below it, for tests that kill things."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from service.database import open_engine
from service.launcher import MARK, end_marked_processes, marked_processes
from service.lifecycle import TERMINAL_STATES
from service.records import Records
from tests.databases import database_of, environment_of

PATIENCE_S = 120


def write_corpus(directory: Path, tokens: int = 6_000) -> Path:
    """A text of 60 words in which each word narrows the choice of the next: something to learn, quickly."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for split, size in (("train", tokens), ("valid", 1_000), ("test", 1_000)):
        words, lines = [0], []
        while len(words) < size:
            words.append((words[-1] * 7 + int(rng.integers(0, 8))) % 60)
        for start in range(0, size, 20):
            lines.append(" ".join(f"w{word:02d}" for word in words[start : start + 20]))
        (directory / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return directory


def small_spec(corpus: Path, **changes: Any) -> dict[str, Any]:
    """Trials of about two seconds, so that there is time to kill them."""
    return {
        "corpus": {"path": str(corpus)},
        "model": {"embedding_size": 24, "hidden_size": 24, "layers": 1},
        "training": {"epochs": 4, "batch_size": 4, "bptt": 15, "non_monotone_interval": 1},
        "space": {"kappa": {"type": "uniform", "low": 0.0, "high": 0.3}},
        "budget": {"trials": 6},
        **changes,
    }


class ServiceProcess:
    """`fraternal serve` on a free port, over one data directory; can be killed and started again."""

    def __init__(self, data_dir: Path, environment: Mapping[str, str] | None = None, port: int = 0) -> None:
        self._port = port
        self.data_dir = data_dir
        self.submitted: list[str] = []
        """Ids of the sweeps."""
        self._environment = {**os.environ, **environment_of(data_dir), **(environment or {})}
        self.database_url = self._environment.get("FRATERNAL_DATABASE_URL") or database_of(data_dir)
        self._process: subprocess.Popen[str] | None = None
        self._http = httpx.Client(timeout=30)

    def start(self) -> None:
        assert self.try_to_start(), self._log()[-3000:]
        wait_until(self.is_ready, "the service is ready", self._log)

    def try_to_start(self) -> bool:
        """Whether it has come to listen: without its database, it ends."""
        if self._process is not None:
            self._process.communicate()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        where = ["--port", str(self._port), "--data-dir", str(self.data_dir)]
        with (self.data_dir / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", *where],
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        first_line = self._process.stdout.readline()
        if "/v1/sweeps" not in first_line:
            return False
        self._http.base_url = httpx.URL(first_line.split()[-1].removesuffix("/v1/sweeps"))
        return True

    def _log(self) -> str:
        return (self.data_dir / "service.log").read_text(errors="replace")

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def has_died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def strike(self) -> None:
        """kill -9, and nothing else: whoever keeps it up finds it dead."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def close(self) -> None:
        self._http.close()

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.communicate(timeout=PATIENCE_S)
            self._process = None

    def get(self, path: str) -> Any:
        response = self._http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def submit(self, spec: dict[str, Any]) -> str:
        response = self._http.post("/v1/sweeps", json=spec)
        assert response.status_code == 201, response.text
        self.submitted.append(str(response.json()["id"]))
        return self.submitted[-1]

    def ask(self, sweep_id: str, verb: str, body: Any = None) -> None:
        response = self._http.post(f"/v1/sweeps/{sweep_id}:{verb}", json=body)
        assert response.status_code == 202, response.text

    def ask_of_trial(self, sweep_id: str, number: int, verb: str) -> None:
        response = self._http.post(f"/v1/sweeps/{sweep_id}/trials/{number}:{verb}")
        assert response.status_code == 202, response.text

    def change(self, sweep_id: str, changes: dict[str, Any]) -> None:
        response = self._http.patch(f"/v1/sweeps/{sweep_id}", json=changes, headers={"if-match": "*"})
        assert response.status_code == 200, response.text

    def cancel(self, sweep_id: str) -> None:
        self.ask(sweep_id, "cancel")

    def delete(self, sweep_id: str) -> None:
        assert self._http.delete(f"/v1/sweeps/{sweep_id}").status_code == 202
        wait_until(lambda: sweep_id not in self.sweeps(), f"sweep {sweep_id} is deleted", self.describe)

    def sweeps(self) -> dict[str, Any]:
        """By id."""
        return {sweep["id"]: sweep for sweep in self.get("/v1/sweeps?page_size=500")["sweeps"]}

    def events(self, sweep_id: str) -> list[dict[str, Any]]:
        """The sweep's story, read from the database."""
        records = Records(open_engine(self.database_url))
        try:
            return [dict(event) for event in records.list_events(sweep_id)]
        finally:
            records.engine.dispose()

    def wait_for_state(self, sweep_id: str, state: str) -> Any:
        wait_until(
            lambda: self.sweep(sweep_id)["state"] == state, f"sweep {sweep_id} is {state}", self.describe
        )
        return self.sweep(sweep_id)

    def sweep(self, sweep_id: str) -> Any:
        return self.get(f"/v1/sweeps/{sweep_id}")

    def find_sweep(self, sweep_id: str) -> Any:
        """None where the service cannot say: it is down, or its database is."""
        try:
            response = self._http.get(f"/v1/sweeps/{sweep_id}")
        except httpx.TransportError:
            return None
        return response.json() if response.status_code == 200 else None

    def trials(self, sweep_id: str) -> list[Any]:
        return list(self.get(f"/v1/sweeps/{sweep_id}/trials?page_size=500")["trials"])

    def curve(self, sweep_id: str, number: int) -> list[Any]:
        return list(self.get(f"/v1/sweeps/{sweep_id}/trials/{number}")["curve"])

    def checkpoints(self, sweep_id: str) -> dict[int, str]:
        """SHA-256 of each trial's best checkpoint, by trial number."""
        return {trial["number"]: trial["checkpoint_sha256"] for trial in self.trials(sweep_id)}

    def has_ended(self, sweep_id: str) -> bool:
        return self.sweep(sweep_id)["state"] in TERMINAL_STATES

    def wait_for_end(self, sweep_id: str) -> Any:
        """As long as it trains: on a busy machine that takes its time."""
        while not self.has_ended(sweep_id):
            done = self.sweep(sweep_id)["epochs_done"]
            wait_until(
                lambda done=done: self.has_ended(sweep_id) or self.sweep(sweep_id)["epochs_done"] > done,
                f"sweep {sweep_id} ends, or gets on",
                self.describe,
            )
        return self.sweep(sweep_id)

    def wait_for_epochs(self, sweep_id: str, epochs: int) -> None:
        """Until so many epochs are recorded; fails if the sweep ends before."""

        def reached() -> bool:
            sweep = self.sweep(sweep_id)
            assert sweep["state"] in {"queued", "running"}, sweep
            return bool(sweep["epochs_done"] >= epochs and sweep["trials"]["running"])

        wait_until(reached, f"sweep {sweep_id} has {epochs} epochs", self.describe)

    def describe(self) -> str:
        logs = [path.read_text(errors="replace")[-3000:] for path in self.data_dir.glob("drivers/*.log")]
        return "\n".join([*logs, self._log()[-3000:], str(self.get("/v1/sweeps"))])


@contextmanager
def running_service(data_dir: Path, environment: Mapping[str, str] | None = None) -> Iterator[ServiceProcess]:
    """A service that leaves nothing behind: its drivers are ended too."""
    service = ServiceProcess(data_dir, environment)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        service.close()
        end_marked_processes("FRATERNAL_DATA_DIR", str(data_dir.resolve()))
        for sweep_id in service.submitted:
            for folder in scratches_of(sweep_id):
                shutil.rmtree(folder, ignore_errors=True)


def workers_of(sweep_id: str) -> list[psutil.Process]:
    """Processes that train, on any node of a cluster too."""
    found = []
    for process in marked_processes(MARK, sweep_id):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(("ray::LanguageModel", "ray::ResourceTrain")):  # as Tune wraps it
                found.append(process)
    return found


def assert_exactly_the_budget(service: ServiceProcess, sweep_id: str) -> None:
    """Every trial once, each of them ended, and a whole curve for each: nothing lost, nothing twice."""
    sweep, trials = service.sweep(sweep_id), service.trials(sweep_id)
    assert [trial["number"] for trial in trials] == list(range(sweep["trials"]["budget"]))
    assert {trial["state"] for trial in trials} == {"COMPLETE"}
    for trial in trials:
        curve = service.curve(sweep_id, trial["number"])
        assert [epoch["epoch"] for epoch in curve] == [1, 2, 3, 4]


def assert_nothing_left(service: ServiceProcess, sweep_id: str) -> None:
    wait_until(
        lambda: not traces(service.data_dir, sweep_id),
        f"nothing of sweep {sweep_id} is left",
        lambda: "\n".join(traces(service.data_dir, sweep_id)),
    )


def traces(data_dir: Path, sweep_id: str) -> list[str]:
    """What there still is of a sweep that has ended, besides its records, checkpoints and log."""
    scratch = f"fraternal-{sweep_id}"
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return [
        *(str(process) for process in marked_processes(MARK, sweep_id)),
        *(line for line in sockets if scratch in line),
        *(f"{process} holds {file}" for process, file in open_files() if scratch in file),
        *map(str, Path(tempfile.gettempdir()).glob(f"*{sweep_id}*")),
        *map(str, data_dir.rglob("*.part")),
    ]


def open_files(processes: Iterable[psutil.Process] | None = None) -> Iterator[tuple[psutil.Process, str]]:
    """What processes, all of them by default, have open or mapped, or stand in, as the kernel says."""
    for process in psutil.process_iter() if processes is None else processes:
        folder = Path(f"/proc/{process.pid}")
        with suppress(OSError):  # gone, or somebody else's
            maps = (folder / "maps").read_text().splitlines()
            mapped = {line.split(maxsplit=5)[5] for line in maps if "/" in line}
            links = {os.readlink(link) for link in [folder / "cwd", *(folder / "fd").iterdir()]}
            yield from ((process, file) for file in sorted(mapped | links))


def find_process(sweep_id: str, words: str) -> psutil.Process | None:
    """A live process of a sweep whose command line has these words."""
    for process in marked_processes(MARK, sweep_id):
        try:
            if words in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            continue
    return None


def kill_process(sweep_id: str, words: str) -> None:
    """kill -9 a process of a sweep while its command line, a worker's says what it does, has these words."""
    wait_until(lambda: try_to_kill(sweep_id, words), f"{words!r} runs for sweep {sweep_id}")


def try_to_kill(sweep_id: str, words: str) -> bool:
    """As kill_process, but now or not at all."""
    process = find_process(sweep_id, words)
    if process is None:
        return False
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        if words in " ".join(process.cmdline()):  # still, and now it cannot change
            process.kill()
            return True
        process.resume()
    return False


def scratches_of(sweep_id: str) -> list[Path]:
    """Folders of a sweep's drivers, whichever service's."""
    return list(Path(tempfile.gettempdir()).glob(f"fraternal-{sweep_id}-*"))


def left_of(sweep_id: str) -> list[str]:
    """What of a sweep's drivers is still there: processes, a folder."""
    return [*map(str, marked_processes(MARK, sweep_id)), *map(str, scratches_of(sweep_id))]


def wait_until(is_so: Callable[[], bool], what: str, describe: Callable[[], str] = str) -> None:
    """Looks less often as time goes by: what looks takes from what is waited for."""
    began = time.monotonic()
    while not is_so():
        waited = time.monotonic() - began
        assert waited < PATIENCE_S, f"waited {PATIENCE_S} s in vain until {what}\n{describe()}"
        time.sleep(min(0.3, 0.1 + waited / 50))
