"""The laws of the head: what it makes of logits that it never holds is what the whole logits give.

N=300, H=7, V=11: a different size on every axis; more rows than are taken at once, and no multiple of them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regularizers.head import (
    FEWEST_ROWS_AT_ONCE,
    cross_entropy,
    mean_square,
    mean_square_difference,
)

N, H, V = 300, 7, 11
HEADS = ("cross_entropy", "mean_square", "difference", "difference_of_a_constant")
EVERY = pytest.mark.parametrize("name", HEADS)


class Case:
    """Hidden vectors of two passes, a decoder with a bias, and targets; the first four take gradients."""

    def __init__(self, n: int = N, width: int = H, size: int = V, device: str = "cpu") -> None:
        def normal(*shape: int) -> Tensor:
            drawn = torch.empty(shape, dtype=torch.float64).normal_(generator=generator)
            return drawn.to(device).requires_grad_()

        generator = torch.Generator().manual_seed(1)
        self.inputs = (normal(n, width), normal(n, width), normal(size, width), normal(size))
        self.targets_N = torch.randint(size, (n,), generator=generator).to(device)

    def cast(self, dtype: torch.dtype) -> "Case":
        self.inputs = tuple(x.detach().to(dtype).requires_grad_() for x in self.inputs)  # type: ignore[assignment]
        return self

    def head(self, name: str) -> Tensor:
        first_NH, second_NH, decoder_VH, bias_V = self.inputs
        heads: dict[str, Callable[[], Tensor]] = {
            "cross_entropy": lambda: cross_entropy(first_NH, decoder_VH, bias_V, self.targets_N),
            "mean_square": lambda: mean_square(first_NH, decoder_VH, bias_V),
            "difference": lambda: mean_square_difference(
                first_NH, second_NH, decoder_VH, bias_V, second_gradient=True
            ),
            "difference_of_a_constant": lambda: mean_square_difference(
                first_NH, second_NH, decoder_VH, bias_V, second_gradient=False
            ),
        }
        return heads[name]()

    def whole(self, name: str) -> Tensor:
        """The same from the whole logits, by autograd."""
        first_NH, second_NH, decoder_VH, bias_V = self.inputs
        l1_NV, l2_NV = (hidden_NH @ decoder_VH.t() + bias_V for hidden_NH in (first_NH, second_NH))
        wholes: dict[str, Callable[[], Tensor]] = {
            "cross_entropy": lambda: F.cross_entropy(l1_NV, self.targets_N),
            "mean_square": lambda: (l1_NV**2).mean(),
            "difference": lambda: ((l1_NV - l2_NV) ** 2).mean(),
            "difference_of_a_constant": lambda: ((l1_NV - l2_NV.detach()) ** 2).mean(),
        }
        return wholes[name]()

    def gradients(self, loss: Tensor, keep: bool = False) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                loss, self.inputs, retain_graph=keep, allow_unused=True, materialize_grads=True
            )
        )


def assert_close_in_norm(one: Tensor, other: Tensor, tolerance: float) -> None:
    assert (one - other).norm().item() <= tolerance * other.norm().item()


DEVICES = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
        ),
    ],
)


@DEVICES
@EVERY
@pytest.mark.parametrize(
    ("n", "width"),
    [(N, H), (2 * FEWEST_ROWS_AT_ONCE, H), (1, H), (FEWEST_ROWS_AT_ONCE + 50, FEWEST_ROWS_AT_ONCE + 9)],
)
def test_value_and_gradients_are_those_of_the_whole_logits(
    name: str, n: int, width: int, device: str
) -> None:
    case = Case(n, width, device=device)
    value, whole = case.head(name), case.whole(name)
    assert_close_in_norm(value, whole, 1e-12)
    for gradient, expected in zip(case.gradients(0.3 * value), case.gradients(0.3 * whole), strict=True):
        assert_close_in_norm(gradient, expected, 1e-10)


@DEVICES
@EVERY
def test_single_precision_is_as_close_as_its_digits_allow(name: str, device: str) -> None:
    exact, case = Case(device=device), Case(device=device).cast(torch.float32)
    value, whole = case.head(name), exact.whole(name)
    assert value.dtype == torch.float32
    assert_close_in_norm(value.double(), whole, 1e-6)
    for gradient, expected in zip(case.gradients(value), exact.gradients(whole), strict=True):
        assert_close_in_norm(gradient.double(), expected, 1e-5)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation, backward too, for the number of elements of the largest tensor it makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@EVERY
def test_no_more_logits_exist_at_once_than_those_of_one_chunk(name: str) -> None:
    size = 97
    case = Case(n=1000, size=size)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        case.gradients(case.head(name))
    assert largest.elements <= max(FEWEST_ROWS_AT_ONCE * size, 1000 * (H + 1))
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        case.gradients(case.whole(name))
    assert largest.elements == 1000 * size


def test_a_loss_is_finite_where_the_targets_probability_is_too_small_for_a_float() -> None:
    bias_V = torch.tensor([300.0, 100.0, 0.0])
    loss = cross_entropy(torch.zeros(2, H), torch.zeros(3, H), bias_V, torch.tensor([1, 2]))
    assert loss.item() == 250


def test_passes_that_agree_differ_by_exactly_zero() -> None:
    hidden_NH, _, decoder_VH, bias_V = Case().inputs
    for second_gradient in (True, False):
        difference = mean_square_difference(
            hidden_NH, hidden_NH.clone(), decoder_VH, bias_V, second_gradient=second_gradient
        )
        assert difference.item() == 0
        assert not any(g.any() for g in torch.autograd.grad(difference, (hidden_NH, decoder_VH)))


def test_a_constant_second_pass_gets_no_gradient_and_changes_the_decoders() -> None:
    case = Case()
    flowing, constant = (case.gradients(case.head(name)) for name in HEADS[2:])
    assert torch.equal(flowing[0], constant[0])
    assert torch.equal(flowing[1], -flowing[0])
    assert not constant[1].any()
    assert not flowing[3].any()
    assert not torch.allclose(flowing[2], constant[2])
    assert constant[3].all()


@EVERY
def test_gradients_are_the_same_when_asked_for_twice(name: str) -> None:
    case = Case()
    value = case.head(name)
    once, again = case.gradients(value, keep=True), case.gradients(value)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@EVERY
def test_a_tied_decoder_adds_up_what_both_of_its_uses_give(name: str) -> None:
    case = Case()
    first_NH, second_NH, table_VH, bias_V = case.inputs
    case.inputs = (
        first_NH * table_VH[case.targets_N],
        second_NH * table_VH[case.targets_N],
        table_VH,
        bias_V,
    )
    head, whole = case.head(name), case.whole(name)
    (gradient,), (expected,) = (
        torch.autograd.grad(loss, table_VH, retain_graph=True) for loss in (head, whole)
    )
    assert_close_in_norm(gradient, expected, 1e-10)


@EVERY
def test_gradients_are_made_only_if_someone_can_ask_for_them(name: str) -> None:
    case, frozen = Case(), Case()
    for x in frozen.inputs:
        x.requires_grad_(False)
    with FlopCounterMode(display=False) as asked:
        value = case.head(name)
    with torch.no_grad(), FlopCounterMode(display=False) as without:
        assert torch.equal(case.head(name), value)
    with FlopCounterMode(display=False) as never:
        assert torch.equal(frozen.head(name), value)
    assert never.get_total_flops() == without.get_total_flops() < asked.get_total_flops()


@EVERY
def test_a_gradient_of_the_gradient_is_refused(name: str) -> None:
    case = Case()
    with pytest.raises(
        RuntimeError, match=r"create_graph asks for the gradient of a gradient, .* leave it out"
    ):
        torch.autograd.grad(case.head(name), case.inputs[0], create_graph=True)
