"""The laws of the head: what it makes of logits that it never holds is what the whole logits give.

N=300, H=7, V=11: a different size on every axis; more rows than are taken at once, and no multiple of them.
"""

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regularizers.head
from models.pieces import FEWEST_ROWS, WIDEST_GRAM
from regularizers.head import FEW_ROWS, HeadLosses, head_losses, mean_square_difference
from regularizers.table import REGULARIZERS
from tests.reference import reference_objective

N, H, V = 300, 7, 11
WIDE = max(FEWEST_ROWS, WIDEST_GRAM) + 9
NAMES = [*sorted(REGULARIZERS), "expectation_linear, gradient flowing"]
EVERY = pytest.mark.parametrize("name", NAMES)
EACH_WAY = pytest.mark.parametrize("width", [H, WIDE])
LOOKING = pytest.mark.parametrize("may_look", [True, False], ids=["looking", "not looking"])
"""As on a CPU, and as on a GPU."""


class Case:
    """Hidden vectors of two passes, a decoder with a bias, targets; all but the targets take gradients."""

    def __init__(
        self, tokens: int = N, width: int = H, size: int = V, dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = [(tokens, width), (tokens, width), (size, width), (size,)]
        drawn = [torch.empty(shape, dtype=torch.float64).normal_(generator=generator) for shape in shapes]
        self.inputs = [x.to(dtype).requires_grad_() for x in drawn]
        self.targets_N = torch.randint(size, (tokens,), generator=generator)

    def to(self, device: str) -> "Case":
        self.inputs = [x.detach().to(device).requires_grad_() for x in self.inputs]
        self.targets_N = self.targets_N.to(device)
        return self

    def head(self, name: str, kappa: float = 0.3, dtype: torch.dtype | None = None) -> HeadLosses:
        first_NH, second_NH, decoder_VH, bias_V = self.inputs
        row = REGULARIZERS[name.split(",")[0]]
        return head_losses(
            [first_NH] if row.second_pass == "none" else [first_NH, second_NH],
            decoder_VH,
            bias_V,
            self.targets_N,
            target=row.target,
            penalty=row.penalty,
            kappa=kappa,
            second_gradient=row.second_gradient or "flowing" in name,
            dtype=dtype,
        )

    def whole(self, name: str, kappa: float = 0.3) -> Tensor:
        """The total from the whole logits, by autograd."""
        first_NH, second_NH, decoder_VH, bias_V = self.inputs
        l1, l2 = (hidden_NH @ decoder_VH.t() + bias_V for hidden_NH in (first_NH, second_NH))
        stop_gradient = "flowing" not in name
        return reference_objective(
            name.split(",")[0], kappa, stop_gradient, self.targets_N, l1, lambda: l2, lambda: l2
        )

    def gradients(self, loss: Tensor, keep: bool = False) -> list[Tensor]:
        return list(
            torch.autograd.grad(
                loss, self.inputs, retain_graph=keep, allow_unused=True, materialize_grads=True
            )
        )


def assert_close_in_norm(one: Tensor, other: Tensor, tolerance: float) -> None:
    assert (one - other).norm().item() <= tolerance * other.norm().item()


@EVERY
@EACH_WAY
@LOOKING
@pytest.mark.parametrize("kappa", [0.3, 0])
@pytest.mark.parametrize("tokens", [N, 2 * FEWEST_ROWS, 1])
def test_total_and_gradients_are_those_of_the_whole_logits(
    name: str, width: int, kappa: float, tokens: int, may_look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regularizers.head, "_may_look", lambda _: may_look)
    case = Case(tokens, width)
    total, whole = case.head(name, kappa).total, case.whole(name, kappa)
    assert_close_in_norm(total, whole, 1e-12)
    for gradient, expected in zip(case.gradients(0.7 * total), case.gradients(0.7 * whole), strict=True):
        assert_close_in_norm(gradient, expected, 1e-10)


@pytest.mark.gpu
def test_total_and_gradients_are_the_same_on_a_gpu() -> None:
    for name, width in itertools.product(NAMES, (H, WIDE)):
        case = Case(width=width).to("cuda")
        total, whole = case.head(name).total, case.whole(name)
        for gradient, expected in zip(case.gradients(total), case.gradients(whole), strict=True):
            assert_close_in_norm(gradient, expected, 1e-10)


@EVERY
@EACH_WAY
@LOOKING
def test_single_precision_is_as_close_as_its_digits_allow(
    name: str, width: int, may_look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regularizers.head, "_may_look", lambda _: may_look)
    exact, case = Case(width=width), Case(width=width, dtype=torch.float32)
    total, whole = case.head(name).total, exact.whole(name)
    assert total.dtype == torch.float32
    assert_close_in_norm(total.double(), whole, 1e-6)
    for gradient, expected in zip(case.gradients(total), exact.gradients(whole), strict=True):
        assert_close_in_norm(gradient.double(), expected, 1e-5)


@EVERY
@EACH_WAY
def test_products_in_bfloat16_are_as_close_as_its_digits_allow(name: str, width: int) -> None:
    exact, case = Case(width=width), Case(width=width, dtype=torch.float32)
    total, whole = case.head(name, dtype=torch.bfloat16).total, exact.whole(name)
    assert total.dtype == torch.float32
    assert total.item() != case.head(name).total.item()
    assert_close_in_norm(total.double(), whole, 5e-3)
    for gradient, expected in zip(case.gradients(total), exact.gradients(whole), strict=True):
        assert_close_in_norm(gradient.double(), expected, 2e-2)


@EVERY
@EACH_WAY
def test_parts_add_up_to_the_total_which_alone_has_a_gradient(name: str, width: int) -> None:
    losses = Case(width=width).head(name)
    torch.testing.assert_close(losses.total, losses.target + 0.3 * losses.penalty)
    parts = (losses.total, losses.target, losses.first_target, losses.penalty)
    assert [part.requires_grad for part in parts] == [True, False, False, False]


@EVERY
@EACH_WAY
def test_first_target_is_the_same_bit_for_bit_whatever_else_is_made(name: str, width: int) -> None:
    case = Case(width=width)
    assert case.head(name).first_target.item() == case.head("none").total.item()


def test_a_penalty_is_the_same_by_either_way() -> None:
    case = Case(width=WIDE)
    by_chunks, by_gram = case.head("fraternal").penalty, case.head("pi_model").penalty
    torch.testing.assert_close(by_chunks, by_gram, rtol=1e-13, atol=0)


class RowsAlive(TorchDispatchMode):
    """Watches every operation, backward too, for the most rows of so many columns that there are at once."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.most = columns, 0
        self._alive: dict[int, tuple[int, int]] = {}
        """Of a storage: the tensors that are of it, and its rows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == self.columns:
                storage = tensor.untyped_storage()
                tensors, _ = self._alive.get(storage.data_ptr(), (0, 0))
                rows = storage.nbytes() // (tensor.element_size() * self.columns)
                self._alive[storage.data_ptr()] = tensors + 1, rows
                weakref.finalize(tensor, self._gone, storage.data_ptr())
        self.most = max(self.most, sum(rows for _, rows in self._alive.values()))
        return made

    def _gone(self, storage: int) -> None:
        tensors, rows = self._alive.pop(storage)
        if tensors > 1:
            self._alive[storage] = tensors - 1, rows


@EVERY
@EACH_WAY
def test_no_more_logits_exist_at_once_than_those_of_one_chunk(name: str, width: int) -> None:
    """Of each pass that has a target, and what of them is penalised; the decoder may be laid out anew."""
    row = REGULARIZERS[name.split(",")[0]]
    passes = 2 if row.target == "mean" else 1
    by_gram = row.penalty == "difference" and (passes == 1 or width <= WIDEST_GRAM)
    chunks = passes + (row.penalty != "none" and not by_gram)
    case = Case(tokens=1000, width=width, size=409)
    with RowsAlive(409) as alive:
        case.gradients(case.head(name).total)
    assert 0 < alive.most <= chunks * max(FEWEST_ROWS, width) + width
    with RowsAlive(409) as alive:
        case.gradients(case.whole(name))
    assert alive.most >= 1000


def test_logits_are_made_again_for_improbable_targets_a_few_at_a_time() -> None:
    case = Case(tokens=1000, width=H, size=409)
    _, _, decoder_VH, bias_V = case.inputs
    with torch.no_grad():
        bias_V[: 409 // 2] += 1000
    with RowsAlive(409) as alive:
        total = case.head("none").total
        case.gradients(total)
    assert alive.most <= FEWEST_ROWS + FEW_ROWS + H
    assert_close_in_norm(
        total,
        torch.nn.functional.cross_entropy(case.inputs[0] @ decoder_VH.t() + bias_V, case.targets_N),
        1e-12,
    )


@LOOKING
def test_a_loss_is_finite_where_the_targets_probability_is_too_small_for_a_float(
    may_look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regularizers.head, "_may_look", lambda _: may_look)
    bias_V = torch.tensor([300.0, 100.0, 0.0])
    zeros, targets_N = [torch.zeros(2, H)], torch.tensor([1, 2])
    losses = head_losses(zeros, torch.zeros(3, H), bias_V, targets_N, target="first", penalty="none", kappa=0)
    assert losses.target.item() == 250


@pytest.mark.parametrize("name", ["fraternal", "expectation_linear", "pi_model"])
@EACH_WAY
def test_passes_that_agree_differ_by_exactly_zero(name: str, width: int) -> None:
    case = Case(width=width)
    case.inputs[1] = case.inputs[0].detach().clone().requires_grad_()
    assert case.head(name).penalty.item() == 0


def test_a_constant_second_pass_gets_no_gradient_and_changes_the_decoders() -> None:
    case = Case()
    flowing, constant = (
        case.gradients(mean_square_difference(*case.inputs, second_gradient=second_gradient))
        for second_gradient in (True, False)
    )
    assert torch.equal(flowing[0], constant[0])
    assert torch.equal(flowing[1], -flowing[0])
    assert not constant[1].any()
    assert not torch.allclose(flowing[2], constant[2])
    assert not flowing[3].any()
    assert constant[3].all()


@EVERY
@EACH_WAY
def test_gradients_are_the_same_when_asked_for_twice(name: str, width: int) -> None:
    case = Case(width=width)
    total = case.head(name).total
    once, again = case.gradients(0.5 * total, keep=True), case.gradients(0.5 * total)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@EVERY
def test_a_tied_decoder_adds_up_what_both_of_its_uses_give(name: str) -> None:
    case = Case()
    first_NH, second_NH, table_VH, bias_V = case.inputs
    words_NH = table_VH[case.targets_N]
    case.inputs = [first_NH * words_NH, second_NH * words_NH, table_VH, bias_V]
    (gradient,) = torch.autograd.grad(case.head(name).total, table_VH, retain_graph=True)
    (expected,) = torch.autograd.grad(case.whole(name), table_VH)
    assert_close_in_norm(gradient, expected, 1e-10)


@EVERY
@EACH_WAY
def test_gradients_are_made_only_if_someone_can_ask_for_them(name: str, width: int) -> None:
    case, frozen = Case(width=width), Case(width=width)
    for x in frozen.inputs:
        x.requires_grad_(False)
    with FlopCounterMode(display=False) as asked:
        total = case.head(name).total
    with torch.no_grad(), FlopCounterMode(display=False) as without:
        assert torch.equal(case.head(name).total, total)
    with FlopCounterMode(display=False) as never:
        assert torch.equal(frozen.head(name).total, total)
    assert never.get_total_flops() == without.get_total_flops() < asked.get_total_flops()


@pytest.mark.parametrize("second_gradient", [True, False])
def test_a_difference_without_gradients_makes_one_wide_product_and_not_two(second_gradient: bool) -> None:
    case = Case(tokens=1, size=409)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        mean_square_difference(*case.inputs, second_gradient=second_gradient)
    assert 2 * 409 * H * H <= counted.get_total_flops() < 2 * (2 * 409 * H * H)


@EVERY
@EACH_WAY
def test_a_gradient_of_the_gradient_is_refused(name: str, width: int) -> None:
    case = Case(width=width)
    with pytest.raises(
        RuntimeError, match=r"create_graph asks for the gradient of a gradient, .* leave it out"
    ):
        torch.autograd.grad(case.head(name).total, case.inputs[0], create_graph=True)
