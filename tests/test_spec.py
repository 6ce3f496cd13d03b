"""The laws of the wire format: what it refuses and where it points, and that what it accepts can be run."""

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from pydantic import ValidationError

from trials.presets import PRESETS
from trials.samplers import value_at
from trials.spec import (
    DROPOUTS,
    MULTIPLIERS,
    SECTION_OF,
    Choice,
    Integer,
    LogUniform,
    SweepRequest,
    SweepSpec,
    TrialConfig,
    Uniform,
    merged,
)

MINIMAL = {"corpus": {"name": "sotu"}, "budget": {"trials": 4}}
LARGEST_U = 1 - 2.0**-53

NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.floats(0, 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 0.0, 5, 1e-6, 2.5]),
)
SCALARS = st.one_of(
    NUMBERS, st.booleans(), st.sampled_from(["none", "fraternal", "fixed", "random", "nt-asgd", "x", "3"])
)


def ends(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(numbers, min_size=2, max_size=2, unique=True).map(
        lambda pair: {"low": min(pair), "high": max(pair)}
    )


RANGES = st.one_of(
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"type": "choice", "values": values}),
    ends(NUMBERS).map(lambda both: {"type": "uniform", **both}),
    ends(st.floats(1e-9, 50)).map(lambda both: {"type": "log_uniform", **both}),
    ends(st.integers(0, 200)).map(lambda both: {"type": "integer", **both}),
)
PARAMETERS = st.sampled_from(sorted([*SECTION_OF, *MULTIPLIERS]))
SPECS = st.fixed_dictionaries(
    {
        **{name: st.just(value) for name, value in MINIMAL.items()},
        "arms": st.dictionaries(
            st.sampled_from(["a", "b"]), st.dictionaries(PARAMETERS, SCALARS, max_size=1), min_size=1
        ),
        "space": st.dictionaries(PARAMETERS, RANGES, max_size=2),
    }
)


def multiplied_specs(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """A rate and its multiplier, each fixed by an arm, sampled or left alone: products may be too much."""
    rates = st.floats(0, 0.99)
    factors = st.floats(0, 2)
    fixed = st.dictionaries(st.just(name), rates) | st.dictionaries(st.just(f"{name}_multiplier"), factors)
    rate_range = ends(rates).map(lambda both: {"type": "uniform", **both})
    factor_range = ends(factors).map(lambda both: {"type": "uniform", **both})
    space = st.fixed_dictionaries({}, optional={name: rate_range, f"{name}_multiplier": factor_range})
    return st.fixed_dictionaries(
        {
            **{key: st.just(value) for key, value in MINIMAL.items()},
            "arms": st.dictionaries(st.sampled_from(["a", "b"]), fixed, min_size=1),
            "space": space,
        }
    )


def distribution(choices: Choice | Uniform | LogUniform | Integer) -> BaseDistribution:
    match choices:
        case Choice(values=values):
            return CategoricalDistribution(values)
        case Integer(low=low, high=high):
            return IntDistribution(low, high)
        case LogUniform(low=low, high=high):
            return FloatDistribution(low, high, log=True)
        case Uniform(low=low, high=high):
            return FloatDistribution(low, high)


def accepted(given_spec: dict[str, Any]) -> SweepSpec:
    """The spec, where it is valid; hypothesis looks for another where it is not."""
    try:
        return SweepSpec.model_validate(given_spec)
    except ValidationError:
        assume(False)
        raise


RARELY_VALID = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@RARELY_VALID
@given(
    given_spec=st.one_of(SPECS, st.sampled_from(DROPOUTS).flatmap(multiplied_specs)),
    us=st.lists(st.floats(0, LARGEST_U) | st.sampled_from([0, LARGEST_U]), min_size=2, max_size=2),
)
def test_valid_spec_never_makes_an_invalid_trial(given_spec: dict[str, Any], us: list[float]) -> None:
    spec = accepted(given_spec)
    for arm in spec.arms:
        params = {
            name: value_at(u, distribution(choices))
            for u, (name, choices) in zip(us, spec.sampled(arm), strict=False)
        }
        assert isinstance(spec.trial_config(arm, params), TrialConfig)


@RARELY_VALID
@given(SPECS)
def test_spec_comes_back_from_json_equal_and_its_arms_in_order(given_spec: dict[str, Any]) -> None:
    spec = accepted(given_spec)
    back = SweepSpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json"), allow_nan=False)))
    assert back == spec
    assert list(back.arms) == list(spec.arms), "a trial's arm depends on the order"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_is_valid_and_comes_back_from_json_equal(name: str) -> None:
    spec = SweepSpec.model_validate({"corpus": {"name": "sotu"}, "preset": name})
    assert SweepSpec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


def test_paper_search_is_the_papers_table() -> None:
    spec = SweepSpec.model_validate({"preset": "paper-search", "corpus": {"name": "ptb"}})
    assert {arm: fixed["regularizer"] for arm, fixed in spec.arms.items()} == {
        "fd": "fraternal",
        "eld": "expectation_linear",
    }
    model = spec.model
    assert (model.embedding_size, model.hidden_size, model.layers) == (400, 1150, 3)
    assert (model.output_p, model.hidden_p, model.input_p, model.embed_p, model.weight_p) == (
        0.4,
        0.25,
        0.4,
        0.1,
        0.5,
    )
    assert (spec.training.bptt, spec.training.averaging) == (70, "nt-asgd")
    assert (spec.regularization.alpha, spec.regularization.beta) == (0, 0)
    assert spec.space == {
        "batch_size": Choice(type="choice", values=[10, 20, 30, 40]),
        "non_monotone_interval": Choice(type="choice", values=[5, 10, 20, 40, 60, 100]),
        "kappa": Uniform(type="uniform", low=0, high=0.3),
        "weight_decay": Uniform(type="uniform", low=0.6e-6, high=2.4e-6),
        **{f"{name}_multiplier": Uniform(type="uniform", low=0.5, high=1.5) for name in DROPOUTS},
    }
    assert spec.pruner.name == "none"
    assert spec.baseline == 60.7
    assert spec.budget.trials > 400


def uniform(low: Any, high: Any) -> dict[str, Any]:
    return {"type": "uniform", "low": low, "high": high}


def integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "low": low, "high": high}


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "choice", "values": list(values)}


MANY = {"budget": {"trials": 100}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"colour": "red"}, "/colour"),
    "unknown field of a section": ({"model": {"lstms": 2}}, "/model/lstms"),
    "unknown preset": ({"preset": "paper"}, "/preset"),
    "preset that is no name": ({"preset": ["quickstart"]}, "/preset"),
    "more than one GPU": ({"resources": {"gpus": 2}}, "/resources/resources/gpus"),
    "of a GPU so little that Ray counts none": ({"resources": {"gpus": 0.0009}}, "/resources/resources/gpus"),
    "unknown baseline": ({"baseline": "plain"}, "/baseline"),
    "baseline that no perplexity goes below": ({"baseline": 1}, "/baseline/constrained-float"),
    "no arms": ({"arms": {}}, "/arms"),
    "unknown parameter of an arm": ({"arms": {"a": {"dropout": 0.5}}}, "/arms/a/dropout"),
    "unknown parameter of the space": ({"space": {"lstm/~p": uniform(0, 1)}}, "/space/lstm~1~0p"),
    "epochs in the space": ({"space": {"epochs": choice(1, 2)}}, "/space/epochs"),
    "range that is a point": ({"space": {"kappa": uniform(0.1, 0.1)}}, "/space/kappa/uniform"),
    "range upside down": ({"space": {"kappa": uniform(0.2, 0.1)}}, "/space/kappa/uniform"),
    "empty choice": ({"space": {"kappa": choice()}}, "/space/kappa/choice/values"),
    "repeated choice": ({"space": {"kappa": choice(0.1, 0.2, 0.1)}}, "/space/kappa/choice/values"),
    "choice repeated as another type": ({"space": {"kappa": choice(1, 1.0)}}, "/space/kappa/choice/values"),
    "probability below 0": ({"model": {"embed_p": -0.1}}, "/model/embed_p"),
    "probability of 1": ({"model": {"embed_p": 1}}, "/model/embed_p"),
    "probability of an arm": ({"arms": {"a": {"weight_p": 1.5}}}, "/arms/a/weight_p"),
    "probability in the space": ({"space": {"embed_p": uniform(0.5, 1)}}, "/space/embed_p"),
    "probability by multiplier": (
        {"space": {"weight_p_multiplier": uniform(0.5, 2)}},
        "/space/weight_p_multiplier",
    ),
    "probability by two ranges": (
        {"space": {"embed_p_multiplier": uniform(0.5, 1.5), "embed_p": uniform(0, 0.7)}},
        "/space/embed_p_multiplier",
    ),
    "probability by an arm's multiplier": (
        {"arms": {"a": {"weight_p_multiplier": 2}}},
        "/arms/a/weight_p_multiplier",
    ),
    "negative multiplier": ({"space": {"embed_p_multiplier": uniform(-1, 1)}}, "/space/embed_p_multiplier"),
    "multiplier in words": ({"arms": {"a": {"embed_p_multiplier": "x"}}}, "/arms/a/embed_p_multiplier"),
    "multiplier that is true": (
        {"arms": {"a": {"embed_p_multiplier": True}}},
        "/arms/a/embed_p_multiplier",
    ),
    "multiplied word": ({"arms": {"a": {"embed_p": "x", "embed_p_multiplier": 2}}}, "/arms/a/embed_p"),
    "NaN": ({"model": {"embed_p": math.nan}}, "/model/embed_p"),
    "infinity": ({"training": {"lr": math.inf}}, "/training/lr"),
    "NaN at the end of a range": ({"space": {"kappa": uniform(0, math.nan)}}, "/space/kappa/uniform/high"),
    "infinite end of a range": ({"space": {"kappa": uniform(0, math.inf)}}, "/space/kappa/uniform/high"),
    "word for a number": ({"space": {"batch_size": choice("x")}}, "/space/batch_size"),
    "number in quotes": ({"space": {"batch_size": choice("10")}}, "/space/batch_size"),
    "true among numbers": ({"space": {"batch_size": choice(10, True)}}, "/space/batch_size"),
    "fractions for a count": ({"space": {"batch_size": uniform(1.5, 3.2)}}, "/space/batch_size"),
    "fractions between whole ends": ({"space": {"batch_size": uniform(1, 3)}}, "/space/batch_size"),
    "true for a count": ({"model": {"layers": True}}, "/model/layers"),
    "true for the budget": ({"budget": {"trials": True}}, "/budget/trials"),
    "number for a switch": ({"space": {"tied": choice(0, 1)}}, "/space/tied"),
    "list for a number": ({"model": {"layers": [1]}}, "/model/layers"),
    "integer too large for a float": ({"training": {"lr": 10**400}}, "/training/lr"),
    "integer too large for the study": (
        {"space": {"kappa": {"type": "integer", "low": 0, "high": 2**60}}},
        "/space/kappa/integer/high",
    ),
    "log of zero": (
        {"space": {"lr": {"type": "log_uniform", "low": 0, "high": 1}}},
        "/space/lr/log_uniform/low",
    ),
    "unknown regularizer": ({"arms": {"a": {"regularizer": "l2"}}}, "/arms/a/regularizer"),
    "unknown sampler": ({"sampler": {"name": "bayes"}}, "/sampler"),
    "option of another sampler": (
        {"sampler": {"name": "qmc", "startup_trials": 3}},
        "/sampler/qmc/startup_trials",
    ),
    "grid of a range without end": (
        {"sampler": {"name": "grid"}, "space": {"batch_size": choice(10, 20), "kappa": uniform(0, 1)}},
        "/space/kappa",
    ),
    "CMA-ES among choices": (
        {
            **MANY,
            "sampler": {"name": "cmaes"},
            "space": {"kappa": uniform(0, 1), "batch_size": choice(10, 20)},
        },
        "/space/batch_size",
    ),
    "CMA-ES of less than a population": (
        {"sampler": {"name": "cmaes"}, "space": {"kappa": uniform(0, 1)}, "budget": {"trials": 8}},
        "/budget/trials",
    ),
    "CMA-ES along one value": (
        {**MANY, "sampler": {"name": "cmaes"}, "space": {"bptt": choice(70)}},
        "/sampler/name",
    ),
    "Gaussian process over too many integers": (
        {**MANY, "sampler": {"name": "gp"}, "space": {"lr_patience": integer(1, 100_001)}},
        "/space/lr_patience",
    ),
    "nothing to learn about": ({**MANY, "sampler": {"name": "tpe"}}, "/sampler/name"),
    "every arm fixes what is searched": (
        {
            **MANY,
            "sampler": {"name": "gp"},
            "arms": {"a": {"kappa": 0}, "b": {"kappa": 1}},
            "space": {"kappa": uniform(0, 1)},
        },
        "/sampler/name",
    ),
    "budget that ends before TPE learns": (
        {"sampler": {"name": "tpe"}, "space": {"kappa": uniform(0, 1)}, "budget": {"trials": 20}},
        "/budget/trials",
    ),
    "Hyperband of one bracket": (
        {"pruner": {"name": "hyperband", "min_epochs": 4}, "training": {"epochs": 11}},
        "/pruner",
    ),
    "successive halving that comes too late": (
        {"pruner": {"name": "successive_halving", "min_epochs": 3}, "training": {"epochs": 3}},
        "/pruner/min_epochs",
    ),
    "Hyperband that comes too late": (
        {"pruner": {"name": "hyperband", "min_epochs": 4}, "training": {"epochs": 3}},
        "/pruner/min_epochs",
    ),
    "median that comes too late": (
        {"pruner": {"name": "median", "min_epochs": 3}, "training": {"epochs": 3}},
        "/pruner/min_epochs",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusal_points_at(kind: str) -> None:
    changes, pointer = REFUSED[kind]
    with pytest.raises(ValidationError) as refusal:
        SweepRequest.model_validate({**MINIMAL, **changes})
    pointers = set()
    for error in refusal.value.errors():
        pointers.add("".join(f"/{part}" for part in error["loc"]) + error.get("ctx", {}).get("pointer", ""))
    assert pointer in pointers


@pytest.mark.parametrize(
    "fits",
    [
        {"sampler": {"name": "grid"}, "space": {"batch_size": choice(10, 20), "kappa": uniform(0, 1)}},
        {**MANY, "sampler": {"name": "cmaes"}, "space": {"kappa": choice(0, 1), "lr": uniform(1, 2)}},
    ],
)
def test_what_every_arm_fixes_is_no_matter_of_the_sampler(fits: dict[str, Any]) -> None:
    assert SweepRequest.model_validate({**MINIMAL, "arms": {"a": {"kappa": 0}, "b": {"kappa": 1}}, **fits})


@pytest.mark.parametrize(
    "fits",
    [
        {"sampler": {"name": "cmaes"}, "space": {"kappa": uniform(0, 1)}, "budget": {"trials": 9}},
        {"sampler": {"name": "tpe"}, "space": {"kappa": uniform(0, 1)}, "budget": {"trials": 21}},
        {
            "sampler": {"name": "cmaes"},
            "space": {"kappa": uniform(0, 1), "bptt": choice(70)},
            "budget": {"trials": 9},
        },
        {**MANY, "sampler": {"name": "gp"}, "space": {"lr_patience": integer(1, 100_000)}},
        {
            **MANY,
            "sampler": {"name": "gp"},
            "arms": {"a": {"lr_patience": 3}},
            "space": {"lr_patience": integer(1, 2**53), "lr": uniform(1, 2)},
        },
        {"pruner": {"name": "successive_halving", "min_epochs": 2}, "training": {"epochs": 3}},
        {"pruner": {"name": "successive_halving"}, "training": {"epochs": 1}},
        {"pruner": {"name": "hyperband", "min_epochs": 4}, "training": {"epochs": 12}},
        {"sampler": {"seed": 3}},
    ],
)
def test_what_is_just_enough_is(fits: dict[str, Any]) -> None:
    assert SweepRequest.model_validate({**MINIMAL, **fits}).sampler.seed in {0, 3}


SEARCHES = [
    "grid of a range without end",
    "CMA-ES among choices",
    "CMA-ES along one value",
    "CMA-ES of less than a population",
    "Gaussian process over too many integers",
    "budget that ends before TPE learns",
    "successive halving that comes too late",
    "median that comes too late",
]


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_stored_sweep_is_read_whatever_is_asked_of_a_new_ones_search(kind: str) -> None:
    changes, _ = REFUSED[kind]
    assert SweepSpec.model_validate({**MINIMAL, **changes}).budget.trials >= 4


def test_a_sampler_without_a_name_keeps_the_one_that_it_is_laid_over() -> None:
    tpe = {"name": "tpe", "startup_trials": 5, "seed": 1}
    assert merged({"sampler": tpe}, {"sampler": {"seed": 2}}) == {"sampler": {**tpe, "seed": 2}}
    assert merged({"sampler": tpe}, {"sampler": {"name": "qmc"}}) == {"sampler": {"name": "qmc"}}


def test_integers_serve_a_parameter_that_takes_fractions() -> None:
    spec = SweepSpec.model_validate({**MINIMAL, "space": {"alpha": {"type": "integer", "low": 0, "high": 2}}})
    assert spec.trial_config("fd", {"alpha": 2}).regularization.alpha == 2


def test_arms_fixed_values_win_over_the_space_and_the_base() -> None:
    spec = SweepSpec.model_validate(
        {
            **MINIMAL,
            "regularization": {"kappa": 0.5},
            "arms": {"fixed": {"kappa": 0}, "free": {}},
            "space": {"kappa": uniform(0.1, 0.2)},
        }
    )
    assert [name for name, _ in spec.sampled("fixed")] == []
    assert spec.trial_config("fixed", {"kappa": 0.15}).regularization.kappa == 0
    assert spec.trial_config("free", {"kappa": 0.15}).regularization.kappa == 0.15
    assert spec.trial_config("free", {}).regularization.kappa == 0.5


def test_multiplier_multiplies_the_arms_own_rate() -> None:
    spec = SweepSpec.model_validate(
        {
            **MINIMAL,
            "arms": {"a": {"hidden_p": 0.3}, "b": {}},
            "space": {"hidden_p_multiplier": uniform(0.5, 1.5)},
        }
    )
    assert spec.trial_config("a", {"hidden_p_multiplier": 0.5}).model.hidden_p == 0.15
    assert spec.trial_config("b", {"hidden_p_multiplier": 0.5}).model.hidden_p == 0.125


def test_preset_yields_to_what_is_given_field_by_field() -> None:
    spec = SweepSpec.model_validate({"preset": "quickstart", "training": {"epochs": 9}, "space": {}})
    assert (spec.training.epochs, spec.training.bptt) == (9, 35)
    assert spec.space == {}


@pytest.mark.parametrize(("layers", "kappa"), [(1, 0.15), (3, 0.1)])
def test_a_trial_knows_the_kappa_that_nobody_gave(layers: int, kappa: float) -> None:
    given = {"corpus": {"name": "sotu"}, "model": {"layers": layers}, "budget": {"trials": 2}}
    spec = SweepSpec.model_validate(given)
    assert spec.trial_config("fd", {}).regularization.kappa == kappa
    assert spec.trial_config("fd", {"kappa": 0}).regularization.kappa == 0
