"""A training step the textbook way, to measure ours against: two passes, whole logits, torch's own modules.

As one writes it from the papers, and as the released code does: masks by bernoulli_, a masked copy of the
embedding table, nn.LSTM with its weights swapped, F.cross_entropy, torch.optim.SGD. Our own parameters, so
that the two can be compared in loss and gradients (`largest_difference`, which step.py prints).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from models.awd_lstm import AWDLSTM, State
from models.config import AWDLSTMConfig
from models.masks import Masks
from regularizers.config import Regularization
from regularizers.losses import loss_parts


@dataclass(frozen=True)
class PlainMasks:
    """Each 0 or 1 / (1 - p)."""

    embed_V: Tensor
    input_1BE: Tensor
    outputs_1BH: list[Tensor]
    """Of every layer, the last one's too."""
    weights_4HH: list[Tensor]

    @staticmethod
    def draw(model: AWDLSTM, batch_size: int, generator: torch.Generator) -> "PlainMasks":
        config, widths = model.config, [width for _, width in model.config.layer_sizes]

        def draw(p: float, *shape: int) -> Tensor:
            drawn = torch.empty(shape, device=generator.device).bernoulli_(1 - p, generator=generator)
            return drawn.div_(1 - p)

        rates = [config.hidden_p] * (config.layers - 1) + [config.output_p]
        return PlainMasks(
            embed_V=draw(config.embed_p, len(model.embedding)),
            input_1BE=draw(config.input_p, 1, batch_size, config.embedding_size),
            outputs_1BH=[draw(p, 1, batch_size, width) for p, width in zip(rates, widths, strict=True)],
            weights_4HH=[draw(config.weight_p, 4 * width, width) for width in widths],
        )

    @staticmethod
    def of(masks: Masks) -> "PlainMasks":
        """The same masks that ours takes, of a model that drops everything there is to drop."""
        every = (masks.embed_V, masks.input_TBE, masks.output_TBH, *masks.hidden_1BH, *masks.kept_4HH)
        embed_V, input_1BE, output_1BH, *rest = (mask for mask in every if mask is not None)
        hidden, kept = rest[: len(masks.hidden_1BH)], rest[len(masks.hidden_1BH) :]
        weights = [mask.to(embed_V.dtype) / (1 - masks.weight_p) for mask in kept]
        return PlainMasks(embed_V, input_1BE, [*hidden, output_1BH], weights)


class PlainStep:
    """Takes steps; the parameters are those of `model`."""

    def __init__(
        self, model: AWDLSTM, regularization: Regularization, lr: float, clip: float, weight_decay: float
    ) -> None:
        self.model = model
        self.regularization = regularization.completed(model.config.layers)
        self.clip = clip
        self.optimiser = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)

    def step(self, inputs_TB: Tensor, targets_TB: Tensor, state: State, generator: torch.Generator) -> State:
        first = PlainMasks.draw(self.model, inputs_TB.shape[1], generator)
        second = None
        if self.regularization.declaration.second_pass == "new_masks":
            second = PlainMasks.draw(self.model, inputs_TB.shape[1], generator)
        loss, state = self.loss(inputs_TB, targets_TB, state, first, second)
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimiser.step()
        return state

    def loss(
        self,
        inputs_TB: Tensor,
        targets_TB: Tensor,
        state: State,
        first: PlainMasks | None,
        second: PlainMasks | None,
    ) -> tuple[Tensor, State]:
        """The whole objective, and the first pass's final state."""
        declaration, targets_N = self.regularization.declaration, targets_TB.flatten()
        raw_TBH, dropped_TBH, final = self._run(inputs_TB, state, first)
        logits_NV = self._logits(dropped_TBH)
        loss = F.cross_entropy(logits_NV, targets_N)
        if declaration.second_pass != "none":
            with torch.set_grad_enabled(self.regularization.second_pass_has_gradient):
                other_NV = self._logits(self._run(inputs_TB, state, second)[1])
            if declaration.target == "mean":
                loss = (loss + F.cross_entropy(other_NV, targets_N)) / 2
            loss = loss + self.regularization.effective_kappa * (logits_NV - other_NV).pow(2).mean()
        elif declaration.penalty == "norm":
            loss = loss + self.regularization.effective_kappa * logits_NV.pow(2).mean()
        if self.regularization.alpha:
            loss = loss + self.regularization.alpha * dropped_TBH.pow(2).mean()
        if self.regularization.beta:
            loss = loss + self.regularization.beta * (raw_TBH[1:] - raw_TBH[:-1]).pow(2).mean()
        return loss, final

    def _run(self, inputs_TB: Tensor, state: State, masks: PlainMasks | None) -> tuple[Tensor, Tensor, State]:
        table_VE = self.model.embedding
        if masks is not None:
            table_VE = table_VE * masks.embed_V.unsqueeze(1)
        hidden = F.embedding(inputs_TB, table_VE)
        if masks is not None:
            hidden = hidden * masks.input_1BE
        raw, final = hidden, []
        for i, (lstm, layer_state) in enumerate(zip(self.model.lstms, state, strict=True)):
            weights = {}
            if masks is not None:
                weights = {"weight_hh_l0": lstm.get_parameter("weight_hh_l0") * masks.weights_4HH[i]}
            raw, (h, c) = functional_call(lstm, weights, (hidden, layer_state))
            final.append((h.detach(), c.detach()))
            hidden = raw if masks is None else raw * masks.outputs_1BH[i]
        return raw, hidden, tuple(final)

    def _logits(self, dropped_TBH: Tensor) -> Tensor:
        return F.linear(dropped_TBH.flatten(0, 1), self.model.decoder_VH, self.model.decoder_bias)


def largest_difference(regularization: Regularization, seed: int = 1) -> float:
    """Of loss and gradients from those of `loss_parts`, relative to the largest number, in float64."""
    generator = torch.Generator().manual_seed(seed)
    model = AWDLSTM(AWDLSTMConfig(12, 19, 3), 101, generator).double()
    columns_TB = torch.randint(101, (10, 4), generator=generator)
    inputs_TB, targets_TB, state = columns_TB[:-1], columns_TB[1:], model.zero_state(4)
    plain = PlainStep(model, regularization, 1.0, 1.0, 0.0)
    first, second = (model.draw_masks(4, 9, key) for key in (1, 2))
    kind = plain.regularization.declaration.second_pass
    loss, _ = plain.loss(
        inputs_TB,
        targets_TB,
        state,
        PlainMasks.of(first),
        PlainMasks.of(second) if kind == "new_masks" else None,
    )
    one = model(inputs_TB, state, first)
    other = None if kind == "none" else model(inputs_TB, state, second if kind == "new_masks" else None)
    ours = loss_parts(plain.regularization, one, other, model, targets_TB).total
    worst = (loss - ours).abs().item() / loss.item()
    parameters = list(model.parameters())
    for found, expected in zip(
        torch.autograd.grad(ours, parameters), torch.autograd.grad(loss, parameters), strict=True
    ):
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    return worst
