"""The wire format of a sweep: everything a client may ask for, and nothing else. No ray, no torch.

A `SweepSpec` names a corpus and a base configuration (`model`, `training`, `regularization`), the `arms` to compare and the
`space` to sample from. Trial n belongs to arm n mod A and to draw n div A, so that arms share their draws: they are paired.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from trials.corpora import CorpusSpec
from trials.presets import PRESETS

CLOSED = ConfigDict(extra="forbid", use_attribute_docstrings=True)

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Scalar = bool | int | FiniteFloat | Text


class Wire(BaseModel):
    """A frozen, closed piece of the wire format."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, config=CLOSED)
class TrainingConfig:
    """How one trial is trained (REFERENCE §4; Merity et al. 2017)."""

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
    averaging: Literal["nt-asgd", "none"] = "nt-asgd"
    """Non-monotonically triggered averaging of the iterates, or none."""
    non_monotone_interval: Annotated[int, Field(ge=0)] = 5
    """n of NT-ASGD, in epochs."""


class Choice(Wire):
    """One of the listed values, each with equal probability."""

    type: Literal["choice"]
    values: Annotated[list[Scalar], Field(min_length=1)]

    @property
    def extremes(self) -> list[Scalar]:
        return self.values

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len({(type(value), value) for value in self.values}) < len(self.values):
            raise _problem("repeated_value", "a choice lists each value once; to weigh a value is not supported", "/values")
        return self


class Interval(Wire):
    low: int | FiniteFloat
    high: int | FiniteFloat

    @property
    def extremes(self) -> list[Scalar]:
        return [self.low, self.high]

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
    low: int
    high: int


Range = Annotated[Choice | Uniform | LogUniform | Integer, Field(discriminator="type")]


class RandomSampler(Wire):
    """Counter-based: a value is a function of (seed, draw, parameter) and of nothing else."""

    name: Literal["random"] = "random"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class NoPruner(Wire):
    """Every trial runs all of its epochs."""

    name: Literal["none"] = "none"


class SuccessiveHalving(Wire):
    """Asynchronous successive halving (Li et al. 2018), within each arm: arms never prune one another."""

    name: Literal["successive_halving"]
    min_epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs before the first rung."""
    reduction_factor: Annotated[int, Field(ge=2)] = 3
    """One in so many trials of an arm passes a rung."""


class Budget(Wire):
    trials: Annotated[int, Field(ge=1, le=100_000)]
    """Trials over all arms; as many rows end in a terminal state, whatever dies."""


class Resources(Wire):
    """What one trial takes."""

    cpus: Annotated[FiniteFloat, Field(gt=0)] = 1
    gpus: Annotated[FiniteFloat, Field(ge=0)] = 0
    """A fraction below 1 lets trials share a GPU."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Trials at once; by default as many as the machine has room for."""


class Retry(Wire):
    max_failures: Annotated[int, Field(ge=0, le=100)] = 3
    """How often a trial is tried again after its worker died."""


Pruner = Annotated[NoPruner | SuccessiveHalving, Field(discriminator="name")]


@dataclass(frozen=True, config=CLOSED)
class TrialConfig:
    """Values already chosen: all that decides a trial's numbers besides its corpus and seed."""

    model: AWDLSTMConfig
    training: TrainingConfig
    regularization: Regularization


DROPOUTS = ("embed_p", "input_p", "hidden_p", "output_p", "weight_p")
SECTION_OF: dict[str, str] = {
    field.name: section
    for section, config in (("model", AWDLSTMConfig), ("training", TrainingConfig), ("regularization", Regularization))
    for field in dataclasses.fields(config)
    if field.name != "epochs"  # a trial's length is the pruner's business; curves of one sweep stay comparable
}
"""The section of the base configuration that each parameter of an arm or of the space belongs to."""
MULTIPLIERS: dict[str, str] = {f"{name}_multiplier": name for name in DROPOUTS}
"""Parameters that multiply a base dropout rate, as in the paper's search."""


class SweepSpec(Wire):
    """A sweep: which configurations to train, on what, and how many of them."""

    preset: str | None = None
    """Take every field that is not given from this preset."""
    name: Text = ""
    """For people; need not be unique."""
    labels: Annotated[dict[Name, Text], Field(max_length=64)] = {}
    corpus: CorpusSpec
    model: AWDLSTMConfig = AWDLSTMConfig()
    training: TrainingConfig = TrainingConfig()
    regularization: Regularization = Regularization()
    arms: Annotated[dict[Name, dict[str, Scalar]], Field(min_length=1, max_length=32)] = {
        "fd": {"regularizer": "fraternal"},
        "eld": {"regularizer": "expectation_linear"},
    }
    """Named sets of fixed values to compare. A fixed value wins over the space and the base configuration."""
    space: dict[str, Range] = {}
    """Where the other values are sampled from; `embed_p_multiplier` and its like multiply the base rate."""
    sampler: RandomSampler = RandomSampler()
    pruner: Pruner = NoPruner()
    budget: Budget
    resources: Resources = Resources()
    retry: Retry = Retry()
    baseline: str | Annotated[FiniteFloat, Field(gt=1)] | None = None
    """What trials are counted against: a validation perplexity, or an arm whose best trial sets it."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        name = given["preset"]
        if name not in PRESETS:
            raise _problem("unknown_preset", f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}", "/preset")
        return merged(PRESETS[name], given)

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        for arm, fixed in self.arms.items():
            for parameter in fixed:
                _check_known(parameter, f"/arms/{arm}/{parameter}")
            self._check_values(arm, {}, f"/arms/{arm}")
        for parameter, choices in self.space.items():
            _check_known(parameter, f"/space/{parameter}")
            for arm, value in itertools.product(self.arms, choices.extremes):
                if parameter not in self.arms[arm]:
                    self._check_values(arm, {parameter: value}, f"/space/{parameter}")
                    self._check_values(arm, {parameter: value, **self._widest(MULTIPLIERS.get(parameter))}, f"/space/{parameter}")
        if isinstance(self.baseline, str) and self.baseline not in self.arms:
            raise _problem(
                "unknown_baseline",
                f"baseline {self.baseline!r} is no arm; arms: {', '.join(self.arms)}; or give a validation perplexity",
                "/baseline",
            )
        return self

    def _widest(self, parameter: str | None) -> dict[str, Scalar]:
        """The largest value that the space lets this parameter take: what a multiplier of it must reckon with."""
        return {parameter: max(self.space[parameter].extremes)} if parameter in self.space else {}  # type: ignore[type-var]

    def _check_values(self, arm: str, params: dict[str, Scalar], pointer: str) -> None:
        try:
            self.trial_config(arm, params)
        except ValidationError as error:
            first = error.errors()[0]
            at = "/".join(str(part) for part in first["loc"])
            raise _problem("value_out_of_bounds", f"arm {arm!r}: {at} = {first['input']!r}: {first['msg']}", pointer) from error

    def trial_config(self, arm: str, params: dict[str, Scalar]) -> TrialConfig:
        """The base configuration with sampled `params`, then the arm's fixed values, put in.

        Raises pydantic.ValidationError where the result is out of bounds.
        """
        sections: dict[str, dict[str, Any]] = {
            section: dataclasses.asdict(getattr(self, section)) for section in ("model", "training", "regularization")
        }
        values = {**params, **self.arms[arm]}
        for name in sorted(values, key=MULTIPLIERS.__contains__):  # rates first, then what multiplies them
            if name in MULTIPLIERS:
                sections["model"][MULTIPLIERS[name]] *= values[name]
            else:
                sections[SECTION_OF[name]][name] = values[name]
        return TrialConfig(**sections)  # type: ignore[arg-type]  # pydantic builds the sections from dicts

    def arm_of(self, number: int) -> str:
        return list(self.arms)[number % len(self.arms)]

    def draw_of(self, number: int) -> int:
        return number // len(self.arms)

    def seed_of(self, number: int) -> int:
        """The trial's own seed: shared by the arms of one draw, so that they start from the same weights."""
        return int.from_bytes(hashlib.sha256(f"{self.sampler.seed}/{self.draw_of(number)}".encode()).digest()[:7])

    def sampled(self, arm: str) -> Iterator[tuple[str, Choice | Uniform | LogUniform | Integer]]:
        """The part of the space that this arm leaves open."""
        return ((name, choices) for name, choices in self.space.items() if name not in self.arms[arm])


def merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` laid over `base`; the base configuration's sections merge field by field, anything else is replaced whole."""
    sections = {
        key: {**base[key], **given[key]}
        for key in ("model", "training", "regularization", "budget", "resources")
        if isinstance(base.get(key), dict) and isinstance(given.get(key), dict)
    }
    return {**base, **given, **sections}


def _check_known(parameter: str, pointer: str) -> None:
    if parameter not in SECTION_OF and parameter not in MULTIPLIERS:
        known = ", ".join(sorted([*SECTION_OF, *MULTIPLIERS]))
        raise _problem("unknown_parameter", f"unknown parameter {parameter!r}; known: {known}", pointer)


def _problem(code: str, message: str, pointer: str = "") -> PydanticCustomError:
    """A validation error whose place is a JSON pointer below the value being validated."""
    return PydanticCustomError(code, "{message}", {"message": message, "pointer": pointer})  # type: ignore[arg-type]
