"""What the API answers about two sweeps, or two trials, side by side."""

from typing import Any, Literal

from service.lifecycle import State
from service.schemas import TrialView, View


class Difference(View):
    pointer: str
    """JSON pointer (RFC 6901) to what differs."""
    a: Any
    b: Any
    absent: Literal["a", "b"] | None = None
    """Which of the two has nothing there; its value is null."""


class Compared(View):
    """One of two things that are compared."""

    sweep_id: str
    name: str
    state: State
    trial: TrialView | None
    """The one that is compared; of a sweep its best, null where there is none yet."""


class ArmResult(View):
    n: int
    """Trials that count: those that have ended, and not for want of a machine."""
    complete: int
    pruned: int
    failed: int
    best: float | None
    """Validation perplexity."""
    top5_mean: float | None


class ArmComparison(View):
    arm: str
    a: ArmResult | None
    """Null where the sweep has no such arm."""
    b: ArmResult | None
    difference: float | None
    """Of the best, b - a: below zero, b is better."""


class TrialPairs(View):
    """Trials of the same number in either sweep."""

    count: int
    same_params: int
    """Of the same arm, seed and sampled values."""
    same_loss: int
    """With the same best validation loss, bit for bit."""
    same_checkpoint: int
    """With the same best checkpoint, bit for bit."""


class EpochComparison(View):
    """Validation perplexities of one epoch."""

    epoch: int
    a: float | None
    b: float | None
    difference: float | None
    """b - a."""


class CurveComparison(View):
    identical: bool
    """As many epochs, and all that is measured in them equal, bit for bit, but for times and speed."""
    parts_at: int | None
    """First epoch in which they differ, or that one of them lacks; null where they are identical."""
    epochs: list[EpochComparison]


class SideBySide(View):
    """Two sweeps, or two trials, compared."""

    a: Compared
    b: Compared
    spec: list[Difference]
    """Of the two sweeps."""
    config: list[Difference]
    """Of what the two trials train with, arm and seed included."""
    environment: list[Difference]
    arms: list[ArmComparison]
    """Of two sweeps, by name; of two trials none."""
    pairs: TrialPairs | None
    """Of two sweeps."""
    curves: CurveComparison | None
    """Of the two trials; null where one is missing."""
