"""The laws of the regularizers. T=5, B=3, V=11: every axis has a size of its own."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from models.awd_lstm import AWDLSTM, Pass, State
from models.config import AWDLSTMConfig
from models.masks import Masks
from regularizers.config import Regularization
from regularizers.losses import LossParts, loss_parts
from regularizers.table import REGULARIZERS, UnknownRegularizer, get_regularizer
from tests.reference import assert_close_to_largest, reference_objective, reference_step

T, B, V = 5, 3, 11
DROPPED = AWDLSTMConfig(embedding_size=7, hidden_size=6, layers=2)
KEPT = replace(DROPPED, embed_p=0, input_p=0, hidden_p=0, output_p=0, weight_p=0)
EVERY = pytest.mark.parametrize("name", sorted(REGULARIZERS))
WITH_DIFFERENCE = pytest.mark.parametrize(
    "name", sorted(name for name, row in REGULARIZERS.items() if row.penalty == "difference")
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Window:
    """A float64 model, one window of text, a starting state that is not zero, and the masks of two passes."""

    def __init__(self, config: AWDLSTMConfig = DROPPED, length: int = T) -> None:
        self.model = AWDLSTM(config, V, seeded(1)).double()
        self.tokens_TB = torch.randint(V, (length, B), generator=seeded(2))
        self.targets_TB = torch.randint(V, (length, B), generator=seeded(3))
        self.state: State = tuple(
            (
                torch.rand(h.shape, generator=seeded(4)).double(),
                torch.rand(c.shape, generator=seeded(5)).double(),
            )
            for h, c in self.model.zero_state(B)
        )
        self.first, self.second = self.masks(6), self.masks(7)

    def masks(self, seed: int) -> Masks:
        return self.model.draw_masks(B, len(self.tokens_TB), seed)

    def run(self, masks: Masks | None) -> Pass:
        result: Pass = self.model(self.tokens_TB, self.state, masks)
        return result

    def second_pass(self, regularization: Regularization) -> Pass | None:
        masks = {"none": None, "new_masks": self.second, "no_dropout": None}
        kind = regularization.declaration.second_pass
        return None if kind == "none" else self.run(masks[kind])

    def parts(self, regularization: Regularization) -> LossParts:
        first, second = self.run(self.first), self.second_pass(regularization)
        return loss_parts(regularization, first, second, self.model, self.targets_TB)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


@EVERY
def test_the_reference_has_a_formula_for_this_row(name: str) -> None:
    """For a new row this fails, and says what to do, until its formula is written down a second time."""
    logits = torch.rand(T, B, V, generator=seeded(1), dtype=torch.float64)
    reference_objective(
        name, 1.0, True, torch.zeros(T, B, dtype=torch.long), logits, lambda: logits, lambda: logits
    )


def test_a_row_that_the_reference_does_not_know_is_named() -> None:
    logits = torch.zeros(T, B, V)
    with pytest.raises(
        AssertionError, match=r"tests/reference\.py has no formula for .* 'made_up': write it"
    ):
        reference_objective("made_up", 1.0, True, torch.zeros(T, B), logits, lambda: logits, lambda: logits)


@EVERY
def test_a_row_asks_for_nothing_that_its_passes_lack(name: str) -> None:
    row = REGULARIZERS[name]
    assert row.name == name
    assert (row.second_pass != "none") == (row.penalty == "difference" or row.target == "mean")
    assert row.second_pass != "none" or not row.second_gradient
    assert row.target == "first" or row.second_gradient
    assert (row.default_kappa > 0) == (row.penalty != "none")
    assert row.source


@EVERY
@pytest.mark.parametrize(("kappa", "alpha", "beta"), [(0.3, 2, 0), (0, 0, 1)])
@pytest.mark.parametrize("length", [1, 50])  # 50 * B words are more than the head takes at once.
def test_loss_and_gradients_equal_the_reference_in_a_short_and_a_long_window(
    name: str, length: int, kappa: float, alpha: float, beta: float
) -> None:
    window = Window(DROPPED, length)
    regularization = Regularization(name, kappa=kappa, alpha=alpha, beta=beta)
    total = window.parts(regularization).total
    weights = {
        key: tensor.detach().clone().requires_grad_() for key, tensor in window.model.state_dict().items()
    }
    expected, _ = reference_step(
        weights, window.model.config, regularization, kappa,
        window.tokens_TB, window.targets_TB, window.state, window.first, window.second,
    )  # fmt: skip
    assert_close_to_largest(total, expected)
    references = torch.autograd.grad(expected, list(weights.values()))
    for gradient, reference in zip(window.gradients(total), references, strict=True):
        assert_close_to_largest(gradient, reference)


@EVERY
def test_parts_add_up_to_the_total(name: str) -> None:
    parts = Window().parts(Regularization(name, kappa=0.7, alpha=2, beta=3))
    torch.testing.assert_close(parts.total, parts.target + 0.7 * parts.penalty + 2 * parts.ar + 3 * parts.tar)


@EVERY
def test_reported_loss_is_the_first_pass_whatever_is_optimised(name: str) -> None:
    window = Window()
    baseline = window.parts(Regularization()).total
    parts = window.parts(Regularization(name, alpha=2, beta=1))
    assert parts.first_target.item() == baseline.item()
    assert not parts.first_target.requires_grad


@WITH_DIFFERENCE
def test_penalty_is_zero_when_nothing_is_dropped(name: str) -> None:
    assert Window(KEPT).parts(Regularization(name)).penalty.item() == 0


@WITH_DIFFERENCE
def test_penalty_is_positive_when_something_is_dropped(name: str) -> None:
    assert Window().parts(Regularization(name)).penalty.item() > 0


@WITH_DIFFERENCE
def test_gradient_is_the_baselines_when_nothing_is_dropped(name: str) -> None:
    window = Window(KEPT)
    baseline = window.gradients(window.parts(Regularization()).total)
    for gradient, expected in zip(
        window.gradients(window.parts(Regularization(name)).total), baseline, strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@EVERY
def test_what_is_added_to_the_target_is_linear_in_kappa(name: str) -> None:
    window = Window()

    def added(kappa: float) -> Tensor:
        parts = window.parts(Regularization(name, kappa=kappa))
        return parts.total - parts.target

    torch.testing.assert_close(added(0.6), 3 * added(0.2), rtol=1e-9, atol=1e-12)


@WITH_DIFFERENCE
def test_a_bias_in_the_decoder_never_changes_the_penalty(name: str) -> None:
    window = Window()
    before = window.parts(Regularization(name)).penalty
    with torch.no_grad():
        window.model.decoder_bias.normal_(0, 10, generator=seeded(8))
    torch.testing.assert_close(window.parts(Regularization(name)).penalty, before, rtol=1e-10, atol=0)


def test_a_bias_in_the_decoder_changes_the_norm() -> None:
    window = Window()
    before = window.parts(Regularization("prediction_norm")).penalty.item()
    with torch.no_grad():
        window.model.decoder_bias.normal_(0, 10, generator=seeded(8))
    assert window.parts(Regularization("prediction_norm")).penalty.item() > before + 1


@EVERY
def test_second_pass_has_gradient_exactly_where_the_table_says(name: str) -> None:
    window = Window()
    regularization = Regularization(name)
    second = window.second_pass(regularization)
    if second is None:
        assert REGULARIZERS[name].second_pass == "none"
        return
    first = window.run(window.first)
    total = loss_parts(regularization, first, second, window.model, window.targets_TB).total
    (gradient,) = torch.autograd.grad(total, [second.dropped_TBH], allow_unused=True)
    assert (gradient is not None) == REGULARIZERS[name].second_gradient


def test_both_and_plain_eld_differ_only_by_the_target_once_gradient_flows() -> None:
    window = Window()

    def passes(kappa: float) -> tuple[LossParts, LossParts]:
        plain = Regularization("expectation_linear", kappa=kappa, eld_stop_gradient=False)
        return window.parts(plain), window.parts(Regularization("expectation_linear_both", kappa=kappa))

    plain, both = passes(kappa=0)
    targets = window.gradients(both.total - plain.total)
    plain, both = passes(kappa=0.25)
    totals = window.gradients(both.total - plain.total)
    assert both.penalty.item() == plain.penalty.item()
    assert max(gradient.abs().max().item() for gradient in targets) > 1e-3
    for total, target in zip(totals, targets, strict=True):
        torch.testing.assert_close(total, target, rtol=0, atol=1e-14)


def test_stopping_the_gradient_changes_the_gradient_but_not_the_loss() -> None:
    window = Window()
    stopped = window.parts(Regularization("expectation_linear")).total
    flowing = window.parts(Regularization("expectation_linear", eld_stop_gradient=False)).total
    assert stopped.item() == flowing.item()
    assert not torch.allclose(window.gradients(stopped)[0], window.gradients(flowing)[0])


def sampled_logits(window: Window, count: int) -> Tensor:
    """(count, T, B, V): the predictions under independent masks."""
    with torch.no_grad():
        passes = [window.run(window.masks(100 + draw)) for draw in range(count)]
        return window.model.decode(torch.stack([each.dropped_TBH for each in passes]))


@dataclass(frozen=True)
class Undecoded:
    """The decoder whose logits are the hidden vectors as they are."""

    decoder_VH: Tensor = field(default_factory=lambda: torch.eye(V, dtype=torch.float64))
    decoder_bias: Tensor = field(default_factory=lambda: torch.zeros(V, dtype=torch.float64))


def mean_penalty(name: str, firsts: Tensor, seconds: Tensor) -> float:
    def as_pass(logits_TBV: Tensor) -> Pass:
        return Pass(logits_TBV, logits_TBV, ())

    targets_TB = torch.zeros(T, B, dtype=torch.long)
    pairs = [(as_pass(l1), as_pass(l2)) for l1, l2 in zip(firsts, seconds, strict=True)]
    parts = [loss_parts(Regularization(name), *pair, Undecoded(), targets_TB) for pair in pairs]
    return math.fsum(part.penalty.item() for part in parts) / len(parts)


def test_fraternal_penalty_is_twice_the_variance_and_at_most_four_times_the_expectation_linear_one() -> None:
    """Remark 1 and Proposition 1 of Zolna et al. 2018, by Monte Carlo."""
    window = Window()
    logits = sampled_logits(window, 2000)
    without = window.model.decode(window.run(None).dropped_TBH).detach().expand(1000, -1, -1, -1)
    fraternal = mean_penalty("fraternal", logits[:1000], logits[1000:])
    expectation_linear = mean_penalty("expectation_linear", logits[:1000], without)
    assert fraternal == pytest.approx(2 * logits.var(dim=0).mean().item(), rel=0.03)
    assert fraternal <= 4 * expectation_linear


def test_ar_looks_at_the_dropped_output_and_tar_at_the_raw_one() -> None:
    window = Window()
    first = window.run(window.first)
    second = window.run(window.second)
    parts = loss_parts(Regularization("fraternal"), first, second, window.model, window.targets_TB)
    steps = [(first.raw_TBH[t] - first.raw_TBH[t - 1]).square().mean() for t in range(1, T)]
    torch.testing.assert_close(parts.ar, (first.dropped_TBH**2).mean())
    torch.testing.assert_close(parts.tar, sum(steps) / len(steps))


def test_tar_of_a_window_of_one_step_is_zero() -> None:
    parts = Window(length=1).parts(Regularization(beta=1))
    assert parts.tar.item() == 0
    assert math.isfinite(parts.total.item())


def test_kappa_zero_means_zero() -> None:
    parts = Window().parts(Regularization("fraternal", kappa=0))
    assert parts.penalty.item() > 0
    assert parts.total.item() == parts.target.item()


@EVERY
def test_kappa_not_given_means_the_tables(name: str) -> None:
    assert Regularization(name).effective_kappa == REGULARIZERS[name].default_kappa
    assert Regularization(name, kappa=0).effective_kappa == 0


def test_kappas_that_the_paper_names_are_its_defaults() -> None:
    named = {"fraternal": 0.1, "expectation_linear": 0.25, "expectation_linear_both": 0.25, "pi_model": 0.15}
    assert {name: REGULARIZERS[name].default_kappa for name in named} == named


@EVERY
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_kappa_not_given_is_written_out_for_so_many_layers(name: str, layers: int) -> None:
    """0.15 for fraternal dropout on one layer, as in the released code's ablation; zero stays zero."""
    single = {"fraternal": 0.15}.get(name) if layers == 1 else None
    expected = REGULARIZERS[name].default_kappa if single is None else single
    assert Regularization(name).completed(layers).kappa == expected
    assert Regularization(name, kappa=0).completed(layers).kappa == 0
    assert Regularization(name, kappa=0.7, alpha=2).completed(layers) == Regularization(name, 0.7, 2)


def test_an_unknown_regularizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownRegularizer, match=r"'fratrenal'; known: expectation_linear, .*, prediction_norm"
    ):
        get_regularizer("fratrenal")
    with pytest.raises(ValidationError, match="unknown regularizer 'fratrenal'; known: "):
        Regularization("fratrenal")


@pytest.mark.parametrize("field", ["kappa", "alpha", "beta"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_factor_is_finite_and_not_negative(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        TypeAdapter(Regularization).validate_python({field: value})


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="lambda"):
        TypeAdapter(Regularization).validate_python({"lambda": 1})


def test_every_field_is_described_in_the_schema() -> None:
    for config in (Regularization, AWDLSTMConfig):
        properties = TypeAdapter(config).json_schema()["properties"]
        assert [name for name, field in properties.items() if not field.get("description")] == []
