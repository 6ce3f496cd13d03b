"""Columns side by side give the loss of batch 1; evaluation's other laws are in tests/test_training.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trials.evaluation
from models.awd_lstm import AWDLSTM, Pass
from models.config import AWDLSTMConfig
from trials.evaluation import Ids, evaluate, evaluate_mc

V = 11
MODEL = AWDLSTMConfig(embedding_size=8, hidden_size=6, layers=2)
COLUMNS = pytest.mark.parametrize("columns", [2, 3, 7, 16, 299, 1000])


def text(tokens: int) -> Ids:
    return np.random.default_rng(1).integers(0, V, tokens).astype(np.int32)


def build(forget: float) -> AWDLSTM:
    """In float64, with much larger weights than it would begin with, and forget gates as open as that."""
    model = AWDLSTM(MODEL, V, torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        model.decoder_bias.normal_(0, 1, generator=torch.Generator().manual_seed(2))
        for lstm in model.lstms:
            width = lstm.hidden_size
            lstm.get_parameter("bias_ih_l0")[width : 2 * width] = forget
    return model


@pytest.fixture(params=[0.0, 30.0], ids=["forgets", "never forgets"])
def model(request: pytest.FixtureRequest) -> AWDLSTM:
    return build(request.param)


@COLUMNS
def test_columns_give_the_loss_of_batch_1(model: AWDLSTM, columns: int) -> None:
    """300 words: a column may be shorter than what it begins with, and the last one than the others."""
    assert evaluate(model, text(300), columns=columns) == pytest.approx(
        evaluate(model, text(300), columns=1), abs=1e-5
    )


@COLUMNS
@pytest.mark.parametrize("locked", [True, False])
def test_columns_give_the_loss_of_batch_1_under_sampled_masks(
    model: AWDLSTM, columns: int, locked: bool
) -> None:
    model.config = replace(MODEL, locked=locked)
    found, expected = (evaluate_mc(model, text(300), 3, seed=1, columns=each) for each in (columns, 1))
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_long_stream_takes_columns_by_itself_and_a_short_one_does_not() -> None:
    for tokens, columns in ((1025, 1), (2048, 1), (2049, 2), (20_000, 16)):
        assert columns == max(batch for batch, _ in passes_over(tokens))


def passes_over(tokens: int, forget: float = 0.0) -> list[tuple[int, int]]:
    """(columns, words) of each pass of an evaluation."""
    model, passes = build(forget), []

    def look(module: nn.Module, arguments: tuple[Tensor, ...], result: Pass) -> None:
        passes.append((arguments[0].shape[1], arguments[0].numel()))

    model.register_forward_hook(look)
    evaluate(model, text(tokens))
    return passes


def test_a_model_that_forgets_is_run_once_and_one_that_does_not_a_few_times_over() -> None:
    once = 8000 + 7 * trials.evaluation.WARM_UP
    assert once <= sum(words for _, words in passes_over(8001)) < 1.05 * once
    passes = passes_over(8001, forget=30.0)
    assert 2 * once < sum(words for _, words in passes) < 5 * once
    # Most of it side by side: the time is that of the steps, of which batch 1 takes 8,000.
    assert sum(words // columns for columns, words in passes) < 1.5 * 8000


def test_without_the_look_at_the_states_a_model_that_never_forgets_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the tests above would see it."""
    model = build(30.0)
    monkeypatch.setattr(trials.evaluation, "SAME_STATE", 1e9)
    assert evaluate(model, text(300), columns=7) != pytest.approx(
        evaluate(model, text(300), columns=1), abs=1e-3
    )


def test_columns_are_no_less_exact_in_single_precision() -> None:
    model = build(0.0).float()
    assert evaluate(model, text(20_000)) == pytest.approx(evaluate(model, text(20_000), columns=1), abs=1e-6)
