"""Looks at test splits: each is asked for by name, written down, and only then shown. No torch.

Whoever chooses by a test split has no test split any more. What the log says is how often, and of how many
checkpoints, one was looked at.
"""

import fcntl
import getpass
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.errors import CommandFailed
from trials.perplexity import perplexity

LOG = "test-evaluations.jsonl"
"""In the data directory."""


@dataclass(frozen=True)
class Look:
    """What of which split is to be looked at, and on whose word."""

    command: str
    """That asked for it, with the option or argument that did."""
    file: str
    sha256: str
    """Of the checkpoint's file."""
    corpus: dict[str, Any]
    split_sha256: str
    """Digest of the split's text: looks at the same text are at the same split, wherever it lies."""
    tokens: int
    """Predicted ones."""
    mc_masks: int | None = None
    """Of MC-eval: over how many samples of the masks; None drops nothing."""
    seed: int | None = None
    """Of those masks."""


@dataclass(frozen=True)
class Looked:
    """A test loss, and what the log had of the same split before it."""

    loss: float
    """Nats per token."""
    before: int
    checkpoints: int
    """Of how many checkpoints, by their digests, those were."""
    log: str

    def line(self) -> str:
        counted = f"{self.before} before it" + (
            f", of {self.checkpoints} checkpoint{'' if self.checkpoints == 1 else 's'}" if self.before else ""
        )
        return f"look {self.before + 1} at this test split, {counted}; logged in {self.log}"


class LookLog:
    """`test-evaluations.jsonl` of a data directory: a JSON object a line, only ever added to."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / LOG

    def test_loss(self, look: Look, compute: Callable[[], float]) -> Looked:
        """The one way to a loss of a test split: computed, written to the log, and only then returned.

        Raises CommandFailed where the log cannot be written: before anything is computed, if that is known.
        """
        self.require_writable()
        loss = compute()
        ppl = perplexity(loss)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "user": _user(),
            **asdict(look),
            "loss": loss if math.isfinite(loss) else None,
            "perplexity": ppl if math.isfinite(ppl) else None,
        }
        with self._open() as log:
            earlier = _same_split(log, look.split_sha256)
            _append(log, (json.dumps(line) + "\n").encode())
        return Looked(loss, len(earlier), len(set(earlier)), str(self.path))

    def require_writable(self) -> None:
        """For who has much to do before a look. Raises CommandFailed."""
        with self._open():
            pass

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Alone, among all processes. Raises CommandFailed."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(log, fcntl.LOCK_EX)
                yield log
            finally:
                os.close(log)
        except OSError as error:
            raise CommandFailed(
                f"a look at a test split is shown only once it is written to {self.path}, and that cannot "
                f"be written: {error.strerror}. Make room, permit it, or name another folder by --data-dir"
            ) from error


def _same_split(log: int, split_sha256: str) -> list[str]:
    """Which checkpoint each earlier look at this split was of; a line that cannot be read is none."""
    found = []
    for line in os.pread(log, os.fstat(log).st_size, 0).splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            look = json.loads(line)
            if look["split_sha256"] == split_sha256:
                found.append(str(look["sha256"]))
    return found


def _append(log: int, line: bytes) -> None:
    """All of it, on the disk, or nothing. Raises OSError."""
    end = os.fstat(log).st_size
    if end and os.pread(log, 1, end - 1) != b"\n":
        line = b"\n" + line
    try:
        left = memoryview(line)
        while left:
            left = left[os.write(log, left) :]
        os.fsync(log)
    except OSError:
        os.ftruncate(log, end)
        raise


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # this user has no name here
        return str(os.getuid())
