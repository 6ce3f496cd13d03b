"""The one way from a loss to a perplexity."""

import math


def perplexity(loss: float | None) -> float:
    """exp(loss), infinite where that overflows or there is no loss."""
    try:
        return math.exp(loss) if loss is not None else math.inf
    except OverflowError:
        return math.inf


def finite_perplexity(loss: float | None) -> float | None:
    """As JSON can say it: None where perplexity is infinite."""
    value = perplexity(loss)
    return value if math.isfinite(value) else None
