"""The laws of the model. T=5, B=3, V=11: every axis has a size of its own."""

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from models.awd_lstm import AWDLSTM, Pass
from models.config import AWDLSTMConfig
from models.masks import Masks, _KeepOnDevice

T, B, V = 5, 3, 11
RATES = ("embed_p", "input_p", "hidden_p", "output_p", "weight_p")
SMALL = AWDLSTMConfig(embedding_size=7, hidden_size=6, layers=2)
KEPT = replace(SMALL, embed_p=0, input_p=0, hidden_p=0, output_p=0, weight_p=0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(config: AWDLSTMConfig = SMALL) -> AWDLSTM:
    return AWDLSTM(config, V, seeded(1)).double()


def window(length: int = T) -> Tensor:
    return torch.randint(V, (length, B), generator=seeded(2))


def run(model: AWDLSTM, masks: Masks | None, tokens_TB: Tensor | None = None) -> Pass:
    result: Pass = model(window() if tokens_TB is None else tokens_TB, model.zero_state(B), masks)
    return result


def logits(model: AWDLSTM, masks: Masks | None, tokens_TB: Tensor | None = None) -> Tensor:
    return model.decode(run(model, masks, tokens_TB).dropped_TBH)


def every_mask(masks: Masks) -> list[Tensor]:
    each = (masks.embed_V, masks.input_TBE, *masks.hidden_1BH, masks.output_TBH, *masks.kept_4HH)
    return [mask for mask in each if mask is not None]


@pytest.mark.parametrize(
    ("vocabulary_size", "config", "count"),
    [
        (10_000, AWDLSTMConfig(), 24_221_600),
        (33_278, AWDLSTMConfig(), 33_556_078),
        (10_000, AWDLSTMConfig(embedding_size=655, layers=1), 9_997_440),
        (10_000, AWDLSTMConfig(embedding_size=64, layers=1), 683_280),
    ],
)
def test_number_of_parameters_is_the_papers(vocabulary_size: int, config: AWDLSTMConfig, count: int) -> None:
    model = AWDLSTM(config, vocabulary_size, seeded(1))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


WIDTHS = {  # of each layer's output, for E=7 and H=6
    (True, 1): (7,),
    (True, 2): (6, 7),
    (True, 3): (6, 6, 7),
    (False, 1): (6,),
    (False, 2): (6, 6),
    (False, 3): (6, 6, 6),
}


@pytest.mark.parametrize(("tied", "layers"), list(WIDTHS))
def test_the_last_layer_is_as_wide_as_an_embedding_exactly_if_the_two_are_tied(
    tied: bool, layers: int
) -> None:
    model, widths = build(replace(SMALL, tied=tied, layers=layers)), WIDTHS[tied, layers]
    assert [state[0].shape for state in model.zero_state(B)] == [(1, B, width) for width in widths]
    lstms = sum(4 * width * (inputs + width + 2) for inputs, width in zip((7, *widths), widths, strict=False))
    decoder = V if tied else V + V * widths[-1]
    count = V * 7 + lstms + decoder
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.config.parameter_count(V) == count


SHAPES = [
    AWDLSTMConfig(embedding_size=7, hidden_size=hidden_size, layers=layers, tied=tied)
    for tied, hidden_size, layers in itertools.product((True, False), (7, 6), (1, 2, 3))
]


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: f"tied={c.tied}-H={c.hidden_size}-layers={c.layers}")
def test_every_parameter_of_every_shape_gets_a_gradient(config: AWDLSTMConfig) -> None:
    model = build(config)
    result = run(model, model.draw_masks(B, T, 3))
    logits_TBV = model.decode(result.dropped_TBH)
    assert logits_TBV.shape == (T, B, V)
    assert result.raw_TBH.shape == (T, B, 7 if config.tied else config.hidden_size)
    torch.autograd.backward(F.cross_entropy(logits_TBV.flatten(0, 1), window().flatten()))
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("tied", [True, False])
def test_state_dict_holds_each_parameter_once_and_loads_again(tied: bool) -> None:
    model, other = build(replace(SMALL, tied=tied)), AWDLSTM(replace(SMALL, tied=tied), V, seeded(9)).double()
    weights = model.state_dict()
    assert list(weights) == [name for name, _ in model.named_parameters()]
    assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights)
    other.load_state_dict(weights)
    assert torch.equal(logits(model, None), logits(other, None))


def test_initial_weights_are_uniform_in_their_bounds() -> None:
    model = AWDLSTM(AWDLSTMConfig(embedding_size=50, hidden_size=40, layers=2, tied=False), 101, seeded(1))
    assert model.decoder is not None
    bounds = {"embedding": 0.1, "decoder": 0.1, "decoder_bias": 0.0}
    for name, parameter in model.named_parameters():
        bound = bounds.get(name, 1 / math.sqrt(40))
        assert parameter.abs().max().item() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_without_masks_it_is_a_plain_lstm() -> None:
    model = build()
    hidden = F.embedding(window(), model.embedding)
    for lstm, (inputs, outputs) in zip(model.lstms, model.config.layer_sizes, strict=True):
        plain = nn.LSTM(inputs, outputs).double()
        plain.load_state_dict(lstm.state_dict())
        hidden, _ = plain(hidden)
    expected = hidden @ model.embedding.T + model.decoder_bias
    first, again = logits(model, None), logits(model, None)
    assert torch.equal(first, again)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)


def test_train_and_eval_mode_change_nothing() -> None:
    model = build()
    masks = model.draw_masks(B, T, 3)
    for given in (masks, None):
        training, evaluating = logits(model.train(), given), logits(model.eval(), given)
        assert torch.equal(training, evaluating)


def test_parameters_stay_the_same_ones_over_training_and_evaluation() -> None:
    model = build()
    before = dict(model.named_parameters())
    for masks in (model.draw_masks(B, T, 3), None, model.draw_masks(B, T, 4)):
        torch.autograd.backward(logits(model, masks).square().mean())
        run(model.eval(), None)
        model.train()
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_dropped_weights_act_from_the_second_step_on() -> None:
    model = build(replace(KEPT, weight_p=0.5))
    one, other = (logits(model, model.draw_masks(B, T, seed)) for seed in (3, 4))
    assert torch.equal(one[0], other[0])
    for step in range(1, T):
        assert not torch.allclose(one[step], other[step])


def test_raw_weights_get_gradient_exactly_where_they_are_kept() -> None:
    model = build(replace(KEPT, embedding_size=40, hidden_size=30, weight_p=0.7))
    masks = model.draw_masks(B, T, 3)
    torch.autograd.backward(logits(model, masks).square().mean())
    for lstm, mask in zip(model.lstms, masks.kept_4HH, strict=True):
        gradient = lstm.get_parameter("weight_hh_l0").grad
        assert gradient is not None
        assert mask is not None
        assert torch.equal(gradient != 0, mask)
        assert (gradient != 0).double().mean().item() == pytest.approx(0.3, abs=0.03)


def test_locked_masks_are_constant_over_time_and_differ_between_sequences() -> None:
    masks = build().draw_masks(2, 5, 3)
    for mask in (masks.input_TBE, *masks.hidden_1BH, masks.output_TBH):
        assert mask is not None
        dropped = torch.ones(5, 2, mask.shape[-1], dtype=torch.float64) * mask
        assert torch.equal(dropped[0], dropped[4])
        assert not torch.equal(dropped[:, 0], dropped[:, 1])


def test_unlocked_input_and_output_masks_and_no_others_change_over_time() -> None:
    masks = build(replace(SMALL, locked=False)).draw_masks(B, T, 3)
    for mask in (masks.input_TBE, masks.output_TBH):
        assert mask is not None
        assert mask.shape[:2] == (T, B)
        assert not torch.equal(mask[0], mask[4])
        assert not torch.equal(mask[:, 0], mask[:, 1])
    assert [mask.shape for mask in masks.hidden_1BH if mask is not None] == [(1, B, 6)]


@pytest.mark.parametrize("rate", RATES)
def test_each_rate_drops_its_own_share_and_scales_the_survivors(rate: str) -> None:
    given = asdict(KEPT) | {"embedding_size": 80, "hidden_size": 70, rate: 0.2}
    config = TypeAdapter(AWDLSTMConfig).validate_python(given)
    masks = every_mask(AWDLSTM(config, 4000, seeded(1)).draw_masks(50, T, 3))
    assert len(masks) == (2 if rate == "weight_p" else 1)
    for mask in masks:
        kept = 1 if mask.dtype == torch.bool else pytest.approx(1 / 0.8)
        assert sorted(set(mask.flatten().tolist())) == [0, kept]
        assert (mask == 0).double().mean().item() == pytest.approx(0.2, abs=0.03)


def test_embedding_mask_drops_whole_word_types_on_the_input_only() -> None:
    """Dropping word 4 equals reading a table whose row 4 is zero, everywhere in the window."""
    model = build(replace(KEPT, tied=False))
    tokens_TB = torch.tensor([[4, 1, 2], [3, 4, 4], [4, 0, 4]])
    keep_V = torch.ones(V, dtype=torch.float64)
    keep_V[4] = 0
    masks = replace(model.draw_masks(B, 3, 3), embed_V=keep_V)
    dropped = logits(model, masks, tokens_TB)
    with torch.no_grad():
        model.embedding[4] = 0
    assert torch.equal(dropped, logits(model, None, tokens_TB))


def test_embedding_mask_does_not_touch_a_tied_decoder() -> None:
    model = build(KEPT)
    masks = replace(model.draw_masks(B, T, 3), embed_V=torch.zeros(V, dtype=torch.float64))
    result = run(model, masks)
    torch.testing.assert_close(model.decode(result.dropped_TBH), result.dropped_TBH @ model.embedding.T)


def test_masks_are_a_function_of_their_key() -> None:
    model = build()
    first, again, other = (every_mask(model.draw_masks(B, T, seed)) for seed in (3, 3, 4))
    assert len(first) == 6
    for mask, same, different in zip(first, again, other, strict=True):
        assert torch.equal(mask, same)
        assert not torch.equal(mask, different)


def test_no_two_parts_of_a_pass_share_their_masks() -> None:
    """All widths and rates equal, so that equal bits would make equal masks."""
    config = AWDLSTMConfig(40, 40, 3, True, True, 0.5, 0.5, 0.5, 0.5, 0.5)
    masks = every_mask(AWDLSTM(config, 40 * B, seeded(1)).draw_masks(B, T, 3))
    beginnings = {tuple((mask.flatten()[: 40 * B] != 0).tolist()) for mask in masks}
    assert len(beginnings) == len(masks) == 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_kept_on_a_gpu_is_drawn_by_its_own_generator(device: str) -> None:
    first, again, other = (_KeepOnDevice(seed, torch.device(device)) for seed in (3, 3, 4))
    for p in (0.2, 0.7):
        kept = first(p, (400, 50))
        assert kept.dtype == torch.bool
        assert kept.device.type == device
        assert kept.double().mean().item() == pytest.approx(1 - p, abs=0.02)
        assert torch.equal(kept, again(p, (400, 50)))
        assert not torch.equal(kept, other(p, (400, 50)))
        assert not torch.equal(kept, first(p, (400, 50)))
        again(p, (400, 50))


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    model = build()
    run(model, model.draw_masks(B, T, 3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(
        build().state_dict()["lstms.0.weight_hh_l0"], model.state_dict()["lstms.0.weight_hh_l0"]
    )


def test_word_zero_gets_a_gradient_from_the_input() -> None:
    model = build(replace(KEPT, tied=False))
    torch.autograd.backward(logits(model, None, torch.zeros(T, B, dtype=torch.long)).square().mean())
    assert model.embedding.grad is not None
    assert model.embedding.grad[0].abs().min().item() > 0
    assert not model.embedding.grad[1:].any()


def test_two_windows_with_the_state_carried_equal_one_long_window() -> None:
    model = build()
    masks = model.draw_masks(B, T, 3)
    whole = run(model, masks)
    start = run(model, masks, window()[:2])
    rest: Pass = model(window()[2:], start.state, masks)
    torch.testing.assert_close(torch.cat([start.dropped_TBH, rest.dropped_TBH]), whole.dropped_TBH)
    for carried, expected in zip(itertools.chain(*rest.state), itertools.chain(*whole.state), strict=True):
        torch.testing.assert_close(carried, expected)
        assert not carried.requires_grad


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_a_rate_is_at_least_zero_and_below_one(rate: str, value: float) -> None:
    with pytest.raises(ValidationError, match=rate):
        TypeAdapter(AWDLSTMConfig).validate_python({rate: value})


@pytest.mark.parametrize("field", ["embedding_size", "hidden_size", "layers"])
def test_a_size_is_at_least_one(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        TypeAdapter(AWDLSTMConfig).validate_python({field: 0})


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="dropouth"):
        TypeAdapter(AWDLSTMConfig).validate_python({"dropouth": 0.1})
