"""Log probabilities, ranks and likeliest tokens, from raw logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.logprobs import score
from engine.logprobs import TokenLogprob

NAN, NEVER = float("nan"), float("-inf")


def by_definition(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return the score of one position by sorting the whole vocabulary."""
    logprobs = logits.float().log_softmax(-1).tolist()
    order = sorted(range(len(logprobs)), key=lambda t: (-logprobs[t], t))
    top = tuple((t, logprobs[t]) for t in order[:num_top])
    return TokenLogprob(token, logprobs[token], order.index(token) + 1, top)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(
        st.lists(st.integers(-3, 3).map(float), min_size=12, max_size=12), min_size=1, max_size=80
    ),
    data=st.data(),
)
def test_scores_are_those_of_the_definition_also_where_tokens_tie(
    rows: list[list[float]], data: st.DataObject
) -> None:
    logits = torch.tensor(rows)
    tokens = data.draw(st.lists(st.integers(0, 11), min_size=len(rows), max_size=len(rows)))
    num_top = data.draw(st.lists(st.integers(0, 14), min_size=len(rows), max_size=len(rows)))
    wanted = [by_definition(*one) for one in zip(logits, tokens, num_top, strict=True)]
    assert score(logits, tokens, num_top) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 400, 32_003])
def test_a_position_is_scored_to_the_bit_alone_as_among_others(
    vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(150, vocab_size, generator=generator) * 4).to(dtype)
    tokens = torch.randint(0, vocab_size, (150,), generator=generator).tolist()
    together = score(logits, tokens, [5] * 150)
    alone = [score(logits[i : i + 1], [tokens[i]], [5])[0] for i in range(150)]
    assert together == alone
    shifted = score(logits[7:], tokens[7:], [5] * 143)
    assert shifted == together[7:]


def test_only_the_chosen_token_is_named_when_no_others_are_asked_for() -> None:
    [found] = score(torch.tensor([[0.0, math.log(3.0)]]), [0], [0])
    assert found.top == ()
    assert found.rank == 2
    assert found.logprob == pytest.approx(math.log(0.25))


def test_the_likeliest_tokens_need_not_hold_the_chosen_one() -> None:
    [found] = score(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), [3], [2])
    assert [token for token, _ in found.top] == [0, 1]
    assert found.rank == 4


def test_nothing_asked_is_nothing_answered() -> None:
    assert score(torch.zeros(0, 5), [], []) == []


def test_impossible_tokens_and_broken_logits_are_told_as_they_are() -> None:
    impossible, broken = score(torch.tensor([[0.0, NEVER, 0.0], [0.0, NAN, 1.0]]), [1, 1], [3, 3])
    assert (impossible.logprob, impossible.rank) == (NEVER, 3)
    assert impossible.top[2] == (1, NEVER)
    assert math.isnan(broken.logprob)
    assert broken.rank == 2
    assert [token for token, _ in broken.top] == [0, 1, 2]


def test_the_tokens_of_broken_logits_come_in_the_order_of_their_ids() -> None:
    logits = torch.randn(2, 5000)
    logits[1, 4000] = NAN
    good, broken = score(logits, [3, 4500], [4, 4])
    assert good == score(logits[:1], [3], [4])[0]
    assert broken.rank == 4501
    assert [token for token, _ in broken.top] == [0, 1, 2, 3]
