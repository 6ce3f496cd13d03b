"""The laws of training, on a text of a few thousand words from a vocabulary of eleven."""

import itertools
import json
import math
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import trials.training
from models.awd_lstm import AWDLSTM, Pass, State
from models.config import AWDLSTMConfig
from models.masks import Masks
from regularizers.config import Regularization
from regularizers.table import REGULARIZERS
from tests.reference import MaskRecorder
from tests.test_averaging import GOLDEN
from trials.averaging import averaging_starts, learning_rate
from trials.evaluation import evaluate, evaluate_mc
from trials.spec import TrainingConfig
from trials.training import (
    STEPS_BETWEEN_CHECKS,
    Diverged,
    EpochResult,
    Ids,
    Training,
    descend,
    window_lengths,
)

V = 11
MODEL = AWDLSTMConfig(embedding_size=8, hidden_size=6, layers=2, embed_p=0.1, input_p=0.2, output_p=0.2)
KEPT = replace(MODEL, embed_p=0, input_p=0, hidden_p=0, output_p=0, weight_p=0)
CONFIG = TrainingConfig(epochs=4, batch_size=3, bptt=7, lr=5.0, averaging="none")
SWITCHING = replace(CONFIG, lr=15.0, clip=1.0, averaging="nt-asgd", non_monotone_interval=0)


def text(length: int, seed: int) -> Ids:
    """Words that count up to V and start again, each tenth replaced by any word."""
    rng = np.random.default_rng(seed)
    ids = np.arange(length) % V
    return np.where(rng.random(length) < 0.1, rng.integers(0, V, length), ids).astype(np.int32)


TRAIN, VALID = text(600, 1), text(101, 2)


def build(
    training: TrainingConfig = CONFIG,
    regularization: Regularization | None = None,
    model: AWDLSTMConfig = MODEL,
    seed: int = 1,
    train: Ids = TRAIN,
) -> Training:
    return Training(model, training, regularization or Regularization("fraternal"), V, train, VALID, seed)


def build_switching(epochs: int = 6, averaging: Literal["nt-asgd", "none"] = "nt-asgd") -> Training:
    """Its validation loss rises by 0.8 nats in the fourth epoch: no rounding moves the switch after it."""
    return build(replace(SWITCHING, epochs=epochs, averaging=averaging), seed=5)


def untimed(results: tuple[EpochResult, ...]) -> list[dict[str, Any]]:
    return [asdict(replace(result, seconds=0.0, tokens_per_s=0.0)) for result in results]


def assert_equal_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


# --- learning


@pytest.mark.parametrize("name", sorted(REGULARIZERS))
def test_every_regularizer_learns_a_simple_text(name: str) -> None:
    model = replace(MODEL, embedding_size=16, layers=1, weight_p=0.2)
    config = replace(CONFIG, epochs=3, batch_size=10, clip=2.0)
    first, *_, last = build(config, Regularization(name), model, train=text(1500, 1)).epochs()
    assert last.valid_loss < 0.6 * math.log(V)
    assert last.train_loss < first.train_loss


SHAPES = itertools.product((True, False), (8, 6), (1, 2, 3))


@pytest.mark.parametrize(("tied", "hidden_size", "layers"), list(SHAPES))
def test_training_lowers_the_loss_of_every_shape(tied: bool, hidden_size: int, layers: int) -> None:
    model = replace(KEPT, tied=tied, hidden_size=hidden_size, layers=layers)
    training = build(replace(CONFIG, epochs=1, lr=1.0), Regularization(), model)
    before = evaluate(training.model, TRAIN)
    list(training.epochs())
    assert evaluate(training.model, TRAIN) < before - 3e-4


def test_same_seed_gives_the_same_epochs_bit_for_bit_whatever_the_global_generator_does() -> None:
    config = replace(CONFIG, epochs=2)
    one, again, other = build(config), build(config), build(config, seed=2)
    for training in (one, again, other):
        torch.rand(3)
        list(training.epochs())
    assert untimed(one.history) == untimed(again.history)
    assert one.history[0].train_loss != other.history[0].train_loss


def test_computing_layers_again_changes_no_bit() -> None:
    for regularizer in sorted(REGULARIZERS):
        kept, recomputed = (
            build(
                replace(CONFIG, epochs=2, recompute=recompute), Regularization(regularizer, alpha=2, beta=1)
            )
            for recompute in (False, True)
        )
        assert untimed(tuple(kept.epochs())) == untimed(tuple(recomputed.epochs()))
        assert_equal_weights(kept.state()[0], recomputed.state()[0])


# --- the step


@pytest.mark.parametrize("lengths", [(5, 3), (7, 1)], ids=["cut short", "longer than bptt"])
def test_each_step_is_clipped_sgd_with_weight_decay_at_a_rate_scaled_by_the_windows_length(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]
) -> None:
    """Two windows, for a bptt of 5, the state carried between them; written down here once more."""
    monkeypatch.setattr(trials.training, "window_lengths", lambda *arguments: list(lengths))
    config = replace(CONFIG, epochs=1, bptt=5, lr=2.0, clip=0.05, weight_decay=0.1)
    training = build(config, Regularization(), KEPT, train=TRAIN[: 3 * 9])
    model = build(config, Regularization(), KEPT).model
    columns_TB = torch.from_numpy(TRAIN[: 3 * 9].astype(np.int64)).view(3, 9).t()
    state = model.zero_state(3)
    norms = []
    for start, end in ((0, lengths[0]), (lengths[0], 8)):
        result = model(columns_TB[start:end], state, None)
        state = result.state
        logits_NV = model.decode(result.dropped_TBH).flatten(0, 1)
        loss = F.cross_entropy(logits_NV, columns_TB[start + 1 : end + 1].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                step = gradient * min(1, 0.05 / norms[-1]) + 0.1 * parameter
                parameter.sub_(2.0 * (end - start) / 5 * step)
    (epoch,) = training.epochs()
    for parameter, expected in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    assert min(norms) > 0.05
    assert epoch.gradient_norm == pytest.approx(np.average(norms, weights=lengths), rel=1e-5)
    assert epoch.tokens == 3 * 8


def test_columns_are_cut_from_the_start_and_what_does_not_fill_them_is_dropped() -> None:
    """Three columns of 20 words, and two words over; the first word of all is seen, the last ones are not."""
    config = replace(CONFIG, epochs=1)
    whole, over = build(config, train=TRAIN[:60]), build(config, train=TRAIN[:62])
    list(whole.epochs())
    list(over.epochs())
    assert untimed(over.history) == untimed(whole.history)
    assert_equal_weights(over.weights_to_use(), whole.weights_to_use())


def test_train_loss_is_the_mean_over_all_tokens_however_they_are_cut() -> None:
    config = replace(CONFIG, epochs=1, batch_size=1, lr=1e-9)
    training = build(config, Regularization("prediction_norm", alpha=2, beta=1), KEPT, train=TRAIN[:59])
    (epoch,) = training.epochs()
    assert epoch.train_loss == pytest.approx(evaluate(training.model, TRAIN[:59]), abs=1e-6)
    added = 0.1 * epoch.penalty + 2 * epoch.ar + epoch.tar
    assert epoch.optimised == pytest.approx(epoch.train_loss + added, abs=1e-6)
    assert min(epoch.penalty, epoch.ar, epoch.tar) > 0


def test_no_two_passes_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """So wide a model and so many words that no two masks are equal by chance."""
    model = replace(MODEL, embedding_size=80, hidden_size=60, embed_p=0.5)
    config = replace(CONFIG, epochs=2)
    training = Training(model, config, Regularization("fraternal"), 200, TRAIN, VALID, 1)
    recorder = MaskRecorder(training.model)
    monkeypatch.setattr(training.model, "draw_masks", recorder)
    list(training.epochs())
    assert len(recorder.drawn) == 2 * training.state()[1]["steps"]
    every = [[m.embed_V, m.input_TBE, *m.hidden_1BH, m.output_TBH, *m.kept_4HH] for m in recorder.drawn]
    for same_place in zip(*every, strict=True):
        kept = {tuple(mask.flatten().tolist()) for mask in same_place if mask is not None}
        assert len(kept) == len(recorder.drawn)


@pytest.mark.parametrize("name", sorted(REGULARIZERS))
def test_a_step_records_a_graph_for_those_passes_alone_that_have_a_gradient(name: str) -> None:
    training = build(replace(CONFIG, epochs=1), Regularization(name), train=TRAIN[:12])
    recorded: list[bool] = []

    def look(model: nn.Module, arguments: tuple[Tensor, ...], result: Pass) -> None:
        if arguments[0].shape[1] == CONFIG.batch_size:  # not validation's
            recorded.append(result.raw_TBH.requires_grad)

    training.model.register_forward_hook(look)
    list(training.epochs())
    row = REGULARIZERS[name]
    assert recorded == [True] + [row.second_gradient] * (row.second_pass != "none")


def test_only_the_first_passs_state_is_carried() -> None:
    """So where nothing is optimised, the first pass of every regularizer sees the same states."""
    losses = set()
    for name in REGULARIZERS:
        (epoch,) = build(replace(CONFIG, epochs=1, lr=1e-30, weight_decay=0), Regularization(name)).epochs()
        losses.add(epoch.train_loss)
    assert len(losses) == 1


def test_training_and_evaluation_leave_the_parameters_and_the_modes_of_the_modules_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is replaced, and no module goes to eval mode, not even for the pass without dropout."""
    monkeypatch.setattr(nn.Module, "train", lambda *arguments: pytest.fail("a mode was changed"))
    training = build(replace(SWITCHING, epochs=3), Regularization("expectation_linear_both"))
    before = dict(training.model.named_parameters())
    weights = training.weights_to_use()
    for _ in training.epochs():
        after = dict(training.model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert not any(torch.equal(after[name], weights[name]) for name in before)
        weights = {name: parameter.detach().clone() for name, parameter in after.items()}
    assert all(module.training for module in training.model.modules())


def test_what_is_not_given_is_the_papers() -> None:
    paper = TrainingConfig(
        batch_size=20, bptt=70, windows="random", lr=30, clip=0.25, weight_decay=1.2e-6,
        lr_schedule="constant", lr_patience=20, lr_factor=0.1, state_reset_p=0,
        averaging="nt-asgd", non_monotone_interval=5,
    )  # fmt: skip
    assert replace(TrainingConfig(), epochs=paper.epochs) == paper
    assert AWDLSTMConfig() == AWDLSTMConfig(400, 1150, 3, True, True, 0.1, 0.4, 0.25, 0.4, 0.5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_the_text_is_trained_on_where_it_lies(dtype: type, tmp_path: Path) -> None:
    """As the workers of a machine have it mapped, which may be all of it that there is room for."""
    np.save(tmp_path / "ids.npy", TRAIN.astype(dtype))
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    config = replace(CONFIG, epochs=2)
    training, other = (
        Training(MODEL, config, Regularization("fraternal"), V, ids, VALID, 1) for ids in (mapped, TRAIN)
    )
    assert training._columns_TB.data_ptr() == mapped.ctypes.data
    assert untimed(tuple(training.epochs())) == untimed(tuple(other.epochs()))


# --- windows


@given(steps=st.integers(1, 3000), bptt=st.integers(5, 200), seed=st.integers(0, 99))
def test_random_windows_use_every_step_once_within_their_bounds(steps: int, bptt: int, seed: int) -> None:
    lengths = window_lengths(steps, replace(CONFIG, bptt=bptt), np.random.default_rng(seed))
    assert sum(lengths) == steps
    assert all(5 <= length <= bptt + 10 for length in lengths[:-1])
    assert 1 <= lengths[-1] <= bptt + 10


def test_random_windows_follow_the_papers_law() -> None:
    lengths = np.array(window_lengths(10**6, replace(CONFIG, bptt=70), np.random.default_rng(1)))
    halved = lengths < 52
    assert halved.mean() == pytest.approx(0.05, abs=0.01)
    assert lengths.max() == 80
    assert lengths[~halved].mean() == pytest.approx(69.5, abs=0.3)
    assert lengths[~halved].std() == pytest.approx(5, abs=0.3)
    assert lengths[halved][:-1].mean() == pytest.approx(34.5, abs=1)
    assert lengths[halved].max() <= 45


def test_fixed_windows_are_all_bptt_but_the_last() -> None:
    assert window_lengths(23, replace(CONFIG, windows="fixed"), np.random.default_rng(1)) == [7, 7, 7, 2]


def test_windows_differ_between_epochs() -> None:
    training = build(replace(CONFIG, epochs=2, lr=1e-30, weight_decay=0), Regularization(), KEPT)
    first, second = training.epochs()
    assert first.gradient_norm != second.gradient_norm
    assert first.train_loss == pytest.approx(second.train_loss, abs=1e-6)


def lengths_of(seed: int, regularizer: str = "none") -> list[int]:
    """Of the windows of two epochs: an input mask that is not locked has one for each step."""
    training = build(
        replace(CONFIG, epochs=2), Regularization(regularizer), replace(MODEL, locked=False), seed
    )
    recorder = MaskRecorder(training.model)
    training.model.draw_masks = recorder  # type: ignore[method-assign]
    list(training.epochs())
    return [len(masks.input_TBE) for masks in recorder.drawn if masks.input_TBE is not None]


def test_windows_follow_the_trials_own_seed_and_nothing_else() -> None:
    before = lengths_of(seed=1)
    np.random.seed(9)
    random.seed(9)
    torch.manual_seed(9)
    assert lengths_of(seed=1) == before != lengths_of(seed=2)
    assert lengths_of(1, "fraternal")[::2] == lengths_of(1, "fraternal")[1::2] == before


def test_a_kappa_that_nobody_gave_is_that_for_so_many_layers() -> None:
    one = replace(MODEL, layers=1)
    given, taken = (
        build(replace(CONFIG, epochs=1), Regularization("fraternal", kappa), one) for kappa in (0.15, None)
    )
    assert untimed(tuple(given.epochs())) == untimed(tuple(taken.epochs()))


def test_every_epoch_starts_from_a_zero_state() -> None:
    """Where nothing is learned, a second epoch over the same windows repeats the first bit for bit."""
    config = replace(CONFIG, epochs=2, lr=1e-30, weight_decay=0, windows="fixed")
    first, second = build(config, Regularization(), KEPT).epochs()
    assert (first.train_loss, first.ar, first.tar) == (second.train_loss, second.ar, second.tar)


def test_a_window_of_one_step_adds_no_tar_and_spoils_nothing() -> None:
    """Eight steps are a window of seven and one of one, whose TAR counts as zero."""
    config = replace(CONFIG, epochs=1, windows="fixed", lr=1e-30, weight_decay=0)
    columns_BT = TRAIN[: 3 * 9].reshape(3, 9)
    texts = (columns_BT.flatten(), columns_BT[:, :8].flatten())
    cut, whole = (next(build(config, Regularization(beta=1), train=text).epochs()) for text in texts)
    assert whole.tar > 0
    assert cut.tar == pytest.approx(whole.tar * 7 / 8, rel=1e-6)
    assert math.isfinite(cut.optimised)
    assert math.isfinite(cut.gradient_norm)


# --- evaluation


@pytest.fixture
def model() -> AWDLSTM:
    return AWDLSTM(MODEL, V, torch.Generator().manual_seed(1))


def test_evaluation_is_the_mean_over_every_predicted_token(model: AWDLSTM) -> None:
    ids_T1 = torch.from_numpy(VALID.astype(np.int64)).unsqueeze(1)
    logits_TV = model.decode(model(ids_T1[:-1], model.zero_state(1), None).dropped_TBH)[:, 0]
    losses = [
        -logits.log_softmax(0)[target].item() for logits, target in zip(logits_TV, ids_T1[1:, 0], strict=True)
    ]
    assert len(losses) == len(VALID) - 1
    assert evaluate(model, VALID) == pytest.approx(math.fsum(losses) / len(losses), abs=1e-6)


@pytest.mark.parametrize("window", [1, 3, 50, 99, 100, 101])
def test_evaluation_does_not_depend_on_the_window(model: AWDLSTM, window: int) -> None:
    assert evaluate(model, VALID, window) == pytest.approx(evaluate(model, VALID), abs=1e-5)


@pytest.mark.parametrize("batch", [2, 4, 25])
def test_evaluation_does_not_depend_on_the_batch_where_each_column_starts_from_the_state_carried_to_it(
    model: AWDLSTM, batch: int
) -> None:
    """The 100 predictions of the stream in columns, side by side."""
    steps = 100 // batch
    ids_T1 = torch.from_numpy(VALID.astype(np.int64)).unsqueeze(1)
    with torch.no_grad():
        states = [model.zero_state(1)]
        for start in range(0, 100 - steps, steps):
            states.append(model(ids_T1[start : start + steps], states[-1], None).state)
        state = tuple(
            (torch.cat([h for h, _ in layer], 1), torch.cat([c for _, c in layer], 1))
            for layer in zip(*states, strict=True)
        )
        inputs_TB, targets_TB = (ids_T1[at : at + 100, 0].view(batch, steps).t() for at in (0, 1))
        logits_TBV = model.decode(model(inputs_TB, state, None).dropped_TBH)
    loss = F.cross_entropy(logits_TBV.flatten(0, 1), targets_TB.flatten())
    assert evaluate(model, VALID) == pytest.approx(loss.item(), abs=1e-5)


def test_the_loss_of_a_long_stream_is_as_exact_as_that_of_a_short_one(
    model: AWDLSTM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word costs log V here; in single precision, their sum would end more than 1e-6 of it off."""
    zeros = model.embedding.new_zeros(1, 1, MODEL.embedding_size)

    def guessing(tokens_TB: Tensor, state: State, masks: Masks | None, **how: Any) -> Pass:
        outputs = zeros.expand(*tokens_TB.shape, -1)
        return Pass(outputs, outputs, state)

    monkeypatch.setattr(model, "forward", guessing)
    ids = np.zeros(100_001, dtype=np.int32)
    assert evaluate(model, ids) == pytest.approx(math.log(V), abs=1e-6)
    assert evaluate_mc(model, ids, masks=2, seed=1) == pytest.approx(math.log(V), abs=1e-6)


def test_evaluation_leaves_no_trace(model: AWDLSTM) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert evaluate(model, VALID) == evaluate(model, VALID)
    assert_equal_weights(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- Monte Carlo evaluation


def probabilities(model: AWDLSTM, masks: Masks | None) -> Tensor:
    """Of every next word of VALID, in one window: (T,)."""
    ids_T1 = torch.from_numpy(VALID.astype(np.int64)).unsqueeze(1)
    logits_TV = model.decode(model(ids_T1[:-1], model.zero_state(1), masks).dropped_TBH)[:, 0]
    return logits_TV.softmax(1).gather(1, ids_T1[1:])[:, 0].detach()


@pytest.mark.parametrize("locked", [True, False])
def test_mc_evaluation_is_that_of_the_mean_of_the_probabilities(
    model: AWDLSTM, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    model.config = replace(MODEL, locked=locked)
    drawn: list[Masks] = []
    draw_masks = model.draw_masks

    def recording(*arguments: Any) -> Masks:
        drawn.append(draw_masks(*arguments))
        return drawn[-1]

    monkeypatch.setattr(model, "draw_masks", recording)
    loss = evaluate_mc(model, VALID, masks=3, seed=1, window=100)
    assert len(drawn) == 3
    mean_T = torch.stack([probabilities(model, masks) for masks in drawn]).mean(0)
    assert loss == pytest.approx(-mean_T.log().mean().item(), abs=1e-6)


@pytest.mark.parametrize("window", [1, 7, 99, 128])
def test_locked_masks_are_held_along_the_whole_stream_whatever_the_window(
    model: AWDLSTM, window: int
) -> None:
    assert evaluate_mc(model, VALID, 2, 1, window) == pytest.approx(evaluate_mc(model, VALID, 2, 1), abs=1e-5)


def test_windows_that_end_early_cut_masks_that_are_not_locked(model: AWDLSTM) -> None:
    model.config = replace(MODEL, locked=False)
    assert math.isfinite(evaluate_mc(model, VALID, masks=2, seed=1, window=7))


def test_mc_evaluation_depends_on_the_seed_and_on_nothing_else(model: AWDLSTM) -> None:
    one = evaluate_mc(model, VALID, masks=2, seed=1)
    torch.rand(3)
    assert evaluate_mc(model, VALID, masks=2, seed=1) == one
    assert evaluate_mc(model, VALID, masks=2, seed=2) != one


@pytest.mark.parametrize("masks", [1, 5])
def test_where_nothing_is_dropped_mc_evaluation_is_evaluation(masks: int) -> None:
    model = AWDLSTM(KEPT, V, torch.Generator().manual_seed(1))
    assert evaluate_mc(model, VALID, masks, seed=1) == pytest.approx(evaluate(model, VALID), abs=1e-6)


# --- the learning rate and the state


def test_on_a_plateau_the_rate_falls_for_good_and_the_training_that_goes_on_knows() -> None:
    config = replace(CONFIG, epochs=8, lr_schedule="plateau", lr_patience=2, lr_factor=0.5, lr=40.0, clip=2.0)
    whole = build(config)
    states = {result.epoch: training_state for result in whole.epochs() if (training_state := whole.state())}
    losses = [result.valid_loss for result in whole.history]
    rates = [learning_rate(40.0, losses[:epoch], 2, 0.5) for epoch in range(8)]
    assert [result.lr for result in whole.history] == rates
    assert len(set(rates)) > 1
    resumed = build(config)
    resumed.load_state(*saved_and_read(states[4]))
    list(resumed.epochs())
    assert untimed(resumed.history) == untimed(whole.history)


@pytest.mark.parametrize("averaging", ["none", "nt-asgd", "from-start"])
def test_the_rate_of_the_schedule_is_the_one_that_is_applied_averaging_or_not(
    monkeypatch: pytest.MonkeyPatch, averaging: Literal["none", "nt-asgd", "from-start"]
) -> None:
    """One window an epoch, and weight decay alone, which shrinks the weights by lr * weight_decay.

    NT-ASGD averages from the third epoch on.
    """
    losses = [3.0, 3.5, 3.5, 2.0]
    monkeypatch.setattr(trials.training, "evaluate", lambda model, ids: losses[len(training.history)])
    config = replace(CONFIG, epochs=4, bptt=50, windows="fixed", lr=1.0, clip=1e-9, weight_decay=0.01)
    config = replace(config, lr_schedule="plateau", lr_patience=1, lr_factor=0.5)
    config = replace(config, averaging=averaging, non_monotone_interval=2 if averaging == "from-start" else 0)
    training = build(config, Regularization(), KEPT, train=TRAIN[: 3 * 51])
    before = training.state()[0]["model.embedding"]
    for result in training.epochs():
        after = training.state()[0]["model.embedding"]
        torch.testing.assert_close(after, before * (1 - 0.01 * result.lr), rtol=1e-6, atol=1e-7)
        before = after
    assert [result.lr for result in training.history] == [1, 1, 0.5, 0.25]
    averaged = {"none": [], "nt-asgd": [3, 4], "from-start": [1, 2, 3, 4]}[averaging]
    assert [result.epoch for result in training.history if result.averaged] == averaged


class States:
    """Stands in for a model, and remembers whether its passes in training started from a zero state."""

    def __init__(self, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        self.zero: list[bool] = []
        forward = training.model.forward

        def watching(tokens_TB: Tensor, state: State, masks: Masks | None, **how: Any) -> Pass:
            if torch.is_grad_enabled():
                self.zero.append(all(not h.any() and not c.any() for h, c in state))
            return forward(tokens_TB, state, masks)

        monkeypatch.setattr(training.model, "forward", watching)


@pytest.mark.parametrize(("p", "low", "high"), [(0.0, 0.0, 0.0), (0.3, 0.2, 0.4), (0.999, 0.97, 1.0)])
def test_windows_start_from_a_zero_state_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, p: float, low: float, high: float
) -> None:
    config = replace(CONFIG, epochs=1, state_reset_p=p)
    training = build(config, Regularization(), train=text(9000, 1))
    states = States(training, monkeypatch)
    list(training.epochs())
    first, *later = states.zero
    assert first
    assert low <= sum(later) / len(later) <= high


def test_other_windows_are_reset_in_another_epoch_and_with_another_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 29 windows, each with a chance of a half."""
    config, drawn = replace(CONFIG, epochs=2, windows="fixed", state_reset_p=0.5), []
    for seed in (1, 2):
        training = build(config, Regularization(), seed=seed)
        states = States(training, monkeypatch)
        list(training.epochs())
        drawn += [tuple(states.zero[:29]), tuple(states.zero[29:])]
    assert len(set(drawn)) == 4


def test_both_passes_start_from_the_reset_state(monkeypatch: pytest.MonkeyPatch) -> None:
    training = build(replace(CONFIG, epochs=1, state_reset_p=0.5))
    states = States(training, monkeypatch)
    list(training.epochs())
    assert states.zero[::2] == states.zero[1::2]
    assert {True, False} == set(states.zero)


# --- fine-tuning

TUNING = replace(SWITCHING, averaging="from-start", epochs=40)


def test_fine_tuning_starts_from_the_weights_that_it_is_given_and_averages_from_the_first_step() -> None:
    given = build(seed=9).weights_to_use()
    config = replace(TUNING, epochs=1, bptt=200, windows="fixed")
    training = Training(MODEL, config, Regularization(), V, TRAIN, VALID, 1, weights=given)
    assert_equal_weights(training.weights_to_use(), given)
    (result,) = training.epochs()
    assert result.averaged
    # One window: the mean of one iterate.
    assert_equal_weights(training.weights_to_use(), training.model.state_dict())


def test_fine_tuning_ends_where_nt_asgd_would_begin_to_average() -> None:
    training = build(TUNING, seed=5)
    losses = [result.valid_loss for result in training.epochs()]
    assert 1 < len(losses) < 40
    stalled = [averaging_starts(loss, losses[:epoch], 0) for epoch, loss in enumerate(losses)]
    assert stalled == [False] * (len(losses) - 1) + [True]
    assert training.finished
    assert list(training.epochs()) == []


def test_fine_tuning_that_goes_on_equals_fine_tuning_that_never_stopped() -> None:
    whole = build(TUNING, seed=5)
    states = [whole.state() for _ in whole.epochs()]
    resumed = build(TUNING, seed=5)
    resumed.load_state(*saved_and_read(states[0]))
    list(resumed.epochs())
    assert untimed(resumed.history) == untimed(whole.history)
    assert_equal_weights(resumed.weights_to_use(), whole.weights_to_use())


# --- averaging


def test_the_golden_case_averages_from_its_tenth_epoch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of tests/test_averaging.py, played as those of a training's validation."""
    monkeypatch.setattr("trials.training.DIVERGED_ABOVE", math.inf)
    losses = iter([*GOLDEN, 300.0, 299.0, 300.0, 299.0])
    monkeypatch.setattr("trials.training.evaluate", lambda *arguments: next(losses))
    training = build(replace(SWITCHING, epochs=11, non_monotone_interval=1), train=TRAIN[:60])
    assert [result.averaged for result in training.epochs()] == [False] * 9 + [True] * 2


def test_the_iterate_goes_on_after_the_switch_as_if_nothing_were_averaged() -> None:
    averaged, plain = build_switching(), build_switching(averaging="none")
    list(averaged.epochs())
    list(plain.epochs())
    assert averaged.history[-1].averaged
    assert [e.raw_valid_loss for e in averaged.history] == [e.valid_loss for e in plain.history]
    assert [e.train_loss for e in averaged.history] == [e.train_loss for e in plain.history]
    assert_equal_weights(averaged.model.state_dict(), plain.model.state_dict())


def test_after_the_switch_both_losses_are_recorded_and_the_average_is_what_is_used() -> None:
    training = build_switching()
    used = AWDLSTM(MODEL, V, torch.Generator())
    for result in training.epochs():
        used.load_state_dict(training.weights_to_use())
        assert evaluate(used, VALID) == result.valid_loss
        assert evaluate(training.model, VALID) == result.raw_valid_loss
        assert (result.valid_loss != result.raw_valid_loss) == result.averaged
    assert {result.averaged for result in training.history} == {False, True}


def test_the_average_is_the_mean_of_the_iterates_after_the_switch() -> None:
    """One window an epoch: every iterate can be seen."""
    config = replace(SWITCHING, epochs=30, bptt=70, windows="fixed")
    training = build(config, train=TRAIN[: 3 * 50])
    iterates = []
    for result in training.epochs():
        if result.averaged:
            iterates.append({name: p.detach().clone() for name, p in training.model.named_parameters()})
    assert 3 < len(iterates) < 29
    for name, weights in training.weights_to_use().items():
        mean = torch.stack([iterate[name] for iterate in iterates]).mean(dim=0)
        torch.testing.assert_close(weights, mean, rtol=1e-5, atol=1e-6)


def first_averaged_epoch(config: TrainingConfig) -> int:
    return next(result.epoch for result in build(replace(config, epochs=30)).epochs() if result.averaged)


def test_a_switch_after_the_last_epoch_leaves_the_raw_weights_in_use() -> None:
    training = build(replace(SWITCHING, epochs=first_averaged_epoch(SWITCHING) - 1))
    assert not any(result.averaged for result in training.epochs())
    assert "averaged_steps" in training.state()[1]
    assert_equal_weights(training.weights_to_use(), training.model.state_dict())


def test_frozen_parameters_stay_as_they_are_across_the_switch() -> None:
    training = build(replace(SWITCHING, epochs=30))
    frozen = training.model.decoder_bias.requires_grad_(False)
    frozen.fill_(0.25)
    assert any(result.averaged for result in training.epochs())
    assert torch.equal(training.weights_to_use()["decoder_bias"], torch.full((V,), 0.25))


def test_without_averaging_there_is_no_switch() -> None:
    training = build_switching(averaging="none")
    assert not any(result.averaged for result in training.epochs())


def test_best_is_every_epoch_below_all_earlier_ones() -> None:
    results = list(build_switching(epochs=5, averaging="none").epochs())
    losses = [result.valid_loss for result in results]
    assert [result.is_best for result in results] == [
        all(loss < earlier for earlier in losses[:epoch]) for epoch, loss in enumerate(losses)
    ]
    assert {result.is_best for result in results} == {False, True}


def test_an_epoch_that_only_equals_the_best_is_not_best() -> None:
    training = build(replace(CONFIG, epochs=2, lr=1e-30, weight_decay=0))
    first, second = training.epochs()
    assert first.valid_loss == second.valid_loss
    assert (first.is_best, second.is_best) == (True, False)


FIFTY_AVERAGED_EPOCHS = """
import itertools, numpy as np, psutil
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from trials.spec import TrainingConfig
from trials.training import Training

config = TrainingConfig(epochs=999, batch_size=3, bptt=9, lr=30, averaging="nt-asgd", non_monotone_interval=0)
model = AWDLSTMConfig(embedding_size=120, hidden_size=90, layers=2)
ids = np.random.default_rng(1).integers(0, 400, 60).astype(np.int32)
training = Training(model, config, Regularization("fraternal", alpha=2, beta=1), 400, ids, ids, seed=1)
averaged = (epoch for epoch in training.epochs() if epoch.averaged)
size = sum(tensor.nbytes for tensor in training.weights_to_use().values())
for _ in itertools.islice(averaged, 10):  # until what is allocated once is allocated
    training.weights_to_use()
before = psutil.Process().memory_info().rss
for _ in itertools.islice(averaged, 50):
    training.weights_to_use()
print((psutil.Process().memory_info().rss - before) / size)
"""


@pytest.mark.slow
def test_memory_is_flat_over_fifty_averaged_epochs() -> None:
    """In a process of its own: one copy of the weights left behind in an epoch would be fifty."""
    ran = subprocess.run(
        [sys.executable, "-c", FIFTY_AVERAGED_EPOCHS], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) < 10


def test_a_step_is_torchs_sgd_bit_for_bit() -> None:
    ours, theirs = build().model, build().model
    theirs.decoder_bias.requires_grad_(False)
    ours.decoder_bias.requires_grad_(False)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=1.0, weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1)
    for lr in (2.0, 0.3):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            if one.requires_grad:
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = one.grad.clone()
        optimiser.param_groups[0]["lr"] = lr
        optimiser.step()
        descend(ours, lr, 0.1)
    assert not torch.equal(ours.embedding, build().model.embedding)
    assert_equal_weights(ours.state_dict(), theirs.state_dict())


ONE_EPOCH = """
import sys
import numpy as np
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from trials.spec import TrainingConfig
from trials.training import Training

ids = np.random.default_rng(1).integers(0, 9, 200).astype(np.int32)
model = AWDLSTMConfig(embedding_size=8, hidden_size=8, layers=1)
config = TrainingConfig(epochs=1, batch_size=2)
training = Training(model, config, Regularization("fraternal"), 9, ids, ids, seed=1)
print(len(list(training.epochs())), len(training.state()), "torch._dynamo" in sys.modules)
"""


def test_an_epoch_loads_no_compiler() -> None:
    """Of torch's, which takes seconds: a sweep's first epoch would wait for it."""
    ran = subprocess.run([sys.executable, "-c", ONE_EPOCH], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "2", "False"]


# --- going on


def saved_and_read(
    state: tuple[dict[str, Tensor], dict[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, values = state
    return safetensors.torch.load(safetensors.torch.save(tensors)), json.loads(
        json.dumps(values, allow_nan=False)
    )


Undisturbed = tuple[Training, dict[int, tuple[dict[str, Tensor], dict[str, Any]]]]


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """Six epochs, averaging from somewhere in between, and the state after each."""
    training = build_switching()
    states = {result.epoch: training.state() for result in training.epochs()}
    assert not training.history[1].averaged
    assert training.history[4].averaged
    return training, states


@pytest.mark.parametrize("epochs_before", [1, 2, 3, 4, 5])
def test_training_that_goes_on_equals_training_that_never_stopped(
    undisturbed: Undisturbed, epochs_before: int
) -> None:
    """From before, at and after the switch. The later epochs have not moved what `state` gave earlier."""
    whole, states = undisturbed
    resumed = build_switching()
    resumed.load_state(*saved_and_read(states[epochs_before]))
    assert len(list(resumed.epochs())) == 6 - epochs_before
    assert untimed(resumed.history) == untimed(whole.history)
    assert_equal_weights(resumed.state()[0], whole.state()[0])
    assert_equal_weights(resumed.weights_to_use(), whole.weights_to_use())


def test_training_goes_on_from_any_pause_within_an_epoch() -> None:
    """Paused at every step; in the epoch before the switch and in the one after it, from each of them."""
    whole, events = build_switching(epochs=5), []
    for result in whole.run(pause_every_s=0):
        events.append((result, whole.state()))
    steps = whole.state()[1]["steps"]
    assert len(events) == steps
    assert whole.history[4].averaged
    assert not whole.history[3].averaged
    for result, state in events[-3 * steps // 5 :: 7]:
        resumed = build_switching(epochs=5)
        resumed.load_state(*saved_and_read(state))
        assert ("under_way" in state[1]) == (result is None)
        list(resumed.epochs())
        assert untimed(resumed.history) == untimed(whole.history)
        assert_equal_weights(resumed.state()[0], whole.state()[0])


@pytest.mark.parametrize("name", sorted(REGULARIZERS))
def test_every_regularizer_goes_on_bit_for_bit_from_within_an_epoch_whatever_is_drawn(
    name: str,
) -> None:
    """Masks for each step, resets of the state: what a step draws depends on where it is and nothing else."""
    config = replace(CONFIG, epochs=3, state_reset_p=0.3)
    choices = Regularization(name, alpha=2, beta=1), replace(MODEL, locked=False)
    whole, train, states = build(config, *choices, train=TRAIN[:180]), TRAIN[:180], []
    for _ in whole.run(pause_every_s=0):
        states.append(whole.state())
    for state in states[2:-1:5]:
        resumed = build(config, *choices, train=train)
        resumed.load_state(*saved_and_read(state))
        list(resumed.epochs())
        assert untimed(resumed.history) == untimed(whole.history)
        assert_equal_weights(resumed.state()[0], whole.state()[0])


def test_pauses_change_nothing() -> None:
    paused, whole = build(), build()
    assert [result for result in paused.run(0) if result is not None] == list(paused.history)
    list(whole.epochs())
    assert untimed(paused.history) == untimed(whole.history)


def test_a_pause_comes_whenever_so_much_time_has_passed_but_never_at_the_end_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock on which a step takes a second; two epochs of 29 steps."""
    now, step = 0, Training._step

    def ticking(*arguments: Any) -> tuple[Tensor, State]:
        nonlocal now
        now += 1
        return step(*arguments)

    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(Training, "_step", ticking)
    monkeypatch.setattr(trials.training, "time", clock)
    training = build(replace(CONFIG, epochs=2, windows="fixed"))
    assert [now for result in training.run(pause_every_s=5) if result is None] == [*range(5, 58, 5)]
    assert now == 58
    whole = build(replace(CONFIG, epochs=1, windows="fixed"))
    assert None not in whole.run(pause_every_s=29)


def test_a_training_that_has_switched_can_go_back_to_before_the_switch(undisturbed: Undisturbed) -> None:
    whole, states = undisturbed
    training = build_switching()
    training.load_state(*states[6])
    training.load_state(*states[1])
    list(training.epochs())
    assert untimed(training.history) == untimed(whole.history)


def test_epochs_stop_where_the_consumer_stops_and_go_on_from_there() -> None:
    whole, stopped = build(), build()
    list(whole.epochs())
    next(stopped.epochs())
    assert len(stopped.history) == 1
    list(stopped.epochs())
    assert untimed(stopped.history) == untimed(whole.history)
    assert list(stopped.epochs()) == []


# --- what goes wrong


def test_a_diverging_trial_ends_within_the_epoch_and_yields_nothing_of_it() -> None:
    training = build(replace(CONFIG, lr=1e38), train=text(30_000, 1))
    with pytest.raises(Diverged, match=r"the loss is (nan|inf) at step \d+ of epoch 1"):
        list(training.epochs())
    assert training.history == ()
    assert training.state()[1]["steps"] == STEPS_BETWEEN_CHECKS


@pytest.mark.parametrize("regularizer", ["fraternal", "expectation_linear"])
def test_a_loss_beyond_all_sense_is_divergence_though_clipping_keeps_it_finite(regularizer: str) -> None:
    training = build(CONFIG, regularization=Regularization(regularizer=regularizer, kappa=1e12))
    with pytest.raises(Diverged, match=r"the loss is [\d.]+ at step 1 of epoch 1"):
        list(training.epochs())


def test_weights_spoilt_by_the_last_step_are_found_by_validation() -> None:
    config = replace(CONFIG, lr=1e38, weight_decay=1e6, bptt=50, windows="fixed")
    training = build(config, train=TRAIN[: 3 * 50])
    with pytest.raises(Diverged, match=r"the validation loss is (nan|inf) after step 1 of epoch 1"):
        list(training.epochs())


def test_a_training_split_too_short_for_the_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"training split of 5 tokens .* batch_size 3: .* lower batch_size or"
    ):
        build(train=TRAIN[:5])
    assert len(list(build(replace(CONFIG, epochs=1), train=TRAIN[:6]).epochs())) == 1


@pytest.mark.parametrize("length", [0, 1])
def test_a_stream_with_nothing_to_predict_is_refused(model: AWDLSTM, length: int) -> None:
    with pytest.raises(ValueError, match=f"has {length} tokens, and needs at least 2"):
        evaluate(model, VALID[:length])
    with pytest.raises(ValueError, match=f"validation split has {length} tokens"):
        Training(MODEL, CONFIG, Regularization(), V, TRAIN, VALID[:length], 1)


def test_perplexity_is_infinite_where_it_overflows() -> None:
    result = next(build().epochs())
    assert result.valid_perplexity == math.exp(result.valid_loss)
    assert replace(result, valid_loss=1e4).valid_perplexity == math.inf
