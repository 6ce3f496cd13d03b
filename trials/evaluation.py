"""The loss of a whole stream of words: by definition at batch 1, with the state carried from word to word.

It is computed in columns side by side, each begun a while before its own first word. Whether a column began
from the state that the one before it ends in is looked at afterwards; where it did not, it is run again from
there. So the result is that of batch 1, but for rounding, whatever a model remembers.

T time steps of a column, C columns, N predicted words, V vocabulary, H width of a layer.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM, State
from models.masks import Masks
from models.pieces import EVALUATION_WINDOW, MOST_COLUMNS, MOST_LOGITS, SHORTEST_COLUMN, WARM_UP

Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""A split as one stream of word ids."""

MC_MASKS = 5
"""What a random stream is for: the second part of its key, after the seed; trials.training has the others."""

SAME_STATE = 1e-5
"""States, h and c of every layer, that differ by no more are one: rounding alone makes a tenth of it."""

ROUNDS = 2
"""How often the columns that began wrong are run again side by side."""


def evaluate(model: AWDLSTM, ids: Ids, window: int = EVALUATION_WINDOW, columns: int | None = None) -> float:
    """Mean loss in nats per token over all N predicted tokens, without dropout.

    So many words are looked at at once as the window says, one of each column at least; neither it nor the
    number of columns changes the result by more than rounding.
    Raises ValueError if there is nothing to predict.
    """
    return -_target_log_probabilities(model, ids, None, window, columns).sum().item() / (len(ids) - 1)


def evaluate_mc(
    model: AWDLSTM,
    ids: Ids,
    masks: int,
    seed: int,
    window: int = EVALUATION_WINDOW,
    columns: int | None = None,
) -> float:
    """The same of the mean, over `masks` samples of the masks, of the probabilities: MC-eval.

    Each sample's masks stay what they are along the whole stream (Zolna et al. 2018, appendix, "sequence
    averaging"); where they are not locked, for as long as a window, and there is one column. A mean over one
    sample, too, drops.
    """
    columns = columns if model.config.locked else 1
    summed_N: Tensor | None = None
    for sample in range(masks):
        drawn = model.draw_masks(1, window, key(seed, MC_MASKS, sample))
        log_p_N = _target_log_probabilities(model, ids, drawn, window, columns)
        summed_N = log_p_N if summed_N is None else torch.logaddexp(summed_N, log_p_N)
    assert summed_N is not None
    return math.log(masks) - summed_N.sum().item() / (len(ids) - 1)


def key(*parts: int) -> int:
    """A seed that is a function of all the parts."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


@torch.no_grad()
def _target_log_probabilities(
    model: AWDLSTM, ids: Ids, masks: Masks | None, window: int, columns: int | None
) -> Tensor:
    """log p(next token) of every token but the last, (N,) in float64."""
    require_two_tokens("the stream to evaluate", ids)
    tokens = as_tokens(ids, model.decoder_bias.device)
    count = len(tokens) - 1
    length = math.ceil(count / (columns or min(MOST_COLUMNS, max(1, count // SHORTEST_COLUMN))))
    first_C = torch.arange(0, count, length, device=tokens.device)
    rows = min(max(1, MOST_LOGITS // len(model.decoder_bias)), max(window, len(first_C)))
    logits_RV = model.decoder_bias.new_empty(rows, len(model.decoder_bias))

    def run(begin: int, end: int, first_C: Tensor, state: State) -> tuple[Tensor, State]:
        """log p (T, C) of the next words, for each column from its first word on, and the last state."""
        # A column reaches over an end of the stream: what comes of that is cut off, or found wrong.
        at_TC = (torch.arange(begin, end, device=tokens.device).unsqueeze(1) + first_C).clamp(0, count - 1)
        log_p = []
        for some_TC in torch.split(at_TC, max(1, window // len(first_C))):
            result = model(tokens[some_TC], state, masks and _cut(masks, len(some_TC)))
            state = result.state
            if begin >= 0:  # else only the state is wanted
                hidden_NH, targets_N = result.dropped_TBH.flatten(0, 1), tokens[some_TC + 1].flatten()
                for some_nH, some_n in zip(
                    torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True
                ):
                    log_p.append(_log_p(model, some_nH, some_n, logits_RV[: len(some_n)]))
        return torch.cat(log_p).view_as(at_TC) if log_p else at_TC, state

    begun = zero = model.zero_state(len(first_C))
    if len(first_C) > 1:
        _, begun = run(-WARM_UP, 0, first_C, zero)
        begun = _replaced(begun, first_C == 0, _some(zero, first_C == 0))
    log_p_TC, ended = run(0, length, first_C, begun)

    def run_again(which_C: Tensor) -> None:
        """From the states that the columns before them end in."""
        nonlocal begun, ended
        truth = _some(_of_the_column_before(ended, zero), which_C)
        log_p_TC[:, which_C], last = run(0, length, first_C[which_C], truth)
        begun, ended = _replaced(begun, which_C, truth), _replaced(ended, which_C, last)

    def wrong() -> Tensor:
        return ~(_difference(begun, _of_the_column_before(ended, zero)) <= SAME_STATE)

    for _ in range(ROUNDS):
        if not (wrong_C := wrong()).any():
            break
        run_again(wrong_C)
    else:  # it remembers for longer than a column: one after another is faster then
        for column in range(1, len(first_C)):
            if wrong()[column]:
                run_again(torch.arange(len(first_C), device=tokens.device) == column)
    return log_p_TC.t().flatten()[:count]


def _log_p(model: AWDLSTM, hidden_nH: Tensor, targets_n: Tensor, logits_nV: Tensor) -> Tensor:
    """log softmax(logits)[target], (n,) in float64. The logits are made, and used up, where there is room for
    them: pieces as large as that, each in a place of its own, leave holes in which the next one has none."""
    torch.addmm(model.decoder_bias, hidden_nH, model.decoder_VH.t(), out=logits_nV)
    target_n1, largest_n1 = logits_nV.gather(1, targets_n.unsqueeze(1)), logits_nV.amax(1, keepdim=True)
    spread_n = logits_nV.sub_(largest_n1).exp_().sum(1).log()
    return (target_n1 - largest_n1).squeeze(1).sub_(spread_n).double()


def _of_the_column_before(state: State, first: State) -> State:
    """Each column's; for the first one, that of `first`."""

    def moved(one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([other[:, :1], one[:, :-1]], 1)

    return tuple((moved(h, h_0), moved(c, c_0)) for (h, c), (h_0, c_0) in zip(state, first, strict=True))


def _difference(one: State, other: State) -> Tensor:
    """The largest of each column, (C,)."""
    each = [
        (a - b).abs().amax((0, 2)) for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True)
    ]
    return torch.stack(each).amax(0)


def _some(state: State, which_C: Tensor) -> State:
    return tuple((h[:, which_C], c[:, which_C]) for h, c in state)


def _replaced(state: State, which_C: Tensor, new: State) -> State:
    def replaced(one: Tensor, other: Tensor) -> Tensor:
        one = one.clone()
        one[:, which_C] = other
        return one

    return tuple(
        (replaced(h, new_h), replaced(c, new_c)) for (h, c), (new_h, new_c) in zip(state, new, strict=True)
    )


def _cut(masks: Masks, length: int) -> Masks:
    """For a window that may be shorter; locked masks stay as they are."""

    def cut(mask_TBH: Tensor | None) -> Tensor | None:
        return None if mask_TBH is None else mask_TBH[:length]

    return dataclasses.replace(masks, input_TBE=cut(masks.input_TBE), output_TBH=cut(masks.output_TBH))


def as_tokens(ids: Ids, device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def require_two_tokens(what: str, ids: Ids) -> None:
    if len(ids) < 2:
        raise ValueError(
            f"{what} has {len(ids)} tokens, and needs at least 2 to predict one; give a longer text"
        )
