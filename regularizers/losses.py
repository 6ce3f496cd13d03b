"""The loss of one window: carries out any declaration of `regularizers.table`.

T time steps, B batch, V vocabulary, H width of the last layer's output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from regularizers.config import Regularization


class Pass(Protocol):
    """What a loss needs to know of one pass over a window."""

    @property
    def logits_TBV(self) -> Tensor: ...
    @property
    def raw_TBH(self) -> Tensor: ...
    @property
    def dropped_TBH(self) -> Tensor: ...


@dataclass(frozen=True)
class LossParts:
    """Scalars of one window: total = target + kappa * penalty + alpha * ar + beta * tar.

    The parts are not scaled by their factors: they can be compared between trials, and exist where a factor
    is zero. Cross-entropies are in nats per token.
    """

    total: Tensor
    """What is optimised."""
    target: Tensor
    first_target: Tensor
    """Cross-entropy of the first pass, detached: what is reported as train_loss."""
    penalty: Tensor
    ar: Tensor
    tar: Tensor


PENALTIES: dict[str, Callable[..., Tensor]] = {
    "none": lambda *logits: logits[0].new_zeros(()),
    "difference": F.mse_loss,
    "norm": lambda logits_TBV: logits_TBV.square().mean(),
}
"""What a declared penalty makes of the logits of its passes."""


def loss_parts(
    regularization: Regularization, first: Pass, second: Pass | None, targets_TB: Tensor
) -> LossParts:
    """The loss of a window from its passes; `second` is None where the regularizer has no second pass.

    Means over T, B and V, not the sums of Zolna et al. 2018, eq. 1: the paper's kappa refers to means.
    AR and TAR (Merity et al. 2017, §4.6) look at the first pass only.
    """
    declaration = regularization.declaration
    logits = [first.logits_TBV]
    if second is not None:
        gradient = regularization.second_pass_has_gradient
        logits.append(second.logits_TBV if gradient else second.logits_TBV.detach())
    judged = logits if declaration.target == "mean" else logits[:1]
    cross_entropies = [_cross_entropy(logits_TBV, targets_TB) for logits_TBV in judged]
    target = torch.stack(cross_entropies).mean()
    penalty = PENALTIES[declaration.penalty](*logits)
    ar, tar = first.dropped_TBH.square().mean(), _temporal_activation(first.raw_TBH)
    total = target
    for factor, part in (
        (regularization.effective_kappa, penalty),
        (regularization.alpha, ar),
        (regularization.beta, tar),
    ):
        if factor:
            total = total + factor * part
    return LossParts(total, target, cross_entropies[0].detach(), penalty, ar, tar)


def _cross_entropy(logits_TBV: Tensor, targets_TB: Tensor) -> Tensor:
    return F.cross_entropy(logits_TBV.flatten(0, 1), targets_TB.flatten())


def _temporal_activation(raw_TBH: Tensor) -> Tensor:
    """mean((h_t - h_{t-1})**2); zero for a window of one step, whose mean over nothing would be NaN."""
    if raw_TBH.shape[0] == 1:
        return raw_TBH.new_zeros(())
    return (raw_TBH[1:] - raw_TBH[:-1]).square().mean()
