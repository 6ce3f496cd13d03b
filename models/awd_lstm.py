"""AWD-LSTM (Merity et al. 2017), with every random number in sight: a pass is a function of its masks.

T time steps, B batch, V vocabulary, E embedding width, H width of an LSTM layer's output, which may differ
between layers.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import AWDLSTMConfig

# What a GPU would do otherwise: compute in TF32 for float32, differ in the last bits from run to run, and say
# at the first step that the weights are copied at every call, as masked weights must be.
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # read when CUDA is first used
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

State = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of each layer, each of shape (1, B, H)."""


@dataclass(frozen=True)
class Masks:
    """Every mask of one pass: 0 or 1 / (1 - p), or None where nothing is dropped.

    Locked masks have a first axis of 1: they are constant over time.
    """

    embed_V: Tensor | None
    input_TBE: Tensor | None
    hidden_1BH: tuple[Tensor | None, ...]
    """One for each gap between two layers."""
    output_TBH: Tensor | None
    weights_4HH: tuple[Tensor | None, ...]
    """One for each layer's hidden-to-hidden matrix, shared by batch and time."""


@dataclass(frozen=True)
class Pass:
    """What one pass over a window yields."""

    raw_TBH: Tensor
    """The last layer's output."""
    dropped_TBH: Tensor
    """The same after output dropout: what the decoder makes logits of."""
    state: State
    """The final state, detached."""


class AWDLSTM(nn.Module):
    """A language model of stacked LSTMs with dropped weights.

    `train()` and `eval()` change nothing: the masks decide.

    Its state_dict holds each parameter once; a tied decoder has no entry of its own.
    """

    def __init__(self, config: AWDLSTMConfig, vocabulary_size: int, generator: torch.Generator) -> None:
        """Draw the initial parameters from a CPU generator.

        As in the released code: U(-0.1, 0.1) for the embedding and the decoder, zero for the decoder's bias,
        U(-1/sqrt(H), 1/sqrt(H)) in an LSTM layer.
        """
        super().__init__()
        self.config = config
        sizes = config.layer_sizes
        self.embedding = nn.Parameter(_uniform((vocabulary_size, config.embedding_size), 0.1, generator))
        self.lstms = nn.ModuleList(_build_lstm(inputs, outputs, generator) for inputs, outputs in sizes)
        decoder_shape = (vocabulary_size, sizes[-1][1])
        self.decoder = None if config.tied else nn.Parameter(_uniform(decoder_shape, 0.1, generator))
        self.decoder_bias = nn.Parameter(torch.zeros(vocabulary_size))

    def zero_state(self, batch_size: int) -> State:
        def zeros(width: int) -> Tensor:
            return self.embedding.new_zeros(1, batch_size, width)

        return tuple((zeros(width), zeros(width)) for _, width in self.config.layer_sizes)

    def draw_masks(self, batch_size: int, window_length: int, generator: torch.Generator) -> Masks:
        """Masks for one pass over a window, from a generator on the model's device."""
        config = self.config
        steps = 1 if config.locked else window_length
        *hidden, last = [width for _, width in config.layer_sizes]

        def draw(p: float, *shape: int) -> Tensor | None:
            return (
                self.embedding.new_empty(shape).bernoulli_(1 - p, generator=generator).div_(1 - p)
                if p
                else None
            )

        return Masks(
            embed_V=draw(config.embed_p, self.embedding.shape[0]),
            input_TBE=draw(config.input_p, steps, batch_size, config.embedding_size),
            hidden_1BH=tuple(draw(config.hidden_p, 1, batch_size, width) for width in hidden),
            output_TBH=draw(config.output_p, steps, batch_size, last),
            weights_4HH=tuple(draw(config.weight_p, 4 * width, width) for width in (*hidden, last)),
        )

    def forward(self, tokens_TB: Tensor, state: State, masks: Masks | None) -> Pass:
        """One pass over a window from `state`; `masks=None` drops nothing."""
        masks = masks or _nothing_dropped(len(self.lstms))
        hidden = F.embedding(tokens_TB, self.embedding)
        if masks.embed_V is not None:
            hidden = hidden * masks.embed_V[tokens_TB].unsqueeze(-1)
        hidden = _masked(hidden, masks.input_TBE)
        final = []
        lstms = cast("Iterable[nn.LSTM]", self.lstms)
        layers = zip(lstms, state, masks.weights_4HH, (*masks.hidden_1BH, masks.output_TBH), strict=True)
        for lstm, (h, c), weight_mask, output_mask in layers:
            raw, (h, c) = _lstm(lstm, hidden, (h, c), weight_mask)
            final.append((h.detach(), c.detach()))
            hidden = _masked(raw, output_mask)
        return Pass(raw, hidden, tuple(final))

    @property
    def decoder_VH(self) -> Tensor:
        """The decoder's matrix: the embedding's where the two are tied."""
        return self.embedding if self.decoder is None else self.decoder

    def decode(self, dropped_TBH: Tensor) -> Tensor:
        """The logits, (T, B, V). A training step does without: they are its largest tensor by far."""
        return F.linear(dropped_TBH, self.decoder_VH, self.decoder_bias)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _lstm(
    layer: nn.LSTM, inputs: Tensor, state: tuple[Tensor, Tensor], weight_mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As layer(inputs, state), where the masked hidden-to-hidden matrix stands in for the raw one."""
    ((input_to_hidden, hidden_to_hidden, *biases),) = layer.all_weights
    weights = (input_to_hidden, _masked(hidden_to_hidden, weight_mask), *biases)
    # Its training form also where no gradient is wanted: cuDNN has no backward for the other one.
    outputs, h, c = torch.lstm(inputs, state, weights, True, 1, 0.0, True, False, False)
    return outputs, (h, c)


def _nothing_dropped(layers: int) -> Masks:
    return Masks(None, None, (None,) * (layers - 1), None, (None,) * layers)


def _uniform(shape: Sequence[int], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def _build_lstm(inputs: int, outputs: int, generator: torch.Generator) -> nn.LSTM:
    # Built on no device first: nn.LSTM's own initialisation would draw from the global generator.
    lstm = nn.LSTM(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = outputs**-0.5
    with torch.no_grad():
        for parameter in lstm.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return lstm
