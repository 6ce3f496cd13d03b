"""The evaluation network in torch's own modules, as docs/checkpoint.md shows it: for who has not us."""

from itertools import pairwise

from torch import Tensor, nn

State = list[tuple[Tensor, Tensor]]
"""(h, c) of each layer, each of shape (1, B, H)."""


class PlainLM(nn.Module):
    """Stacked LSTMs between an embedding and a decoder. `widths`: of the embedding, then of each layer."""

    def __init__(self, vocabulary_size: int, widths: list[int], tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, widths[0])
        self.lstms = nn.ModuleList(nn.LSTM(inputs, outputs) for inputs, outputs in pairwise(widths))
        self.decoder = nn.Linear(widths[-1], vocabulary_size)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits (T, B, V) of the words that follow `tokens` (T, B), and the state to go on from."""
        hidden, after = self.embedding(tokens), []
        for number, lstm in enumerate(self.lstms):
            hidden, last = lstm(hidden, state[number] if state else None)
            after.append(last)
        return self.decoder(hidden), after
