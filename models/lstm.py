"""One LSTM layer over a window, with dropped hidden-to-hidden weights, in two ways that compute the same.

torch's own operation, and a recurrence of ours for CPUs, whose matrix oneDNN lays out once a window: each of
its products reads that matrix whole for a few rows only, and is what a step of a wide layer takes its time
for.

T time steps, B batch, N = T·B, I width of the inputs, H of the outputs; the gates are in nn.LSTM's order: i,
f, g, o.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.pieces import NARROWEST
from models.products import product_with

SHORTEST = 32
"""Time steps that make up for laying a matrix out: windows of training, not of evaluation, have so many."""


def lstm(
    layer: nn.LSTM,
    inputs_TBI: Tensor,
    state: tuple[Tensor, Tensor],
    kept_4HH: Tensor | None,
    weight_p: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As layer(inputs, state), where only the kept hidden-to-hidden weights count, by 1 / (1 - weight_p).

    The state is (h, c), (1, B, H) each, and gets no gradient. Matrix products are computed in `dtype` where
    one is given, and in torch's own way everything else within the layer, too; what is returned is of the
    inputs' dtype. Which way is taken does not depend on whether a gradient is wanted: two passes of a step
    that are to be equal are.
    """
    way = _by_our_recurrence if _ours_is_faster(layer, inputs_TBI) else _by_torch
    return way(layer, inputs_TBI, state, kept_4HH, weight_p, dtype)


def _ours_is_faster(layer: nn.LSTM, inputs_TBI: Tensor) -> bool:
    return (
        inputs_TBI.device.type == "cpu"
        and inputs_TBI.dtype == torch.float32
        and layer.hidden_size >= NARROWEST
        and len(inputs_TBI) >= SHORTEST
    )


def _by_torch(
    layer: nn.LSTM,
    inputs_TBI: Tensor,
    state: tuple[Tensor, Tensor],
    kept_4HH: Tensor | None,
    weight_p: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    ((input_to_hidden, hidden_to_hidden, *biases),) = layer.all_weights
    weights = [input_to_hidden, _Kept.apply(hidden_to_hidden, kept_4HH, weight_p), *biases]  # type: ignore[no-untyped-call]
    inputs, (h, c) = inputs_TBI, state
    if dtype is not None:
        weights, inputs, h, c = [w.to(dtype) for w in weights], inputs.to(dtype), h.to(dtype), c.to(dtype)
    # Its training form also where no gradient is wanted: cuDNN has no backward for the other one.
    outputs, h, c = torch.lstm(inputs, (h, c), weights, True, 1, 0.0, True, False, False)
    like = inputs_TBI.dtype
    return outputs.to(like), (h.detach().to(like), c.detach().to(like))


def _by_our_recurrence(
    layer: nn.LSTM,
    inputs_TBI: Tensor,
    state: tuple[Tensor, Tensor],
    kept_4HH: Tensor | None,
    weight_p: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    ((weight_4HI, weight_4HH, *biases),) = layer.all_weights
    h_BH, c_BH = (each.squeeze(0) for each in state)
    dtype = dtype or inputs_TBI.dtype
    outputs_TBH, c_BH = _Recurrence.apply(  # type: ignore[no-untyped-call]
        inputs_TBI, weight_4HI, weight_4HH, sum(biases), kept_4HH, weight_p, h_BH, c_BH, dtype
    )
    return outputs_TBH, (outputs_TBH.detach()[-1:].clone(), c_BH.unsqueeze(0))


def kept_weights(weight_4HH: Tensor, kept_4HH: Tensor | None, weight_p: float) -> Tensor:
    """The matrix with what is dropped set to zero, the rest scaled: a new tensor, or the same undropped."""
    if kept_4HH is None:
        return weight_4HH
    # Converted first, as bytes: on a CPU torch multiplies floats by booleans many times slower.
    return kept_4HH.view(torch.uint8).to(weight_4HH.dtype).mul_(weight_4HH).mul_(1 / (1 - weight_p))


class _Kept(torch.autograd.Function):
    """kept_weights, for which only the booleans are remembered."""

    @staticmethod
    def forward(ctx: Any, weight_4HH: Tensor, kept_4HH: Tensor | None, weight_p: float) -> Tensor:
        ctx.save_for_backward(kept_4HH)
        ctx.weight_p = weight_p
        return kept_weights(weight_4HH, kept_4HH, weight_p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weight_4HH: Tensor) -> tuple[Tensor, None, None]:
        (kept_4HH,) = ctx.saved_tensors
        return kept_weights(d_weight_4HH, kept_4HH, ctx.weight_p), None, None


class _Recurrence(torch.autograd.Function):
    """The layer with its gradients written out. Of the gates, (T, B, G = 4H), the activations are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs_TBI: Tensor,
        weight_4HI: Tensor,
        weight_4HH: Tensor,
        bias_4H: Tensor,
        kept_4HH: Tensor | None,
        weight_p: float,
        h_BH: Tensor,
        c_BH: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        steps, batch, width = len(inputs_TBI), *h_BH.shape
        inputs_NI = inputs_TBI.flatten(0, 1).to(dtype)
        gates_NG = F.linear(inputs_NI, weight_4HI.to(dtype)).to(h_BH.dtype).add_(bias_4H)
        gates_TBG = gates_NG.view(steps, batch, 4 * width)
        matrix_GH = kept_weights(weight_4HH, kept_4HH, weight_p).to(dtype)
        recurrent = product_with(matrix_GH, rows=batch)
        outputs_TBH, cells_TBH = (h_BH.new_empty(steps + 1, batch, width) for _ in range(2))
        outputs_TBH[0], cells_TBH[0] = h_BH, c_BH
        for t, gates_BG in enumerate(gates_TBG):
            gates_BG += recurrent(outputs_TBH[t].to(dtype))
            i, f, g, o = gates_BG.chunk(4, 1)
            gates_BG[:, : 2 * width].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, cells_TBH[t], out=cells_TBH[t + 1]).addcmul_(i, g)
            torch.tanh(cells_TBH[t + 1], out=outputs_TBH[t + 1]).mul_(o)
        # In bfloat16 the matrix is small enough to keep; else it is made again from the booleans.
        kept = None if dtype == h_BH.dtype else matrix_GH
        ctx.save_for_backward(
            inputs_NI, weight_4HI, weight_4HH, kept_4HH, kept, gates_TBG, outputs_TBH, cells_TBH
        )
        ctx.weight_p, ctx.dtype = weight_p, dtype
        last_c_BH = cells_TBH[-1].clone()
        ctx.mark_non_differentiable(last_c_BH)
        return outputs_TBH[1:], last_c_BH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_returned: Tensor) -> tuple[Tensor | None, ...]:
        (
            inputs_NI, weight_4HI, weight_4HH, kept_4HH, matrix_GH, gates_TBG, outputs_TBH, cells_TBH
        ) = ctx.saved_tensors  # fmt: skip
        d_outputs_TBH, dtype, like = d_returned[0], ctx.dtype, gates_TBG.dtype
        steps, batch, width = d_outputs_TBH.shape
        if matrix_GH is None:
            matrix_GH = kept_weights(weight_4HH, kept_4HH, ctx.weight_p)
        recurrent = product_with(matrix_GH.t(), rows=batch)
        # What each gate's gradient is multiples of dc, or of dh for o, made for all time steps at once.
        d_gates_TBG, to_c_TBH = _factors(gates_TBG, cells_TBH)
        d_h_BH = d_c_BH = None
        for t in reversed(range(steps)):
            d_h_BH = d_outputs_TBH[t] if d_h_BH is None else d_h_BH.add_(d_outputs_TBH[t])
            change_BH = d_h_BH * to_c_TBH[t]
            d_c_BH = change_BH if d_c_BH is None else d_c_BH.add_(change_BH)
            d_gates_BG = d_gates_TBG[t]
            d_gates_BG.view(batch, 4, width)[:, :3].mul_(d_c_BH.unsqueeze(1))
            d_gates_BG[:, 3 * width :].mul_(d_h_BH)
            d_c_BH.mul_(gates_TBG[t, :, width : 2 * width])
            if t:
                d_h_BH = recurrent(d_gates_BG.to(dtype)).to(like)
        d_gates_NG = d_gates_TBG.flatten(0, 1)
        d_bias_4H = d_gates_NG.sum(0)
        d_gates_NG = d_gates_NG.to(dtype)
        d_gates_GN = d_gates_NG.t() if dtype == like else d_gates_NG.t().contiguous()  # 1.4 x in bfloat16
        d_weight_4HH = torch.mm(d_gates_GN, outputs_TBH[:-1].flatten(0, 1).to(dtype)).to(like)
        return (
            torch.mm(d_gates_NG, weight_4HI.to(dtype)).to(like).view(steps, batch, -1),
            torch.mm(d_gates_GN, inputs_NI).to(like),
            kept_weights(d_weight_4HH, kept_4HH, ctx.weight_p),
            d_bias_4H,
            *(None,) * 5,
        )


def _factors(gates_TBG: Tensor, cells_TBH: Tensor) -> tuple[Tensor, Tensor]:
    """d gates / d c, or for o / d h, before the nonlinearities, (T, B, 4H); and dc / dh, (T, B, H)."""
    i, f, g, o = gates_TBG.chunk(4, 2)
    before, tanh_c = cells_TBH[:-1], cells_TBH[1:].tanh()
    factors_TBG = torch.empty_like(gates_TBG)
    of_i, of_f, of_g, of_o = factors_TBG.chunk(4, 2)
    torch.addcmul(i, i, i, value=-1, out=of_i).mul_(g)
    torch.addcmul(f, f, f, value=-1, out=of_f).mul_(before)
    torch.addcmul(i, i * g, g, value=-1, out=of_g)
    torch.addcmul(o, o, o, value=-1, out=of_o).mul_(tanh_c)
    return factors_TBG, torch.addcmul(o, o * tanh_c, tanh_c, value=-1)
