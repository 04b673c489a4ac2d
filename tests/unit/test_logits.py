"""What parameters do to logits, against transformers' processors and by plain definitions."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.layers.logits import process
from engine.layers.sampler import sample
from engine.layers.slot import Slot
from engine.messages import SamplerSpec

VOCAB_SIZE = 24
NEVER = float("-inf")
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
PROMPTS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**32 - 1)


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def slot(prompt: list[int], output: list[int], **fields: Any) -> Slot:
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    keys = {"seed": 1, "sampling_key": 2, "sample_index": 0}
    return Slot(
        uid=0,
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=[],
        sampler=SamplerSpec(**(plain | keys | fields)),
    )


def processed(logits: torch.Tensor, one: Slot) -> torch.Tensor:
    rows = logits[None].clone()
    process(rows, [one])
    return rows[0]


def by_transformers(
    processor: LogitsProcessor, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    changed: torch.Tensor = processor(torch.tensor([prompt + output]), logits[None].clone())
    return changed[0]


# Against transformers.


@settings(deadline=None, max_examples=60)
@given(prompt=PROMPTS, output=TOKENS, penalty=st.sampled_from([0.5, 1.3, 2.0]), seed=SEEDS)
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    logits = random_logits(seed)
    found = processed(logits, slot(prompt, output, repetition_penalty=penalty))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(found, by_transformers(theirs, prompt, output, logits))


@settings(deadline=None, max_examples=100)
@given(
    output=st.lists(st.integers(0, 3), max_size=12),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    seed=SEEDS,
)
def test_bad_words_are_those_of_transformers(
    output: list[int], bad_words: list[list[int]], seed: int
) -> None:
    logits = random_logits(seed)
    # The prompt's token begins no bad word: transformers looks into the prompt too.
    prompt = [VOCAB_SIZE - 1]
    words = tuple(tuple(word) for word in bad_words)
    found = processed(logits, slot(prompt, output, bad_words=words))
    theirs = NoBadWordsLogitsProcessor(bad_words)
    assert torch.equal(found, by_transformers(theirs, prompt, output, logits))


@pytest.mark.parametrize("num_output", range(6))
def test_min_tokens_is_that_of_transformers(num_output: int) -> None:
    logits, prompt, output = random_logits(0), [1, 2], [5] * num_output
    found = processed(logits, slot(prompt, output, min_tokens=4, forbidden_token_ids=(3, 9)))
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), 4, [3, 9])
    assert torch.equal(found, by_transformers(theirs, prompt, output, logits))


@settings(deadline=None, max_examples=40)
@given(
    which=st.sampled_from(["top_k", "top_p", "min_p"]),
    share=st.sampled_from([0.1, 0.5, 0.9]),
    seed=SEEDS,
)
def test_the_filters_leave_what_those_of_transformers_leave(
    which: str, share: float, seed: int
) -> None:
    logits = random_logits(seed)
    value = int(share * 10) if which == "top_k" else share
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    kept = by_transformers(warpers[which](value), [0], [], logits) > NEVER
    drawn = {
        sample(logits[None].clone(), [slot([0], [0] * i, temperature=1.0, **{which: value})])[0]
        for i in range(300)
    }
    assert drawn <= set(kept.nonzero()[:, 0].tolist())
    likely = kept & (logits.softmax(-1) > 0.05)
    assert set(likely.nonzero()[:, 0].tolist()) <= drawn


# By their definitions.


@settings(deadline=None, max_examples=60)
@given(prompt=PROMPTS, output=TOKENS, seed=SEEDS)
def test_presence_and_frequency_count_what_was_generated_and_not_the_prompt(
    prompt: list[int], output: list[int], seed: int
) -> None:
    logits = random_logits(seed)
    found = processed(logits, slot(prompt, output, presence_penalty=0.7, frequency_penalty=-0.25))
    for token in range(VOCAB_SIZE):
        count = output.count(token)
        wanted = logits[token] + 0.25 * count - (0.7 if count else 0.0)
        assert found[token].item() == pytest.approx(wanted.item(), abs=1e-5)


def test_penalties_come_after_the_bias_and_repetition_before_the_others() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    found = processed(
        logits,
        slot([1], [2, 2], logit_bias={1: 4.0, 2: 6.0}, repetition_penalty=2.0,
             frequency_penalty=0.5, presence_penalty=1.0),
    )  # fmt: skip
    assert found[1].item() == 4.0 / 2
    assert found[2].item() == 6.0 / 2 - 2 * 0.5 - 1.0
    assert found[3:].eq(0).all()


def test_a_bias_is_added_and_does_not_bring_back_what_is_forbidden() -> None:
    logits = random_logits(1)
    one = slot([0], [], logit_bias={3: 100.0, 4: -2.5}, min_tokens=1, forbidden_token_ids=(3,))
    found = processed(logits, one)
    assert found[3] == NEVER
    assert found[4] == logits[4] - 2.5


def test_a_bad_word_is_forbidden_only_at_its_last_token() -> None:
    words = ((5, 6, 7), (8,))
    logits = torch.zeros(VOCAB_SIZE)
    forbidden = {
        tuple(output): (processed(logits, slot([9], output, bad_words=words)) == NEVER).nonzero()
        for output in ([], [5], [5, 6], [6, 5], [5, 6, 5], [4, 5, 6])
    }
    found = {output: ids[:, 0].tolist() for output, ids in forbidden.items()}
    assert found == {
        (): [8], (5,): [8], (5, 6): [7, 8], (6, 5): [8], (5, 6, 5): [8], (4, 5, 6): [7, 8],
    }  # fmt: skip


def test_a_bad_word_that_the_prompt_begins_may_be_finished() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    assert processed(logits, slot([5, 6], [], bad_words=((5, 6, 7),))).eq(0).all()


def test_an_eos_outside_of_the_vocabulary_is_no_matter() -> None:
    ids = (1, VOCAB_SIZE, 2**31 - 1)
    found = processed(torch.zeros(VOCAB_SIZE), slot([0], [], min_tokens=1, forbidden_token_ids=ids))
    assert (found == NEVER).nonzero()[:, 0].tolist() == [1]


# Counts.


@settings(deadline=None, max_examples=40)
@given(prompt=PROMPTS, steps=st.lists(TOKENS, max_size=6), seed=SEEDS)
def test_counts_that_grew_with_the_text_equal_those_made_anew(
    prompt: list[int], steps: list[list[int]], seed: int
) -> None:
    fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
    logits = random_logits(seed)
    growing = slot(prompt, [], **fields)
    for tokens in steps:
        processed(logits, growing)
        growing.token_ids.extend(tokens)
    again = slot(prompt, growing.token_ids[len(prompt) :], **fields)
    assert torch.equal(processed(logits, growing), processed(logits, again))


def test_counts_have_room_for_a_long_text_of_many_words() -> None:
    vocabulary = 3000
    one = slot([0], [], frequency_penalty=1.0)
    logits = torch.zeros(1, vocabulary)
    for start in range(0, vocabulary, 500):
        process(logits.clone(), [one])
        one.token_ids.extend(range(start, start + 500))
    process(logits, [one])
    assert logits.eq(-1).all()


# Rows do not meet.


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "repetition_penalty": st.just(1.5),
                "presence_penalty": st.just(0.5),
                "logit_bias": st.just({1: 3.0}),
                "bad_words": st.just(((2,), (4, 4))),
                "min_tokens": st.just(9),
                "forbidden_token_ids": st.just((6,)),
                "temperature": st.just(0.8),
                "min_p": st.just(0.05),
            },
        ),
        min_size=1,
        max_size=6,
    ),
    output=TOKENS,
    seed=SEEDS,
)
def test_a_row_is_processed_alone_as_in_any_batch(
    rows: list[dict[str, Any]], output: list[int], seed: int
) -> None:
    logits = torch.stack([random_logits(seed + row) for row in range(len(rows))])
    together = logits.clone()
    process(together, [slot([4], output, **fields) for fields in rows])
    for row, fields in enumerate(rows):
        assert torch.equal(together[row], processed(logits[row], slot([4], output, **fields)))
    tokens = sample(logits.clone(), [slot([4], output, **fields) for fields in rows])
    alone = [
        sample(logits[row : row + 1].clone(), [slot([4], output, **fields)])[0]
        for row, fields in enumerate(rows)
    ]
    assert tokens == alone


# Numbers that are none.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["all", "one", "inf", "forbidden"])
def test_broken_logits_give_some_token_and_leave_the_neighbours_alone(
    kind: str, temperature: float
) -> None:
    broken = random_logits(3)
    fields: dict[str, Any] = {"temperature": temperature, "repetition_penalty": 1e-30}
    if kind == "all":
        broken[:] = float("nan")
    elif kind == "one":
        broken[5] = float("nan")
    elif kind == "inf":
        broken[5] = float("inf")
    else:
        fields["bad_words"] = tuple((token,) for token in range(VOCAB_SIZE))
    good = random_logits(4)
    tokens = sample(
        torch.stack([broken, good, broken]),
        [slot([0], [], **fields), slot([0], []), slot([0], [], **fields)],
    )
    assert tokens[1] == good.argmax()
    assert tokens[0] == tokens[2]
    assert 0 <= tokens[0] < VOCAB_SIZE
    if kind == "inf":
        assert tokens[0] == 5
    if kind == "one":
        assert tokens[0] != 5


def test_what_is_no_number_is_taken_before_what_is_forbidden() -> None:
    logits = torch.full((1, VOCAB_SIZE), float("nan"))
    words = tuple((token,) for token in range(VOCAB_SIZE) if token != 7)
    assert sample(logits, [slot([0], [], bad_words=words)]) == [7]
