"""One trial's training: a generator of epochs that knows no Ray, no Optuna and no path.

Nothing random is carried along: the initial weights, the windows of an epoch and the masks of a step are
functions of the seed and of where they are used. So training that goes on from a saved state, be it one from
the middle of an epoch, equals training that never stopped.

T time steps, B batch.
"""

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from models.awd_lstm import AWDLSTM, Pass, State
from models.config import AWDLSTMConfig
from models.masks import Masks
from models.precision import product_dtype, require_precision, tf32_products
from models.side_by_side import passes_side_by_side
from regularizers.config import Regularization
from regularizers.losses import loss_parts
from trials.averaging import RunningMean, averaging_starts, learning_rate
from trials.dynamics import COLUMNS, STEPS, prediction_dynamics
from trials.evaluation import Ids, as_tokens, evaluate, key, require_two_tokens
from trials.perplexity import perplexity
from trials.recorded import Recorded, cuda_recorder
from trials.spec import MOST_ABOVE_BPTT, TrainingConfig

INITIAL_WEIGHTS, WINDOWS, MASKS, STATE_RESETS, DYNAMICS = range(5)
"""What a random stream is for: the second part of its key, after the seed; trials.evaluation has one more."""

STEPS_BETWEEN_CHECKS = 50
"""A diverged loss is noticed after at most so many steps: each check waits for the device."""

DIVERGED_ABOVE = 1e6
"""Nats per token. A uniform guess costs log V, some 10: so far above it nothing is learned, finite or not."""

STATE_VERSION = 3
"""Of what `Training.state` returns."""

MEASURED = ("optimised", "train_loss", "penalty", "ar", "tar", "gradient_norm")
"""What each step measures: fields of EpochResult."""

UNDER_WAY = ("windows", "sums", "seconds")
"""What of an epoch under way is kept as values."""


class Diverged(Exception):
    """The loss is not finite, or beyond all sense. Go on from an earlier state, or not at all."""


@dataclass(frozen=True)
class EpochResult:
    """What one epoch yielded: losses in nats per token, training figures as token-weighted means."""

    epoch: int
    """1 for the first."""
    train_loss: float
    """Cross-entropy of the first pass, with dropout."""
    valid_loss: float
    """Of the weights to use: the averaged ones once averaging is on."""
    raw_valid_loss: float
    """Of the weights that training goes on with."""
    averaged: bool
    """Whether valid_loss is that of averaged weights."""
    penalty: float
    """The regularizer's, not scaled by kappa; likewise ar by alpha and tar by beta."""
    ar: float
    """Mean hidden activation |m * h|^2 / d of the last layer, m its dropout mask."""
    tar: float
    optimised: float
    """Target loss plus everything added to it."""
    gradient_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of a window of bptt steps."""
    pair_difference: float
    """R_FD / m on text of the validation split, of the weights that training goes on with."""
    prediction_variance: float
    """Variance of a logit under the masks: by Remark 1, half of pair_difference."""
    expectation_gap: float
    """R_ELD / m: by Proposition 1, at least a quarter of pair_difference."""
    tokens: int
    """Predicted tokens trained on."""
    tokens_per_s: float
    """While training: without validation and pauses."""
    seconds: float
    """Wall-clock time, validation included, pauses not."""
    is_best: bool
    """Whether valid_loss is lower than in every earlier epoch."""

    @property
    def valid_perplexity(self) -> float:
        return perplexity(self.valid_loss)


def window_lengths(steps: int, config: TrainingConfig, rng: np.random.Generator) -> list[int]:
    """Cut `steps` time steps into windows; only the last one is cut short by the end.

    Random lengths follow Merity et al. 2017, §4.1: max(5, int(Normal(base, 5))), where base is bptt or, once
    in 20, half of it; never more than base + 10, so that a rare long window cannot run out of memory.
    """
    lengths = []
    while steps > 0:
        length = config.bptt if config.windows == "fixed" else _random_length(config.bptt, rng)
        lengths.append(min(length, steps))
        steps -= length
    return lengths


def _random_length(bptt: int, rng: np.random.Generator) -> int:
    base = bptt if rng.random() < 0.95 else bptt / 2
    return max(5, min(int(rng.normal(base, 5)), int(base + MOST_ABOVE_BPTT)))


@dataclass
class _UnderWay:
    """How far an epoch has come."""

    state: State
    """That the next window starts from."""
    windows: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(MEASURED))
    """Of each of MEASURED, times the length of its window."""
    seconds: float = 0.0


class Training:
    """Trains one model; at a pause and after an epoch, `state` has all that a new Training needs to go on.

    Raises ValueError if the training split is too short for the batch size, or the validation split is;
    UnsupportedPrecision if the device does not compute in the precision that is asked for.
    """

    def __init__(
        self,
        model_config: AWDLSTMConfig,
        training_config: TrainingConfig,
        regularization: Regularization,
        vocabulary_size: int,
        train_ids: Ids,
        valid_ids: Ids,
        seed: int,
        device: str | torch.device = "cpu",
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        """Starts from `weights`, a state dict of the model, where they are given: fine-tuning does."""
        require_two_tokens("the validation split", valid_ids)
        self._config = training_config
        self._regularization = regularization.completed(model_config.layers)
        self._seed = seed
        self._device = torch.device(device)
        require_precision(training_config.precision, self._device)
        self._product_dtype = product_dtype(training_config.precision)
        self._valid_ids = valid_ids
        self._columns_TB = _columns(train_ids, training_config.batch_size).to(self._device)
        generator = torch.Generator().manual_seed(key(seed, INITIAL_WEIGHTS))
        self.model = AWDLSTM(model_config, vocabulary_size, generator).to(self._device)
        if weights is not None:
            self.model.load_state_dict(weights)
        from_start = training_config.averaging == "from-start"
        self._average = RunningMean(self.model) if from_start else None
        self._recorded: Recorded | None = None
        if training_config.cuda_graphs and self._device.type == "cuda":
            parameters = list(self.model.parameters())
            recorder = cuda_recorder(self._device)
            self._recorded = Recorded(parameters, training_config.longest_window, recorder)
        self._steps = 0
        self._history: list[EpochResult] = []
        self._under_way: _UnderWay | None = None

    @property
    def history(self) -> tuple[EpochResult, ...]:
        return tuple(self._history)

    @property
    def steps(self) -> int:
        """Taken so far."""
        return self._steps

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or fine-tuning has converged."""
        if len(self._history) >= self._config.epochs:
            return True
        return self._config.averaging == "from-start" and bool(self._history) and self._has_stalled()

    def epochs(self) -> Iterator[EpochResult]:
        """Train from where the state stands to the last epoch. Raises Diverged in place of an epoch."""
        return (result for result in self.run() if result is not None)

    def run(self, pause_every_s: float = math.inf) -> Iterator[EpochResult | None]:
        """As `epochs`, with a None about so often in the middle of an epoch: a moment to save the state."""
        pause_at = time.monotonic() + pause_every_s
        while not self.finished:
            if self._under_way is None:
                self._under_way = _UnderWay(self.model.zero_state(self._config.batch_size))
            pause_at = yield from self._train(self._under_way, pause_every_s, pause_at)
            yield self._end_epoch(self._under_way)

    def weights_to_use(self) -> dict[str, Tensor]:
        """A copy of what is validated, saved and tested: the averaged weights once there are any."""
        return _copied(self.model if self._average is None else self._average.module)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of all that is needed to go on bit for bit: unshared tensors, and values for JSON."""
        modules: dict[str, nn.Module] = {"model": self.model}
        values: dict[str, Any] = {
            "version": STATE_VERSION,
            "steps": self._steps,
            "history": [dataclasses.asdict(epoch) for epoch in self._history],
        }
        if self._average is not None:
            modules["average"] = self._average.module
            values["averaged_steps"] = self._average.count
        tensors = _copied(nn.ModuleDict(modules))
        if (under_way := self._under_way) is not None:
            values["under_way"] = {name: getattr(under_way, name) for name in UNDER_WAY}
            for layer, (h, c) in enumerate(under_way.state):
                tensors |= {f"state.{layer}.h": h.clone(), f"state.{layer}.c": c.clone()}
        return tensors, values

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from what `state` returned; all but `epochs` must be as it was there.

        Raises ValueError if another version of this program wrote it.
        """
        if (version := values.get("version")) != STATE_VERSION:
            raise ValueError(f"a training state of version {version}; this program reads {STATE_VERSION}")
        self.model.load_state_dict(_below("model.", tensors))
        self._average = None
        if "averaged_steps" in values:
            self._average = RunningMean(self.model)
            self._average.module.load_state_dict(_below("average.", tensors))
            self._average.count = values["averaged_steps"]
        self._steps = values["steps"]
        self._history = [EpochResult(**epoch) for epoch in values["history"]]
        self._under_way = None
        if "under_way" in values:
            carried = (
                (tensors[f"state.{i}.h"], tensors[f"state.{i}.c"]) for i in range(len(self.model.lstms))
            )
            state = tuple((h.to(self._device), c.to(self._device)) for h, c in carried)
            self._under_way = _UnderWay(state, **values["under_way"])

    def _has_stalled(self) -> bool:
        """The non-monotone trigger, after the latest epoch."""
        *earlier, latest = [epoch.valid_loss for epoch in self._history]
        return averaging_starts(latest, earlier, self._config.non_monotone_interval)

    def _learning_rate(self) -> float:
        """Of the epoch that is next or under way."""
        config = self._config
        if config.lr_schedule == "constant":
            return config.lr
        losses = [epoch.valid_loss for epoch in self._history]
        return learning_rate(config.lr, losses, config.lr_patience, config.lr_factor)

    def _train(
        self, under_way: _UnderWay, pause_every_s: float, pause_at: float
    ) -> Generator[None, None, float]:
        """One pass over the training split, or the rest of it; returns when the next pause is due."""
        epoch = len(self._history) + 1
        lengths, resets = self._windows_of(epoch)
        lr = self._learning_rate()
        while (done := under_way.windows) < len(lengths):
            self._take_steps(under_way, lengths[done:], resets[done:], sum(lengths[:done]), lr, pause_at)
            if time.monotonic() >= pause_at and under_way.windows < len(lengths):
                yield
                pause_at = time.monotonic() + pause_every_s
        return pause_at

    def _windows_of(self, epoch: int) -> tuple[list[int], list[bool]]:
        """The lengths of an epoch's windows, and which of them start from a zero state."""
        rng = np.random.default_rng([self._seed, WINDOWS, epoch])
        lengths = window_lengths(len(self._columns_TB) - 1, self._config, rng)
        chances = np.random.default_rng([self._seed, STATE_RESETS, epoch]).random(len(lengths))
        return lengths, (chances < self._config.state_reset_p).tolist()

    def _take_steps(
        self,
        under_way: _UnderWay,
        lengths: Sequence[int],
        resets: Sequence[bool],
        start: int,
        lr: float,
        until: float,
    ) -> None:
        """Take one step a window from time step `start` on, till the next check or pause is due.

        Raises Diverged at a loss without sense.
        """
        began, measured = time.perf_counter(), []
        for length, reset in itertools.islice(zip(lengths, resets, strict=True), STEPS_BETWEEN_CHECKS):
            if reset:
                under_way.state = self.model.zero_state(self._config.batch_size)
            inputs_TB, targets_TB = _window(self._columns_TB, start, length)
            row, under_way.state = self._step(inputs_TB, targets_TB, under_way.state, lr)
            measured.append(row)
            start += length
            if time.monotonic() >= until:
                break
        for length, row in zip(lengths, torch.stack(measured).tolist(), strict=False):
            under_way.windows += 1
            if not row[0] <= DIVERGED_ABOVE:  # NaN, too
                where = f"step {under_way.windows} of epoch {len(self._history) + 1}"
                raise Diverged(f"the loss is {row[0]} at {where}")
            under_way.sums = [total + length * x for total, x in zip(under_way.sums, row, strict=True)]
        under_way.seconds += time.perf_counter() - began

    def _end_epoch(self, under_way: _UnderWay) -> EpochResult:
        """Validate, and put the epoch into the history."""
        began, epoch = time.perf_counter(), len(self._history) + 1
        raw_valid_loss = self._validate(epoch, self.model)
        valid_loss = raw_valid_loss if self._average is None else self._validate(epoch, self._average.module)
        measured = [total / (len(self._columns_TB) - 1) for total in under_way.sums]
        tokens = self._columns_TB[1:].numel()
        result = EpochResult(
            epoch=epoch,
            valid_loss=valid_loss,
            raw_valid_loss=raw_valid_loss,
            averaged=self._average is not None,
            lr=self._learning_rate(),
            tokens=tokens,
            tokens_per_s=tokens / under_way.seconds,
            is_best=all(valid_loss < earlier.valid_loss for earlier in self._history),
            **dict(zip(MEASURED, measured, strict=True)),
            **self._dynamics(epoch),
            seconds=under_way.seconds + time.perf_counter() - began,
        )
        self._history.append(result)
        self._under_way = None
        if self._average is None and self._config.averaging == "nt-asgd" and self._has_stalled():
            self._average = RunningMean(self.model)
        return result

    def _dynamics(self, epoch: int) -> dict[str, float]:
        keys = (key(self._seed, DYNAMICS, epoch, sample) for sample in itertools.count())
        tokens_N = as_tokens(self._valid_ids[: COLUMNS * STEPS], self._device)
        return dataclasses.asdict(prediction_dynamics(self.model, tokens_N, keys))

    def _step(self, inputs_TB: Tensor, targets_TB: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        """Both passes start from `state`; the first one's final state is returned."""
        masks = self._draw_masks(inputs_TB)
        with tf32_products(self._config.precision == "tf32"):
            if self._recorded is None:
                self.model.zero_grad()
                total, figures, state = self._losses(inputs_TB, targets_TB, state, masks)
                torch.autograd.backward(total)
            else:
                figures, state = self._recorded(self._losses, inputs_TB, targets_TB, state, masks)
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip)
        descend(self.model, lr * len(inputs_TB) / self._config.bptt, self._config.weight_decay)
        if self._average is not None:
            self._average.update(self.model)
        self._steps += 1
        return torch.cat([figures, gradient_norm.unsqueeze(0)]), state

    def _losses(
        self, inputs_TB: Tensor, targets_TB: Tensor, state: State, masks: Sequence[Masks | None]
    ) -> tuple[Tensor, Tensor, State]:
        """What is optimised; what of it is MEASURED; and the state that the next window starts from."""
        passes = self._passes if self._recorded is None else self._passes_side_by_side
        first, *others = passes(inputs_TB, state, masks)
        second = others[0] if others else None
        parts = loss_parts(self._regularization, first, second, self.model, targets_TB, self._product_dtype)
        figures = torch.stack((parts.total, parts.first_target, parts.penalty, parts.ar, parts.tar))
        return parts.total, figures.detach(), first.state

    def _passes(self, inputs_TB: Tensor, state: State, masks: Sequence[Masks | None]) -> tuple[Pass, ...]:
        def one(of_pass: Masks | None, with_gradient: bool) -> Pass:
            recompute = self._config.recompute and with_gradient
            with torch.set_grad_enabled(with_gradient):
                result: Pass = self.model(
                    inputs_TB, state, of_pass, dtype=self._product_dtype, recompute=recompute
                )
            return result

        first, *others = masks
        with_gradient = self._regularization.second_pass_has_gradient
        return one(first, True), *(one(other, with_gradient) for other in others)

    def _passes_side_by_side(
        self, inputs_TB: Tensor, state: State, masks: Sequence[Masks | None]
    ) -> tuple[Pass, ...]:
        with_gradient = len(masks) if self._regularization.second_pass_has_gradient else 1
        how: dict[str, Any] = {"dtype": self._product_dtype, "recompute": self._config.recompute}
        return passes_side_by_side(self.model, inputs_TB, state, masks, with_gradient, **how)

    def _draw_masks(self, inputs_TB: Tensor) -> tuple[Masks | None, ...]:
        """Those of each pass; None for one that drops nothing."""
        length, batch_size = inputs_TB.shape

        def draw(which_pass: int) -> Masks:
            return self.model.draw_masks(batch_size, length, key(self._seed, MASKS, self._steps, which_pass))

        match self._regularization.declaration.second_pass:
            case "none":
                return (draw(1),)
            case "no_dropout":
                return draw(1), None
            case "new_masks":
                return draw(1), draw(2)

    def _validate(self, epoch: int, model: AWDLSTM) -> float:
        loss = evaluate(model, self._valid_ids)
        if not loss <= DIVERGED_ABOVE:
            raise Diverged(f"the validation loss is {loss} after step {self._steps} of epoch {epoch}")
        return loss


@torch.no_grad()
def descend(model: nn.Module, lr: float, weight_decay: float) -> None:
    """One step of torch.optim.SGD, fused. The class loads torch's compiler with its first step, which takes
    seconds that a sweep's first epoch would wait for; the function that it calls does not."""
    moved = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    sgd(
        [parameter for parameter, _ in moved],
        [gradient for _, gradient in moved],
        [None] * len(moved),
        fused=True,
        weight_decay=weight_decay,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def _columns(ids: Ids, batch_size: int) -> Tensor:
    """The stream cut into `batch_size` columns (T, B) where it lies, since others have it mapped, too."""
    rows = len(ids) // batch_size
    if rows < 2:
        raise ValueError(
            f"a training split of {len(ids)} tokens is too short for batch_size {batch_size}: each column "
            "needs at least 2 tokens; lower batch_size or give a longer text"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        tokens = torch.from_numpy(ids[: rows * batch_size])
    return tokens.view(batch_size, rows).t()


def _window(columns_TB: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of at most `length` time steps."""
    some_TB = columns_TB[start : start + length + 1].to(torch.int64).contiguous()
    return some_TB[:-1], some_TB[1:]


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
