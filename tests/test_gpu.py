"""Training on a CUDA device, where one is there; the laws of a step and of the head have their own files."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from models.config import Precision
from models.precision import tf32_products
from regularizers.config import Regularization
from tests.test_step import REGULARIZATIONS
from tests.test_training import (
    CONFIG,
    KEPT,
    MODEL,
    TRAIN,
    VALID,
    V,
    assert_equal_weights,
    saved_and_read,
    untimed,
)
from trials.attempt import run_attempt
from trials.corpora import PathCorpus
from trials.evaluation import evaluate, evaluate_mc
from trials.spec import TrialConfig
from trials.store import CheckpointStore
from trials.tasks import Task
from trials.training import Training

pytestmark = pytest.mark.gpu


def build(device: str = "cuda", averaging: Literal["none", "from-start"] = "from-start") -> Training:
    config = replace(CONFIG, epochs=3, averaging=averaging)
    return Training(MODEL, config, Regularization("fraternal"), V, TRAIN, VALID, 1, device)


@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_every_regularizer_trains(name: str) -> None:
    training = Training(MODEL, CONFIG, REGULARIZATIONS[name], V, TRAIN, VALID, 1, "cuda")
    first, *_, last = training.epochs()
    assert last.train_loss < first.train_loss
    assert {tensor.device.type for tensor in training.weights_to_use().values()} == {"cuda"}


@pytest.mark.parametrize("averaging", ["none", "from-start"])
def test_training_that_goes_on_in_mid_epoch_equals_training_that_never_stopped(
    averaging: Literal["none", "from-start"],
) -> None:
    whole = build(averaging=averaging)
    states = [whole.state() for _ in whole.run(pause_every_s=0)]
    for state in states[::29]:
        resumed = build(averaging=averaging)
        resumed.load_state(*saved_and_read(state))
        list(resumed.epochs())
        assert untimed(resumed.history) == untimed(whole.history)
        assert_equal_weights(resumed.state()[0], whole.state()[0])


@pytest.mark.parametrize(("one", "other"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_state_is_taken_up_on_another_device(one: str, other: str) -> None:
    started = build(one)
    next(started.epochs())
    resumed = build(other)
    resumed.load_state(*started.state())
    *_, last = resumed.epochs()
    assert last.epoch == 3


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", list(REGULARIZATIONS))
def test_every_regularizer_trains_in_every_precision(name: str, precision: Precision) -> None:
    single, other = (
        Training(
            MODEL, replace(CONFIG, lr=1.0, precision=each), REGULARIZATIONS[name], V, TRAIN, VALID, 1, "cuda"
        )
        for each in ("float32", precision)
    )
    for expected, found in zip(single.epochs(), other.epochs(), strict=True):
        assert found.train_loss != expected.train_loss
        assert found.train_loss == pytest.approx(expected.train_loss, rel=0.01)
        assert found.valid_loss == pytest.approx(expected.valid_loss, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_computing_layers_again_changes_no_bit(precision: Precision) -> None:
    kept, recomputed = (
        Training(
            MODEL,
            replace(CONFIG, epochs=2, precision=precision, recompute=recompute),
            Regularization("fraternal"),
            *(V, TRAIN, VALID, 1, "cuda"),
        )
        for recompute in (False, True)
    )
    assert untimed(tuple(kept.epochs())) == untimed(tuple(recomputed.epochs()))


def test_float32_is_not_tf32() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = one.double() @ other.double()
    product = (one.cuda() @ other.cuda()).cpu().double()
    assert (product - exact).abs().max().item() < 1e-3
    with tf32_products(True):
        rounded = (one.cuda() @ other.cuda()).cpu().double()
    assert (rounded - exact).abs().max().item() > 1e-3


@pytest.mark.parametrize("columns", [2, 7])
def test_columns_give_the_loss_of_batch_1(columns: int) -> None:
    model = build("cuda").model
    assert evaluate(model, VALID, columns=columns) == pytest.approx(
        evaluate(model, VALID, columns=1), abs=1e-5
    )


def test_an_attempt_says_which_card_it_ran_on(tmp_path: Path) -> None:
    for split, ids in (("train", TRAIN), ("valid", VALID), ("test", VALID)):
        (tmp_path / f"{split}.txt").write_text(" ".join(map(str, ids)))
    config = TrialConfig(MODEL, replace(CONFIG, epochs=1), Regularization("fraternal"))
    task = Task("s1", 0, 1, "fd", 1, config, PathCorpus(path=str(tmp_path)), "cuda", 0)
    (_, report) = run_attempt(task, CheckpointStore((tmp_path / "store").as_uri()), tmp_path)
    assert report.failure is None
    assert report.device == f"cuda: {torch.cuda.get_device_name()}"


def test_a_model_predicts_the_same_on_either_device() -> None:
    training = build("cpu")
    next(training.epochs())
    expected = evaluate(training.model, VALID)
    model = training.model.to("cuda")
    assert evaluate(model, VALID) == pytest.approx(expected, rel=1e-5)
    assert evaluate_mc(model, VALID, 3, seed=1) != pytest.approx(expected, rel=1e-5)
    model.config = KEPT  # nothing is dropped: every sample of the masks is the whole model
    assert evaluate_mc(model, VALID, 3, seed=1) == pytest.approx(expected, rel=1e-5)
