"""What the API answers. The request shape is `trials.spec.SweepRequest`, not repeated here."""

import math
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trials.spec import FailureClass, SweepSpec

SweepState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
TERMINAL_STATES: frozenset[SweepState] = frozenset({"succeeded", "failed", "cancelled"})
TrialState = Literal["RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING"]


class View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Failure(View):
    failure_class: FailureClass
    message: str


class EpochView(View):
    """One epoch of a trial. Losses are in nats per token; a perplexity too large for a float is null."""

    epoch: int
    """1-based."""
    attempt: int
    """The attempt that trained it."""
    train_loss: float
    """Token-weighted target loss of the first pass."""
    valid_loss: float
    """Of the weights that would be kept: the averaged ones once averaging is on."""
    valid_perplexity: float | None
    raw_valid_loss: float
    """Of the weights that training goes on with."""
    averaged: bool
    optimised: float
    """Target loss, penalty, AR and TAR together: what the gradient is of."""
    penalty: float
    ar: float
    """Also the mean hidden activation of the last layer."""
    tar: float
    gradient_norm: float
    """Mean over steps, before clipping."""
    lr: float | None
    """Learning rate; this and the four below are null where an older version of this service trained."""
    pair_difference: float | None
    """Mean square of the difference between the logits under two masks, on text of the validation split."""
    prediction_variance: float | None
    """Variance of a logit under the masks: by the paper's Remark 1, half of pair_difference."""
    expectation_gap: float | None
    """Mean square of the difference that dropping nothing makes: by the paper's Proposition 1, at least a
    quarter of pair_difference."""
    tokens: int
    tokens_per_s: float | None
    """Of training alone."""
    seconds: float
    is_best: bool


class TrialView(View):
    number: int
    """0-based within the sweep; its identity in the study, the store and here."""
    arm: str
    draw: int
    """Trials of one draw share their sampled values and their seed across arms."""
    seed: int
    attempt: int
    state: TrialState
    params: dict[str, Any]
    """Sampled values."""
    epochs_done: int
    best_epoch: int | None
    best_valid_loss: float | None
    """Nats per token."""
    best_valid_perplexity: float | None
    valid_perplexity: float | None
    """Of the latest epoch."""
    failure: Failure | None
    checkpoint_sha256: str | None
    device: str | None
    runtime: str | None
    """What its process was: torch, threads, the allocator and its settings."""
    started_at: datetime | None
    finished_at: datetime | None

    @property
    def rank(self) -> float:
        """Its best validation loss; infinite where it has none."""
        return math.inf if self.best_valid_loss is None else self.best_valid_loss


class TrialDetail(TrialView):
    config: dict[str, Any]
    """Every value that the trial trains with."""
    curve: list[EpochView]


class TrialCounts(View):
    budget: int
    running: int
    complete: int
    pruned: int
    failed: int

    @property
    def done(self) -> int:
        return self.complete + self.pruned + self.failed


class SweepView(View):
    id: str
    name: str
    labels: dict[str, str]
    state: SweepState
    desired_state: Literal["running", "cancelled"]
    state_reason: str | None
    """Why the state is what it is, where that is not plain."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    trials: TrialCounts
    epochs_done: int
    """Epochs recorded over all trials."""
    best: TrialView | None
    time_left_s: float | None
    """An estimate in seconds; null before the first trial ends."""
    driver_generation: int
    """How many drivers this sweep has had."""
    dashboard_url: str | None
    """Path of the study's page on this service."""


class SweepDetail(SweepView):
    spec: SweepSpec


class SweepList(View):
    sweeps: list[SweepView]


class TrialList(View):
    trials: list[TrialView]


class Health(View):
    status: Literal["alive", "ready", "not ready"]
    not_ready: list[str] = []
    """What is missing."""
