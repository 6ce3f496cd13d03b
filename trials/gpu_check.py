"""`python -m trials.gpu_check float32 bf16`: what keeps torch from computing so on the GPUs here.

A process of its own for it: it loads torch, and keeps memory of a GPU as long as it lives.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import cast

import torch

from models.config import Precision
from models.precision import UnsupportedPrecision, require_precision
from trials.attempt import is_out_of_memory
from trials.gpus import VISIBLE


def main(precisions: Sequence[str]) -> str | None:
    """What keeps torch from computing in all of these on the GPUs here, in words; None where nothing does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if not there:
        why = f" ({_first_line(said[-1].message)})" if said else ""
        return (
            f"torch {torch.__version__} finds no CUDA device{why}: install its CUDA build and NVIDIA's "
            "driver, or submit with resources.gpus 0"
        )
    try:
        for number in range(torch.cuda.device_count()):
            if (words := _not_computing(number)) is not None:
                return words
            for precision in precisions:
                require_precision(cast(Precision, precision), torch.device("cuda", number))
    except UnsupportedPrecision as error:
        return str(error)
    return None


def _not_computing(number: int) -> str | None:
    try:
        compute(torch.device("cuda", number))
    except RuntimeError as error:
        if is_out_of_memory(error):  # others have it: a trial waits for its room
            return None
        names = os.environ.get(VISIBLE, "").split(",")
        name = names[number] if number < len(names) and names[number] else f"GPU {number}"
        return (
            f"torch {torch.__version__} does not compute on {name} ({_first_line(error)}): leave it out of "
            f"{VISIBLE}, install a build of torch for such a card, or submit with resources.gpus 0"
        )
    return None


def compute(device: torch.device) -> None:
    """A little: torch may have no code for the card, and the card may be broken. Raises RuntimeError."""
    torch.ones(8, device=device).sum().item()


def _first_line(said: object) -> str:
    return str(said).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
