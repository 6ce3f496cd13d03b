"""In which precision matrix products are computed; weights, gradients and losses are float32 in each.

float32 is exact to its 24 bits. tf32 rounds the factors of a product to 11 bits, on NVIDIA GPUs from Ampere
on. bf16 rounds factors and products to 8 bits, on such GPUs and on CPUs with AVX-512 BF16 or AMX; where
torch's own LSTM runs, on GPUs and for narrow layers, its states and gates are bf16 as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.config import Precision


class UnsupportedPrecision(ValueError):
    """This device does not compute so."""


def require_precision(precision: Precision, device: torch.device) -> None:
    """Raises UnsupportedPrecision where the device has no such products, or would only imitate them."""
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "tf32" and not ampere:
        raise UnsupportedPrecision(
            f"precision 'tf32' is for NVIDIA GPUs from Ampere on, and this is {_named(device)}: "
            "set training.precision to 'float32' or, where the processor has it, 'bf16'"
        )
    if precision == "bf16" and not (ampere or (device.type == "cpu" and _cpu_has_bf16())):
        raise UnsupportedPrecision(
            "precision 'bf16' is for GPUs from Ampere on and for CPUs with AVX-512 BF16, AMX or ARM's BF16; "
            f"this one, {_named(device)}, would only imitate it, slowly: set training.precision to 'float32'"
        )


def product_dtype(precision: Precision) -> torch.dtype | None:
    """What products are computed in, where that is not the dtype of the weights."""
    return torch.bfloat16 if precision == "bf16" else None


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Whether float32 products on a GPU may be TF32, for the length of the block: torch has one switch."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
