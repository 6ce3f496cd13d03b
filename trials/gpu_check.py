"""`python -m trials.gpu_check float32 bf16`: what keeps torch from computing so on the GPUs here.

A process of its own for it: it loads torch, and keeps memory of a GPU as long as it lives.
"""

import sys
from collections.abc import Sequence
from typing import cast

import torch

from models.config import Precision
from models.precision import UnsupportedPrecision, require_precision


def main(precisions: Sequence[str]) -> str | None:
    """What keeps torch from computing in all of these on the GPUs here, in words; None where nothing does."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA device: install its CUDA build and NVIDIA's driver, "
            "or submit with resources.gpus 0"
        )
    try:
        for number in range(torch.cuda.device_count()):
            for precision in precisions:
                require_precision(cast(Precision, precision), torch.device("cuda", number))
    except UnsupportedPrecision as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
