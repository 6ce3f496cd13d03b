"""What a loss makes of the logits of a window, without ever holding them.

The logits, hidden_NH @ decoder_VH.T + bias_V, are by far the largest tensor of a step. A cross-entropy needs
each row of them once, so it takes a few rows at a time; a mean of squares needs none of them. Both are
scalars: their gradients are made on the way, and backward only scales them.

N predicted tokens, V vocabulary, H width of the hidden vectors, F = H + 1; n <= N rows taken at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

FEWEST_ROWS_AT_ONCE = 128
"""Enough for an efficient matrix product, few enough for their logits to stay in a CPU's cache."""

WithGradients = tuple[Tensor, tuple[Tensor, ...]]
"""A scalar and its gradients, one for each input; no gradients where they were not asked for."""


def cross_entropy(hidden_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Mean over N of -log softmax(logits)[target], in nats. Its gradient has no gradient."""
    summed = partial(_summed_cross_entropy, targets_N)
    return _differentiable(summed, hidden_NH, decoder_VH, bias_V) / len(targets_N)


def mean_square(hidden_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor) -> Tensor:
    """Mean over N and V of logits**2. Its gradient has no gradient."""
    hidden_NF = torch.cat([hidden_NH, hidden_NH.new_ones(len(hidden_NH), 1)], dim=1)
    decoder_VF = torch.cat([decoder_VH, bias_V.unsqueeze(1)], dim=1)
    summed = partial(_summed_squares, hidden_NF.detach())
    return _differentiable(summed, hidden_NF, decoder_VF) / (len(hidden_NH) * len(bias_V))


def mean_square_difference(
    first_NH: Tensor, second_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor, *, second_gradient: bool
) -> Tensor:
    """Mean over N and V of (l1 - l2)**2, l1 and l2 the logits of two passes. Its gradient has no gradient.

    Without `second_gradient` l2 is a constant, and the decoder and its bias get the gradient that l1 gives.
    """
    if second_gradient:
        difference_NH = first_NH - second_NH
        summed = partial(_summed_squares, difference_NH.detach())
        total = _differentiable(summed, difference_NH, decoder_VH)
    else:
        summed = partial(_summed_squares_from_a_constant, first_NH.detach())
        total = _differentiable(summed, first_NH - second_NH.detach(), decoder_VH, bias_V)
    return total / (len(first_NH) * len(bias_V))


def _summed_cross_entropy(
    targets_N: Tensor, hidden_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor, *, gradients: bool
) -> WithGradients:
    total = hidden_NH.new_zeros(())
    d_hidden_NH, d_decoder_VH, d_bias_V = map(torch.zeros_like, (hidden_NH, decoder_VH, bias_V))
    # Each chunk reads the decoder again: the wider that is, the more rows make up for it.
    rows = min(len(hidden_NH), max(FEWEST_ROWS_AT_ONCE, hidden_NH.shape[1]))
    buffer_nV = hidden_NH.new_empty(rows, len(bias_V))
    decoder_HV = decoder_VH.t().contiguous()  # On a CPU its product is 1.3 x faster than a transposed view's.
    chunks = zip(*(torch.split(x, rows) for x in (hidden_NH, targets_N, d_hidden_NH)), strict=True)
    for hidden_nH, targets_n, d_hidden_nH in chunks:
        logits_nV = torch.addmm(bias_V, hidden_nH, decoder_HV, out=buffer_nV[: len(hidden_nH)])
        targets_n1 = targets_n.unsqueeze(1)
        target_n, largest_n = logits_nV.gather(1, targets_n1).squeeze(1), logits_nV.amax(1)
        p_nV = torch.softmax(logits_nV, 1, out=logits_nV)
        # The largest p gives log p[target] even where p[target] is too small for a float.
        total += (largest_n - p_nV.amax(1).log() - target_n).sum()
        if gradients:
            d_logits_nV = p_nV.scatter_add_(1, targets_n1, p_nV.new_full(targets_n1.shape, -1.0))
            torch.mm(d_logits_nV, decoder_VH, out=d_hidden_nH)
            d_decoder_VH.addmm_(d_logits_nV.t(), hidden_nH)
            d_bias_V += d_logits_nV.sum(0)
    return total, (d_hidden_NH, d_decoder_VH, d_bias_V) if gradients else ()


def _summed_squares(
    varying_NH: Tensor, rows_NH: Tensor, decoder_VH: Tensor, *, gradients: bool
) -> WithGradients:
    """The sum of (rows @ decoder.T)**2, as that of (rows @ gram) * rows with gram_HH = decoder.T @ decoder.

    The rest of the rows, rows - varying, stands for a product with the decoder that is a constant. Two products
    of V * H * H do it whatever N: cheaper than going over the logits up to H of 150 or so, 4 % of a step dearer
    at H = 200, and the logits of a pass that has no target need not exist.
    """
    product_NH = rows_NH @ (decoder_VH.t() @ decoder_VH)
    total = (product_NH * rows_NH).sum()
    if not gradients:
        return total, ()
    return total, (2 * product_NH, decoder_VH @ (2 * rows_NH.t() @ varying_NH))


def _summed_squares_from_a_constant(
    varying_NH: Tensor, rows_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor, *, gradients: bool
) -> WithGradients:
    """The same where each of the two products has the bias, but only the varying one varies with it."""
    total, made = _summed_squares(varying_NH, rows_NH, decoder_VH, gradients=gradients)
    return total, (*made, decoder_VH @ (2 * rows_NH.sum(0))) if gradients else ()


def _differentiable(summed: Callable[..., WithGradients], *inputs: Tensor) -> Tensor:
    """The scalar that `summed` makes of the inputs, with its gradients if any input asks for one."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return summed(*inputs, gradients=False)[0]
    total: Tensor = _MadeWithItsGradients.apply(summed, *inputs)  # type: ignore[no-untyped-call]
    return total


class _MadeWithItsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summed: Callable[..., WithGradients], *inputs: Tensor) -> Tensor:
        total, gradients = summed(*inputs, gradients=True)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *d_totals: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph asks for the gradient of a gradient, and regularizers.head makes none: "
                "leave it out, or make the loss from whole logits"
            )
        return None, *(d_totals[0] * gradient for gradient in ctx.saved_tensors)
