"""The NVIDIA GPUs of this machine, as their driver names them. No torch: NVML is asked.

A part of a GPU that is divided by MIG is a GPU here: that is what a process computes on.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""CUDA's variable: the GPUs that a process may use, by index or identity."""


@dataclass(frozen=True)
class Gpu:
    """One that a process can compute on: a whole one, or a part of one that MIG has divided."""

    uuid: str
    """`GPU-…` or `MIG-…`, as CUDA_VISIBLE_DEVICES takes it."""
    name: str
    """`NVIDIA H200`, or `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
    memory_bytes: int


@dataclass(frozen=True)
class Usage:
    """Of a GPU, by the processes of all containers and users that its driver shows."""

    pid: int
    memory_bytes: int | None
    """None where the driver does not say."""


@contextmanager
def _nvml() -> Iterator[None]:
    """Raises pynvml.NVMLError where there is no driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it: up to the first entry that names none.

    Without it all there are, in the order of nvidia-smi, with every part of those that MIG has divided; where
    it names a divided one as a whole, CUDA takes the first of its parts. Indexes are nvidia-smi's. None where
    there is no driver; one that does not answer, since it fell off its bus say, is left out.
    """
    try:
        with _nvml():
            there = [_card(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return ()
    uuids, parts = [uuid for uuid, _ in there], [parts_of_one for _, parts_of_one in there]
    every = [part for parts_of_one in parts for part in parts_of_one]
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return tuple(every)
    firsts = [next(iter(parts_of_one), None) for parts_of_one in parts]
    found: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = _named(entry, uuids, firsts, every)
        if gpu is None:
            break
        if gpu not in found:
            found.append(gpu)
    return tuple(found)


def _named(
    entry: str, uuids: Sequence[str], firsts: Sequence[Gpu | None], every: Sequence[Gpu]
) -> Gpu | None:
    """The one that an entry of CUDA_VISIBLE_DEVICES is about; identities may be shortened, if plain."""
    if entry.isdecimal():
        return firsts[int(entry)] if int(entry) < len(firsts) else None
    if entry.startswith("MIG-"):
        matching = [gpu for gpu in every if gpu.uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    if entry.startswith("GPU-"):
        whole = [first for uuid, first in zip(uuids, firsts, strict=True) if uuid.startswith(entry)]
        return whole[0] if len(whole) == 1 else None
    return None


def _card(index: int) -> tuple[str, list[Gpu]]:
    """Its identity, and what of it a process can compute on."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return pynvml.nvmlDeviceGetUUID(handle), list(_parts(handle))
    except pynvml.NVMLError as error:
        log.warning("GPU %d does not answer, and is left out: %s", index, error)
        return "", []


def _parts(handle: Any) -> Iterator[Gpu]:
    """A GPU itself, or what MIG has made of it: nothing, where it is to be divided and is not yet."""
    try:
        divided, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # older than MIG
        divided = pynvml.NVML_DEVICE_MIG_DISABLE
    if divided != pynvml.NVML_DEVICE_MIG_ENABLE:
        yield _gpu(handle)
        return
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):  # places need not be taken
            yield _gpu(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))


def _gpu(handle: Any) -> Gpu:
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=_memory_bytes(handle),
    )


def _memory_bytes(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:  # it has the machine's, as a GB10 does
        return int(psutil.virtual_memory().total)


def answering(uuids: Sequence[str]) -> list[str]:
    """Those of these GPUs that their driver still reaches; all of them where it reaches none, which whoever
    computes there is told."""
    found = []
    try:
        with _nvml():
            for uuid in uuids:
                with suppress(pynvml.NVMLError):
                    _memory_bytes(pynvml.nvmlDeviceGetHandleByUUID(uuid))
                    found.append(uuid)
    except pynvml.NVMLError:
        pass
    return found or list(uuids)


def driver_version() -> str | None:
    """Of NVIDIA's driver; None where there is none."""
    try:
        with _nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def users_of(uuid: str) -> list[Usage]:
    """The processes that compute on a GPU, as far as its driver shows them to this one."""
    try:
        with _nvml():
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return []
    return [Usage(process.pid, process.usedGpuMemory) for process in running]
