"""The method written down a second time: float64, one formula a line, no code shared with what is tested.

Masks and weights are given, so that losses and gradients can be compared to the last digits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM, State
from models.config import AWDLSTMConfig
from models.masks import Masks
from regularizers.config import Regularization

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class ReferencePass:
    """What one pass over a window yields."""

    logits_TBV: Tensor
    raw_TBH: Tensor
    """The last layer's output."""
    dropped_TBH: Tensor
    state: State
    """After the window, to start the next one from."""


def reference_pass(
    weights: Weights, config: AWDLSTMConfig, tokens_TB: Tensor, state: State, masks: Masks | None
) -> ReferencePass:
    """Run the model over a window from `state`."""

    def drop(x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x * mask

    masks = masks or Masks(None, None, (None,) * (config.layers - 1), None, (None,) * config.layers, 0)
    table_VE = weights["embedding"]
    if masks.embed_V is not None:
        table_VE = table_VE * masks.embed_V[:, None]
    x_TBE = drop(table_VE[tokens_TB], masks.input_TBE)
    raw = x_TBE
    final = []
    for layer in range(config.layers):
        kept = masks.kept_4HH[layer]
        matrix = drop(
            weights[f"lstms.{layer}.weight_hh_l0"],
            None if kept is None else kept.double() / (1 - masks.weight_p),
        )
        h, c = state[layer][0][0], state[layer][1][0]
        outputs = []
        for x_BE in x_TBE:
            gates = x_BE @ weights[f"lstms.{layer}.weight_ih_l0"].T + weights[f"lstms.{layer}.bias_ih_l0"]
            gates = gates + h @ matrix.T + weights[f"lstms.{layer}.bias_hh_l0"]
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        final.append((h.detach()[None], c.detach()[None]))
        raw = torch.stack(outputs)
        is_last = layer == config.layers - 1
        x_TBE = drop(raw, masks.output_TBH if is_last else masks.hidden_1BH[layer])
    decoder_VH = weights["embedding"] if config.tied else weights["decoder"]
    return ReferencePass(x_TBE @ decoder_VH.T + weights["decoder_bias"], raw, x_TBE, tuple(final))


def reference_objective(
    name: str,
    kappa: float,
    stop_gradient: bool,
    targets: Tensor,
    l1: Tensor,
    new_masks: Callable[[], Tensor],
    no_dropout: Callable[[], Tensor],
) -> Tensor:
    """Target and penalty, the method's table read row by row.

    `new_masks` and `no_dropout` make the logits of a second pass; the last axis of logits is the vocabulary.
    """

    def cross_entropy(logits: Tensor) -> Tensor:
        probabilities = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
        return -probabilities.gather(-1, targets[..., None]).log().sum() / targets.numel()

    match name:
        case "none":
            return cross_entropy(l1)
        case "fraternal":
            l2 = new_masks()
            return (cross_entropy(l1) + cross_entropy(l2)) / 2 + kappa * ((l1 - l2) ** 2).mean()
        case "expectation_linear":
            l2 = no_dropout().detach() if stop_gradient else no_dropout()
            return cross_entropy(l1) + kappa * ((l1 - l2) ** 2).mean()
        case "expectation_linear_both":
            l2 = no_dropout()
            return (cross_entropy(l1) + cross_entropy(l2)) / 2 + kappa * ((l1 - l2) ** 2).mean()
        case "pi_model":
            l2 = new_masks()
            return cross_entropy(l1) + kappa * ((l1 - l2) ** 2).mean()
        case "prediction_norm":
            return cross_entropy(l1) + kappa * (l1**2).mean()
        case unknown:
            raise AssertionError(
                f"tests/reference.py has no formula for the regularizer {unknown!r}: "
                "write it down in reference_objective"
            )


def reference_step(
    weights: Weights,
    config: AWDLSTMConfig,
    regularization: Regularization,
    kappa: float,
    tokens_TB: Tensor,
    targets_TB: Tensor,
    state: State,
    first: Masks,
    second: Masks,
) -> tuple[Tensor, State]:
    """The optimised loss of a window, and the state that the next window starts from."""

    def logits(masks: Masks | None) -> Tensor:
        return reference_pass(weights, config, tokens_TB, state, masks).logits_TBV

    one = reference_pass(weights, config, tokens_TB, state, first)
    loss = reference_objective(
        regularization.regularizer, kappa, regularization.eld_stop_gradient, targets_TB, one.logits_TBV,
        new_masks=lambda: logits(second), no_dropout=lambda: logits(None),
    )  # fmt: skip
    loss = loss + regularization.alpha * (one.dropped_TBH**2).mean()
    if len(one.raw_TBH) > 1:
        loss = loss + regularization.beta * ((one.raw_TBH[1:] - one.raw_TBH[:-1]) ** 2).mean()
    return loss, one.state


def assert_close_to_largest(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """No element is off by more than `tolerance` times the largest magnitude that is expected."""
    off, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert largest > 0
    assert off <= tolerance * largest, f"off by {off / largest:.1e} of the largest magnitude, {largest:.1e}"


class MaskRecorder:
    """Stands in for a model's draw_masks, and remembers what it drew for training."""

    def __init__(self, model: AWDLSTM) -> None:
        self.drawn: list[Masks] = []
        self._draw_masks = model.draw_masks

    def __call__(self, batch_size: int, window_length: int, key: int) -> Masks:
        masks = self._draw_masks(batch_size, window_length, key)
        if torch.is_grad_enabled():
            self.drawn.append(masks)
        return masks
