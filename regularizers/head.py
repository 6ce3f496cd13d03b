"""What a loss makes of the logits of a window, without ever holding them.

The logits, hidden_NH @ decoder_VH.T + bias_V, are by far the largest tensor of a step. But a loss is a scalar
and goes row by row: a few rows of logits at a time do, for its gradients too. These are made on the way, and
backward only scales them.

N predicted tokens, V vocabulary, H width of the hidden vectors; n <= N rows taken at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.pieces import FEWEST_ROWS
from models.products import Product, product_with
from regularizers.table import Penalty, Target, penalises_logits

FEW_ROWS = 32
"""Of logits that are made a second time, beside those that are there."""

SIGNS: dict[Penalty, tuple[int, int]] = {"none": (0, 0), "difference": (1, -1), "norm": (1, 0)}
"""A penalty is the mean square of this combination of the logits of the two passes."""

WithGradients = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Scalars, and the gradients of the first one: one for each input, or none where they were not asked for."""


@dataclass(frozen=True)
class HeadLosses:
    """Scalars: total = target + kappa * penalty. Only the total has a gradient, and that has none in turn."""

    total: Tensor
    target: Tensor
    """Mean over the tokens of -log softmax(logits)[target], in nats."""
    first_target: Tensor
    """The same of the first pass."""
    penalty: Tensor


def head_losses(
    hidden: Sequence[Tensor],
    decoder_VH: Tensor,
    bias_V: Tensor,
    targets_N: Tensor,
    *,
    target: Target,
    penalty: Penalty,
    kappa: float,
    second_gradient: bool = True,
    dtype: torch.dtype | None = None,
) -> HeadLosses:
    """The losses of one or two passes, whose hidden vectors are (N, H) each; in the words of the table.

    Without `second_gradient` the logits of the second pass, which then has no target, are a constant. The
    products that logits take part in, those of a penalty made from logits too, are computed in `dtype` where
    one is given; those of a penalty without logits are not.
    """
    targeted = hidden if target == "mean" else hidden[:1]
    if penalty != "none" and not penalises_logits(target, penalty, decoder_VH.shape[1]):
        losses = head_losses(
            targeted, decoder_VH, bias_V, targets_N, target=target, penalty="none", kappa=0, dtype=dtype
        )
        first_NH, second_NH = hidden
        difference = mean_square_difference(
            first_NH, second_NH, decoder_VH, bias_V, second_gradient=second_gradient
        )
        return replace(losses, total=losses.total + kappa * difference, penalty=difference.detach())
    logits, tokens = len(targets_N) * len(bias_V), len(targets_N) * len(targeted)
    summed = partial(_summed_by_chunks, targets_N, penalty, kappa * tokens / logits, dtype)
    total, target_sum, first_sum, squares = _differentiable(summed, decoder_VH, bias_V, *targeted)
    return HeadLosses(total / tokens, target_sum / tokens, first_sum / len(targets_N), squares / logits)


def mean_square_difference(
    first_NH: Tensor, second_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor, *, second_gradient: bool
) -> Tensor:
    """Mean over N and V of (l1 - l2)**2, l1 and l2 the logits of two passes, none of which are made.

    Without `second_gradient` l2 is a constant, and the decoder and its bias get the gradient that l1 gives.
    """
    if second_gradient:
        difference_NH = first_NH - second_NH
        summed = partial(_summed_squares, difference_NH.detach())
        (total,) = _differentiable(summed, difference_NH, decoder_VH)
    else:
        summed = partial(_summed_squares_from_a_constant, first_NH.detach())
        (total,) = _differentiable(summed, first_NH - second_NH.detach(), decoder_VH, bias_V)
    return total / (len(first_NH) * len(bias_V))


def _summed_by_chunks(
    targets_N: Tensor,
    penalty: Penalty,
    factor: float,
    dtype: torch.dtype | None,
    decoder_VH: Tensor,
    bias_V: Tensor,
    *hidden: Tensor,
    gradients: bool,
) -> WithGradients:
    """Cross-entropy + factor * squares, the cross-entropy, the first pass's alone, the squares penalised."""
    cross_entropies, squares = bias_V.new_zeros(len(hidden)), bias_V.new_zeros(())
    d_decoder_VH, d_bias_V, *d_hidden = map(torch.zeros_like, (decoder_VH, bias_V, *hidden))
    to_logits, to_hidden = _product(decoder_VH, dtype, bias_V), _product(decoder_VH.t(), dtype)
    cast_hidden = [hidden_NH if dtype is None else hidden_NH.to(dtype) for hidden_NH in hidden]
    # Each chunk reads the decoder again: the wider that is, the more rows make up for it.
    rows = min(len(targets_N), max(FEWEST_ROWS, decoder_VH.shape[1]))
    ones_n = bias_V.new_ones(rows)

    def take(chunk: slice) -> None:
        """All that is as large as logits goes before the next chunk comes."""
        targets_n1 = targets_N[chunk].unsqueeze(1)
        logits = [to_logits(hidden_NH[chunk]) for hidden_NH in cast_hidden]
        if penalty != "none":
            combined_nV = torch.sub(logits[0], logits[1] if penalty == "difference" else 0)
            squares.add_(torch.dot(combined_nV.view(-1), combined_nV.view(-1)))
        for i, (logits_nV, sign) in enumerate(zip(logits, SIGNS[penalty], strict=False)):
            cross_entropies[i] += _cross_entropy_leaving_probabilities(
                logits_nV, targets_n1, to_logits, cast_hidden[i][chunk]
            )
            if gradients:
                d_logits_nV = logits_nV.scatter_add_(1, targets_n1, logits_nV.new_full(targets_n1.shape, -1))
                if sign:
                    d_logits_nV.add_(combined_nV, alpha=2 * factor * sign)
                d_bias_V.addmv_(d_logits_nV.t(), ones_n[: len(d_logits_nV)])  # a sum(0), 1.4 to 2.7 x faster
                if dtype is None:
                    d_decoder_VH.addmm_(d_logits_nV.t(), hidden[i][chunk])
                else:
                    d_logits_nV = d_logits_nV.to(dtype)
                    d_decoder_VH.add_(torch.mm(d_logits_nV.t(), cast_hidden[i][chunk]))
                d_hidden[i][chunk] = to_hidden(d_logits_nV)

    for start in range(0, len(targets_N), rows):
        take(slice(start, start + rows))
    total = cross_entropies.sum() + factor * squares
    made = (d_decoder_VH, d_bias_V, *d_hidden) if gradients else ()
    return (total, cross_entropies.sum(), cross_entropies[0].clone(), squares), made


def _product(matrix_NK: Tensor, dtype: torch.dtype | None, bias_N: Tensor | None = None) -> Product:
    """product_with, computed in dtype where one is given; what has a bias added is of the matrix's dtype."""
    if dtype is None:
        return product_with(matrix_NK, bias_N)
    product, like = product_with(matrix_NK.to(dtype)), matrix_NK.dtype
    if bias_N is None:
        return product
    return lambda x_MK: product(x_MK).to(like).add_(bias_N)


def _cross_entropy_leaving_probabilities(
    logits_nV: Tensor, targets_n1: Tensor, to_logits: Product, hidden_nH: Tensor
) -> Tensor:
    """The sum of -log p[target]; leaves p = softmax(logits) in place of the logits, those of `hidden_nH`."""
    may_look = _may_look(logits_nV)
    above_n = None if may_look else _largest_above_target(logits_nV, targets_n1)
    torch.softmax(logits_nV, 1, out=logits_nV)
    if may_look:
        p_n1, limits = logits_nV.gather(1, targets_n1), torch.finfo(logits_nV.dtype)
        if p_n1.min() > limits.tiny / limits.eps:
            return -p_n1.log().sum()
    if above_n is None:  # too small for a float: the logits once more, a few at a time
        few = zip(torch.split(hidden_nH, FEW_ROWS), torch.split(targets_n1, FEW_ROWS), strict=True)
        above_n = torch.cat([_largest_above_target(to_logits(some_nH), some_n1) for some_nH, some_n1 in few])
    return (above_n - logits_nV.amax(1).log()).sum()


def _largest_above_target(logits_nV: Tensor, targets_n1: Tensor) -> Tensor:
    return logits_nV.amax(1) - logits_nV.gather(1, targets_n1).squeeze(1)


def _may_look(x: Tensor) -> bool:
    """Whether what is done may depend on numbers: a GPU would be waited for, and a graph has none to see."""
    return x.device.type == "cpu"


def _summed_squares(
    varying_NH: Tensor, rows_NH: Tensor, decoder_VH: Tensor, *, gradients: bool
) -> WithGradients:
    """The sum of (rows @ decoder.T)**2, as that of (rows @ gram) * rows with gram_HH = decoder.T @ decoder.

    The rest of the rows, rows - varying, stands for a product with the decoder that is a constant.
    """
    product_NH = rows_NH @ (decoder_VH.t() @ decoder_VH)
    totals = ((product_NH * rows_NH).sum(),)
    if not gradients:
        return totals, ()
    return totals, (2 * product_NH, decoder_VH @ (2 * rows_NH.t() @ varying_NH))


def _summed_squares_from_a_constant(
    varying_NH: Tensor, rows_NH: Tensor, decoder_VH: Tensor, bias_V: Tensor, *, gradients: bool
) -> WithGradients:
    """The same where each of the two products has the bias, but only the varying one varies with it."""
    totals, made = _summed_squares(varying_NH, rows_NH, decoder_VH, gradients=gradients)
    return totals, (*made, decoder_VH @ (2 * rows_NH.sum(0))) if gradients else ()


def _differentiable(summed: Callable[..., WithGradients], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The scalars that `summed` makes of the inputs, the first one with its gradients if any input asks."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return summed(*inputs, gradients=False)[0]
    scalars: tuple[Tensor, ...] = _MadeWithItsGradients.apply(summed, *inputs)  # type: ignore[no-untyped-call]
    return scalars


class _MadeWithItsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summed: Callable[..., WithGradients], *inputs: Tensor) -> tuple[Tensor, ...]:
        scalars, gradients = summed(*inputs, gradients=True)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*scalars[1:])
        return scalars

    @staticmethod
    def backward(ctx: Any, *d_scalars: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph asks for the gradient of a gradient, and regularizers.head makes none: "
                "leave it out, or make the loss from whole logits"
            )
        return None, *(d_scalars[0] * gradient for gradient in ctx.saved_tensors)
