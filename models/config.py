"""The shape and the dropout rates of a model. No torch."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Width = Annotated[int, Field(ge=1, le=2**31 - 1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["float32", "tf32", "bf16"]
"""What matrix products are computed in; see models.precision."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class AWDLSTMConfig:
    """AWD-LSTM (Merity et al. 2017). The size of the vocabulary comes from the corpus."""

    embedding_size: Width = 400
    """Width of the word embeddings, E."""
    hidden_size: Width = 1150
    """Width of the LSTM layers, H; with tied weights the last one is E wide."""
    layers: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of LSTM layers."""
    tied: bool = True
    """Whether the decoder uses the embedding's weights."""
    locked: bool = True
    """One input and one output mask for a whole window; false draws them for each time step."""
    embed_p: Rate = 0.1
    """Dropout of whole word types."""
    input_p: Rate = 0.4
    """Dropout of the first layer's input."""
    hidden_p: Rate = 0.25
    """Dropout between layers."""
    output_p: Rate = 0.4
    """Dropout of the last layer's output."""
    weight_p: Rate = 0.5
    """Dropout of the elements of the hidden-to-hidden matrices."""

    @property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        """(input width, output width) of each LSTM layer."""
        last = self.embedding_size if self.tied else self.hidden_size
        widths = (self.embedding_size, *[self.hidden_size] * (self.layers - 1), last)
        return tuple(pairwise(widths))

    def parameter_count(self, vocabulary_size: int) -> int:
        """How many numbers a model for so many word types learns."""
        sizes = self.layer_sizes
        lstms = sum(4 * outputs * (inputs + outputs + 2) for inputs, outputs in sizes)
        decoder = 0 if self.tied else sizes[-1][1]
        return vocabulary_size * (self.embedding_size + decoder + 1) + lstms
