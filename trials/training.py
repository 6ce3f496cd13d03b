"""One trial's training: a generator of epochs that knows no Ray, no Optuna and no path.

Nothing random is carried along: the initial weights, the windows of an epoch and the masks of a step are
functions of the seed and of where they are used. So training that goes on from a saved state equals training
that never stopped.

T time steps, B batch.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.awd_lstm import AWDLSTM, Masks, Pass, State
from models.config import AWDLSTMConfig
from regularizers.config import Regularization
from regularizers.losses import loss_parts
from trials.averaging import RunningMean, averaging_starts
from trials.perplexity import perplexity
from trials.spec import TrainingConfig

Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""A split as one stream of word ids."""

INITIAL_WEIGHTS, WINDOWS, MASKS = range(3)
"""What a random stream is for: the second part of its key, after the seed."""

STEPS_BETWEEN_CHECKS = 50
"""A diverged loss is noticed after at most so many steps: each check waits for the device."""

DIVERGED_ABOVE = 1e6
"""Nats per token. A uniform guess costs log V, some 10: so far above it nothing is learned, finite or not."""

EVALUATION_WINDOW = 128
"""Time steps evaluated at once: enough for efficient matrix products, few enough to stay in a cache."""

MEASURED = ("optimised", "train_loss", "penalty", "ar", "tar", "gradient_norm")
"""What each step measures: fields of EpochResult."""


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
    tar: float
    optimised: float
    """Target loss plus everything added to it."""
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Predicted tokens trained on."""
    seconds: float
    """Wall-clock time, validation included."""
    is_best: bool
    """Whether valid_loss is lower than in every earlier epoch."""

    @property
    def valid_perplexity(self) -> float:
        return perplexity(self.valid_loss)


def evaluate(model: AWDLSTM, ids: Ids, window: int = EVALUATION_WINDOW) -> float:
    """Mean loss in nats per token over all N-1 predicted tokens, at batch 1 with the state carried along.

    The window bounds memory and does not change the result. Raises ValueError if there is nothing to predict.
    """
    _require_two_tokens("the stream to evaluate", ids)
    tokens_T1 = _tokens(ids, model.decoder_bias.device).unsqueeze(1)
    total = torch.zeros((), dtype=torch.float64, device=tokens_T1.device)
    state = model.zero_state(1)
    with torch.no_grad():
        for start in range(0, len(tokens_T1) - 1, window):
            inputs_T1, targets_T1 = _window(tokens_T1, start, window)
            result = model(inputs_T1, state, None)
            state = result.state
            logits_TV = model.decode(result.dropped_TBH).squeeze(1)
            total += F.cross_entropy(logits_TV, targets_T1.squeeze(1), reduction="sum")
    return total.item() / (len(ids) - 1)


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
    return max(5, min(int(rng.normal(base, 5)), int(base + 10)))


class Training:
    """Trains one model; between two epochs, `state` has all that a new Training needs to go on from there.

    Raises ValueError if the training split is too short for the batch size, or the validation split is.
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
    ) -> None:
        _require_two_tokens("the validation split", valid_ids)
        self._config = training_config
        self._regularization = regularization
        self._seed = seed
        self._device = torch.device(device)
        self._valid_ids = valid_ids
        self._columns_TB = _columns(_tokens(train_ids, self._device), training_config.batch_size)
        generator = torch.Generator().manual_seed(_key(seed, INITIAL_WEIGHTS))
        self.model = AWDLSTM(model_config, vocabulary_size, generator).to(self._device)
        self._optimiser = torch.optim.SGD(
            self.model.parameters(),
            lr=training_config.lr,
            weight_decay=training_config.weight_decay,
            fused=True,
        )
        self._average: RunningMean[AWDLSTM] | None = None
        self._steps = 0
        self._history: list[EpochResult] = []

    @property
    def history(self) -> tuple[EpochResult, ...]:
        return tuple(self._history)

    def epochs(self) -> Iterator[EpochResult]:
        """Train from where the state stands to the last epoch. Raises Diverged in place of an epoch."""
        while len(self._history) < self._config.epochs:
            result = self._run_epoch(len(self._history) + 1)
            if self._average is None and self._switches_after(result):
                self._average = RunningMean(self.model)
            self._history.append(result)
            yield result

    def weights_to_use(self) -> dict[str, Tensor]:
        """A copy of what is validated, saved and tested: the averaged weights once there are any."""
        return _copied(self.model if self._average is None else self._average.module)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of all that is needed to go on bit for bit: unshared tensors, and values for JSON."""
        modules: dict[str, nn.Module] = {"model": self.model}
        values: dict[str, Any] = {
            "steps": self._steps,
            "history": [dataclasses.asdict(epoch) for epoch in self._history],
        }
        if self._average is not None:
            modules["average"] = self._average.module
            values["averaged_steps"] = self._average.count
        return _copied(nn.ModuleDict(modules)), values

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from what `state` returned; all but `epochs` must be as it was there."""
        self.model.load_state_dict(_below("model.", tensors))
        self._average = None
        if "averaged_steps" in values:
            self._average = RunningMean(self.model)
            self._average.module.load_state_dict(_below("average.", tensors))
            self._average.count = values["averaged_steps"]
        self._steps = values["steps"]
        self._history = [EpochResult(**epoch) for epoch in values["history"]]

    def _switches_after(self, result: EpochResult) -> bool:
        earlier = [epoch.valid_loss for epoch in self._history]
        interval = self._config.non_monotone_interval
        return self._config.averaging == "nt-asgd" and averaging_starts(result.valid_loss, earlier, interval)

    def _run_epoch(self, epoch: int) -> EpochResult:
        started = time.perf_counter()
        means = self._train(epoch)
        raw_valid_loss = self._validate(epoch, self.model)
        valid_loss = raw_valid_loss if self._average is None else self._validate(epoch, self._average.module)
        return EpochResult(
            epoch=epoch,
            valid_loss=valid_loss,
            raw_valid_loss=raw_valid_loss,
            averaged=self._average is not None,
            tokens=self._columns_TB[1:].numel(),
            seconds=time.perf_counter() - started,
            is_best=all(valid_loss < earlier.valid_loss for earlier in self._history),
            **means,
        )

    def _train(self, epoch: int) -> dict[str, float]:
        """One pass over the training split; the token-weighted mean of each of MEASURED."""
        rng = np.random.default_rng([self._seed, WINDOWS, epoch])
        lengths = window_lengths(len(self._columns_TB) - 1, self._config, rng)
        rows = list(_finite_rows(epoch, self._steps_over(lengths)))
        return dict(zip(MEASURED, np.average(rows, axis=0, weights=lengths).tolist(), strict=True))

    def _steps_over(self, lengths: Sequence[int]) -> Iterator[Tensor]:
        """Take one step a window, from a zero state; yield the values of MEASURED for each."""
        state = self.model.zero_state(self._config.batch_size)
        start = 0
        for length in lengths:
            inputs_TB, targets_TB = _window(self._columns_TB, start, length)
            measured, state = self._step(inputs_TB, targets_TB, state)
            start += length
            yield measured

    def _step(self, inputs_TB: Tensor, targets_TB: Tensor, state: State) -> tuple[Tensor, State]:
        """Both passes start from `state`; the first one's final state is returned."""
        first: Pass = self.model(inputs_TB, state, self._draw_masks(inputs_TB, 1))
        second = self._second_pass(inputs_TB, state)
        parts = loss_parts(self._regularization, first, second, self.model, targets_TB)
        self._optimiser.zero_grad()
        torch.autograd.backward(parts.total)
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip)
        for group in self._optimiser.param_groups:
            group["lr"] = self._config.lr * len(inputs_TB) / self._config.bptt
        self._optimiser.step()
        if self._average is not None:
            self._average.update(self.model)
        self._steps += 1
        measured = (parts.total, parts.first_target, parts.penalty, parts.ar, parts.tar, gradient_norm)
        return torch.stack(measured).detach(), first.state

    def _second_pass(self, inputs_TB: Tensor, state: State) -> Pass | None:
        second_pass = self._regularization.declaration.second_pass
        if second_pass == "none":
            return None
        masks = self._draw_masks(inputs_TB, 2) if second_pass == "new_masks" else None
        with torch.set_grad_enabled(self._regularization.second_pass_has_gradient):
            second: Pass = self.model(inputs_TB, state, masks)
        return second

    def _draw_masks(self, inputs_TB: Tensor, which_pass: int) -> Masks:
        generator = torch.Generator(self._device).manual_seed(
            _key(self._seed, MASKS, self._steps, which_pass)
        )
        length, batch_size = inputs_TB.shape
        return self.model.draw_masks(batch_size, length, generator)

    def _validate(self, epoch: int, model: AWDLSTM) -> float:
        loss = evaluate(model, self._valid_ids)
        if not loss <= DIVERGED_ABOVE:
            raise Diverged(f"the validation loss is {loss} after step {self._steps} of epoch {epoch}")
        return loss


def _finite_rows(epoch: int, measured: Iterator[Tensor]) -> Iterator[list[float]]:
    """The rows as numbers, fetched from the device by blocks. Raises Diverged at a loss without sense."""
    step = 0
    while block := list(itertools.islice(measured, STEPS_BETWEEN_CHECKS)):
        for row in torch.stack(block).tolist():
            step += 1
            if not row[0] <= DIVERGED_ABOVE:  # NaN, too
                raise Diverged(f"the loss is {row[0]} at step {step} of epoch {epoch}")
            yield row


def _require_two_tokens(what: str, ids: Ids) -> None:
    if len(ids) < 2:
        raise ValueError(
            f"{what} has {len(ids)} tokens, and needs at least 2 to predict one; give a longer text"
        )


def _tokens(ids: Ids, device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def _columns(tokens: Tensor, batch_size: int) -> Tensor:
    """The stream cut into `batch_size` columns (T, B); the rest is dropped."""
    rows = len(tokens) // batch_size
    if rows < 2:
        raise ValueError(
            f"a training split of {len(tokens)} tokens is too short for batch_size {batch_size}: each column "
            "needs at least 2 tokens; lower batch_size or give a longer text"
        )
    return tokens[: rows * batch_size].view(batch_size, rows).t().contiguous()


def _window(tokens_TB: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of at most `length` time steps."""
    targets_TB = tokens_TB[start + 1 : start + 1 + length]
    return tokens_TB[start : start + len(targets_TB)], targets_TB


def _key(*parts: int) -> int:
    """A seed that is a function of all the parts."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
