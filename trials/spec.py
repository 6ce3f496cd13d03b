"""The wire format of a sweep: everything a client may ask for, and nothing else. No ray, no torch.

A `SweepSpec` names a corpus and a base configuration (`model`, `training`, `regularization`), the `arms` to
compare and the `space` to sample from. Trial n belongs to arm n mod A and to draw n div A. Unless
the sampler learns, arms share what is drawn: they are paired.

Nothing is converted: JSON's true is no number, "3" is none, and 3.5 is no count.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError, to_json

from models.config import AWDLSTMConfig, Precision, Rate
from regularizers.config import Regularization
from trials.corpora import CorpusSpec
from trials.presets import PRESETS

CLOSED = ConfigDict(extra="forbid", use_attribute_docstrings=True)

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
LabelName = Annotated[str, Field(max_length=317, pattern=f"^([a-zA-Z0-9.-]{{1,253}}/)?{_LABEL}$")]
LabelSelector = Annotated[
    str, Field(max_length=1000, pattern=rf"^!?{_LABEL}$|^!?in\({_LABEL}(, ?{_LABEL})*\)$")
]
"""Both as Ray has them."""
Scalar = bool | int | FiniteFloat | Text
Factor = Annotated[FiniteFloat, Field(ge=0, strict=True)]
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""What the study, which keeps parameters as floats, gives back unchanged."""

MOST_ABOVE_BPTT = 10
"""Time steps that a window of a random length may have more than its base."""


class Wire(BaseModel):
    """A frozen, closed piece of the wire format."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True, config=CLOSED)
class TrainingConfig:
    """How one trial is trained (Merity et al. 2017)."""

    epochs: Annotated[int, Field(ge=1, le=100_000)] = 500
    """Passes over the training split."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 20
    """Columns that the training stream is cut into, B."""
    bptt: Annotated[int, Field(ge=5, le=10_000)] = 70
    """Base length of a window, in time steps."""
    windows: Literal["random", "fixed"] = "random"
    """`random` draws lengths around bptt as AWD-LSTM does; `fixed` always takes bptt."""
    lr: Annotated[FiniteFloat, Field(gt=0)] = 30.0
    """SGD's learning rate for a window of bptt steps."""
    clip: Annotated[FiniteFloat, Field(gt=0)] = 0.25
    """Largest global norm of the gradient."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 1.2e-6
    """L2 on every parameter."""
    lr_schedule: Literal["constant", "plateau"] = "constant"
    """`plateau` multiplies lr by lr_factor whenever lr_patience epochs in a row bring no better loss."""
    lr_patience: Annotated[int, Field(ge=1)] = 20
    """In epochs."""
    lr_factor: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 0.1
    state_reset_p: Rate = 0.0
    """Probability that a window starts from a zero state in place of the one carried along."""
    averaging: Literal["nt-asgd", "none", "from-start"] = "nt-asgd"
    """Non-monotonically triggered averaging of the iterates, or none; `from-start`, which is fine-tuning,
    averages from the first step and ends where nt-asgd would begin to."""
    non_monotone_interval: Annotated[int, Field(ge=0)] = 5
    """n of NT-ASGD, in epochs."""
    precision: Precision = "float32"
    """What the matrix products of a training step are computed in: `tf32` on NVIDIA GPUs from Ampere on,
    `bf16` there and on CPUs with AVX-512 BF16 or AMX. Weights, losses and evaluation are float32 in each."""
    recompute: bool = False
    """Compute each layer once more for its gradient in place of keeping what that needs: the same numbers
    in more time, and in less memory where both passes are kept and layers are wide."""
    cuda_graphs: bool = False
    """On a GPU, carry out each step as a CUDA graph, recorded once for each length of a window, with both
    passes side by side: the same numbers but for rounding. On a CPU it changes nothing."""

    @property
    def longest_window(self) -> int:
        """In time steps."""
        return self.bptt + (MOST_ABOVE_BPTT if self.windows == "random" else 0)


class Choice(Wire):
    """One of the listed values, each with equal probability."""

    type: Literal["choice"]
    values: Annotated[list[Scalar], Field(min_length=1)]

    @property
    def extremes(self) -> list[Scalar]:
        return self.values

    def take(self, value: Scalar) -> Scalar:
        """The value as it would have been drawn. Raises ValueError where it never would be."""
        for known in self.values:
            if known == value and isinstance(known, bool) == isinstance(value, bool):
                return known
        raise ValueError(f"the choices are {', '.join(map(repr, self.values))}")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.values)) < len(self.values):
            raise _problem(
                "repeated_value",
                "a choice lists each value once; to weigh a value is not supported",
                "/values",
            )
        return self


class Interval(Wire):
    low: int | FiniteFloat
    high: int | FiniteFloat

    @property
    def extremes(self) -> list[Scalar]:
        return [self.low, self.high]

    def take(self, value: Scalar) -> Scalar:
        """The value as it would have been drawn. Raises ValueError where it never would be."""
        whole = isinstance(self.low, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"it must be a {'whole ' if whole else ''}number")
        if not self.low <= value <= self.high:
            raise ValueError(f"the range is from {self.low} to {self.high}")
        return value if whole else float(value)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.low >= self.high:
            raise _problem(
                "empty_range",
                f"the range from {self.low} to {self.high} is empty: low must be below high; "
                "fix a single value in an arm, or in model, training or regularization",
            )
        return self


class Uniform(Interval):
    """U(low, high)."""

    type: Literal["uniform"]
    low: FiniteFloat
    high: FiniteFloat


class LogUniform(Interval):
    """exp U(log low, log high)."""

    type: Literal["log_uniform"]
    low: Annotated[FiniteFloat, Field(gt=0)]
    high: Annotated[FiniteFloat, Field(gt=0)]


class Integer(Interval):
    """A whole number from low to high, both included."""

    type: Literal["integer"]
    low: Whole
    high: Whole

    @property
    def size(self) -> int:
        return self.high - self.low + 1


Range = Annotated[Choice | Uniform | LogUniform | Integer, Field(discriminator="type")]
Point = dict[str, Scalar]
"""Values of parameters of the space; what it leaves out is sampled."""


Seed = Annotated[int, Field(ge=0, lt=2**63)]
StartupTrials = Annotated[int, Field(ge=1)]


class RandomSampler(Wire):
    """Counter-based: a value is a function of (seed, draw, parameter) and of nothing else."""

    name: Literal["random"] = "random"
    seed: Seed = 0


class QMCSampler(Wire):
    """Scrambled Sobol points, which fill the space more evenly than chance, best in 2, 4, 8, … draws. A value
    is a function of (seed, space, how many draws before it are no client's points)."""

    name: Literal["qmc"]
    seed: Seed = 0


class GridSampler(Wire):
    """Every combination of the space's choices and integers, in an order that the seed shuffles. A budget of
    fewer draws tries a part of the grid; one of more begins again, in another order, from other weights."""

    name: Literal["grid"]
    seed: Seed = 0


class TPESampler(Wire):
    """Tree-structured Parzen estimators (Bergstra et al. 2011): each arm learns from its own trials."""

    name: Literal["tpe"]
    startup_trials: StartupTrials = 10
    """Trials of an arm that end before it learns; until then draws are random, and the arms share them."""
    seed: Seed = 0


MOST_INTEGERS_OF_GP = 100_000
"""Values of a range, each of which Optuna's GP sampler looks at: a megabyte or two."""


class GPSampler(Wire):
    """Expected improvement under a Gaussian process: each arm learns from its own trials. It takes about half
    a second a trial, and pays where trials are few and long."""

    name: Literal["gp"]
    startup_trials: StartupTrials = 10
    """Trials of an arm that end before it learns; until then draws are random, and the arms share them."""
    seed: Seed = 0


class CMAESSampler(Wire):
    """CMA-ES (Hansen 2016), for spaces without choices: each arm adapts a normal distribution to its own
    trials, after every 4 + 3 ln(dimensions) of them."""

    name: Literal["cmaes"]
    seed: Seed = 0


def _named(given: Any) -> Any:
    return {"name": "random", **given} if isinstance(given, dict) else given


Sampler = Annotated[
    Annotated[
        RandomSampler | QMCSampler | GridSampler | TPESampler | GPSampler | CMAESSampler,
        Field(discriminator="name"),
    ],
    BeforeValidator(_named),
]


class NoPruner(Wire):
    """Every trial runs all of its epochs."""

    name: Literal["none"] = "none"


MinEpochs = Annotated[int, Field(ge=1)]
ReductionFactor = Annotated[int, Field(ge=2)]


class SuccessiveHalving(Wire):
    """Asynchronous successive halving (Li et al. 2018), within each arm: arms never prune one another."""

    name: Literal["successive_halving"]
    min_epochs: MinEpochs = 1
    """Epochs before the first rung."""
    reduction_factor: ReductionFactor = 3
    """One in so many trials of an arm passes a rung."""


class Hyperband(Wire):
    """Hyperband (Li et al. 2018), within each arm: successive halving in brackets, each of which has fewer
    trials than the one before, and begins to prune later. A trial's bracket is a function of its draw."""

    name: Literal["hyperband"]
    min_epochs: MinEpochs = 1
    """Epochs before the first rung of the first bracket."""
    reduction_factor: ReductionFactor = 3
    """One in so many trials of a bracket passes a rung; each bracket's first rung is so many times later."""

    def first_rungs(self, epochs: int) -> list[int]:
        """Of each bracket. The last one's may be the last epoch: its trials run to their end."""
        rungs, rung = [], self.min_epochs
        while rung <= epochs:
            rungs.append(rung)
            rung *= self.reduction_factor
        return rungs


class MedianPruner(Wire):
    """Ends a trial whose best perplexity so far is above the median, at the same epoch, of those of its arm
    that have run to their end."""

    name: Literal["median"]
    min_epochs: MinEpochs = 1
    """Epochs that every trial runs."""
    startup_trials: StartupTrials = 5
    """Trials of an arm that run to their end before any is pruned."""


MOST_TRIALS = 100_000


class Budget(Wire):
    """When a sweep is over: at the first limit that it reaches. What runs then counts as it stands."""

    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)]
    """Trials over all arms; as many rows end, whatever dies; what is tried again counts once."""
    wall_s: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Seconds that the sweep may run; those in the queue and those paused do not count."""
    target: Annotated[FiniteFloat, Field(gt=1)] | None = None
    """A validation perplexity: the sweep is over once a trial has reached it."""
    max_failed: Annotated[int, Field(ge=0)] | None = None
    """So many trials may fail; with one more the sweep has failed."""


LEAST_GPU = 0.001


def _enough_of_a_gpu(gpus: float) -> float:
    if 0 < gpus < LEAST_GPU:
        words = "Input should be 0, or at least {least} of a GPU: Ray counts in ten-thousandths of one"
        raise PydanticCustomError("too_little_of_a_gpu", words, {"least": LEAST_GPU})
    return gpus


class Resources(Wire):
    """What one trial takes."""

    cpus: Annotated[FiniteFloat, Field(ge=0.1)] = 1
    gpus: Annotated[FiniteFloat, Field(ge=0, le=1), AfterValidator(_enough_of_a_gpu)] = 0
    """A trial runs on one GPU at most; a fraction below 1 lets trials share one."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Trials at once; by default as many as there is room for."""
    labels: Annotated[dict[LabelName, LabelSelector], Field(max_length=20)] = {}
    """Of the nodes of a Ray cluster on which trials may run, `{"ray.io/accelerator-type": "in(H100, A100)"}`
    say: a value, `!value`, `in(…)` or `!in(…)`, as in Ray's label selectors; all have to hold."""

    @property
    def device(self) -> str:
        """torch's name for what a trial runs on."""
        return "cuda" if self.gpus else "cpu"

    def room(self, cpus: float, gpus: float) -> int:
        """How many trials one machine with so many CPUs and GPUs has room for."""
        by_cpu = cpus / self.cpus
        # A trial's share is of one GPU: what is left of several makes up no other.
        by_gpu = int(gpus) * int(1 / self.gpus) if self.gpus else by_cpu
        return int(min(by_cpu, by_gpu))


FailureClass = Literal[
    "diverged", "out_of_memory", "infrastructure", "user_error", "timeout", "disk_full", "cancelled"
]
"""Why a trial failed. Where its process dies (infrastructure) or hangs (timeout), it is tried again; where
there is no room for its checkpoint (disk_full), the sweep is paused."""


class Retry(Wire):
    max_failures: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a trial is tried again after its worker died, or had to be ended."""
    checkpoint_every_s: Annotated[FiniteFloat, Field(gt=0)] = 60
    """Seconds of training that may have to be done again, at most: a trial in the middle of an epoch saves so
    often what it needs to go on; less often where saving would cost more than 2.5 % of the time."""
    hang_s: Annotated[FiniteFloat, Field(gt=0)] = 1800
    """Seconds without a sign of life after which a trial's process is ended, and the trial tried again."""
    identical_failures: Annotated[int, Field(ge=1)] | None = 3
    """So many trials in a row that fail of the same thing pause the sweep, divergence aside; null: never."""


class Retention(Wire):
    """Which checkpoints stay once their trials have ended."""

    bests_per_arm: Annotated[int, Field(ge=1)] | None = None
    """Of so many best trials of each arm; null: of all. Failed trials keep theirs, to be tried again."""


Pruner = Annotated[NoPruner | SuccessiveHalving | Hyperband | MedianPruner, Field(discriminator="name")]


@dataclass(frozen=True, config=CLOSED)
class TrialConfig:
    """Values already chosen: all that decides a trial's numbers besides its corpus and seed."""

    model: AWDLSTMConfig
    training: TrainingConfig
    regularization: Regularization
    """With a kappa, the default one where none was given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "regularization", self.regularization.completed(self.model.layers))


DROPOUTS = ("embed_p", "input_p", "hidden_p", "output_p", "weight_p")
SECTION_OF: dict[str, str] = {
    field.name: section
    for section, config in (
        ("model", AWDLSTMConfig),
        ("training", TrainingConfig),
        ("regularization", Regularization),
    )
    for field in dataclasses.fields(config)
    if field.name
    != "epochs"  # a trial's length is the pruner's business; curves of one sweep stay comparable
}
"""The section of the base configuration that each parameter of an arm or of the space belongs to."""
MULTIPLIERS: dict[str, str] = {f"{name}_multiplier": name for name in DROPOUTS}
"""Parameters that multiply a dropout rate, the arm's own where it has one, as in the paper's search."""

_TRIAL_CONFIG = TypeAdapter(TrialConfig)
_FACTORS = TypeAdapter(dict[str, Factor])


def _as_written(config: type) -> BeforeValidator:
    """Validate a section by the rules of JSON: in Python, pydantic would convert what only looks alike."""
    adapter: TypeAdapter[Any] = TypeAdapter(config)

    def validate(given: Any) -> Any:
        return adapter.validate_json(to_json(given), strict=True) if isinstance(given, dict) else given

    return BeforeValidator(validate)


class SweepSpec(Wire):
    """A sweep: which configurations to train, on what, and how many of them."""

    preset: str | None = None
    """Take every field that is not given from this preset."""
    name: Text = ""
    """For people; need not be unique."""
    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}
    corpus: CorpusSpec
    model: Annotated[AWDLSTMConfig, _as_written(AWDLSTMConfig)] = AWDLSTMConfig()
    training: Annotated[TrainingConfig, _as_written(TrainingConfig)] = TrainingConfig()
    regularization: Annotated[Regularization, _as_written(Regularization)] = Regularization()
    arms: Annotated[dict[Name, dict[str, Scalar]], Field(min_length=1, max_length=32)] = {
        "fd": {"regularizer": "fraternal"},
        "eld": {"regularizer": "expectation_linear"},
    }
    """Named sets of fixed values to compare. A fixed value wins over the space and the base configuration."""
    space: dict[str, Range] = {}
    """Where the other values are sampled from; `embed_p_multiplier` and its like multiply the arm's rate, or
    the base configuration's where the arm fixes none."""
    points: Annotated[list[Point], Field(max_length=100)] = []
    """To be tried first, in this order: each is a draw, of every arm."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Of the queued sweeps, one with the highest starts first; of equals, the one that came first."""
    sampler: Sampler = RandomSampler()
    pruner: Pruner = NoPruner()
    budget: Budget
    resources: Resources = Resources()
    retry: Retry = Retry()
    retention: Retention = Retention()
    baseline: str | Annotated[FiniteFloat, Field(gt=1)] | None = None
    """What trials are counted against: a validation perplexity, or an arm whose best trial sets it."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(name := given.get("preset"), str):
            return given
        if name not in PRESETS:
            known = ", ".join(sorted(PRESETS))
            raise _problem("unknown_preset", f"unknown preset {name!r}; known: {known}", "/preset")
        return merged(PRESETS[name], given)

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        """Whatever is sampled makes a valid trial: every end of a range does, and the widest products do."""
        for arm, fixed in self.arms.items():
            for parameter in fixed:
                _check_known(parameter, f"/arms/{arm}/{_escaped(parameter)}")
            self._check_values(arm, {}, None)
        for parameter, choices in self.space.items():
            _check_known(parameter, f"/space/{_escaped(parameter)}")
            for arm in self.arms:
                for value in choices.extremes:
                    self._check_values(arm, {parameter: value}, f"/space/{parameter}")
        for multiplier in self.space.keys() & MULTIPLIERS.keys():
            for arm in self.arms:
                widest = self._widest(arm, (multiplier, MULTIPLIERS[multiplier]))
                self._check_values(arm, widest, f"/space/{multiplier}")
        for index, point in enumerate(self.points):
            self.taken(point, f"/points/{index}")
        if len(self.points) > self.draws:
            raise _problem(
                "too_many_points",
                f"{len(self.points)} points are more than the budget has draws: {self.budget.trials} trials "
                f"of {len(self.arms)} arms are {self.draws} draws; raise budget.trials, or give fewer points",
                "/points",
            )
        if isinstance(self.baseline, str) and self.baseline not in self.arms:
            arms = ", ".join(self.arms)
            raise _problem(
                "unknown_baseline",
                f"baseline {self.baseline!r} is no arm; arms: {arms}; or give a validation perplexity",
                "/baseline",
            )
        return self

    @property
    def searched(self) -> dict[str, Range]:
        """The part of the space that any arm leaves open."""
        fixed_by_all = set.intersection(*(set(fixed) for fixed in self.arms.values()))
        return {name: choices for name, choices in self.space.items() if name not in fixed_by_all}

    @property
    def arms_share_draws(self) -> bool:
        """Whether the trials of a draw have the same values; else each arm's sampler learns for itself."""
        return isinstance(self.sampler, RandomSampler | QMCSampler | GridSampler)

    @property
    def draws(self) -> int:
        """How many the budget begins."""
        return -(-self.budget.trials // len(self.arms))

    def taken(self, point: Point, pointer: str = "") -> Point:
        """A point's values as they would have been drawn.

        Raises PydanticCustomError, which points below `pointer`, where one never would be.
        """
        values: Point = {}
        for name, value in point.items():
            at = f"{pointer}/{_escaped(name)}"
            if name not in self.space:
                known = ", ".join(sorted(self.space)) or "nothing, since it has no space"
                raise _problem("not_in_space", f"{name!r} is not sampled in this sweep: {known}", at)
            if all(name in fixed for fixed in self.arms.values()):
                raise _problem("fixed_by_arms", f"every arm fixes {name!r}: a point cannot change it", at)
            try:
                values[name] = self.space[name].take(value)
            except ValueError as error:
                raise _problem("outside_space", f"{name} = {value!r}: {error}", at) from error
        return values

    def _widest(self, arm: str, parameters: tuple[str, str]) -> dict[str, Scalar]:
        """The largest values that an arm can draw for these, which are known to be numbers."""
        open_ones = dict(self.sampled(arm))
        return {name: max(open_ones[name].extremes) for name in parameters if name in open_ones}

    def _check_values(self, arm: str, params: dict[str, Scalar], pointer: str | None) -> None:
        """Blame `pointer`, or what the arm itself fixes, for a configuration that is out of bounds."""
        try:
            self.trial_config(arm, params)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][-1])
            fixed = name if name in self.arms[arm] else f"{name}_multiplier"
            raise _problem(
                "value_out_of_bounds",
                f"arm {arm!r}: {name} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}",
                pointer or f"/arms/{arm}/{fixed}",
            ) from error

    def trial_config(self, arm: str, params: dict[str, Scalar]) -> TrialConfig:
        """The base configuration with sampled `params`, then the arm's fixed values, put in.

        Raises pydantic.ValidationError where the result is out of bounds.
        """
        sections: dict[str, dict[str, Any]] = {
            section: dict(vars(getattr(self, section))) for section in ("model", "training", "regularization")
        }
        values = {**params, **self.arms[arm]}
        for name in values.keys() & SECTION_OF.keys():
            sections[SECTION_OF[name]][name] = values[name]
        config = _TRIAL_CONFIG.validate_json(to_json(sections), strict=True)
        factors = _FACTORS.validate_python(
            {name: values[name] for name in values.keys() & MULTIPLIERS.keys()}
        )
        rates = {
            MULTIPLIERS[name]: getattr(config.model, MULTIPLIERS[name]) * by for name, by in factors.items()
        }
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **rates))

    def written(self, parameter: str) -> Iterator[tuple[str, Scalar]]:
        """(JSON pointer, value) for each value that trials may have of a parameter that no range is for."""
        for arm, fixed in self.arms.items():
            if parameter in fixed:
                yield f"/arms/{arm}/{parameter}", fixed[parameter]
        if all(parameter in fixed for fixed in self.arms.values()):
            return
        if parameter in self.space:
            yield from ((f"/space/{parameter}", value) for value in self.space[parameter].extremes)
        else:
            section = SECTION_OF[parameter]
            yield f"/{section}/{parameter}", getattr(getattr(self, section), parameter)

    def arm_of(self, number: int) -> str:
        return list(self.arms)[number % len(self.arms)]

    def draw_of(self, number: int) -> int:
        return number // len(self.arms)

    def seed_of(self, number: int) -> int:
        """The trial's own seed: shared by the arms of one draw, so that they start from the same weights.

        48 bits: JSON clients keep numbers as doubles.
        """
        digest = hashlib.sha256(f"{self.sampler.seed}/{self.draw_of(number)}".encode()).digest()
        return int.from_bytes(digest[:6])

    def sampled(self, arm: str) -> Iterator[tuple[str, Choice | Uniform | LogUniform | Integer]]:
        """The part of the space that this arm leaves open."""
        return ((name, choices) for name, choices in self.space.items() if name not in self.arms[arm])


class SweepRequest(SweepSpec):
    """A sweep as a client may ask for it."""

    resources: Annotated[
        Annotated[Resources, Tag("resources")] | Annotated[Literal["auto"], Tag("auto")],
        Discriminator(lambda given: "auto" if isinstance(given, str) else "resources"),
    ] = Resources()  # type: ignore[assignment]
    """`auto` leaves it to the service: it chooses when the sweep comes, by what the machine has and what was
    measured, and the sweep says what it chose."""

    @model_validator(mode="after")
    def _search_fits(self) -> Self:
        """The sampler can search this space within the budget, and the pruner has something to prune.

        A stored sweep is not asked again: a rule may be younger than it, and a budget may be lowered later.
        """
        self._check_space()
        self._check_budget()
        self._check_pruner()
        return self

    def _check_space(self) -> None:
        kind = self.sampler.name
        if isinstance(self.sampler, GridSampler):
            self._refuse(
                lambda choices: isinstance(choices, Uniform | LogUniform),
                "grid takes every combination of values, and a continuous range has no end of them: list "
                "some as a choice, or let sampler qmc cover the range evenly",
            )
        if isinstance(self.sampler, CMAESSampler):
            self._refuse(
                lambda choices: isinstance(choices, Choice) and not has_one_value(choices),
                "cmaes moves along ranges, and a choice has no order: make it an integer or a uniform range, "
                "fix it in the arms, or let tpe or gp sample",
            )
        if isinstance(self.sampler, GPSampler):
            self._refuse(
                lambda choices: isinstance(choices, Integer) and choices.size > MOST_INTEGERS_OF_GP,
                f"gp looks at every value of an integer range, and this one has more than "
                f"{MOST_INTEGERS_OF_GP}: narrow it, list some as a choice, make it uniform or log_uniform "
                "where the parameter takes fractions, or let tpe sample",
            )
        if not self.arms_share_draws and not self._axes:
            words = (
                f"{kind} learns what to sample, and the arms leave nothing of the space open that has two "
                "values or more: take random"
            )
            raise _problem("nothing_to_sample", words, "/sampler/name")

    def _refuse(self, does_not_fit: Callable[[Range], bool], words: str) -> None:
        """Raises PydanticCustomError where that is so of a parameter that is searched for."""
        for name, choices in self.searched.items():
            if does_not_fit(choices):
                raise _problem("not_for_this_sampler", words, f"/space/{_escaped(name)}")

    def _check_budget(self) -> None:
        if self.draws > (begins := self._trials_before_learning):
            return
        words = (
            f"{self.sampler.name} learns from an arm's first {begins} trials, and {self.budget.trials} "
            f"trials of {len(self.arms)} arms are no more than {self.draws} for each: raise budget.trials"
        )
        if isinstance(self.sampler, TPESampler | GPSampler):
            words += ", or lower sampler.startup_trials"
        raise _problem("nothing_to_learn", f"{words}, or take random or qmc", "/budget/trials")

    def _check_pruner(self) -> None:
        pruner, epochs = self.pruner, self.training.epochs
        # Of one epoch: a try-out, in which whatever a preset prunes by does no harm.
        if not isinstance(pruner, NoPruner) and pruner.min_epochs >= max(2, epochs):
            words = (
                f"{pruner.name} with min_epochs {pruner.min_epochs} prunes nothing: training.epochs is "
                f"{epochs}, and no trial is pruned after its last; train for more, lower min_epochs, or take "
                "pruner none"
            )
            raise _problem("nothing_to_prune", words, "/pruner/min_epochs")
        if isinstance(pruner, Hyperband) and len(pruner.first_rungs(epochs)) < 2:
            words = (
                f"hyperband with training.epochs {epochs} and pruner.min_epochs {pruner.min_epochs} has one "
                f"bracket: train for {pruner.min_epochs * pruner.reduction_factor} epochs or more, or take "
                "successive_halving, which that is"
            )
            raise _problem("one_bracket", words, "/pruner")

    @property
    def _trials_before_learning(self) -> int:
        """Of an arm; 0 for samplers that learn nothing."""
        if isinstance(self.sampler, CMAESSampler):
            return max(map(cmaes_population, self._axes))
        return self.sampler.startup_trials if isinstance(self.sampler, TPESampler | GPSampler) else 0

    @property
    def _axes(self) -> list[int]:
        """The dimensions in which each arm can be searched, of those that can."""
        axes = (sum(not has_one_value(choices) for _, choices in self.sampled(arm)) for arm in self.arms)
        return [count for count in axes if count]


def has_one_value(choices: Range) -> bool:
    """Whether nothing is to be searched there."""
    return len(choices.extremes) == 1


def cmaes_population(dimensions: int) -> int:
    """How many trials CMA-ES learns from at a time (Hansen 2016, table 1)."""
    return 4 + int(3 * math.log(dimensions))


def merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` laid over `base`: sections merge field by field, anything else is replaced whole.

    A sampler is a section as long as its name stays: `{"seed": 2}` is the same one with another seed.
    """
    sections = {
        key: {**base[key], **given[key]}
        for key in ("model", "training", "regularization", "budget", "resources", "sampler")
        if isinstance(base.get(key), dict) and isinstance(given.get(key), dict)
    }
    if "sampler" in sections and sections["sampler"].get("name") != base["sampler"].get("name"):
        del sections["sampler"]
    return {**base, **given, **sections}


def _escaped(name: str) -> str:
    """As a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _check_known(parameter: str, pointer: str) -> None:
    if parameter not in SECTION_OF and parameter not in MULTIPLIERS:
        known = ", ".join(sorted([*SECTION_OF, *MULTIPLIERS]))
        if parameter == "epochs":
            raise _problem("fixed_parameter", "every trial has training.epochs; set it there", pointer)
        raise _problem("unknown_parameter", f"unknown parameter {parameter!r}; known: {known}", pointer)


def _problem(code: str, message: str, pointer: str = "") -> PydanticCustomError:
    """A validation error whose place is a JSON pointer below the value being validated."""
    return PydanticCustomError(code, "{message}", {"message": message, "pointer": pointer})
