"""What travels between a driver and its workers. Workers load neither Optuna nor SQLAlchemy for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trials.corpora import CorpusSpec
from trials.spec import FailureClass, TrialConfig


@dataclass(frozen=True)
class Failure:
    failure_class: FailureClass
    message: str
    of_gpu: bool = True
    """Where memory was too little: whether it was a GPU's, of which there may be more."""


@dataclass(frozen=True)
class Task:
    """One attempt at a trial, as it travels to a worker."""

    sweep_id: str
    number: int
    attempt: int
    arm: str
    seed: int
    config: TrialConfig
    corpus: CorpusSpec
    device: str
    recorded_epochs: int
    best_epoch: int = 0
    """The best one on record; 0 before the first."""
    checkpoint_every_s: float = 60.0
    hang_s: float = 1800.0
    """Seconds without a report after which the attempt is taken for dead."""
    corpus_sha256: dict[str, str] | None = None
    """Digests of the text that the sweep began with; None before its first epoch."""
    gpu_share: float = 1.0
    """How much of a GPU's memory this trial may take, where it runs on one."""
    was_enlarged: bool = False
    """Whether that is more than others of its sweep have."""


@dataclass(frozen=True)
class Report:
    """What a worker says after one epoch, or when it cannot go on."""

    epoch: Mapping[str, Any] | None
    """The fields of trials.training.EpochResult; None where a worker only says that it lives."""
    finished: bool = False
    failure: Failure | None = None
    best_epoch: int | None = None
    best_valid_loss: float | None = None
    checkpoint_sha256: str | None = None
    device: str | None = None
    runtime: str | None = None
    corpus_sha256: dict[str, str] | None = None
