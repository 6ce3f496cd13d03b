"""The precisions that products may be computed in, and where each is refused."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

import models.awd_lstm
import models.lstm
import models.precision
import regularizers.losses
import trials.training
from models.config import Precision
from models.precision import UnsupportedPrecision, require_precision, tf32_products
from regularizers.table import REGULARIZERS
from tests.test_step import REGULARIZATIONS
from tests.test_training import CONFIG, MODEL, TRAIN, VALID, V
from trials.training import Training

CPU = torch.device("cpu")


def build(name: str, precision: Precision) -> Training:
    config = replace(CONFIG, epochs=2, lr=1.0, precision=precision)
    return Training(MODEL, config, REGULARIZATIONS[name], V, TRAIN, VALID, 1)


@pytest.mark.parametrize("name", sorted(REGULARIZERS))
def test_training_in_bf16_differs_from_float32_by_rounding_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor only imitates it, too: slowly, but it computes the same."""
    monkeypatch.setattr(models.precision, "_cpu_has_bf16", lambda: True)
    single, half = build(name, "float32"), build(name, "bf16")
    for expected, found in zip(single.epochs(), half.epochs(), strict=True):
        assert found.train_loss != expected.train_loss
        assert found.train_loss == pytest.approx(expected.train_loss, rel=0.01)
        assert found.optimised == pytest.approx(expected.optimised, rel=0.01)
        assert found.valid_loss == pytest.approx(expected.valid_loss, rel=0.01)
    assert {tensor.dtype for tensor in half.weights_to_use().values()} == {torch.float32}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("name", ["none", "fraternal", "expectation_linear"])
def test_a_step_does_as_it_is_told_and_validation_is_float32(
    name: str, precision: Precision, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each layer's products, and the head's, are computed in, and how TF32's switch stands then."""
    called: list[tuple[torch.dtype | None, bool]] = []
    layer, losses = models.lstm.lstm, regularizers.losses.head_losses

    def watching_layer(*given: Any) -> Any:
        called.append((given[-1], torch.backends.cuda.matmul.allow_tf32))
        return layer(*given)

    def watching_head(*given: Any, dtype: torch.dtype | None, **others: Any) -> Any:
        called.append((dtype, torch.backends.cudnn.allow_tf32))
        return losses(*given, dtype=dtype, **others)

    monkeypatch.setattr(trials.training, "require_precision", lambda *arguments: None)
    monkeypatch.setattr(models.awd_lstm, "lstm", watching_layer)
    monkeypatch.setattr(regularizers.losses, "head_losses", watching_head)
    config = replace(CONFIG, epochs=1, precision=precision, recompute=recompute)
    training = Training(MODEL, config, REGULARIZATIONS[name], V, TRAIN[: 3 * 8], VALID, 1)
    assert training._windows_of(1)[0] == [7]
    (_,) = training.epochs()
    passes = {"none": 1, "fraternal": 2, "expectation_linear": 2}[name]
    with_gradient = {"none": 1, "fraternal": 2, "expectation_linear": 1}[name]
    of_the_step = 2 * passes + 1 + 2 * with_gradient * recompute
    expected = (torch.bfloat16 if precision == "bf16" else None, precision == "tf32")
    assert set(called[:of_the_step]) == {expected}
    assert len(called) > of_the_step
    assert set(called[of_the_step:]) == {(None, False)}


def test_a_cpu_that_would_only_imitate_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.precision, "_cpu_has_bf16", lambda: False)
    with pytest.raises(UnsupportedPrecision, match=r"'bf16' is for GPUs .* 'float32'"):
        build("fraternal", "bf16")


def test_a_cpu_has_no_tf32() -> None:
    with pytest.raises(UnsupportedPrecision, match=r"'tf32' is for NVIDIA GPUs .* a CPU: .*'float32'"):
        build("fraternal", "tf32")
    require_precision("float32", CPU)


def test_tf32_is_for_the_length_of_a_block_and_off_otherwise() -> None:
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    assert not any(switch.allow_tf32 for switch in switches)
    with tf32_products(True):
        assert all(switch.allow_tf32 for switch in switches)
    assert not any(switch.allow_tf32 for switch in switches)
