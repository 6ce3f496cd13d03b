"""A layer's two ways compute the same. T=5, B=3, I=7 (INPUTS), H=6."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models.lstm
from models.lstm import kept_weights, lstm
from tests.reference import assert_close_to_largest

T, B, INPUTS, H = 5, 3, 7, 6
WAYS: dict[str, Callable[..., Any]] = {
    "torch's": models.lstm._by_torch,
    "ours": models.lstm._by_our_recurrence,
}
DROPPED = pytest.mark.parametrize("weight_p", [0.0, 0.3])


class Given:
    """A layer with inputs, a state that is not zero, and a gradient for its outputs."""

    def __init__(
        self, weight_p: float, dtype: torch.dtype = torch.float64, steps: int = T, width: int = H
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.layer = nn.LSTM(INPUTS, width).to(dtype)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(normal(*parameter.shape))
        self.inputs_TBI = normal(steps, B, INPUTS).requires_grad_()
        self.state = normal(1, B, width), normal(1, B, width)
        self.kept_4HH = torch.rand(4 * width, width, generator=generator) >= weight_p if weight_p else None
        self.weight_p = weight_p
        self.d_outputs_TBH = normal(steps, B, width)

    def results(self, way: Callable[..., Any], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """The outputs, the last state, and the gradient of everything that has one."""
        outputs_TBH, state = way(self.layer, self.inputs_TBI, self.state, self.kept_4HH, self.weight_p, dtype)
        inputs = [self.inputs_TBI, *self.layer.parameters()]
        gradients = torch.autograd.grad(outputs_TBH, inputs, self.d_outputs_TBH)
        return itertools.chain([outputs_TBH.detach()], state, gradients)


@DROPPED
@pytest.mark.parametrize("steps", [1, T])
def test_both_ways_give_the_same_outputs_states_and_gradients(weight_p: float, steps: int) -> None:
    given = Given(weight_p, steps=steps)
    expected, found = (given.results(way) for way in WAYS.values())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if other.any():  # a single step from a state without gradient leaves some weights without one
            assert_close_to_largest(one, other, 1e-13)
        else:
            assert not one.any()


@DROPPED
def test_without_dropped_weights_it_is_the_layer_itself(weight_p: float) -> None:
    given = Given(weight_p)
    with torch.no_grad():
        given.layer.weight_hh_l0.copy_(kept_weights(given.layer.weight_hh_l0, given.kept_4HH, weight_p))
    expected_TBH, _ = given.layer(given.inputs_TBI, given.state)
    for way in WAYS.values():
        outputs_TBH, _ = way(given.layer, given.inputs_TBI, given.state, None, 0.0, None)
        assert_close_to_largest(outputs_TBH, expected_TBH, 1e-13)


@DROPPED
@pytest.mark.parametrize("way", list(WAYS))
def test_products_in_bfloat16_are_off_by_its_rounding_and_no_more(weight_p: float, way: str) -> None:
    given = Given(weight_p, torch.float32)
    expected = given.results(WAYS[way])
    for one, other in zip(given.results(WAYS[way], torch.bfloat16), expected, strict=True):
        assert one.dtype == torch.float32
        assert not torch.equal(one, other)
        assert_close_to_largest(one, other, 0.1)


@pytest.mark.parametrize("width", [37, 64])
def test_in_single_precision_ours_is_what_torchs_is_in_double(width: int) -> None:
    """Where oneDNN lays the matrix out: it does so for no other precision of ours."""
    single, double = (Given(0.3, dtype, steps=9, width=width) for dtype in (torch.float32, torch.float64))
    with torch.no_grad():
        for one, other in zip(single.layer.parameters(), double.layer.parameters(), strict=True):
            other.copy_(one.mul_(0.2))
        double.inputs_TBI.copy_(single.inputs_TBI)
        double.d_outputs_TBH.copy_(single.d_outputs_TBH)
    double.state = single.state[0].double(), single.state[1].double()
    double.kept_4HH = single.kept_4HH
    expected = double.results(models.lstm._by_torch)
    for one, other in zip(single.results(models.lstm._by_our_recurrence), expected, strict=True):
        assert_close_to_largest(one.double(), other, 1e-5)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    given = Given(0.3)
    for way in WAYS.values():
        outputs_TBH, _ = way(given.layer, given.inputs_TBI, given.state, given.kept_4HH, 0.3, None)
        loss = outputs_TBH.square().sum()
        (gradient,) = torch.autograd.grad(loss, [given.layer.weight_hh_l0], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.backward(gradient.sum())


def test_the_state_that_is_carried_has_no_gradient_and_keeps_nothing_else_alive() -> None:
    given = Given(0.3)
    for way in WAYS.values():
        _, state = way(given.layer, given.inputs_TBI, given.state, given.kept_4HH, given.weight_p, None)
        assert [tuple(each.shape) for each in state] == [(1, B, H)] * 2
        assert not any(each.requires_grad for each in state)
        assert {each.untyped_storage().nbytes() for each in state} == {8 * B * H}


@pytest.mark.parametrize("ours", [True, False])
def test_the_way_is_chosen_by_what_is_faster(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths and lengths of this file are below the bounds, and so small ones stand in for them."""
    taken: list[str] = []
    for name in ("_by_torch", "_by_our_recurrence"):
        monkeypatch.setattr(models.lstm, name, lambda *arguments, name=name: taken.append(name))
    monkeypatch.setattr(models.lstm, "NARROWEST", H if ours else H + 1)
    monkeypatch.setattr(models.lstm, "SHORTEST", T)
    for given in (Given(0.3, torch.float32), Given(0.3, torch.float32, T - 1), Given(0.3)):
        lstm(given.layer, given.inputs_TBI, given.state, given.kept_4HH, given.weight_p)
    with torch.no_grad():  # the pass of Expectation-Linear Dropout that has no gradient equals one that has
        given = Given(0.3, torch.float32)
        lstm(given.layer, given.inputs_TBI, given.state, given.kept_4HH, given.weight_p)
    chosen = "_by_our_recurrence" if ours else "_by_torch"
    assert taken == [chosen, "_by_torch", "_by_torch", chosen]


def test_dropped_weights_are_zero_and_the_rest_is_scaled() -> None:
    weight, kept = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]])
    assert kept_weights(weight, kept, 0.75).tolist() == [[4, 0], [0, 16]]
    assert kept_weights(weight, None, 0.0) is weight
