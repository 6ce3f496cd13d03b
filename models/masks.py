"""Dropout masks, each a function of a key: nothing random is carried along, so that resuming is exact.

T time steps, B batch, V vocabulary, E embedding width, H width of an LSTM layer's output.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.config import AWDLSTMConfig


@dataclass(frozen=True)
class Masks:
    """Every mask of one pass, or None where nothing is dropped.

    Those of activations are 0 or 1 / (1 - p); locked ones, constant over time, have a first axis of 1.
    """

    embed_V: Tensor | None
    input_TBE: Tensor | None
    hidden_1BH: tuple[Tensor | None, ...]
    """One for each gap between two layers."""
    output_TBH: Tensor | None
    kept_4HH: tuple[Tensor | None, ...]
    """Booleans, which elements of each layer's hidden-to-hidden matrix stay; shared by batch and time."""
    weight_p: float
    """The kept elements are scaled by 1 / (1 - weight_p)."""


def nothing_dropped(layers: int) -> Masks:
    return Masks(None, None, (None,) * (layers - 1), None, (None,) * layers, 0.0)


def draw_masks(
    config: AWDLSTMConfig,
    vocabulary_size: int,
    batch_size: int,
    window_length: int,
    key: int,
    like: Tensor,
) -> Masks:
    """Masks for one pass over a window, of the dtype and on the device of `like`; equal keys, equal masks."""
    device = like.device
    keep = _KeepOnCPU(key) if device.type == "cpu" else _KeepOnDevice(key, device)
    steps = 1 if config.locked else window_length
    *hidden, last = [width for _, width in config.layer_sizes]

    def draw(p: float, *shape: int) -> Tensor | None:
        return keep(p, shape).to(like.dtype).div_(1 - p) if p else None

    def draw_kept(width: int) -> Tensor | None:
        return keep(config.weight_p, (4 * width, width)) if config.weight_p else None

    return Masks(
        embed_V=draw(config.embed_p, vocabulary_size),
        input_TBE=draw(config.input_p, steps, batch_size, config.embedding_size),
        hidden_1BH=tuple(draw(config.hidden_p, 1, batch_size, width) for width in hidden),
        output_TBH=draw(config.output_p, steps, batch_size, last),
        kept_4HH=tuple(draw_kept(width) for width in (*hidden, last)),
        weight_p=config.weight_p,
    )


class _KeepOnCPU:
    """Booleans that are true with probability 1 - p, to 2^-32; some 6 x faster than torch's bernoulli_."""

    def __init__(self, key: int) -> None:
        self._bits = np.random.SFC64(key)

    def __call__(self, p: float, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        drawn = self._bits.random_raw((size + 1) // 2).view(np.uint32)[:size]
        return torch.from_numpy(drawn >= np.uint32(min(round(p * 2**32), 2**32 - 1))).view(shape)


class _KeepOnDevice:
    def __init__(self, key: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(key)

    def __call__(self, p: float, shape: tuple[int, ...]) -> Tensor:
        kept = torch.empty(shape, dtype=torch.bool, device=self._generator.device)
        return kept.bernoulli_(1 - p, generator=self._generator)
