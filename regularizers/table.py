"""The regularizers as declarations: what each adds to the cross-entropy of one pass. No torch.

`regularizers.losses` carries a declaration out. A new regularizer is one more row.
"""

from dataclasses import dataclass
from typing import Literal

from models.pieces import WIDEST_GRAM

Target = Literal["first", "mean"]
Penalty = Literal["none", "difference", "norm"]


class UnknownRegularizer(ValueError):
    """No regularizer has this name."""


@dataclass(frozen=True)
class Regularizer:
    """One row of the method's table; l1 and l2 are the logits of the first and the second pass."""

    name: str
    second_pass: Literal["none", "new_masks", "no_dropout"]
    second_gradient: bool
    """Whether gradient flows through the second pass."""
    target: Target
    """Cross-entropy of the first pass, or the mean of both passes'."""
    penalty: Penalty
    """Nothing, mean((l1 - l2)**2) or mean(l1**2), over T, B and V."""
    default_kappa: float
    """Factor of the penalty where none is given."""
    source: str
    single_layer_kappa: float | None = None
    """The same for a model of one layer, where that is another."""

    def kappa_for(self, layers: int) -> float:
        """Factor of the penalty where none is given, for a model of so many layers."""
        single = self.single_layer_kappa if layers == 1 else None
        return self.default_kappa if single is None else single


_ROWS = (
    Regularizer("none", "none", False, "first", "none", 0.0, "Merity 2017"),
    Regularizer("fraternal", "new_masks", True, "mean", "difference", 0.1, "Zolna 2018 eq. 1-2", 0.15),
    Regularizer("expectation_linear", "no_dropout", False, "first", "difference", 0.25, "Zolna 2018 §3.1"),
    Regularizer("expectation_linear_both", "no_dropout", True, "mean", "difference", 0.25, "Zolna 2018 §5.1"),
    Regularizer("pi_model", "new_masks", True, "first", "difference", 0.15, "Zolna 2018 §3.2"),
    # The paper tunes kappa for the norm and names no value; this one is ours.
    Regularizer("prediction_norm", "none", False, "first", "norm", 0.1, "Zolna 2018 §5.3"),
)

REGULARIZERS: dict[str, Regularizer] = {row.name: row for row in _ROWS}


def penalises_logits(target: Target, penalty: Penalty, width: int) -> bool:
    """Whether there is a penalty that is made from logits, in a last layer of that width: a difference is not
    where only one pass has its logits made, nor where that layer is narrow."""
    return penalty == "norm" or (penalty == "difference" and target == "mean" and width > WIDEST_GRAM)


def get_regularizer(name: str) -> Regularizer:
    """The declaration of that name; raises UnknownRegularizer."""
    try:
        return REGULARIZERS[name]
    except KeyError:
        raise UnknownRegularizer(
            f"unknown regularizer {name!r}; known: {', '.join(sorted(REGULARIZERS))}"
        ) from None
