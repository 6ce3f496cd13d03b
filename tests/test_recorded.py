"""What is recorded does, each time, what a step does: here in traces, since CUDA graphs need a GPU.

As a graph does, a trace has torch's operations in their order, of the tensors that they were of, and all else
as it was when it was made: whatever else changes from step to step, or follows from what a tensor has in it,
would be found.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from regularizers.config import Regularization
from tests.test_step import REGULARIZATIONS
from tests.test_training import (
    CONFIG,
    MODEL,
    TRAIN,
    VALID,
    V,
    assert_equal_weights,
    saved_and_read,
    untimed,
)
from trials.recorded import Recorded
from trials.spec import TrainingConfig
from trials.training import Training

UNLOCKED = replace(MODEL, locked=False)
FIXED = replace(CONFIG, epochs=2, bptt=5, lr=1.0, windows="fixed")
"""In each epoch nine windows of five steps, and one of four."""
TEXT = TRAIN[:150]


class Tracing:
    """A recorder that counts its traces, and how often they were replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        compute()  # as before a CUDA graph
        trace = make_fx(lambda: compute() or 0)()

        @torch.no_grad()
        def replay() -> None:
            self.replayed += 1
            trace()

        return replay


def build(
    config: TrainingConfig = CONFIG,
    regularization: Regularization | None = None,
    recorder: Tracing | None = None,
    dtype: torch.dtype = torch.float64,
) -> Training:
    """Recorded where a recorder is given."""
    regularization = regularization or Regularization("fraternal")
    training = Training(UNLOCKED, config, regularization, V, TEXT, VALID, 1)
    training.model.to(dtype)
    if recorder is not None:
        parameters = list(training.model.parameters())
        training._recorded = Recorded(training._losses, parameters, recorder)
    return training


@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_training_by_recorded_steps_is_that_by_others(name: str) -> None:
    """Windows of equal lengths and of another, masks that change with each, states carried and reset."""
    config = replace(FIXED, state_reset_p=0.3)
    regularization = replace(REGULARIZATIONS[name], alpha=2, beta=1)
    plain, recorded = build(config, regularization), build(config, regularization, recorder := Tracing())
    for expected, found in zip(plain.epochs(), recorded.epochs(), strict=True):
        for field in ("optimised", "train_loss", "penalty", "ar", "tar", "gradient_norm", "valid_loss"):
            assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-9), field
    lengths = [length for epoch in (1, 2) for length in recorded._windows_of(epoch)[0]]
    assert (recorder.recorded, recorder.replayed) == (len(set(lengths)), len(lengths)) == (2, 20)


@pytest.mark.parametrize("averaging", ["none", "from-start"])
def test_recorded_training_goes_on_from_any_state_bit_for_bit(
    averaging: Literal["none", "from-start"],
) -> None:
    config = replace(FIXED, averaging=averaging)
    whole = build(config, recorder=Tracing(), dtype=torch.float32)
    states = [saved_and_read(whole.state()) for _ in whole.run(pause_every_s=0)]
    for state in states[::7]:
        resumed = build(config, recorder=Tracing(), dtype=torch.float32)
        resumed.load_state(*state)
        list(resumed.epochs())
        assert untimed(resumed.history) == untimed(whole.history)
        assert_equal_weights(resumed.state()[0], whole.state()[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_products_in_bfloat16_are_off_by_its_rounding_and_no_more(recompute: bool) -> None:
    config = replace(FIXED, epochs=1, recompute=recompute)
    single = build(config, recorder=Tracing(), dtype=torch.float32)
    half = build(config, recorder=Tracing(), dtype=torch.float32)
    half._product_dtype = torch.bfloat16  # whether this processor has it or not
    (expected,), (found,) = single.epochs(), half.epochs()
    assert found.train_loss != expected.train_loss
    assert found.train_loss == pytest.approx(expected.train_loss, rel=0.01)
    assert {tensor.dtype for tensor in half.state()[0].values()} == {torch.float32}


def test_what_a_step_returned_is_not_what_the_next_one_writes_to() -> None:
    training = build(recorder=Tracing())
    inputs_TB, targets_TB = training._columns_TB[:7], training._columns_TB[1:8]
    zero = training.model.zero_state(CONFIG.batch_size)
    measured, state = training._step(inputs_TB, targets_TB, zero, 1.0)
    before = [each.clone() for each in (measured, *state[0], *state[1])]
    training._step(inputs_TB, targets_TB, state, 1.0)
    for one, other in zip((measured, *state[0], *state[1]), before, strict=True):
        assert torch.equal(one, other)
    assert not any(each.any() for layer in zero for each in layer)


def test_windows_of_other_lengths_share_what_has_their_shape() -> None:
    """Masks of recurrent weights are as large as those; there are dozens of lengths."""
    training = build(recorder=Tracing())
    zero, columns_TB = training.model.zero_state(CONFIG.batch_size), training._columns_TB
    assert training._recorded is not None
    kept = []
    for length in (5, 6, 7):
        training._step(columns_TB[:length], columns_TB[1 : length + 1], zero, 1.0)
        inputs = training._recorded._inputs.values()
        kept.append({each.data_ptr() for each in inputs if each.dtype == torch.bool})
    assert len(kept[0]) == 2 * MODEL.layers
    assert kept[0] == kept[1] == kept[2]


def test_a_cpu_records_nothing() -> None:
    training = build(replace(CONFIG, epochs=1, cuda_graphs=True))
    assert training._recorded is None
    assert untimed(tuple(training.epochs())) == untimed(tuple(build(replace(CONFIG, epochs=1)).epochs()))
