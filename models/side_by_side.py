"""The passes of a step over one window, side by side: for a GPU, which a single pass keeps waiting.

Each time step of a recurrence is too little work for it. So that of all passes is one batched product, each
with its own masked matrix, and one cell; everything else sees the passes as a wider batch. What is computed
is what AWDLSTM.forward computes for each.

T time steps, C passes ("copies" of the model), B batch, A = C·B, R = n·B rows of the n passes with a
gradient, I and H width of a layer's inputs and outputs, G = 4H; P is H, and Q is I, rounded up.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from models.awd_lstm import AWDLSTM, Pass, State
from models.lstm import kept_weights
from models.masks import Masks, nothing_dropped

ALIGNED = 8
"""Widths are filled up with zeros to multiples of it: 16 bytes of bfloat16, as tensor cores want them."""


def passes_side_by_side(
    model: AWDLSTM,
    tokens_TB: Tensor,
    state: State,
    masks: Sequence[Masks | None],
    with_gradient: int,
    *,
    dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> tuple[Pass, ...]:
    """One pass for each of the masks, all from `state`; None drops nothing.

    Gradients flow through the first `with_gradient` of them. The rest as in AWDLSTM.forward.
    """
    each = [mask or nothing_dropped(len(model.lstms)) for mask in masks]
    weight_p = max(mask.weight_p for mask in each)  # a pass that drops nothing has 0, and no use for it
    hidden_TCBI = F.embedding(tokens_TB, model.embedding).unsqueeze(1).expand(-1, len(each), -1, -1)
    words = [None if mask.embed_V is None else mask.embed_V[tokens_TB].unsqueeze(-1) for mask in each]
    hidden_TCBI = _masked(hidden_TCBI, words)
    hidden_TCBI = _masked(hidden_TCBI, [mask.input_TBE for mask in each])
    final: list[tuple[Tensor, Tensor]] = []
    for number, (layer, (h_1BH, c_1BH)) in enumerate(zip(model.lstms, state, strict=True)):
        ((weight_GI, weight_GH, *biases),) = cast("nn.LSTM", layer).all_weights
        run = partial(
            _Recurrences.apply,
            *(hidden_TCBI, weight_GI, weight_GH, sum(biases)),
            tuple(mask.kept_4HH[number] for mask in each),
            weight_p,
            *(h_1BH[0], c_1BH[0], with_gradient, dtype or hidden_TCBI.dtype),
        )
        # Nothing in a layer is random: masks are given.
        raw_TCBH, c_CBH = (
            checkpoint(run, use_reentrant=False, preserve_rng_state=False) if recompute else run()
        )
        final.append((raw_TCBH.detach()[-1].clone(), c_CBH))
        hidden_TCBI = _masked(raw_TCBH, [(*mask.hidden_1BH, mask.output_TBH)[number] for mask in each])
    return tuple(
        Pass(raw_TCBH[:, i], hidden_TCBI[:, i], tuple((h[i : i + 1], c[i : i + 1]) for h, c in final))
        for i in range(len(each))
    )


def _masked(x_TCBI: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Each copy by its own mask, (T or 1, B, I or 1)."""
    given = next((mask for mask in masks if mask is not None), None)
    if given is None:
        return x_TCBI
    return x_TCBI * torch.stack([torch.ones_like(given) if mask is None else mask for mask in masks], 1)


class _Recurrences(torch.autograd.Function):
    """A layer of every pass. The products of a time step are in `dtype`, cells and sums as the inputs are."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs_TCBI: Tensor,
        weight_GI: Tensor,
        weight_GH: Tensor,
        bias_G: Tensor,
        kept_4HH: tuple[Tensor | None, ...],
        weight_p: float,
        h_BH: Tensor,
        c_BH: Tensor,
        with_gradient: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        steps, copies, batch, _ = inputs_TCBI.shape
        width, like = h_BH.shape[1], h_BH.dtype
        inputs_TCBQ, weight_GQ = _aligned(inputs_TCBI, dtype), _aligned(weight_GI, dtype)
        gates_TAG = F.linear(inputs_TCBQ, weight_GQ).to(like).add_(bias_G).flatten(1, 2)
        before_CBP = _aligned(h_BH, dtype).repeat(copies, 1, 1)
        matrix_CGP = before_CBP.new_zeros(copies, len(weight_GH), before_CBP.shape[2])
        for matrix_GP, kept in zip(matrix_CGP, kept_4HH, strict=True):
            matrix_GP[:, :width] = kept_weights(weight_GH, kept, weight_p)
        cells, activations, outputs = [c_BH.repeat(copies, 1)], [], []
        for t in range(steps):
            recurrent_CBG = _products(before_CBP, matrix_CGP.mT, like)
            h_AH, c_AH, activations_AG = _cell(gates_TAG[t], recurrent_CBG.flatten(0, 1), cells[t])
            before_CBP[:, :, :width] = h_AH.view(copies, batch, width)
            cells.append(c_AH)
            activations.append(activations_AG)
            outputs.append(h_AH)
        outputs_TCBH = torch.stack(outputs).view(steps, copies, batch, width)
        ctx.save_for_backward(
            inputs_TCBQ, weight_GQ, matrix_CGP, h_BH, outputs_TCBH, *kept_4HH, *cells, *activations
        )
        ctx.weight_p, ctx.with_gradient, ctx.inputs = weight_p, with_gradient, inputs_TCBI.shape[3]
        last_CBH = cells[-1].view(copies, batch, width)
        ctx.mark_non_differentiable(last_CBH)
        return outputs_TCBH, last_CBH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_returned: Tensor) -> tuple[Tensor | None, ...]:
        inputs_TCBQ, weight_GQ, matrix_CGP, h_BH, outputs_TCBH, *rest = ctx.saved_tensors
        steps, copies, batch, width = outputs_TCBH.shape
        kept_4HH, cells, activations = (
            rest[:copies], rest[copies : copies + steps + 1], rest[copies + steps + 1 :]
        )  # fmt: skip
        n, dtype, like = ctx.with_gradient, matrix_CGP.dtype, h_BH.dtype
        rows = n * batch
        d_outputs_TCBH = d_returned[0][:, :n].contiguous()
        d_gates: list[Tensor] = []
        d_h_RH = d_outputs_TCBH[-1].flatten(0, 1)
        d_c_RH = torch.zeros_like(d_h_RH)
        for t in reversed(range(steps)):
            d_gates_RG, d_c_RH = _cell_backward(
                d_h_RH, d_c_RH, cells[t][:rows], cells[t + 1][:rows], activations[t][:rows]
            )
            d_gates.append(d_gates_RG)
            if t:
                d_gates_CBG = d_gates_RG.view(n, batch, -1).to(dtype)
                d_before_CBP = _products(d_gates_CBG, matrix_CGP[:n], like)
                d_h_RH = (d_outputs_TCBH[t - 1] + d_before_CBP[:, :, :width]).flatten(0, 1)
        d_gates_TCBG = torch.stack(d_gates[::-1]).view(steps, n, batch, -1)
        d_bias_G = d_gates_TCBG.sum((0, 1, 2))
        d_gates_TCBG = d_gates_TCBG.to(dtype)
        before_TCBH = torch.cat([h_BH.expand(1, n, -1, -1), outputs_TCBH[:-1, :n]])
        d_weight_CGP = torch.bmm(_of_copies(d_gates_TCBG).mT, _of_copies(_aligned(before_TCBH, dtype)))
        d_weights = (
            kept_weights(d_weight_GP[:, :width].to(like), kept, ctx.weight_p)
            for d_weight_GP, kept in zip(d_weight_CGP, kept_4HH, strict=False)
        )
        d_weight_GH = reduce(torch.add, d_weights)
        d_gates_NG = d_gates_TCBG.flatten(0, 2)
        d_weight_GI = torch.mm(d_gates_NG.t(), inputs_TCBQ[:, :n].flatten(0, 2)).to(like)[:, : ctx.inputs]
        d_inputs_TCBI = inputs_TCBQ.new_zeros(steps, copies, batch, ctx.inputs, dtype=like)
        d_inputs_TCBI[:, :n] = torch.matmul(d_gates_TCBG, weight_GQ)[..., : ctx.inputs]
        return d_inputs_TCBI, d_weight_GI, d_weight_GH, d_bias_G, *(None,) * 6


def _aligned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype, and its last axis filled up with zeros."""
    missing = -x.shape[-1] % ALIGNED
    return F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _of_copies(x_TCBW: Tensor) -> Tensor:
    """(C, T·B, W)"""
    return x_TCBW.transpose(0, 1).flatten(1, 2)


def _products(one_CMK: Tensor, other_CKN: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each copy, summed up and given in `dtype`, whatever the factors are in, where the device can."""
    if _is_on_gpu(one_CMK) and one_CMK.dtype != dtype:
        return torch.bmm(one_CMK, other_CKN, out_dtype=dtype)
    return torch.bmm(one_CMK, other_CKN).to(dtype)


def _cell(inputs_AG: Tensor, recurrent_AG: Tensor, c_AH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h and c after a time step, and what the gates are then, which the gradient needs.

    torch has that as one kernel, private to it, for GPUs alone; without it, it is a dozen.
    """
    if _is_on_gpu(inputs_AG) and hasattr(torch.ops.aten, "_thnn_fused_lstm_cell"):
        fused: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._thnn_fused_lstm_cell(
            inputs_AG, recurrent_AG, c_AH
        )
        return fused
    activations_AG = inputs_AG + recurrent_AG
    i, f, g, o = activations_AG.chunk(4, 1)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    c_AH = torch.addcmul(i * g, f, c_AH)
    return o * c_AH.tanh(), c_AH, activations_AG


def _cell_backward(
    d_h_RH: Tensor, d_c_RH: Tensor, before_RH: Tensor, after_RH: Tensor, activations_RG: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the gates before their nonlinearities, and of c before the step; `before` and `after` are c's."""
    if _is_on_gpu(d_h_RH) and hasattr(torch.ops.aten, "_thnn_fused_lstm_cell_backward_impl"):
        backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        d_gates_RG, d_before_RH, _ = backward(d_h_RH, d_c_RH, before_RH, after_RH, activations_RG, False)
        return d_gates_RG, d_before_RH
    i, f, g, o = activations_RG.chunk(4, 1)
    tanh_c = after_RH.tanh()
    d_c_RH = d_c_RH + d_h_RH * o * (1 - tanh_c**2)
    of_gates = (
        d_c_RH * g * i * (1 - i),
        d_c_RH * before_RH * f * (1 - f),
        d_c_RH * i * (1 - g**2),
        d_h_RH * tanh_c * o * (1 - o),
    )
    return torch.cat(of_gates, 1), d_c_RH * f
