"""NVIDIA's management library on a machine that we describe, as its bindings name it."""

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


@dataclass
class Card:
    """A GPU, and the parts of it: None where MIG is off, "unknown" where it is too old to have it."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    gib: int = 80
    parts: "list[Card | None] | str | None" = None
    users: dict[int, int | None] = field(default_factory=dict)
    """Bytes by process; None where the driver does not say."""
    trouble: int | None = None
    """NVML's code for what is the matter with it: it has no memory of its own, or is none any more."""


class Nvml:
    """Without cards: a machine without the driver."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.opened = 0

    def nvmlInit(self) -> None:
        if not self.cards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        if self.cards[index].trouble == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            for one in [card, *(card.parts if isinstance(card.parts, list) else [])]:
                if one is not None and one.uuid == uuid:
                    return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Card) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Card) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Card, version: Any = None) -> SimpleNamespace:
        if handle.trouble is not None:
            raise pynvml.NVMLError(handle.trouble)
        return SimpleNamespace(total=handle.gib * 2**30)

    def nvmlDeviceGetMigMode(self, device: Card) -> list[int]:
        if device.parts == "unknown":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device.parts is not None), 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Card, index: int) -> Card:
        assert isinstance(device.parts, list)
        part = device.parts[index] if index < len(device.parts) else None
        if part is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Card) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.users.items()]


def installed(nvml: Nvml, patch: pytest.MonkeyPatch) -> None:
    """In place of the library, in this process."""
    for name, function in inspect.getmembers(nvml, inspect.ismethod):
        if name.startswith("nvml"):
            there = inspect.signature(inspect.unwrap(getattr(pynvml, name)))
            assert list(there.parameters) in (
                list(inspect.signature(function).parameters),
                ["args", "kwargs"],  # behind their decorator
            ), name
            patch.setattr(pynvml, name, function)
