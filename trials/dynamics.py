"""How far the masks move a model's predictions: the two sides of what Zolna et al. 2018 prove, measured.

l(s) are the logits under masks s, l(1) those without dropout, m their number:
R_FD = E |l(s) - l(s')|^2 = 2 Var l(s) (Remark 1), and R_FD <= 4 R_ELD, R_ELD = E |l(s) - l(1)|^2
(Proposition 1). As with the penalties, everything is divided by m and is a mean over tokens. The decoder is
linear, so no logits are made: differences are taken between hidden vectors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM, Pass
from regularizers.head import mean_square_difference

PAIRS = 2
"""Of masks, for R_FD."""

SAMPLES = 4
"""Other masks, for the variance: so that the two sides of Remark 1 are measured apart."""

COLUMNS, STEPS = 10, 40
"""As much text is looked at, where there is enough of it."""


@dataclass(frozen=True)
class PredictionDynamics:
    """Means over tokens and logits; each is unbiased."""

    pair_difference: float
    """R_FD / m."""
    prediction_variance: float
    expectation_gap: float
    """R_ELD / m."""


@torch.no_grad()
def prediction_dynamics(model: AWDLSTM, tokens_N: Tensor, keys: Iterator[int]) -> PredictionDynamics:
    """Measure on the first tokens of a text, from a zero state; `keys` are those of the masks."""
    columns = min(COLUMNS, len(tokens_N))
    steps = min(STEPS, len(tokens_N) // columns)
    tokens_TB = tokens_N[: columns * steps].view(columns, steps).t()
    state = model.zero_state(columns)

    def flattened(result: Pass) -> Tensor:
        return result.dropped_TBH.flatten(0, 1)

    def hidden() -> Tensor:
        masks = model.draw_masks(columns, steps, next(keys))
        return flattened(model(tokens_TB, state, masks))

    def difference(one_NH: Tensor, other_NH: Tensor) -> float:
        decoder = model.decoder_VH, model.decoder_bias
        return mean_square_difference(one_NH, other_NH, *decoder, second_gradient=True).item()

    pairs_NH = torch.cat([hidden() for _ in range(2 * PAIRS)])
    samples = torch.stack([hidden() for _ in range(SAMPLES)])
    without_NH = flattened(model(tokens_TB, state, None))
    spread = difference(samples.flatten(0, 1), samples.mean(0).repeat(SAMPLES, 1))
    return PredictionDynamics(
        pair_difference=difference(*pairs_NH.chunk(2)),
        prediction_variance=spread * SAMPLES / (SAMPLES - 1),
        expectation_gap=difference(pairs_NH, without_NH.repeat(2 * PAIRS, 1)),
    )
