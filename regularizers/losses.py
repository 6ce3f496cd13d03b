"""The loss of one window: carries out any declaration of `regularizers.table`.

T time steps, B batch, V vocabulary, H width of the last layer's output.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regularizers.config import Regularization
from regularizers.head import head_losses


class Pass(Protocol):
    """What a loss needs to know of one pass over a window."""

    @property
    def raw_TBH(self) -> Tensor: ...
    @property
    def dropped_TBH(self) -> Tensor: ...


class Decoder(Protocol):
    """What makes the logits of a pass: dropped_TBH @ decoder_VH.T + decoder_bias."""

    @property
    def decoder_VH(self) -> Tensor: ...
    @property
    def decoder_bias(self) -> Tensor: ...


@dataclass(frozen=True)
class LossParts:
    """Scalars of one window: total = target + kappa * penalty + alpha * ar + beta * tar.

    The parts are not scaled by their factors: they can be compared between trials, and exist where a factor
    is zero. Cross-entropies are in nats per token. Target and penalty have no gradient but the total's.
    """

    total: Tensor
    """What is optimised."""
    target: Tensor
    first_target: Tensor
    """Cross-entropy of the first pass: what is reported as train_loss."""
    penalty: Tensor
    ar: Tensor
    tar: Tensor


def loss_parts(
    regularization: Regularization,
    first: Pass,
    second: Pass | None,
    decoder: Decoder,
    targets_TB: Tensor,
    dtype: torch.dtype | None = None,
) -> LossParts:
    """The loss of a window from its passes; `second` is None where the regularizer has no second pass.

    Means over T, B and V, not the sums of Zolna et al. 2018, eq. 1: the paper's kappa refers to means.
    AR and TAR (Merity et al. 2017, §4.6) look at the first pass only. The products that logits take part in
    are computed in `dtype` where one is given.
    """
    declaration = regularization.declaration
    losses = head_losses(
        [each.dropped_TBH.flatten(0, 1) for each in (first, second) if each is not None],
        decoder.decoder_VH,
        decoder.decoder_bias,
        targets_TB.flatten(),
        target=declaration.target,
        penalty=declaration.penalty,
        kappa=regularization.effective_kappa,
        second_gradient=regularization.second_pass_has_gradient,
        dtype=dtype,
    )
    ar, tar = first.dropped_TBH.square().mean(), _temporal_activation(first.raw_TBH)
    total = losses.total
    for factor, part in ((regularization.alpha, ar), (regularization.beta, tar)):
        if factor:
            total = total + factor * part
    return LossParts(total, losses.target, losses.first_target, losses.penalty, ar, tar)


def _temporal_activation(raw_TBH: Tensor) -> Tensor:
    """mean((h_t - h_{t-1})**2); zero for a window of one step, whose mean over nothing would be NaN."""
    if raw_TBH.shape[0] == 1:
        return raw_TBH.new_zeros(())
    return (raw_TBH[1:] - raw_TBH[:-1]).square().mean()
