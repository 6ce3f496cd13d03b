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

    def __init__(self, weight_p: float, dtype: torch.dtype = torch.float64, steps: int = T) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.layer = nn.LSTM(INPUTS, H).to(dtype)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(normal(*parameter.shape))
        self.inputs_TBI = normal(steps, B, INPUTS).requires_grad_()
        self.state = normal(1, B, H), normal(1, B, H)
        self.kept_4HH = torch.rand(4 * H, H, generator=generator) >= weight_p if weight_p else None
        self.weight_p = weight_p
        self.d_outputs_TBH = normal(steps, B, H)

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


def test_the_state_that_is_carried_has_no_gradient_and_is_no_view_of_the_outputs_graph() -> None:
    given = Given(0.3)
    for way in WAYS.values():
        _, state = way(given.layer, given.inputs_TBI, given.state, given.kept_4HH, given.weight_p, None)
        assert [tuple(each.shape) for each in state] == [(1, B, H)] * 2
        assert not any(each.requires_grad for each in state)


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
    with torch.no_grad():
        given = Given(0.3, torch.float32)
        lstm(given.layer, given.inputs_TBI, given.state, given.kept_4HH, given.weight_p)
    assert taken == ["_by_our_recurrence" if ours else "_by_torch", *["_by_torch"] * 3]


def test_dropped_weights_are_zero_and_the_rest_is_scaled() -> None:
    weight, kept = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]])
    assert kept_weights(weight, kept, 0.75).tolist() == [[4, 0], [0, 16]]
    assert kept_weights(weight, None, 0.0) is weight
