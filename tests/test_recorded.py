"""What is recorded does, each time, what a step does: here in traces, since CUDA graphs need a GPU.

As a graph does, a trace has torch's operations in their order, of the tensors that they were of, and all else
as it was when it was made: whatever else changes from step to step, or follows from what a tensor has in it,
would be found.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch._meta_registrations
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import models.side_by_side
import regularizers.head
import trials.recorded
from models.side_by_side import _Recurrences
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
from trials.memory import KERNELS_A_STEP, KERNELS_BESIDE
from trials.recorded import Recorded
from trials.spec import TrainingConfig
from trials.training import Training, _window


@pytest.fixture(autouse=True)
def nothing_depends_on_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(regularizers.head, "_may_look", lambda _: False)


UNLOCKED = replace(MODEL, locked=False)
FIXED = replace(CONFIG, epochs=2, bptt=5, lr=1.0, windows="fixed")
"""In each epoch nine windows of five steps, and one of four."""
TEXT = TRAIN[:150]


UNCAPTURED = {"_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "masked_select", "unique"}
"""Operations that wait for the device, or bring something from the host: a CUDA graph can have none."""


class Operations(TorchDispatchMode):
    """Counts those that a device is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not func.overloadpacket.__name__.startswith(("empty", "new_empty", "detach")):
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Tracing:
    """A recorder that counts its traces, and how often they were replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        with Operations() as asked:
            compute()  # as before a CUDA graph
        assert not UNCAPTURED & set(asked.names)
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
        training._recorded = Recorded(parameters, config.longest_window, recorder)
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


@pytest.mark.parametrize("averaging", ["none", "from-start"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_no_step_waits_for_its_device(
    name: str, recompute: bool, averaging: Literal["none", "from-start"]
) -> None:
    config = replace(CONFIG, averaging=averaging, recompute=recompute)
    training = build(config, replace(REGULARIZATIONS[name], alpha=2, beta=1), dtype=torch.float32)
    take_steps(training, 5)
    with Operations() as asked:
        take_steps(training, 6, 5)
    assert asked.names.total() > 100
    assert not UNCAPTURED & set(asked.names)


def test_what_a_step_returned_is_not_what_the_next_one_writes_to() -> None:
    training = build(recorder=Tracing())
    inputs_TB, targets_TB = _window(training._columns_TB, 0, 7)
    zero = training.model.zero_state(CONFIG.batch_size)
    measured, state = training._step(inputs_TB, targets_TB, zero, 1.0)
    before = [each.clone() for each in (measured, *state[0], *state[1])]
    training._step(inputs_TB, targets_TB, state, 1.0)
    for one, other in zip((measured, *state[0], *state[1]), before, strict=True):
        assert torch.equal(one, other)
    assert not any(each.any() for layer in zero for each in layer)


def take_steps(training: Training, *lengths: int) -> None:
    zero = training.model.zero_state(CONFIG.batch_size)
    for length in lengths:
        training._step(*_window(training._columns_TB, 0, length), zero, 1.0)


def test_windows_of_all_lengths_share_what_they_are_given() -> None:
    """Masks are as large as weights, or as what a window has of words; there are dozens of lengths."""
    training = build(recorder=Tracing())
    kept = []
    for length in (6, 5, CONFIG.longest_window, 1):
        take_steps(training, length)
        assert training._recorded is not None
        kept.append({each.data_ptr() for each in training._recorded._inputs.values()})
    state, mask = 2 * MODEL.layers, 3 + (MODEL.layers - 1) + MODEL.layers
    assert len(kept[0]) == 2 + state + 2 * mask
    assert kept[0] == kept[1] == kept[2] == kept[3]


def test_further_lengths_are_computed_unrecorded_and_no_recording_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is reckoned with for so many; and torch takes from all graphs of a stream what products work
    with when one of them goes."""
    whole, limited = build(recorder=Tracing()), build(recorder=(recorder := Tracing()))
    lengths = (5, 6, 7, 5, 8, 7, 6)
    take_steps(whole, *lengths)
    monkeypatch.setattr(trials.recorded, "MOST_GRAPHS", 2)
    take_steps(limited, *lengths)
    assert (recorder.recorded, recorder.replayed) == (2, 4)
    assert_equal_weights(limited.state()[0], whole.state()[0])


def test_recordings_go_with_the_last_reference_to_their_training() -> None:
    """And not when the garbage collector comes: maybe in the middle of another recording, which CUDA ends."""

    class Replay:
        def __init__(self, compute: Callable[[], None]) -> None:
            compute()

        def __call__(self) -> None: ...

    training = build()
    parameters = list(training.model.parameters())
    training._recorded = Recorded(parameters, CONFIG.longest_window, Replay)
    gc.collect()
    gc.disable()
    try:
        take_steps(training, 5, 6)
        replays = [weakref.ref(replay) for replay in training._recorded._replays.values()]
        assert len(replays) == 2
        del training
        assert [replay() for replay in replays] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_gradient", [1, 2])
@pytest.mark.parametrize("width", [24, 26])
def test_a_gpus_own_operations_are_there_and_as_many_as_memory_reckons_with(
    dtype: torch.dtype, with_gradient: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shapes alone: torch has these two kernels for no CPU, and under no public name."""
    monkeypatch.setattr(models.side_by_side, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(torch._meta_registrations, "rnn_cell_checkSizes", lambda *_: None)  # wants biases
    copies, batch, inputs = 2, 3, 17

    def asked(steps: int) -> "Counter[str]":
        def given(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        ctx = SimpleNamespace(mark_non_differentiable=lambda *_: None)
        ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
        kept = tuple(given(4 * width, width, dtype=torch.bool) for _ in range(copies))
        arguments = (
            given(steps, copies, batch, inputs),
            *(given(4 * width, inputs), given(4 * width, width), given(4 * width)),
        )
        state = given(batch, width), given(batch, width)
        with Operations() as operations:
            returned = _Recurrences.forward(ctx, *arguments, kept, 0.5, *state, with_gradient, dtype)
            gradients = _Recurrences.backward(ctx, torch.empty_like(returned[0]), None)
        for argument, gradient in zip(arguments, gradients, strict=False):
            assert gradient is not None
            assert (gradient.shape, gradient.dtype) == (argument.shape, argument.dtype)
        return operations.names

    short, long = asked(5), asked(6)
    assert long["_thnn_fused_lstm_cell"] == long["_thnn_fused_lstm_cell_backward_impl"] == 6
    of_a_step = (long - short).total()
    assert of_a_step <= 7
    assert of_a_step + 2 <= KERNELS_A_STEP
    assert short.total() - 5 * of_a_step <= KERNELS_BESIDE


def test_a_cpu_records_nothing() -> None:
    training = build(replace(CONFIG, epochs=1, cuda_graphs=True))
    assert training._recorded is None
    assert untimed(tuple(training.epochs())) == untimed(tuple(build(replace(CONFIG, epochs=1)).epochs()))
