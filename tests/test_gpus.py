"""GPUs and MIG's parts of them, by name: on machines that we describe."""

import warnings

import psutil
import pynvml
import pytest
import torch

import trials.gpu_check
from tests.nvml import Card, Nvml, installed
from trials.gpu_check import main
from trials.gpus import Gpu, Usage, answering, driver_version, users_of, visible_gpus

PART = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
LOST = Nvml(Card("GPU-1a"), Card("GPU-2b", trouble=pynvml.NVML_ERROR_GPU_IS_LOST), Card("GPU-3c"))
TWO = Nvml(Card("GPU-1a"), Card("GPU-2b", "NVIDIA A40", 48, "unknown"))
DIVIDED = Nvml(
    Card("GPU-1a", parts=[None, Card("MIG-x1", PART, 10), Card("MIG-y2", PART, 10)]),
    Card("GPU-2b"),
    Card("GPU-3c", parts=[]),
)


@pytest.mark.parametrize(
    ("nvml", "visible", "uuids"),
    [
        (TWO, None, ["GPU-1a", "GPU-2b"]),
        (TWO, "", []),
        (TWO, "1", ["GPU-2b"]),
        (TWO, "1,0", ["GPU-2b", "GPU-1a"]),
        (TWO, " 1 , 0 ", ["GPU-2b", "GPU-1a"]),
        (TWO, "1,1", ["GPU-2b"]),
        (TWO, "0,2,1", ["GPU-1a"]),
        (TWO, "0,-1,1", ["GPU-1a"]),
        (TWO, "GPU-2b", ["GPU-2b"]),
        (TWO, "GPU-2", ["GPU-2b"]),
        (TWO, "GPU-", []),
        (TWO, "MIG-x1", []),
        (TWO, "NoDevFiles", []),
        (DIVIDED, None, ["MIG-x1", "MIG-y2", "GPU-2b"]),
        (DIVIDED, "0", ["MIG-x1"]),
        (DIVIDED, "GPU-1a,1", ["MIG-x1", "GPU-2b"]),
        (DIVIDED, "MIG-y2,MIG-x1", ["MIG-y2", "MIG-x1"]),
        (DIVIDED, "MIG-y", ["MIG-y2"]),
        (DIVIDED, "2", []),
        (LOST, None, ["GPU-1a", "GPU-3c"]),
        (LOST, "2,1,0", ["GPU-3c"]),
        (Nvml(), None, []),
        (Nvml(), "0", []),
    ],
)
def test_gpus_are_those_that_cuda_would_show(
    nvml: Nvml, visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(nvml, monkeypatch)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in visible_gpus()] == uuids
    assert nvml.opened == 0


def test_a_part_has_its_own_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(DIVIDED, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-y2,1")
    assert visible_gpus() == (
        Gpu("MIG-y2", PART, 10 * 2**30),
        Gpu("GPU-2b", "NVIDIA H100 80GB HBM3", 80 * 2**30),
    )


def test_a_gpu_that_is_lost_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(LOST, monkeypatch)
    assert answering(["GPU-3c", "GPU-2b", "GPU-1a", "GPU-9"]) == ["GPU-3c", "GPU-1a"]
    assert answering(["GPU-2b"]) == ["GPU-2b"], "whoever computes there is told"
    installed(DIVIDED, monkeypatch)
    assert answering(["MIG-y2"]) == ["MIG-y2"]
    installed(Nvml(), monkeypatch)
    assert answering(["GPU-1a"]) == ["GPU-1a"]


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(Nvml(Card("GPU-1a", "NVIDIA GB10", trouble=pynvml.NVML_ERROR_NOT_SUPPORTED)), monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == (Gpu("GPU-1a", "NVIDIA GB10", psutil.virtual_memory().total),)


def test_the_driver_and_who_uses_a_gpu_are_told_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(Nvml(Card("GPU-1a", users={12: 3 * 2**30, 13: None})), monkeypatch)
    assert driver_version() == "580.65.06"
    assert users_of("GPU-1a") == [Usage(12, 3 * 2**30), Usage(13, None)]
    assert users_of("GPU-9") == []
    installed(Nvml(), monkeypatch)
    assert driver_version() is None
    assert users_of("GPU-1a") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_torch_without_gpus_is_told_with_the_way_out() -> None:
    words = main(["float32"]) or ""
    assert words.startswith(f"torch {torch.__version__} finds no CUDA device: install its CUDA build")
    assert words.endswith("or submit with resources.gpus 0")


def test_a_precision_that_any_gpu_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capability = {0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(trials.gpu_check, "compute", lambda device: None)
    assert main(["float32"]) is None
    assert "card 1" in (main(["float32", "bf16"]) or "")
    capability[1] = (8, 0)
    assert main(["float32", "bf16"]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_driver_that_torch_finds_too_old_is_told_as_torch_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", find_none)
    words = main(["float32"]) or ""
    assert words.startswith(
        f"torch {torch.__version__} finds no CUDA device (CUDA initialization: The NVIDIA driver on your "
        "system is too old): install"
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "CUDA error: no kernel image is available for execution on the device\nSearch for it",
            f"torch {torch.__version__} does not compute on GPU-2b (CUDA error: no kernel image is available "
            "for execution on the device): leave it out of CUDA_VISIBLE_DEVICES, install a build of torch "
            "for such a card, or submit with resources.gpus 0",
        ),
        ("CUDA error: out of memory", None),  # by others: trials wait for their room
    ],
)
def test_a_gpu_that_is_there_and_does_not_compute_is_told(
    said: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        if device.index == 1:
            raise RuntimeError(said)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a,GPU-2b")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(trials.gpu_check, "compute", fail)
    monkeypatch.setattr(trials.gpu_check, "require_precision", lambda *_: None)
    assert main(["float32"]) == words
