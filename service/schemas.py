"""What the API answers. The request shape is `trials.spec.SweepRequest`, not repeated here."""

import math
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from service.lifecycle import State
from trials.spec import MOST_TRIALS, FailureClass, Name, Point, SweepSpec, Text
from trials.verification import Outcome

TrialState = Literal["RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING"]
ENDED = frozenset({"COMPLETE", "PRUNED", "FAIL"})


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
    recorded_at: datetime
    """When it was written down."""
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


class VerificationView(View):
    """A trial's best checkpoint, evaluated again on the validation split by a process started for that."""

    outcome: Outcome
    """`verified`: it comes to the recorded loss. `differs`: it does not, and is never called best. `damaged`:
    the file is gone, or not what was written, and neither. `impossible`: it could not be evaluated."""
    epoch: int | None
    checkpoint_sha256: str | None
    """Of the file that was read."""
    recorded_valid_loss: float | None
    """Nats per token, by the checkpoint's own metrics."""
    valid_loss: float | None
    """The same, evaluated again."""
    tolerance: float | None
    """How far they may lie apart: 1e-6 on a device of the name that it was trained on."""
    device: str | None
    runtime: str | None
    seconds: float
    """That it took, the start of its process included."""
    verified_at: datetime
    message: str | None
    """Why it is not verified."""


class TrialView(View):
    number: int
    """0-based within the sweep; its identity in the study, the store and here."""
    arm: str
    draw: int
    """Trials of one draw share their sampled values and their seed across arms."""
    seed: int
    attempt: int
    state: TrialState
    stopped: bool = False
    """Whether it was ended on request, before its time."""
    pinned: bool = False
    """Whether its best checkpoint stays whatever `retention` says."""
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
    verification: VerificationView | None = None
    """Of its best checkpoint. The best trial is verified before its sweep ends, and once in a while before
    that; null: this one has not been."""
    device: str | None
    runtime: str | None
    """What its process was: versions, threads, the allocator and its settings."""
    started_at: datetime | None
    finished_at: datetime | None

    @property
    def rank(self) -> float:
        """Its best validation loss; infinite where it has none."""
        return math.inf if self.best_valid_loss is None else self.best_valid_loss

    @property
    def score(self) -> float | None:
        """Its best validation perplexity, where that stands: none of a trial that failed, or runs still."""
        return self.best_valid_perplexity if self.state in {"COMPLETE", "PRUNED"} else None

    @property
    def had_its_chance(self) -> bool:
        """It was neither cancelled with its sweep nor lost with its workers."""
        return self.failure is None or self.failure.failure_class not in {"cancelled", "infrastructure"}

    @property
    def counts(self) -> bool:
        """In what is said of its arm."""
        return self.state in ENDED and self.had_its_chance


class TrialDetail(TrialView):
    config: dict[str, Any]
    """Every value that the trial trains with."""
    curve: list[EpochView]

    @property
    def in_short(self) -> TrialView:
        return TrialView(**{name: getattr(self, name) for name in TrialView.model_fields})


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`training.lr`, 30.0) for each value of a config, however deep."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Environment(View):
    """What a sweep's numbers were made with, as far as they depend on it."""

    version: str
    """Of the service that tells."""
    corpus_sha256: dict[str, str] | None
    """Of each split's text; null before the first epoch."""
    devices: list[str]
    """That its trials ran on."""
    runtimes: list[str]
    """What their processes were: torch, threads, the allocator and its settings."""
    driver_generation: int
    """How many drivers the sweep has had."""


class TrialCounts(View):
    budget: int
    running: int
    waiting: int
    """Begun, and to go on once the sweep runs again."""
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
    priority: int = 0
    state: State
    state_since: datetime
    desired_state: str
    """What the service brings the sweep to."""
    state_reason: str | None
    """Why the state is what it is, where that is not plain."""
    legal: list[str]
    """What may be asked of the sweep now."""
    revision: int = 1
    """Grows with all that clients ask of the sweep; also its ETag, for If-Match."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    trials: TrialCounts
    epochs_done: int
    """Epochs recorded over all trials."""
    best: TrialView | None
    ran_s: float
    """Seconds that the sweep has run; those in the queue and those paused do not count."""
    time_left_s: float | None
    """An estimate in seconds; null before the first trial ends."""
    driver_generation: int
    """How many drivers this sweep has had."""
    dashboard_url: str | None
    """Path of the study's page on this service."""


class SweepDetail(SweepView):
    spec: SweepSpec


class SweepExport(View):
    """All that is known of a sweep, but its checkpoints."""

    exported_at: datetime
    """All of it is as it was at this moment."""
    environment: Environment
    sweep: SweepDetail
    trials: list[TrialDetail]
    """By number, each with its curve."""


class Extension(View):
    """What a sweep's budget becomes larger by."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trials: Annotated[int, Field(ge=0, le=100_000)] = 0
    """So many more."""
    wall_s: Annotated[FiniteFloat, Field(ge=0)] = 0
    """Seconds more; only for a sweep whose budget has wall_s."""
    max_failed: Annotated[int, Field(ge=0)] = 0
    """So many more may fail; only for a sweep whose budget has max_failed."""
    target: Annotated[FiniteFloat, Field(gt=1)] | None = None
    """In place of the target so far, a validation perplexity."""


class BudgetChanges(View):
    """Limits in place of those so far; null takes one away."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = 1
    wall_s: Annotated[FiniteFloat, Field(gt=0)] | None = None
    target: Annotated[FiniteFloat, Field(gt=1)] | None = None
    max_failed: Annotated[int, Field(ge=0)] | None = None


class Changes(View):
    """What of a sweep may be changed: as a JSON merge patch (RFC 7396), what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Text = ""
    labels: Annotated[dict[Name, Text | None], Field(max_length=64)] = {}
    """Merged into those that there are; null removes one."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Trials at once, from now on: more begin at once; what runs beyond it is not ended. Null: as many as
    there is room for."""
    budget: BudgetChanges = BudgetChanges()
    """Not of a sweep that has ended: extend that."""


class PointRequest(View):
    """Values to be tried next, as a draw of their own, in every arm that does not fix them."""

    model_config = ConfigDict(extra="forbid")

    params: Point
    """Of parameters of the sweep's space; what is left out is sampled."""


class PointView(PointRequest):
    id: int
    draw: int | None
    """That it is tried as; null: it waits for the next one."""
    created_at: datetime


class RetryRequest(View):
    """Which failed trials are tried again, from where they stood."""

    model_config = ConfigDict(extra="forbid")

    classes: Annotated[list[FailureClass], Field(min_length=1)] | None = None
    """Of failures; null: all but diverged, which would diverge again."""


class PageView(View):
    next_page_token: str | None = None
    """Of the next page, with the same filters and order; null on the last one."""


class SweepList(PageView):
    sweeps: list[SweepView]


class TrialList(PageView):
    trials: list[TrialView]


class PointList(View):
    points: list[PointView]


class ControllerLease(View):
    """Of several services at one database, which one starts and ends drivers."""

    holder: dict[str, Any]
    """Where it runs: host, process id, when it started."""
    until: datetime
    """When another one takes over, unless this one renews the lease before."""
    is_this_service: bool


class Health(View):
    status: Literal["alive"]


class Readiness(View):
    status: Literal["ready", "not ready"]
    not_ready: list[str] = []
    """What is missing."""
    controller: ControllerLease | None = None
    """Null where nobody holds the lease, or it is not known."""
