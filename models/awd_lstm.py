"""AWD-LSTM (Merity et al. 2017), with every random number in sight: a pass is a function of its masks.

T time steps, B batch, V vocabulary, E embedding width, H width of an LSTM layer's output, which may differ
between layers.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config import AWDLSTMConfig
from models.lstm import lstm
from models.masks import Masks, draw_masks, nothing_dropped

# What a GPU would do otherwise: compute in TF32 for float32, differ in the last bits from run to run, and say
# at the first step that the weights are copied at every call, as masked weights must be.
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # read when CUDA is first used
# What a CPU would do otherwise: oneDNN keeps a kernel and megabytes of work space for each of a thousand
# shapes, and windows have dozens of lengths. In bfloat16 that came to more than the rest of a process.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # read when oneDNN is first used
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

State = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of each layer, each of shape (1, B, H)."""


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

    def draw_masks(self, batch_size: int, window_length: int, key: int) -> Masks:
        """Masks for one pass over a window; equal keys give equal masks."""
        vocabulary_size = len(self.embedding)
        return draw_masks(self.config, vocabulary_size, batch_size, window_length, key, like=self.embedding)

    def forward(
        self,
        tokens_TB: Tensor,
        state: State,
        masks: Masks | None,
        *,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> Pass:
        """One pass over a window from `state`; `masks=None` drops nothing.

        The products of the layers are computed in `dtype` where one is given. With `recompute`, what a layer
        leaves for its gradient is not kept, but made again when that is wanted: the same numbers in less
        memory.
        """
        masks = masks or nothing_dropped(len(self.lstms))
        hidden = F.embedding(tokens_TB, self.embedding)
        if masks.embed_V is not None:
            hidden = hidden * masks.embed_V[tokens_TB].unsqueeze(-1)
        hidden = _masked(hidden, masks.input_TBE)
        final = []
        lstms = cast("Iterable[nn.LSTM]", self.lstms)
        layers = zip(lstms, state, masks.kept_4HH, (*masks.hidden_1BH, masks.output_TBH), strict=True)
        for layer, before, kept_4HH, output_mask in layers:
            run = partial(lstm, layer, hidden, before, kept_4HH, masks.weight_p, dtype)
            # Nothing in a layer is random: masks are given.
            raw, after = (
                checkpoint(run, use_reentrant=False, preserve_rng_state=False) if recompute else run()
            )
            final.append(after)
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


def _uniform(shape: Sequence[int], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def _build_lstm(inputs: int, outputs: int, generator: torch.Generator) -> nn.LSTM:
    # Built on no device first: nn.LSTM's own initialisation would draw from the global generator.
    layer = nn.LSTM(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = outputs**-0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return layer
