"""What starts, watches and ends a sweep's driver. A Launcher knows processes, not sweeps' states."""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import psutil
from anyio import fail_after, run_process
from sqlalchemy.engine import make_url

from service.errors import ClusterAway
from service.packing import Packing, read_packings
from service.settings import Settings
from trials.cpus import usable_cpus
from trials.gpus import VISIBLE, Gpu, visible_gpus
from trials.memory import total_bytes
from trials.shares import Node, room_on
from trials.spec import Resources
from trials.steps import EXIT_CORPUS, PROBE, PROBE_ORDER, Probe, ProbeOrder
from trials.store import CheckpointStore

log = logging.getLogger(__name__)

CLUSTER_S, CLUSTER_KNOWN_S = 30.0, 30.0
"""For a Ray cluster to say what it has, and how long that is taken to be so."""
CLUSTER_AWAY_S = 2.0
"""How long that it has never answered is believed: by those who came while it was asked."""
GPUS_KNOWN_S = 30.0
"""How long it is taken to be so that this machine has the GPUs that it has."""
PROBE_S = 180.0
"""For a probe, with all that it loads, and a corpus that is downloaded first."""
OWN_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every listener on 127.0.0.1
    "RAY_AUTH_MODE": "token",
}
"""For a driver whose Ray nobody else is to reach; that of a cluster is as the service's environment says."""
DRIVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the study remembers, not Tune's folder
    "TUNE_GLOBAL_CHECKPOINT_S": "inf",  # nor its state, all of it every ten seconds
    # Tune would begin a trial again itself whose node is drained, and then not know its own state.
    "RAY_TRAIN_COUNT_PREEMPTION_AS_FAILURE": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a worker removes what Tune made for it to stand in
    "RAY_task_events_report_interval_ms": "0",  # which Ray's GCS would keep for a dashboard
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_worker_niceness": "15",  # Ray's own default, said here since a probe has to be as modest
    "OMP_NUM_THREADS": "1",  # two OpenMP threads that meet on a core cost up to ten times
    # glibc gives logits-sized buffers back to the kernel after every step and faults them in again: half the
    # time of a small model whose logits are made all at once. Ours are not, and gain little.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
    "PYTHONUNBUFFERED": "1",
    "SPT_NOENV": "1",  # Ray's processes give themselves titles, which would overwrite the mark
    "TZ": "UTC",  # Optuna stamps trials with naive local time
}
MARK = "FRATERNAL_DRIVER_OF"
"""Environment variable that marks a driver and all that it starts with the sweep's id."""
OWNER = "FRATERNAL_OWNER"
"""The mark beside it says whose sweep that is: a database that was restored has sweeps of the same ids."""
NO_DRIVERS_BUSINESS = {
    "FRATERNAL_TOKEN",
    "FRATERNAL_TOKEN_FILE",
    "FRATERNAL_ADMIN_TOKEN",
    "FRATERNAL_DATABASE_PASSWORD",  # it is in the URL that they are given
}
"""What whoever starts a service may have in the environment, and nothing that it starts needs."""
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Of x86 and of ARM, in /proc/cpuinfo."""
LOG_TAIL_BYTES = 2000
SECONDS_OF_EXEC = 0.05
"""A process that is being started shows no environment for less than so long."""


@dataclass(frozen=True)
class Capacity:
    """What the machine, or each of them at most, has for trials."""

    cpus: float
    gpus: float
    cpus_have_bf16: bool = False
    """Whether they compute in bfloat16, as models.precision finds it."""
    memory_bytes: float = math.inf
    """Of the machine, or of the control group that this process is in; not of its GPUs."""
    gpu_bytes: float | None = None
    """Of the memory of the GPU that has the least; None where that is not known."""
    packings: tuple[Packing, ...] = ()
    """How its kinds of GPUs are shared best; none where that has not been measured of each."""
    grows: bool = False
    """Whether machines may come that have more than is said here."""
    nodes: tuple[Node, ...] = ()
    """Where there are several machines, all of them; what is said above is then the most that one of them
    has, as far as that is seen from here."""

    def room(self, resources: Resources) -> int:
        """How many trials run at once, where nothing else does; at least one."""
        return max(1, room_on(resources, self.nodes or (Node(self.cpus, self.gpus),)))


def local_capacity(data_dir: Path | None = None) -> Capacity:
    """Of this machine, as far as this process may use it and torch can.

    `data_dir` is where it is kept how GPUs are shared best, if it is.
    """
    gpus = usable_gpus()
    known = read_packings(data_dir) if data_dir is not None and gpus else {}
    names = {gpu.name for gpu in gpus}
    return Capacity(
        cpus=usable_cpus(),
        gpus=len(gpus),
        cpus_have_bf16=_cpus_have_bf16(),
        memory_bytes=total_bytes("cpu"),
        gpu_bytes=min((gpu.memory_bytes for gpu in gpus), default=None),
        packings=tuple(known[name] for name in sorted(names)) if names <= known.keys() else (),
    )


def capacity_of(nodes: Sequence[Node], *, grows: bool = False) -> Capacity:
    """Of a cluster. Its workers look at their memory, and at what their processors can do, themselves."""
    return Capacity(
        cpus=max((node.cpus for node in nodes), default=0.0),
        gpus=max((node.gpus for node in nodes), default=0.0),
        cpus_have_bf16=True,
        grows=grows,
        nodes=tuple(nodes),
    )


class ProbeFailed(Exception):
    """Nothing could be measured; the message says why."""


class TextUnusable(ProbeFailed):
    """No trial could read the text either. `pointer` is the JSON pointer, within the corpus, to blame."""

    def __init__(self, message: str, pointer: str) -> None:
        super().__init__(message)
        self.pointer = pointer


class Launcher(Protocol):
    def capacity(self) -> Capacity:
        """Raises ClusterAway where nothing is known of it."""

    async def probe(self, order: ProbeOrder) -> Probe:
        """Time training on what trials run on. Cancelled, it leaves nothing behind. Raises ProbeFailed,
        TextUnusable.
        """

    def launch(self, sweep_id: str, generation: int) -> dict[str, Any]:
        """Start a driver; returns what finds it again, as JSON, also for another process."""

    def is_alive(self, driver: dict[str, Any]) -> bool: ...

    def is_stopped(self, driver: dict[str, Any]) -> bool:
        """Whether its process is there, as can be seen from here, and does not run: SIGSTOP, a debugger."""

    def identity(self) -> dict[str, Any]:
        """What this process is known by, as a driver is: `is_alive` tells of either."""

    def end(self, sweep_id: str) -> None:
        """Make sure that nothing of any driver of this sweep is left: no process, no folder, no file that was
        being written. Idempotent."""

    def forget(self, sweep_id: str) -> None:
        """Remove what was kept of a sweep's drivers: their logs."""

    def log_tail(self, sweep_id: str) -> str:
        """The driver's last words, for people; no NUL, which PostgreSQL would refuse."""


class Cluster:
    """A Ray cluster as a service sees it, by asking in a process of its own: the service loads no ray."""

    def __init__(self, address: str, *, grows: bool) -> None:
        self._address, self._grows = address, grows
        self._lock = threading.Lock()
        self._known: Capacity | None = None
        self._asked_at = -math.inf
        self._trouble = ""

    def capacity(self) -> Capacity:
        """As of half a minute ago at most, or of its last answer. Raises ClusterAway where there was none."""
        with self._lock:
            for_s = CLUSTER_KNOWN_S if self._known is not None else CLUSTER_AWAY_S
            if time.monotonic() - self._asked_at > for_s:
                try:
                    self._known = capacity_of(self._ask(), grows=self._grows)
                except ClusterAway as error:
                    self._trouble = str(error)
                    if self._known is not None:
                        log.warning("%s; what it had before is taken to be there", error)
                self._asked_at = time.monotonic()  # also in vain: whoever waits for the lock waits once
            if self._known is None:
                raise ClusterAway(self._trouble)
            return self._known

    def _ask(self) -> list[Node]:
        command = [sys.executable, "-P", "-m", "trials.cluster", self._address]
        try:
            asked = subprocess.run(
                command,
                env=inherited_environment(),
                capture_output=True,
                text=True,
                timeout=CLUSTER_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterAway(
                f"the Ray cluster at {self._address} has not answered in {CLUSTER_S:g} s: see that this is "
                "its head's address and port, as `ray start --head` says them"
            ) from error
        if asked.returncode:
            words = asked.stderr.strip().rpartition("\n")[2].partition("ClusterAway: ")[2]
            raise ClusterAway(
                words or f"the Ray cluster at {self._address} could not be asked: {asked.stderr[-300:]}"
            )
        return [
            Node(node["cpus"], node["gpus"], tuple(node["labels"].items()))
            for node in json.loads(asked.stdout)
        ]


def inherited_environment() -> dict[str, str]:
    """What processes of the service take over from it."""
    return {name: value for name, value in os.environ.items() if name not in NO_DRIVERS_BUSINESS}


class LocalLauncher:
    """A driver is a process in a session of its own on this machine.

    What it starts, Ray's processes and their workers, inherits the mark in its environment and is found.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._data_dir = settings.data_dir.resolve()
        self._owner = owner_of(settings)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        address = settings.ray_address
        self._cluster = Cluster(address, grows=settings.ray_grows) if address else None

    def capacity(self) -> Capacity:
        return local_capacity(self._data_dir) if self._cluster is None else self._cluster.capacity()

    async def probe(self, order: ProbeOrder) -> Probe:
        """In a process of its own, with what a worker's has in its environment."""
        if self._cluster is not None:
            raise ProbeFailed("trials run on the nodes of a Ray cluster, which are not timed in advance")
        environment = {**inherited_environment(), **DRIVER_ENVIRONMENT}
        environment.pop("FRATERNAL_DATABASE_URL", None)  # which may have a password
        command = [sys.executable, "-P", "-m", "trials.probe", str(self._data_dir)]
        try:
            scratch = tempfile.mkdtemp(prefix="fraternal-probe-")
        except OSError as error:
            raise ProbeFailed(f"the probe has no folder for its files: {error}") from error
        try:
            with fail_after(PROBE_S):
                ended = await run_process(
                    [*command, scratch, str(os.getpid())],
                    input=PROBE_ORDER.dump_json(order),
                    env=environment,
                    check=False,
                )
        except TimeoutError as error:
            raise ProbeFailed(f"the probe did not come to its end in {PROBE_S:.0f} s") from error
        except OSError as error:
            raise ProbeFailed(f"the probe could not be started: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if ended.returncode != 0:
            said = ended.stderr.decode(errors="replace").strip()
            log.warning("a probe has failed: %s", said)
            last = said.rpartition("\n")[2][:300] or f"the probe ended with {ended.returncode}"
            if ended.returncode == EXIT_CORPUS:
                raise TextUnusable(last, ended.stdout.decode().strip())
            raise ProbeFailed(last)
        return PROBE.validate_json(ended.stdout)

    def launch(self, sweep_id: str, generation: int) -> dict[str, Any]:
        scratch = scratch_of(sweep_id, self._owner)
        scratch.mkdir(mode=0o700)
        log = self._log(sweep_id)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "service.drive", sweep_id, str(generation), str(scratch)],
                env=self._environment(sweep_id),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[child.pid] = child
        driver = findable(child.pid)  # while it is sure to be there, if only as a zombie
        _wait_for_mark(child, sweep_id)
        return driver

    def identity(self) -> dict[str, Any]:
        return findable(os.getpid())

    def _environment(self, sweep_id: str) -> dict[str, str]:
        """Settings travel in the environment: a command line would show everyone the database's password."""
        settings = {
            "FRATERNAL_DATA_DIR": str(self._data_dir),
            "FRATERNAL_DATABASE_URL": self._settings.resolved_database_url,
            "FRATERNAL_STORE_URL": self._settings.resolved_store_url,
            "FRATERNAL_RAY_ADDRESS": self._settings.ray_address or "",
        }
        own = {
            **OWN_RAY,
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }  # or Ray would leave one in the user's home
        return {
            **inherited_environment(),
            **DRIVER_ENVIRONMENT,
            **({} if self._settings.ray_address else own),
            **settings,
            MARK: sweep_id,
            OWNER: self._owner,
        }

    def is_alive(self, driver: dict[str, Any]) -> bool:
        if driver.get("host", socket.gethostname()) != socket.gethostname():
            return True  # for all that can be seen from here: its lease tells
        child = self._children.get(driver["pid"])
        if child is not None:
            return child.poll() is None
        try:
            process = psutil.Process(driver["pid"])
            same = abs(process.create_time() - driver["started"]) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def is_stopped(self, driver: dict[str, Any]) -> bool:
        if driver.get("host") != socket.gethostname() or not self.is_alive(driver):
            return False
        try:
            status = psutil.Process(driver["pid"]).status()
        except psutil.NoSuchProcess:
            return False
        return status in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}

    def end(self, sweep_id: str) -> None:
        end_marked_processes(MARK, sweep_id, **{OWNER: self._owner})
        for child in self._children.values():
            child.poll()  # no zombies
        shutil.rmtree(scratch_of(sweep_id, self._owner), ignore_errors=True)
        CheckpointStore(self._settings.resolved_store_url).discard_unfinished(sweep_id)

    def forget(self, sweep_id: str) -> None:
        self._log(sweep_id).unlink(missing_ok=True)

    def log_tail(self, sweep_id: str) -> str:
        try:
            with self._log(sweep_id).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        except FileNotFoundError:
            return ""

    def _log(self, sweep_id: str) -> Path:
        return self._data_dir / "drivers" / f"{sweep_id}.log"


def findable(pid: int) -> dict[str, Any]:
    """What LocalLauncher finds a process by, and no other that comes to have its number."""
    return {"host": socket.gethostname(), "pid": pid, "started": psutil.Process(pid).create_time()}


def owner_of(settings: Settings) -> str:
    """Short for the database, which services that share its sweeps share, too."""
    url = make_url(settings.resolved_database_url)
    where = (url.get_backend_name(), url.host, url.port, url.database, sorted(url.query.items()))
    return hashlib.sha256(repr(where).encode()).hexdigest()[:6]


def scratch_of(sweep_id: str, owner: str) -> Path:
    """Ray's folder. Short, since Ray keeps sockets in it; named by sweep and owner, so that it is found."""
    return Path(tempfile.gettempdir()) / f"fraternal-{sweep_id}-{owner}"


def _wait_for_mark(child: "subprocess.Popen[bytes]", sweep_id: str) -> None:
    """Until it can be found by its mark, or is gone: for a moment its environment reads as empty."""
    until = time.monotonic() + 5
    while child.poll() is None and time.monotonic() < until:
        with contextlib.suppress(psutil.NoSuchProcess):
            if _has_marks(psutil.Process(child.pid), {MARK: sweep_id}):
                return
        time.sleep(0.002)  # an exec takes about as long


def marked_processes(mark: str, value: str, **others: str) -> list[psutil.Process]:
    """Live processes that have this environment variable, and these others, from whatever they descend."""
    marks = {mark: value, **others}
    return [process for process in psutil.process_iter() if _has_marks(process, marks)]


def _has_marks(process: psutil.Process, marks: Mapping[str, str]) -> bool:
    try:
        return marks.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone, or somebody else's
        return False


def end_marked_processes(mark: str, value: str, **others: str) -> None:
    """Kill them all, and what they may still have started, whose mark cannot be read at once."""
    looks_in_vain = 0
    while looks_in_vain < 2:
        left = marked_processes(mark, value, **others)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=2)
        looks_in_vain = 0 if left else looks_in_vain + 1
        time.sleep(0 if left else SECONDS_OF_EXEC)  # what is being started has its mark by then


@cache
def _cpus_have_bf16(listed: Path = Path("/proc/cpuinfo")) -> bool:
    """By the kernel's list of what they can do: torch, which knows, is not loaded here."""
    with listed.open() as lines:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", lines.read(), re.MULTILINE)
    return found is not None and not BF16_FLAGS.isdisjoint(found[1].split())


@cache
def torch_version() -> str:
    return version("torch")


def usable_gpus() -> tuple[Gpu, ...]:
    """Those that torch may use; it is not loaded here. None where it is built for CPUs alone."""
    if torch_version().endswith("+cpu"):
        return ()
    return _known_gpus(os.environ.get(VISIBLE), int(time.monotonic() / GPUS_KNOWN_S))


@lru_cache(maxsize=1)
def _known_gpus(visible: str | None, period: int) -> tuple[Gpu, ...]:
    """Their driver may take a second to wake."""
    return visible_gpus()
