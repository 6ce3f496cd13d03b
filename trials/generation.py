"""Text that a model goes on with, word by word."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM


@torch.no_grad()
def generate(
    model: AWDLSTM,
    prompt: Sequence[int],
    words: int,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    without: Sequence[int] = (),
) -> Iterator[int]:
    """The ids of `words` words after the prompt, which has one at least, as they come; nothing is dropped.

    Each is drawn from softmax(logits / temperature), of the `top_k` likeliest words where that is given, and
    never one of `without`. Temperature 0 takes the likeliest. `generator` is on the CPU, on any device.
    Raises ValueError where the logits are no finite numbers.
    """
    device = model.decoder_bias.device
    tokens_T1 = torch.tensor(prompt, device=device).unsqueeze(1)
    state = model.zero_state(1)
    for _ in range(words):
        result = model(tokens_T1, state, None)
        state = result.state
        logits_V = model.decode(result.dropped_TBH[-1:]).flatten().double().cpu()
        if not logits_V.isfinite().all():
            raise ValueError("the model's predictions are not finite numbers: train it again")
        logits_V[list(without)] = -torch.inf
        found = _choose(logits_V, temperature, top_k, generator)
        yield found
        tokens_T1 = torch.tensor([[found]], device=device)


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_K, ids_K = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    scaled_K = (logits_K - logits_K[0]) / temperature  # the largest is 0: no temperature makes it overflow
    return int(ids_K[torch.multinomial(scaled_K.softmax(0), 1, generator=generator)])
