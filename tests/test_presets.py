"""Presets: nothing in one is without a source, and those of the paper are the paper's."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from trials.presets import DECLARED, PRESETS
from trials.spec import SweepSpec, TrialConfig


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


def config_of(preset: str) -> TrialConfig:
    spec = SweepSpec.model_validate({"preset": preset})
    return spec.trial_config(next(iter(spec.arms)), {})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_value_of_a_preset_lacks_a_source(name: str) -> None:
    sources = {field: source for field, _, source in DECLARED[name].written}
    assert len(sources) == len(DECLARED[name].written), "a field is written once"
    assert all(len(source) > 3 for source in sources.values())
    for leaf in set(leaves(PRESETS[name])) - {"name"}:
        assert any(leaf == field or leaf.startswith(f"{field}.") for field in sources), leaf


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_of_the_paper_leaves_nothing_to_defaults(name: str) -> None:
    config = config_of(name)
    plateau_only = {"lr_patience", "lr_factor"} if config.training.lr_schedule == "constant" else set()
    for section in ("model", "training", "regularization"):
        fields = {field.name for field in dataclasses.fields(getattr(config, section))}
        without_effect = plateau_only | {"eld_stop_gradient", "recompute", "cuda_graphs"}
        assert fields - set(PRESETS[name][section]) <= without_effect


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_a_whole_sweep_of_its_own(name: str) -> None:
    assert SweepSpec.model_validate({"preset": name}).budget.trials >= 1


# Batch, bptt; output, hidden, input, embed, weight p; alpha, beta; n; kappa.
BY_THE_PAPER: dict[str, tuple[float | None, ...]] = {
    "awd-lstm-ptb": (20, 70, 0.4, 0.25, 0.4, 0.1, 0.5, 2, 1, 5, 0),
    "fraternal-ptb": (20, 70, 0.4, 0.25, 0.4, 0.1, 0.5, 0, 0, 60, 0.1),
    "fraternal-ptb-released": (20, 70, 0.4, 0.3, 0.4, 0.1, 0.5, 0, 0, 60, 0.1),
    "awd-lstm-wt2": (80, 70, 0.4, 0.2, 0.65, 0.1, 0.5, 2, 1, 5, 0),
    "fraternal-wt2": (40, 70, 0.4, 0.2, 0.65, 0.1, 0.5, 0, 0, 60, 0.1),
    "fraternal-wt2-released": (40, 70, 0.4, 0.3, 0.4, 0.1, 0.5, 0, 0, 60, 0.1),
    "ablation-ptb": (64, 35, 0.4, 0.0, 0.65, 0.1, 0.5, 0, 0, 5, 0),
}


@pytest.mark.parametrize("name", BY_THE_PAPER)
def test_a_preset_is_the_references_row(name: str) -> None:
    config = config_of(name)
    model, training, regularization = config.model, config.training, config.regularization
    assert BY_THE_PAPER[name] == (
        *(training.batch_size, training.bptt),
        *(model.output_p, model.hidden_p, model.input_p, model.embed_p, model.weight_p),
        *(regularization.alpha, regularization.beta),
        *(training.non_monotone_interval, regularization.effective_kappa),
    )


def test_the_ablation_has_a_trial_for_each_method() -> None:
    spec = SweepSpec.model_validate({"preset": "ablation-ptb"})
    assert spec.budget.trials == len(spec.arms) == 5
    assert (spec.training.lr_schedule, spec.training.lr_patience, spec.training.lr_factor) == (
        "plateau",
        20,
        0.1,
    )
    assert (spec.training.averaging, spec.training.state_reset_p) == ("none", 0.01)


def test_another_regularizer_on_the_baseline_has_its_own_kappa() -> None:
    spec = SweepSpec.model_validate(
        {"preset": "awd-lstm-ptb", "regularization": {"regularizer": "fraternal"}}
    )
    assert spec.regularization.effective_kappa == 0.1
