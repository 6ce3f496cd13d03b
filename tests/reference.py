"""The method written down a second time: float64, one formula a line, no code shared with what is tested.

Masks and weights are given, so that losses and gradients can be compared to the last digits.
"""

import torch
from torch import Tensor

from models.awd_lstm import Masks, State
from models.config import AWDLSTMConfig
from regularizers.config import Regularization

Weights = dict[str, Tensor]


def reference_pass(
    weights: Weights, config: AWDLSTMConfig, tokens_TB: Tensor, state: State, masks: Masks | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, raw output and dropped output of the last layer."""

    def drop(x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x * mask

    masks = masks or Masks(None, None, (None,) * (config.layers - 1), None, (None,) * config.layers)
    table_VE = weights["embedding"]
    if masks.embed_V is not None:
        table_VE = table_VE * masks.embed_V[:, None]
    x_TBE = drop(table_VE[tokens_TB], masks.input_TBE)
    raw = x_TBE
    for layer in range(config.layers):
        matrix = drop(weights[f"lstms.{layer}.weight_hh_l0"], masks.weights_4HH[layer])
        h, c = state[layer][0][0], state[layer][1][0]
        outputs = []
        for x_BE in x_TBE:
            gates = x_BE @ weights[f"lstms.{layer}.weight_ih_l0"].T + weights[f"lstms.{layer}.bias_ih_l0"]
            gates = gates + h @ matrix.T + weights[f"lstms.{layer}.bias_hh_l0"]
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        raw = torch.stack(outputs)
        is_last = layer == config.layers - 1
        x_TBE = drop(raw, masks.output_TBH if is_last else masks.hidden_1BH[layer])
    decoder_VH = weights["embedding"] if config.tied else weights["decoder"]
    return x_TBE @ decoder_VH.T + weights["decoder_bias"], raw, x_TBE


def reference_loss(
    weights: Weights,
    config: AWDLSTMConfig,
    regularization: Regularization,
    kappa: float,
    tokens_TB: Tensor,
    targets_TB: Tensor,
    state: State,
    first: Masks,
    second: Masks,
) -> Tensor:
    """The optimised loss: the method's table read row by row."""

    def run(masks: Masks | None) -> tuple[Tensor, Tensor, Tensor]:
        return reference_pass(weights, config, tokens_TB, state, masks)

    def cross_entropy(logits_TBV: Tensor) -> Tensor:
        probabilities = logits_TBV.exp() / logits_TBV.exp().sum(dim=2, keepdim=True)
        return -probabilities.gather(2, targets_TB[:, :, None]).log().sum() / targets_TB.numel()

    l1, raw, dropped = run(first)
    match regularization.regularizer:
        case "none":
            loss = cross_entropy(l1)
        case "fraternal":
            l2 = run(second)[0]
            loss = (cross_entropy(l1) + cross_entropy(l2)) / 2 + kappa * ((l1 - l2) ** 2).mean()
        case "expectation_linear":
            l2 = run(None)[0]
            if regularization.eld_stop_gradient:
                l2 = l2.detach()
            loss = cross_entropy(l1) + kappa * ((l1 - l2) ** 2).mean()
        case "expectation_linear_both":
            l2 = run(None)[0]
            loss = (cross_entropy(l1) + cross_entropy(l2)) / 2 + kappa * ((l1 - l2) ** 2).mean()
        case "pi_model":
            l2 = run(second)[0]
            loss = cross_entropy(l1) + kappa * ((l1 - l2) ** 2).mean()
        case "prediction_norm":
            loss = cross_entropy(l1) + kappa * (l1**2).mean()
        case unknown:
            raise AssertionError(f"the reference knows no {unknown!r}: write its formula down here")
    loss = loss + regularization.alpha * (dropped**2).mean()
    if len(raw) > 1:
        loss = loss + regularization.beta * ((raw[1:] - raw[:-1]) ** 2).mean()
    return loss
