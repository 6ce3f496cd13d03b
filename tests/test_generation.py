"""The laws of generated text: a model of eleven words, fewer than which its embeddings are wide."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from models.awd_lstm import AWDLSTM
from models.config import AWDLSTMConfig
from trials.generation import generate as words_of

V, E = 11, 4
PROMPT = [3, 0, 10]


def generate(*arguments: Any, **options: Any) -> list[int]:
    return list(words_of(*arguments, **options))


@pytest.fixture
def model() -> AWDLSTM:
    """With a decoder bias, as a trained one has."""
    built = AWDLSTM(AWDLSTMConfig(E, 6, 2), V, seeded(1))
    torch.nn.init.normal_(built.decoder_bias, std=0.7, generator=seeded(2))
    return built


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_TV(model: AWDLSTM, ids: list[int]) -> Tensor:
    """In one pass without dropout, as evaluation makes them."""
    result = model(torch.tensor(ids).unsqueeze(1), model.zero_state(1), None)
    return model.decode(result.dropped_TBH).squeeze(1)


def test_the_greedy_choice_is_the_argmax_of_the_logits_that_evaluation_has(model: AWDLSTM) -> None:
    found = generate(model, PROMPT, 20, seeded(1), temperature=0)
    expected = logits_TV(model, PROMPT + found)[len(PROMPT) - 1 : -1].argmax(1)
    assert found == expected.tolist()
    assert generate(model, PROMPT, 20, seeded(2), temperature=1e-300) == found, "the limit, without overflow"


def test_sampled_words_cover_the_vocabulary_as_often_as_the_model_says(model: AWDLSTM) -> None:
    """More words than E: a sample must not be an index into the hidden vector."""
    draws, generator = 4000, seeded(3)
    for temperature in (1.0, 2.0):
        drawn = (generate(model, PROMPT, 1, generator, temperature=temperature) for _ in range(draws))
        counts = Counter(word for (word,) in drawn)
        expected = (logits_TV(model, PROMPT)[-1] / temperature).softmax(0)
        assert set(counts) == set(range(V))
        for word in range(V):
            p = expected[word].item()
            assert counts[word] / draws == pytest.approx(p, abs=5 * (p * (1 - p) / draws) ** 0.5)


def test_the_words_of_a_text_follow_from_one_another(model: AWDLSTM) -> None:
    """The second of two words is drawn given the first: as after a prompt that ends in it."""
    first, second = generate(model, PROMPT, 2, seeded(4))
    draw = seeded(4)
    assert generate(model, PROMPT, 1, draw) == [first]
    assert generate(model, [*PROMPT, first], 1, draw) == [second]


@pytest.mark.parametrize("top_k", [1, 3, V, 10 * V])
def test_top_k_leaves_the_likeliest(model: AWDLSTM, top_k: int) -> None:
    generator = seeded(5)
    found = {generate(model, PROMPT, 1, generator, top_k=top_k)[0] for _ in range(1000)}
    assert found == set(logits_TV(model, PROMPT)[-1].topk(min(top_k, V)).indices.tolist())


def test_what_is_left_out_is_never_drawn(model: AWDLSTM) -> None:
    likeliest = generate(model, PROMPT, 1, seeded(1), temperature=0)
    for temperature, top_k in itertools.product((0, 1), (None, 2)):
        options = {"temperature": temperature, "top_k": top_k, "without": likeliest}
        found = generate(model, PROMPT, 300, seeded(6), **options)
        assert likeliest[0] not in found


def test_a_seed_decides_the_text(model: AWDLSTM) -> None:
    one, same, other = (generate(model, PROMPT, 30, seeded(seed)) for seed in (7, 7, 8))
    assert one == same != other
