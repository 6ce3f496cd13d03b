"""Parts of this machine's GPUs, each of them a process's for as long as that lives. No torch.

Every driver has a Ray of its own, which gives out the GPUs as if there were no other; and there are processes
that Ray knows nothing of: verifications, probes. What keeps two of them from the same part is a file that its
holder has locked: the kernel frees those of the dead.
"""

import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.files import alone


@dataclass(frozen=True)
class Part:
    """Of one GPU, that this process may compute on."""

    uuid: str
    share: float
    _descriptor: int
    """Of the file that is locked: not closed with this object, but with the process."""

    def give_back(self) -> None:
        os.close(self._descriptor)


def parts_dir() -> Path:
    """Where the processes of this user and machine, or container, see each other's parts."""
    return Path(tempfile.gettempdir(), f"fraternal-gpus-{os.getuid()}")


def take_part(uuids: Sequence[str], share: float) -> Part | None:
    """So much of one of these GPUs: of that which has the least left that is enough, so that others stay
    whole. None where none has, now. Raises OSError."""
    folder = parts_dir()
    with alone(folder / "lock"):
        free = dict.fromkeys(uuids, 1.0)
        for uuid, taken in filter(None, map(_held, folder.glob("*.part"))):
            if uuid in free:
                free[uuid] = round(free[uuid] - taken, 4)  # as Ray counts
        enough = [uuid for uuid in free if free[uuid] >= round(share, 4)]
        if not enough:
            return None
        uuid = min(enough, key=lambda each: free[each])
        name = folder / f"{os.getpid()}-{secrets.token_hex(4)}.part"
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, json.dumps((uuid, share)).encode())
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # the disk is full: what is not locked is nobody's
            os.close(descriptor)
            raise
        return Part(uuid, share, descriptor)


def wait_for_part(uuids: Sequence[str], share: float, patience_s: float) -> Part | None:
    """As take_part, for some time."""
    until = time.monotonic() + patience_s
    while (part := take_part(uuids, share)) is None and time.monotonic() < until:
        time.sleep(0.2)
    return part


def _held(file: Path) -> tuple[str, float] | None:
    """A GPU, and how much of it somebody has; None, and it is removed, where that process is no more."""
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            uuid, share = json.load(opened)
            return str(uuid), float(share)
    file.unlink()
    return None
