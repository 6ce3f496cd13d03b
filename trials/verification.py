"""The best checkpoint is evaluated again, by a fresh process that has nothing but its file and the text.

This is the driver's side, which loads no torch; trials.verify is what the fresh process runs.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

from trials.corpora import CorpusSpec
from trials.store import CheckpointStore

log = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""Nats per token by which the loss may differ on a device of the same name."""
TOLERANCE_ELSEWHERE = 1e-4
"""The same on another one, which rounds otherwise."""
SHARE = 40
"""While trials run, at most one part in so many of the time goes to verifying."""
FIRST_AFTER_S = 200.0
"""Seconds until a running sweep verifies for the first time: a small one does so at its end alone."""
LOOK_EVERY_S = 2.0
LEAST_TIMEOUT_S = 300.0
"""However soon a silent trial is taken for hung: this process says nothing before its end."""
_CORPUS: TypeAdapter[CorpusSpec] = TypeAdapter(CorpusSpec)

Outcome = Literal["verified", "differs", "damaged", "impossible"]
GONE = "its file is gone"
REFUSED: tuple[Outcome, ...] = ("differs", "damaged")
"""What is never called best."""


@dataclass(frozen=True)
class Check:
    """What is to be verified; travels as JSON."""

    sweep_id: str
    number: int
    epoch: int
    """Of the best loss on record."""
    valid_loss: float
    """That loss, in nats per token."""
    checkpoint_sha256: str | None
    """On record."""
    device: str | None
    """On which the loss on record was computed, as trials.attempt names it."""
    corpus: CorpusSpec
    on: str
    """The torch device to compute on."""
    threads: int
    timeout_s: float
    gpu_share: float | None = None
    """Of one of this machine's, as much as a trial of the sweep has; None: it computes on what it sees."""

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "corpus": self.corpus.model_dump(mode="json")})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Check":
        return cls(**{**values, "corpus": _CORPUS.validate_python(values["corpus"])})


@dataclass(frozen=True)
class Verification:
    """What came of it. Losses are in nats per token; None where there is none."""

    outcome: Outcome
    recorded_sha256: str | None
    """Of the checkpoint on record when it was looked at: says of which record this is."""
    checkpoint_sha256: str | None = None
    """Of the file."""
    epoch: int | None = None
    recorded_valid_loss: float | None = None
    """In the checkpoint's own metrics."""
    valid_loss: float | None = None
    """Computed again."""
    tolerance: float | None = None
    device: str | None = None
    runtime: str | None = None
    seconds: float = 0.0
    message: str | None = None
    """Why it is not verified."""


class Verify(Protocol):
    def __call__(self, check: Check) -> Verification:
        """Never raises: what keeps it from a result is the result `impossible`."""


class InFreshProcess:
    """Verifies in a process that is started for it, with the caches and the store of the sweep's workers."""

    def __init__(self, store_url: str, data_dir: Path, shared: Path | None) -> None:
        self._where = [store_url, str(data_dir), *([str(shared)] if shared else [])]
        self._store = CheckpointStore(store_url)
        self._waiting: subprocess.Popen[str] | None = None

    def prepare(self) -> None:
        """Have the next process load what it needs, so that who waits for it waits less."""
        if self._waiting is None:
            self._waiting = self._start()

    def close(self) -> None:
        """End a process that was prepared for nothing."""
        if self._waiting is not None:
            self._waiting.kill()
            self._waiting.communicate()
            self._waiting = None

    def __call__(self, check: Check) -> Verification:
        with suppress(Exception):  # the store is away: the process says so
            if not self._store.has_best(check.sweep_id, check.number):  # thousands may be, by `retention`
                return Verification("damaged", check.checkpoint_sha256, message=GONE)
        began = time.monotonic()
        try:
            if self._waiting is not None and self._waiting.poll() is not None:
                self.close()
            process, self._waiting = self._waiting or self._start(), None
            with process:
                try:
                    said, error = process.communicate(check.to_json(), check.timeout_s)
                finally:
                    process.kill()
            if process.returncode == 0:
                return Verification(**json.loads(said.splitlines()[-1]))
            words = f"its process ended with {process.returncode}: {error.strip()[-2000:]}"
        except subprocess.TimeoutExpired:
            words = f"it took longer than {check.timeout_s:g} s: raise retry.hang_s"
        except (OSError, ValueError, IndexError, TypeError) as error:
            words = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        return Verification("impossible", check.checkpoint_sha256, seconds=seconds, message=words)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "trials.verify", *self._where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class Ledger(Protocol):
    """What of a trials.ledger.StudyLedger is needed."""

    @property
    def is_running_out(self) -> bool:
        """Whether the sweep ends once the trials that run have ended."""

    def next_check(self) -> Check | None:
        """Of the best trial that has ended and was not refused, unless it is verified already.

        None also while trials are being paused. One that could not be evaluated is asked for again.
        """

    def record_verification(self, number: int, verification: Verification) -> None:
        """Write it down."""


class Verifier:
    """Sees to it that the best checkpoint of the trials that have ended is verified: now and then while
    others run, and before the sweep ends.
    """

    def __init__(self, ledger: Ledger, verify: Verify, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` is called once no trial is to begin any more: soon something is to be verified."""
        self._ledger, self._verify, self._prepare = ledger, verify, prepare
        self._turn = threading.Lock()
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="verifier", daemon=True).start()

    def settle(self) -> None:
        """Until the best is verified, or cannot be. From then on nothing is verified in passing."""
        self._over.set()
        outcome: Outcome | None = None
        with self._turn:
            while outcome != "impossible" and (check := self._ledger.next_check()) is not None:
                verification = self._verify(check)
                outcome = verification.outcome
                self._ledger.record_verification(check.number, verification)

    def _run(self) -> None:
        due_at = time.monotonic() + FIRST_AFTER_S
        while not self._over.wait(LOOK_EVERY_S):
            began = time.monotonic()
            try:
                with self._turn:
                    if self._over.is_set():
                        return
                    if self._ledger.is_running_out:
                        self._prepare()
                    elif began >= due_at:
                        try:
                            self._verify_in_passing()
                        finally:
                            due_at = time.monotonic() + SHARE * (time.monotonic() - began)
            except Exception:  # fenced, or the database is away: the watch sees to that
                log.exception("the best checkpoint so far could not be verified")

    def _verify_in_passing(self) -> None:
        if (check := self._ledger.next_check()) is None:
            return
        verification = self._verify(check)
        if verification.outcome != "impossible":  # the end tries once more, and says so
            self._ledger.record_verification(check.number, verification)
