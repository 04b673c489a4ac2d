"""Stop strings and the text of an answer, on a real tokenizer whose tokens cut words anywhere."""

from typing import Any

import pytest
import tiny_model
from engine_builders import infer_request
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError, RequestErrorCode
from engine.logprobs import ScoredPart, TokenLogprob
from engine.output_processor import OutputProcessor
from engine.request import Completion, FinishReason, InferRequest, RequestState
from engine.sampling_params import SamplingParams
from engine.tokenizer import PretrainedTokenizer

ALPHABET = "Here is the English alphabet: ABCDEFG"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.train_byte_level_bpe().save_pretrained(folder)
    return tiny_model.load_tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    folder = tmp_path_factory.mktemp("sentencepiece")
    tiny_model.train_sentencepiece_bpe().save_pretrained(folder)
    return tiny_model.load_tokenizer(folder)


def ids_of(tokenizer: PretrainedTokenizer, text: str) -> list[int]:
    return tokenizer._encode_text(text)[1:]


def request_of(uid: int = 0, **sampling: Any) -> InferRequest:
    request = infer_request(uid)
    request.params = SamplingParams(**sampling)
    request.state = RequestState.RUNNING
    return request


def answer(
    tokenizer: PretrainedTokenizer,
    token_ids: list[int],
    reason: FinishReason = FinishReason.LENGTH,
    *,
    stops_at: int | None = None,
    **sampling: Any,
) -> Completion:
    """Push tokens until a stop string ends the request, as the loop does, and complete it."""
    processor = OutputProcessor(tokenizer)
    request = request_of(**sampling)
    request.stop_token_ids = frozenset() if stops_at is None else frozenset({stops_at})
    for token in token_ids:
        request.output_token_ids.append(token)
        if processor.push(request, token):
            request.finish_reason = FinishReason.STOP
            break
    else:
        request.finish_reason = reason
    request.transition_to(RequestState.DONE)
    return processor.complete(request)


def test_a_text_without_stop_strings_is_the_text_of_its_tokens(
    tokenizer: PretrainedTokenizer,
) -> None:
    completion = answer(tokenizer, [*ids_of(tokenizer, "naïve café 🙂"), 1], FinishReason.STOP)
    assert completion.text == "naïve café 🙂"
    assert completion.token_ids[-1] == 1
    assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DE", "Here is the English alphabet: ABC"),
        ("D", "Here is the English alphabet: ABC"),
        (": A", "Here is the English alphabet"),
        ("H", ""),
        ("English alphabet", "Here is the "),
        (["FG", "CD", "zz"], "Here is the English alphabet: AB"),
    ],
)
def test_a_stop_string_is_found_across_tokens_and_the_text_ends_before_it(
    tokenizer: PretrainedTokenizer, stop: Any, text: str
) -> None:
    completion = answer(tokenizer, ids_of(tokenizer, ALPHABET), stop=stop)
    assert completion.text == text
    assert completion.finish_reason is FinishReason.STOP


def test_a_stop_string_inside_of_one_token_is_found(tokenizer: PretrainedTokenizer) -> None:
    [token] = ids_of(tokenizer, " return")
    completion = answer(tokenizer, [token], stop="etu")
    assert completion.text == " r"


def test_the_first_of_two_stop_strings_in_one_token_counts(tokenizer: PretrainedTokenizer) -> None:
    [token] = ids_of(tokenizer, " return")
    assert answer(tokenizer, [token], stop=["rn", "et"]).text == " r"


def test_generation_ends_at_the_token_that_completes_the_stop_string(
    tokenizer: PretrainedTokenizer,
) -> None:
    token_ids = ids_of(tokenizer, ALPHABET)
    completion = answer(tokenizer, token_ids, stop="ABC")
    end = len(completion.token_ids)
    assert end < len(token_ids)
    assert "ABC" in tokenizer.decode(token_ids[:end])
    assert "ABC" not in tokenizer.decode(token_ids[: end - 1])


def test_a_stop_string_that_never_comes_changes_nothing(tokenizer: PretrainedTokenizer) -> None:
    completion = answer(tokenizer, ids_of(tokenizer, ALPHABET), stop=["XYZ", "DEF!"])
    assert completion.text == ALPHABET
    assert completion.finish_reason is FinishReason.LENGTH


def test_a_stop_string_completed_by_the_very_last_token_is_a_stop(
    tokenizer: PretrainedTokenizer,
) -> None:
    processor, request = OutputProcessor(tokenizer), request_of(stop="G")
    for token in ids_of(tokenizer, ALPHABET):
        request.output_token_ids.append(token)
        is_stopped = processor.push(request, token)
    assert is_stopped
    request.finish_reason = FinishReason.LENGTH  # the scheduler saw the length first
    completion = processor.complete(request)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.text == ALPHABET[:-1]


def test_a_stop_string_of_characters_that_take_several_tokens_is_found(
    tokenizer: PretrainedTokenizer,
) -> None:
    completion = answer(tokenizer, ids_of(tokenizer, "one 🦀 two"), stop="🦀")
    assert completion.text == "one "


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens", "text"),
    [(0, 2, "a"), (1, 2, "a"), (2, 4, "a.b"), (3, 4, "a.b"), (4, 6, "a.b.c"), (5, 6, "a.b.c"),
     (8, 9, "a.b.c.d.e"), (9, 9, "a.b.c.d.e")],
)  # fmt: skip
def test_min_tokens_come_before_the_token_that_completes_a_stop_string(
    tokenizer: PretrainedTokenizer, min_tokens: int, num_tokens: int, text: str
) -> None:
    token_ids = ids_of(tokenizer, "a.b.c.d.e")
    assert len(token_ids) == 9
    completion = answer(tokenizer, token_ids, stop=".", min_tokens=min_tokens)
    assert (len(completion.token_ids), completion.text) == (num_tokens, text)


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_counts(
    tokenizer: PretrainedTokenizer,
) -> None:
    token_ids = ids_of(tokenizer, "a.b.c.d.e")
    completion = answer(tokenizer, token_ids, stop="b.c.", min_tokens=5)
    assert (len(completion.token_ids), completion.text) == (6, "a.")


def test_a_tail_that_was_held_back_is_not_searched_before_min_tokens(
    tokenizer: PretrainedTokenizer,
) -> None:
    token_ids = [*ids_of(tokenizer, "ab"), ids_of(tokenizer, "\U0001f980")[0]]
    for min_tokens, text in ((0, "ab"), (len(token_ids), "ab\ufffd")):
        completion = answer(tokenizer, token_ids, stop="\ufffd", min_tokens=min_tokens)
        assert completion.text == text


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("ab🙂é.", max_size=20),
    stop=st.lists(st.text("ab🙂é.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_text_is_cut_where_searching_the_whole_text_would_cut_it(
    tokenizer: PretrainedTokenizer, text: str, stop: list[str]
) -> None:
    completion = answer(tokenizer, ids_of(tokenizer, text), stop=stop)
    seen = tokenizer.decode(completion.token_ids)
    found = [position for word in stop if (position := seen.find(word)) >= 0]
    is_stopped = any(word in text for word in stop)
    assert completion.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    assert completion.text == (text[: min(found)] if is_stopped else text)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DE", "Here is the English alphabet: ABCDE"),
        ("H", "H"),
        (["FG", "CD", "zz"], "Here is the English alphabet: ABCD"),
        ("etu", ALPHABET),
    ],
)
def test_a_stop_string_is_left_in_the_text_where_that_is_asked_for(
    tokenizer: PretrainedTokenizer, stop: Any, text: str
) -> None:
    token_ids = ids_of(tokenizer, ALPHABET)
    completion = answer(tokenizer, token_ids, stop=stop, include_stop_str_in_output=True)
    assert completion.text == text
    assert completion.token_ids == answer(tokenizer, token_ids, stop=stop).token_ids


def test_what_a_token_brings_after_a_stop_string_is_cut_also_where_the_string_stays(
    tokenizer: PretrainedTokenizer,
) -> None:
    [token] = ids_of(tokenizer, " return")
    completion = answer(tokenizer, [token], stop="etu", include_stop_str_in_output=True)
    assert completion.text == " retu"


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({}, "the"),
        ({"include_stop_str_in_output": True}, "the return"),
        ({"skip_special_tokens": False}, "the"),
        ({"stop": "etu"}, "the"),
        ({"stop": "etu", "include_stop_str_in_output": True}, "the retu"),
    ],
)
def test_a_stop_token_is_no_part_of_the_text_unless_it_is_asked_for(
    tokenizer: PretrainedTokenizer, sampling: dict[str, Any], text: str
) -> None:
    [token] = ids_of(tokenizer, " return")
    token_ids = [*ids_of(tokenizer, "the"), token]
    completion = answer(tokenizer, token_ids, FinishReason.STOP, stops_at=token, **sampling)
    assert completion.token_ids == tuple(token_ids)
    assert completion.text == text


def test_special_tokens_are_left_in_the_text_where_that_is_asked_for(
    tokenizer: PretrainedTokenizer,
) -> None:
    token_ids = [*ids_of(tokenizer, "the"), 3, *ids_of(tokenizer, "dog"), 1]
    plain = {"stops_at": 1, "skip_special_tokens": False}
    assert answer(tokenizer, token_ids, **plain).text == "the<|im_start|>dog"
    whole = answer(tokenizer, token_ids, include_stop_str_in_output=True, **plain)
    assert whole.text == "the<|im_start|>dog</s>"
    assert answer(tokenizer, token_ids, stop="start|", **plain).text == "the<|im_"


def test_logprobs_are_told_only_where_they_were_asked_for(tokenizer: PretrainedTokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    score = TokenLogprob(5, -0.5, 1)
    asked, plain = request_of(1, logprobs=0, prompt_logprobs=0), request_of(2)
    for request in (asked, plain):
        request.output_token_ids.append(5)
        request.logprobs.append(score)
        request.add_scores(ScoredPart(1, [score, score]))
        request.finish_reason = FinishReason.LENGTH
    told = processor.complete(asked)
    assert told.logprobs == (score,)
    assert told.prompt_logprobs == (None, score, score)
    silent = processor.complete(plain)
    assert (silent.logprobs, silent.prompt_logprobs) == (None, None)


def test_requests_are_searched_apart(tokenizer: PretrainedTokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    one, two = request_of(1, stop="AB"), request_of(2, stop="AB")
    [a], [b] = ids_of(tokenizer, "A"), ids_of(tokenizer, "B")
    for request, token in ((one, a), (two, b), (one, a), (two, a)):
        request.output_token_ids.append(token)
        assert not processor.push(request, token)
    two.output_token_ids.append(b)
    assert processor.push(two, b)
    for request in (one, two):
        request.finish_reason = FinishReason.STOP
    assert [processor.complete(r).text for r in (one, two)] == ["AA", "B"]


def test_a_stop_string_asked_for_in_vain_does_not_change_garbled_text(
    sentencepiece: PretrainedTokenizer,
) -> None:
    # Byte fallback reads a run of bytes as one: a wrong byte at its end spoils the beginning.
    crab = ids_of(sentencepiece, "🦀")[-4:]
    token_ids = [*crab, crab[0], *ids_of(sentencepiece, "the")]
    plain = answer(sentencepiece, token_ids)
    assert answer(sentencepiece, token_ids, stop="never").text == plain.text


def test_an_error_has_no_text_and_no_tokens(tokenizer: PretrainedTokenizer) -> None:
    processor, request = OutputProcessor(tokenizer), request_of(stop="x")
    request.output_token_ids.append(5)
    processor.push(request, 5)
    request.error = RequestError(RequestErrorCode.TIMEOUT, "out of time")
    request.finish_reason = FinishReason.TIMEOUT
    completion = processor.complete(request)
    assert (completion.text, completion.token_ids) == ("", ())
    assert completion.error is request.error
    assert completion.finish_reason is FinishReason.TIMEOUT
