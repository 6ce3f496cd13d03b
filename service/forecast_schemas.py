"""What is told of a sweep before it runs."""

from datetime import datetime
from typing import Any, Literal

from service.schemas import View
from trials.spec import SweepSpec


class BandView(View):
    """Of ten sweeps like it, one is expected below `p10`, one above `p90`."""

    p10: float
    p50: float
    p90: float


class SampledView(View):
    """A trial that is to come."""

    number: int
    arm: str
    draw: int
    seed: int
    params: dict[str, Any]
    """Sampled values."""
    exact: bool
    """Whether it will have these values. False where the sampler will have learned by then: an example."""
    epoch_s: BandView | None
    """Seconds of an epoch; null where they are not known. Once weights are averaged, an epoch is validated
    twice, and takes that much longer."""
    timed: bool
    """Whether the probe has timed this very configuration; else its time follows from those that it has."""
    memory_bytes: int | None
    """That its process takes at most, beyond having torch loaded."""


class ArmForecast(View):
    arm: str
    trials: int
    epoch_s: BandView | None
    """Seconds of an epoch, over the arm's trials."""


class CorpusView(View):
    train_tokens: int
    valid_tokens: int
    vocabulary_size: int


class MemoryForecast(View):
    """Of the machine, or of the GPU where trials run on one."""

    per_trial_bytes: int | None
    """That the largest trial takes at most; null where the vocabulary is not known."""
    at_once: int
    """Trials that run at once."""
    all_trials_bytes: int | None
    """That those take at most, with torch in each of their processes."""
    service_bytes: int
    """That the service, the driver and Ray take beside them, of the machine."""
    available_bytes: int | None
    """What there is in all; null where it is not known."""


class DiskForecast(View):
    """At most: all trials to their ends, each with its best checkpoint as far as `retention` keeps it."""

    checkpoints_bytes: int | None
    """Null where the vocabulary is not known."""
    database_bytes: int
    free_bytes: int | None
    """On the disk of the checkpoints; null where their store is not on this machine."""


class ProbeView(View):
    """The measurement that times follow from."""

    measured_at: datetime
    from_memory: bool
    """Whether it was made for an earlier request of the last hour."""
    took_s: float
    start_s: float
    """Until a process had loaded torch and the corpus: a driver's start takes the longer, the longer this."""
    device: str
    processes: int
    """That trained at once, as the trials will."""
    threads: int
    """Of each."""
    configurations: int
    """That it timed."""
    share: float
    """Of the cores' time that its processes wanted, and would have had alone, what they had: others had the
    rest."""


class Forecast(View):
    """How long a sweep will take, and how much; null is what is not known, and `unknown` says why."""

    wall_s: BandView | None
    """Seconds from its start to its end, a budget's `wall_s` counted in; waiting in the queue is not."""
    device: Literal["cpu_threads", "gpus"]
    """What `device_hours` are of."""
    device_hours: BandView | None
    """Of all trials together: hours by the threads, or by the part of a GPU, that each of them has."""
    epochs: BandView | None
    """Trained by all trials: fewer than all where a pruner or the budget ends some."""
    samples: list[SampledView]
    """The first trials."""
    arms: list[ArmForecast]
    corpus: CorpusView | None
    memory: MemoryForecast
    disk: DiskForecast
    probe: ProbeView | None
    unknown: list[str]
    """Why something is null, in sentences."""
    assumptions: list[str]
    """What it holds under, in sentences."""


class Validation(View):
    """A sweep that was not queued, since only its check was asked for."""

    valid: Literal[True] = True
    spec: SweepSpec
    """As it would be written down."""
    forecast: Forecast | None = None
    """Null where it was not asked for."""
