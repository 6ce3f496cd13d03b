"""What validation losses decide: when averaging begins (NT-ASGD), and the learning rate.

NT-ASGD (Merity et al. 2017, algorithm 1) is SGD that averages its iterates once validation stalls.
"""

import copy
import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def averaging_starts(valid_loss: float, earlier_losses: Sequence[float], interval: int) -> bool:
    """Whether averaging starts: the loss is above the best of all but the latest `interval` epochs.

    `earlier_losses` are those of all epochs before it, oldest first; interval 0 compares with all of them.
    """
    long_ago = earlier_losses[: max(0, len(earlier_losses) - interval)]
    return bool(long_ago) and valid_loss > min(long_ago)


def learning_rate(initial: float, losses: Sequence[float], patience: int, factor: float) -> float:
    """The rate after epochs with these validation losses.

    It is multiplied by `factor` after each `patience` epochs in a row without a new lowest loss (Zolna et al.
    2018, §5, footnote).
    """
    lr, best, waited = initial, math.inf, 0
    for loss in losses:
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited == patience:
            lr, waited = lr * factor, 0
    return lr


class RunningMean(Generic[Module]):
    """The mean of a module's parameters over the updates so far; before the first, the module as it stood.

    torch.optim.ASGD differs: its mean leaves out the first iterate after the start.
    """

    def __init__(self, module: Module) -> None:
        self.module = copy.deepcopy(module)
        self.count = 0

    @torch.no_grad()
    def update(self, module: Module) -> None:
        """Take the module's present parameters into the mean."""
        self.count += 1
        means: list[Tensor] = list(self.module.parameters())
        torch._foreach_lerp_(means, list[Tensor](module.parameters()), 1 / self.count)  # a GPU: at once
