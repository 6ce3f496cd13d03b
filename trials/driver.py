"""One process per running sweep: runs the ledger's tasks with Ray Tune.

It loads no torch: a sweep's first epoch waits for the workers to load it, already. And Tune only once Ray is
up, whose first worker loads what it needs meanwhile.

Crash-only: nothing here needs to happen before the process dies. A new driver finds all it needs in the study
and in the checkpoint store; whatever this one leaves in Tune's folder is never read.
"""

import itertools
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import psutil
import ray
import ray._private.node
from ray._private import services

from trials import cluster
from trials.cpus import usable_cpus
from trials.gpus import VISIBLE, Gpu, visible_gpus
from trials.ledger import Fenced, Journal, StudyLedger
from trials.spec import SweepSpec
from trials.store import CheckpointStore
from trials.verification import InFreshProcess, Verifier
from trials.version import own_version

if TYPE_CHECKING:
    from trials.search import StudySearch

log = logging.getLogger(__name__)

BEAT_S = 2.0
EXIT_FENCED = 0
EXIT_RAY_DIED = 75  # EX_TEMPFAIL: start another driver
EXIT_UNSETTLED = EXIT_RAY_DIED
GPU_CHECK_S = 180.0
"""For torch to load, and to compute a little on each GPU."""
PRELOAD, PRESTART = "RAY_preload_python_modules", "--num_prestart_python_workers="
"""To the raylet: what each worker loads as soon as it is there, and how many are before any is asked for."""
WHOLE_RAY = ("raylet", "gcs_server")
"""Processes without which a Ray of our own is none."""


def drive(
    ledger: StudyLedger,
    journal: Journal,
    spec: SweepSpec,
    *,
    store_url: str,
    data_dir: Path,
    scratch: Path,
    end: Callable[[], None],
    ray_address: str | None = None,
) -> None:
    """Run the ledger's tasks until none is left, or the sweep is paused or at a limit; then call `end`.

    `end` writes down how the sweep stands; `scratch` may be deleted afterwards. The trials run on the nodes
    of the Ray cluster at `ray_address`, which is waited for, or else on this machine. Raises RuntimeError
    where this machine's GPUs are not what the sweep asks for.
    """
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    corpora = scratch / "corpora"
    in_cluster = ray_address is not None
    shared: dict[str, Any] = {
        "store_url": store_url,
        "data_dir": None if in_cluster else str(data_dir),
        "cpus": spec.resources.cpus,
        "scratch": None if in_cluster else str(corpora),
        "driver": name,
        "version": own_version(),
        "gpus": None,  # of which workers choose theirs; in a cluster Ray does, which is one for all drivers
    }
    store = CheckpointStore(store_url)
    pause = PauseSwitch(store, ledger.sweep_id, name)
    fresh = InFreshProcess(store_url, data_dir, corpora)
    if in_cluster:
        verifier = Verifier(ledger, cluster.OnANode(store_url, spec.resources))
    else:
        verifier = Verifier(ledger, fresh, fresh.prepare)
    watch = _Watch(ledger, journal, pause, verifier, end, in_cluster=in_cluster)
    watch.start()
    try:
        if not ledger.exhausted:
            if ray_address is None:
                gpus = require_gpus(spec) if spec.resources.gpus else ()
                shared["gpus"] = [gpu.uuid for gpu in gpus] or None
                start_ray(scratch, gpus)
            else:
                store.announce(ledger.sweep_id, name)
                _join_patiently(ray_address, scratch, ledger)
        if not ledger.exhausted:
            watch.ray_is_up.set()
            from trials import tuning

            search = tuning.build_search(ledger, shared, in_cluster=in_cluster)
            watch.search = search
            if not (in_cluster and spec.resources.gpus):  # whose share of a GPU would have to be waited for
                verifier.start()
            tuning.run(ledger, search, spec.resources, scratch, in_cluster=in_cluster)
        watch.leave_ray_alone()
        if ledger.limit is not None:
            ledger.end_open_trials()
        verifier.settle()
    finally:
        watch.end()
        fresh.close()
    pause.set_to(False)
    if in_cluster:
        store.withdraw(ledger.sweep_id, name)
    end()
    ray.shutdown()


class PauseSwitch:
    """Tells the workers of a driver, through the store, that they are to save their states."""

    def __init__(self, store: CheckpointStore, sweep_id: str, driver: str) -> None:
        self._store, self._sweep_id, self._driver = store, sweep_id, driver
        self._is_on = False

    def set_to(self, on: bool) -> None:
        if on and not self._is_on:
            self._store.ask_to_pause(self._sweep_id, self._driver)
        elif self._is_on and not on:
            self._store.withdraw_pause(self._sweep_id, self._driver)
        self._is_on = on


def _join_patiently(address: str, scratch: Path, ledger: StudyLedger) -> None:
    """Wait for the cluster as long as there is something to run."""
    pauses = itertools.chain((0.5, 1.0, 2.0, 4.0), itertools.repeat(8.0))
    while not ledger.exhausted:
        try:
            cluster.join(address, scratch)
        except cluster.ClusterAway as error:
            log.warning("%s; asking again", error)
            ledger.say_why_it_waits(f"{error}; it is asked again until it can")
            time.sleep(next(pauses))
        else:
            ledger.say_why_it_waits(None)
            return


def require_gpus(spec: SweepSpec) -> tuple[Gpu, ...]:
    """Those of this machine, by which this process and all that it starts know them from now on.

    Asks torch, which takes seconds to load, whether it computes on them as the sweep wants: by a process of
    its own, since it would keep memory of a GPU. Raises RuntimeError where it does not.
    """
    gpus = visible_gpus()
    if not gpus:
        raise RuntimeError(
            f"resources.gpus is {spec.resources.gpus:g}, but NVIDIA's driver shows no GPU here: install it, "
            f"look at {VISIBLE}, or submit with resources.gpus 0"
        )
    # CUDA counts the fastest first, others as they are plugged in, and Ray counts none that MIG has made.
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in gpus)
    precisions = sorted({str(precision) for _, precision in spec.written("precision")})
    command = [sys.executable, "-m", "trials.gpu_check", *precisions]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GPU_CHECK_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"resources.gpus is {spec.resources.gpus:g}, but torch has not computed on the GPUs here in "
            f"{GPU_CHECK_S:g} s: see nvidia-smi, or leave one that hangs out of {VISIBLE}"
        ) from error
    if asked.returncode != 0:
        raise RuntimeError(f"resources.gpus is {spec.resources.gpus:g}, but {asked.stderr.strip()}")
    return gpus


def start_ray(scratch: Path, gpus: Sequence[Gpu] = ()) -> None:
    """Start a small Ray of our own: a bare init would join what others left running.

    `gpus` are in CUDA_VISIBLE_DEVICES: a worker finds its own there, by its identity.
    """
    if not gpus:  # else nothing is loaded before Ray has said which of them a worker sees
        os.environ[PRELOAD] = "trials.trainable,trials.attempt"
    with mock.patch.object(ray._private.node, "Node", _SmallNode):
        ray.init(
            address="local",
            num_cpus=usable_cpus(),
            num_gpus=len(gpus),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=cluster.OBJECT_STORE_BYTES,
            _temp_dir=str(scratch),
        )


class _SmallNode(ray._private.node.Node):
    """Of Ray, what runs our trials. Each of the others is a process that loads Ray anew, one of which `init`
    would wait for."""

    def start_api_server(self, **_options: Any) -> None:
        """The dashboard's, which is there without a dashboard, too."""
        self._webui_url = ""

    def start_monitor(self) -> None:
        """An autoscaler's: there is nothing to scale."""

    def start_log_monitor(self) -> None:
        """It would send what workers print to this process, which has no use for it."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """With one worker from the start, which is the first trial's: Ray would start one for each CPU, of
        which the sweep may use few."""
        start_process = services.start_ray_process

        def start(command: list[str], *arguments: Any, **options: Any) -> Any:
            words = [PRESTART + "1" if word.startswith(PRESTART) else word for word in command]
            return start_process(words, *arguments, **options)

        with mock.patch.object(services, "start_ray_process", start):
            super().start_raylet(*arguments, **options)


class _Watch(threading.Thread):
    """Renews the lease, and does what Tune, which has the main thread, would not notice in time.

    It ends the process, without more ado, when another driver has the sweep; when our Ray is gone, since
    without its raylet fit() would loop for ever, and init wait for half a minute; and, with all that still
    runs, when a limit of the budget is reached.
    """

    def __init__(
        self,
        ledger: StudyLedger,
        journal: Journal,
        pause: PauseSwitch,
        verifier: Verifier,
        write_down: Callable[[], None],
        *,
        in_cluster: bool = False,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._own = ("raylet",) if in_cluster else WHOLE_RAY
        """Of Ray's processes, those that are children of this one, or theirs."""
        self._ledger, self._journal = ledger, journal
        self.search: StudySearch | None = None
        """Once there is one: before, no trial has been handed out."""
        self._pause, self._verifier, self._write_down = pause, verifier, write_down
        self.ray_is_up = threading.Event()
        self._done, self._ray_may_go = threading.Event(), threading.Event()
        self._deciding = threading.Lock()
        self._last_words: threading.Thread | None = None
        """Begun where a limit ends the sweep: what is still done before the process ends."""
        self._is_settled = False

    def leave_ray_alone(self) -> None:
        """Tune is done with it: from now on limits are for who has called this."""
        with self._deciding:
            self._ray_may_go.set()

    def end(self) -> None:
        """Wait for its last round; where it is ending the process, wait for that."""
        self.leave_ray_alone()
        if self._last_words is None:
            self._done.set()
        self.join()

    def run(self) -> None:
        pause_s = BEAT_S
        while not self._done.wait(pause_s):
            pause_s = BEAT_S
            if _ray_has_died(self.ray_is_up.is_set(), self._own) and not self._ray_may_go.is_set():
                leave(EXIT_RAY_DIED)
            try:
                self._look()
                if self._last_words is not None:  # which it has waited for
                    pause_s = 0.0
            except Fenced:
                leave(EXIT_FENCED)
            except Exception:  # the database or the store is away: the lease outlasts several beats
                log.exception("the watch could not do its round")
                self._ledger.waited_at = time.monotonic()

    def _come_to_an_end(self) -> None:
        if self._ledger.end_open_trials():
            if self.search is not None:
                self.search.end_all()
            self._last_words = threading.Thread(target=self._settle, name="verifier", daemon=True)
            self._last_words.start()

    def _settle(self) -> None:
        try:
            self._verifier.settle()
        except Exception:  # fenced, or the database was away for too long: the next driver verifies
            log.exception("the best checkpoint could not be verified")
            return
        self._is_settled = True

    def _look(self) -> None:
        orders = self._journal.beat()
        self._ledger.heed(orders)
        with self._deciding:
            if self._ledger.limit is not None and not self._ray_may_go.is_set() and self._last_words is None:
                self._come_to_an_end()
        if self._last_words is not None:
            self._last_words.join(BEAT_S)
            if not self._last_words.is_alive():
                if not self._is_settled:
                    leave(EXIT_UNSETTLED)
                self._write_down()
                leave(0)
            return
        if self.ray_is_up.is_set() and not self._ray_may_go.is_set():
            self._ledger.share(cluster.joined_nodes())
        self._pause.set_to(orders.state == "pausing")
        if self.search is not None:
            self.search.end_stopped()
            if not self.search.end_hung():
                leave(EXIT_RAY_DIED)


def leave(code: int) -> NoReturn:
    """End this process and all that it has started, at once."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(code)


def _ray_has_died(is_up: bool, own: Sequence[str] = WHOLE_RAY) -> bool:
    """Whether one of its processes has; before it is up, they need not have been started yet."""
    found = dict(filter(None, map(_name_and_status, psutil.Process().children(recursive=True))))
    ours = [found.get(name) for name in own]
    return psutil.STATUS_ZOMBIE in ours or (is_up and None in ours)


def _name_and_status(process: psutil.Process) -> tuple[str, str] | None:
    try:
        return process.name(), process.status()
    except psutil.NoSuchProcess:
        return None
