"""The laws of what is measured of a model's predictions. N=70 tokens, V=11."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trials.dynamics
from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from trials.dynamics import prediction_dynamics

V = 11
MODEL = AWDLSTMConfig(embedding_size=7, hidden_size=6, layers=2)
KEPT = replace(MODEL, embed_p=0, input_p=0, hidden_p=0, output_p=0, weight_p=0)
TOKENS_N = torch.randint(V, (70,), generator=torch.Generator().manual_seed(3))


def build(config: AWDLSTMConfig = MODEL) -> AWDLSTM:
    model = AWDLSTM(config, V, torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        model.decoder_bias.normal_(0, 1, generator=torch.Generator().manual_seed(2))
    return model


def keys() -> Iterator[int]:
    return itertools.count(4)


def test_each_is_what_the_logits_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 masks two pairs, of 4 others the variance; 10 columns of 7 steps."""
    model, logits = build(), []
    forward = model.forward

    def watching(*arguments: object) -> object:
        result = forward(*arguments)  # type: ignore[arg-type]
        logits.append(model.decode(result.dropped_TBH).detach())
        return result

    monkeypatch.setattr(model, "forward", watching)
    measured = prediction_dynamics(model, TOKENS_N, keys())
    *masked, without = logits
    assert [tuple(each.shape) for each in logits] == [(7, 10, V)] * 9
    pairs, samples = torch.stack(masked[:4]), torch.stack(masked[4:])

    def mean_square(x: Tensor) -> float:
        return x.square().mean().item()

    assert measured.pair_difference == pytest.approx(mean_square(pairs[:2] - pairs[2:]))
    assert measured.prediction_variance == pytest.approx(samples.var(dim=0).mean().item())
    assert measured.expectation_gap == pytest.approx(mean_square(pairs - without))


def test_remark_1_and_proposition_1_hold_where_many_masks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.dynamics, "PAIRS", 500)
    monkeypatch.setattr(trials.dynamics, "SAMPLES", 1000)
    measured = prediction_dynamics(build(), TOKENS_N, keys())
    assert measured.pair_difference == pytest.approx(2 * measured.prediction_variance, rel=0.05)
    assert 0 < measured.pair_difference <= 4 * measured.expectation_gap


def test_all_are_zero_where_nothing_is_dropped() -> None:
    measured = prediction_dynamics(build(KEPT), TOKENS_N, keys())
    assert measured.pair_difference == 0
    assert measured.prediction_variance == pytest.approx(0, abs=1e-25)
    assert measured.expectation_gap == 0


@pytest.mark.parametrize("length", [1, 2, 9, 11, 5000])
@pytest.mark.parametrize("locked", [True, False])
def test_any_length_of_text_will_do(length: int, locked: bool) -> None:
    tokens_N = TOKENS_N.repeat(100)[:length]
    measured = prediction_dynamics(build(replace(MODEL, locked=locked)), tokens_N, keys())
    assert measured.pair_difference > 0
