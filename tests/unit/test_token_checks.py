"""What is said in token ids: how a prompt is cut, how bad words are spelt, what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError, RequestErrorCode
from engine.sampling_params import SamplingParams
from engine.token_checks import check_sampling, spell_bad_words, truncate

BOS = 0


@settings(deadline=None, max_examples=200)
@given(
    token_ids=st.lists(st.integers(0, 9), min_size=2, max_size=12),
    limit=st.integers(1, 11),
    num_fixed=st.integers(0, 5),
)
def test_a_cut_prompt_has_the_limits_length_the_old_end_and_the_old_bos(
    token_ids: list[int], limit: int, num_fixed: int
) -> None:
    limit, num_fixed = min(limit, len(token_ids) - 1), min(num_fixed, len(token_ids) - 1)
    has_bos = token_ids[0] == BOS
    if num_fixed and num_fixed + has_bos > limit:
        with pytest.raises(RequestError, match=f"truncate_prompt_tokens is {limit}, .* takes"):
            truncate(token_ids, limit, num_fixed=num_fixed, bos_token_id=BOS)
        return
    kept = truncate(token_ids, limit, num_fixed=num_fixed, bos_token_id=BOS)
    assert len(kept) == limit
    assert num_fixed == 0 or kept[-num_fixed:] == token_ids[-num_fixed:]
    if has_bos and limit > 1:
        assert kept == [BOS, *token_ids[len(token_ids) - limit + 1 :]]
    else:
        assert kept == token_ids[-limit:]


def test_a_model_without_a_bos_keeps_the_end_only() -> None:
    assert truncate([0, 1, 2, 3], 2, num_fixed=0, bos_token_id=None) == [2, 3]


def spell(word: str) -> list[int]:
    """Encode like a tokenizer that has tokens for a, b, " a" and a space."""
    vocabulary = {" a": 9, "a": 1, "b": 2, " ": 3, "z": 99}
    token_ids = []
    while word:
        piece = next(piece for piece in vocabulary if word.startswith(piece))
        token_ids.append(vocabulary[piece])
        word = word[len(piece) :]
    return token_ids


@pytest.mark.parametrize(
    ("word", "spellings"),
    [
        ("a", ((1,), (9,))),
        (" a", ((1,), (9,))),
        ("ab", ((1, 2), (9, 2))),
        ("b", ((2,),)),  # with a space before it, it would be two tokens
    ],
)
def test_a_bad_word_is_spelt_with_a_space_before_it_where_that_is_another_token(
    word: str, spellings: tuple[tuple[int, ...], ...]
) -> None:
    assert spell_bad_words([word], spell, 10) == spellings


def test_the_spellings_of_several_words_come_together() -> None:
    assert spell_bad_words(["b", "a"], spell, 10) == ((2,), (1,), (9,))
    assert spell_bad_words([], spell, 10) == ()


def test_a_word_that_the_model_cannot_spell_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="bad_words holds 'az'"):
        spell_bad_words(["b", "az"], spell, 10)
    with pytest.raises(RequestError, match="bad_words holds 'x'"):
        spell_bad_words(["x"], lambda _: [], 10)


@pytest.mark.parametrize(
    ("name", "value"), [("stop_token_ids", (3, 10)), ("logit_bias", {10: 1.0, 3: 2.0})]
)
def test_a_token_that_the_model_has_not_is_refused_by_parameter(name: str, value: object) -> None:
    params = SamplingParams().overlaid({name: value})
    check_sampling(params, vocab_size=11)
    with pytest.raises(RequestError, match=f"{name} names token 10; .* 0 to 9") as caught:
        check_sampling(params, vocab_size=10)
    assert caught.value.code is RequestErrorCode.INVALID_SAMPLING_PARAMS
