"""What training does to the weights is what the reference says, to 1e-10 of each parameter's largest value.

Two windows of 5 and mostly of 2 steps, the state carried between them; B=3, V=11, E=7, H=6 or, where the
widths are equal, 7.
"""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import models.lstm
import regularizers.head
import regularizers.table
from models.awd_lstm import AWDLSTM, Pass, State
from models.config import AWDLSTMConfig
from models.masks import Masks
from regularizers.config import Regularization
from regularizers.losses import loss_parts
from regularizers.table import REGULARIZERS
from tests.reference import MaskRecorder, Weights, assert_close_to_largest, reference_step
from trials.recorded import Recorded
from trials.spec import TrainingConfig
from trials.training import Training

B, V, E, H = 3, 11, 7, 6
STEPS = 7
KAPPA = 0.3
TRAINING = TrainingConfig(
    epochs=1, batch_size=B, bptt=5, windows="fixed", lr=0.5, clip=1e9, weight_decay=0, averaging="none"
)
REGULARIZATIONS = {name: Regularization(name, kappa=KAPPA) for name in sorted(REGULARIZERS)} | {
    "expectation_linear, gradient flowing": Regularization(
        "expectation_linear", kappa=KAPPA, eld_stop_gradient=False
    )
}
SHAPES = {
    f"{'tied' if tied else 'untied'}-{layers}-{'locked' if locked else 'unlocked'}-E={E}-H={width}": (
        AWDLSTMConfig(E, width, layers, tied, locked, 0.2, 0.3, 0.25, 0.4, 0.35)
    )
    for tied, layers, locked, width in itertools.product((True, False), (1, 2, 3), (True, False), (H, E))
    if not (tied and layers == 1 and width != E)  # whose only layer is E wide whatever H is
}
SHAPES["nothing dropped"] = AWDLSTMConfig(E, H, 2, True, True, 0, 0, 0, 0, 0)
A_FEW_SHAPES = pytest.mark.parametrize(
    "shape", [f"tied-1-locked-E={E}-H={E}", f"untied-3-unlocked-E={E}-H={H}"]
)
EVERY = pytest.mark.parametrize("name", list(REGULARIZATIONS))
EVERY_SHAPE = pytest.mark.parametrize("shape", list(SHAPES))
AR_AND_TAR = pytest.mark.parametrize(("alpha", "beta"), [(0, 0), (2, 1)], ids=["plain", "AR-TAR"])


def build(
    model: AWDLSTMConfig,
    regularization: Regularization,
    training: TrainingConfig = TRAINING,
    device: str = "cpu",
    steps: int = STEPS,
) -> tuple[Training, list[Masks], Tensor]:
    """In float64: a training of one epoch, the masks that it will have drawn, and its text (T, B)."""
    size = steps + 1, training.batch_size
    columns_TB = torch.randint(V, size, generator=torch.Generator().manual_seed(2))
    ids = columns_TB.t().flatten().numpy().astype(np.int32)
    trained = Training(model, training, regularization, V, ids, ids[:2], 1, device)
    trained.model.double()
    recorder = MaskRecorder(trained.model)
    trained.model.draw_masks = recorder  # type: ignore[method-assign]
    return trained, recorder.drawn, columns_TB.to(device)


@cache
def model_of(shape: str) -> AWDLSTM:
    """One that takes any weights of that shape."""
    return AWDLSTM(SHAPES[shape], V, torch.Generator()).double()


def copied(model: AWDLSTM) -> Weights:
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


def second_pass(
    model: AWDLSTM, regularization: Regularization, tokens_TB: Tensor, state: State, new_masks: Masks
) -> Pass | None:
    kind = regularization.declaration.second_pass
    if kind == "none":
        return None
    result: Pass = model(tokens_TB, state, new_masks if kind == "new_masks" else None)
    return result


@EVERY
@EVERY_SHAPE
@AR_AND_TAR
def test_a_step_and_its_loss_equal_the_reference(name: str, shape: str, alpha: float, beta: float) -> None:
    assert_equal_to_the_reference(name, shape, alpha, beta, "cpu")


@EVERY
@A_FEW_SHAPES
def test_one_column_and_a_window_of_one_time_step_do_too(name: str, shape: str) -> None:
    assert_equal_to_the_reference(name, shape, 2, 1, "cpu", replace(TRAINING, batch_size=1), steps=6)


@EVERY
@A_FEW_SHAPES
def test_a_penalty_made_from_logits_whatever_the_width_does_too(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Fraternal Dropout is for all but narrow models; and with logits in several pieces."""
    monkeypatch.setattr(regularizers.table, "WIDEST_GRAM", 0)
    monkeypatch.setattr(regularizers.head, "FEWEST_ROWS", 4)
    assert_equal_to_the_reference(name, shape, 2, 1, "cpu")


@EVERY
@A_FEW_SHAPES
@pytest.mark.parametrize("recompute", [False, True])
def test_our_recurrence_and_recomputing_do_too(
    name: str, shape: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.lstm, "_ours_is_faster", lambda layer, inputs_TBI: True)
    training = replace(TRAINING, recompute=recompute)
    assert_equal_to_the_reference(name, shape, 2, 1, "cpu", training)


@EVERY
@EVERY_SHAPE
@pytest.mark.parametrize("recompute", [False, True])
def test_passes_side_by_side_at_fixed_addresses_do_too(name: str, shape: str, recompute: bool) -> None:
    """All that a CUDA graph needs, and here without one: what it would do again is called again."""
    training = replace(TRAINING, recompute=recompute)
    assert_equal_to_the_reference(name, shape, 2, 1, "cpu", training, recorded=True)


@pytest.mark.gpu
@EVERY
@A_FEW_SHAPES
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_too(name: str, shape: str, cuda_graphs: bool) -> None:
    training = replace(TRAINING, cuda_graphs=cuda_graphs)
    assert_equal_to_the_reference(name, shape, 2, 1, "cuda", training)


def assert_equal_to_the_reference(
    name: str,
    shape: str,
    alpha: float,
    beta: float,
    device: str,
    training_config: TrainingConfig = TRAINING,
    recorded: bool = False,
    steps: int = STEPS,
) -> None:
    config, regularization = SHAPES[shape], replace(REGULARIZATIONS[name], alpha=alpha, beta=beta)
    training, drawn, columns_TB = build(config, regularization, training_config, device, steps)
    if recorded:
        parameters = list(training.model.parameters())
        training._recorded = Recorded(parameters, training_config.longest_window, lambda compute: compute)
    model = model_of(shape).to(device)
    weights = initial = copied(training.model)
    state = model.zero_state(training_config.batch_size)
    (epoch,) = training.epochs()
    masks = iter(drawn)
    losses = []
    for start, end in ((0, TRAINING.bptt), (TRAINING.bptt, steps)):
        tokens_TB, targets_TB = columns_TB[start:end], columns_TB[start + 1 : end + 1]
        first = next(masks)
        second = next(masks) if regularization.declaration.second_pass == "new_masks" else first
        expected, next_state = reference_step(
            weights, config, regularization, KAPPA, tokens_TB, targets_TB, state, first, second
        )
        gradients = dict(zip(weights, torch.autograd.grad(expected, list(weights.values())), strict=True))
        if start:  # loss_parts alone, from the state that was carried
            model.load_state_dict(weights)
            one: Pass = model(tokens_TB, state, first)
            other = second_pass(model, regularization, tokens_TB, state, second)
            total = loss_parts(regularization, one, other, model, targets_TB).total
            assert_close_to_largest(total, expected)
            for gradient, reference in zip(
                torch.autograd.grad(total, list(model.parameters())), gradients.values(), strict=True
            ):
                assert_close_to_largest(gradient, reference)
            for carried, reference in zip(
                itertools.chain(*one.state), itertools.chain(*next_state), strict=True
            ):
                assert_close_to_largest(carried, reference)
        losses += [expected.item()] * (end - start)
        state = next_state
        rate = TRAINING.lr * (end - start) / TRAINING.bptt
        weights = {
            key: (weight - rate * gradients[key]).detach().requires_grad_() for key, weight in weights.items()
        }
    assert next(masks, None) is None
    assert epoch.optimised == pytest.approx(sum(losses) / len(losses), rel=1e-10)
    for key, parameter in training.model.named_parameters():
        assert parameter.grad is not None
        assert_close_to_largest(parameter.grad, gradients[key])
        assert_close_to_largest(parameter - initial[key], weights[key] - initial[key])
