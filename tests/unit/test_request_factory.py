"""What a turn becomes inside the engine: one request for each sample, with all that it needs."""

from pathlib import Path
from typing import Any

import pytest
import tiny_model

from engine.config import EngineConfig
from engine.errors import RequestError, RequestErrorCode
from engine.model_source import ModelSource
from engine.request import GenerateRequest
from engine.request_factory import RequestFactory
from engine.sampling_params import SamplingParams
from engine.session import Turn
from engine.tokenizer import Tokenizer

MAX_MODEL_LEN = 20


@pytest.fixture(scope="module")
def mock() -> tuple[RequestFactory, Tokenizer]:
    config = EngineConfig(model_path="none", device="mock", max_model_len=MAX_MODEL_LEN)
    source = ModelSource.inspect(config)
    tokenizer = Tokenizer.load(config, source)
    return RequestFactory(source, tokenizer), tokenizer


def turn_of(token_ids: list[int], *, error: RequestError | None = None, **sampling: Any) -> Turn:
    request = GenerateRequest(request_id="0", sampling_params=SamplingParams(**sampling))
    return Turn(request=request, token_ids=token_ids, error=error)


def test_samples_share_the_prompts_tokens_and_nothing_else(
    mock: tuple[RequestFactory, Tokenizer],
) -> None:
    first, second = mock[0].make(turn_of([5, 6], n=2))
    assert first.prompt_token_ids is second.prompt_token_ids
    assert (first.sample_index, second.sample_index) == (0, 1)
    assert first.uid != second.uid
    assert first.logprobs is not second.logprobs


def test_bad_words_arrive_as_tokens(mock: tuple[RequestFactory, Tokenizer]) -> None:
    factory, tokenizer = mock
    [request] = factory.make(turn_of([5], bad_words=("ab", "c")))
    assert [tokenizer.decode(spelling) for spelling in request.bad_words_token_ids] == ["ab", "c"]


def test_a_turn_that_failed_over_its_bad_words_does_not_fail_again(tmp_path: Path) -> None:
    tiny_model.train_byte_level_bpe().save_pretrained(tmp_path)
    tokenizer = tiny_model.load_tokenizer(tmp_path, vocab_size=5)
    source = ModelSource.inspect(EngineConfig(model_path="none", device="mock"))
    turn = turn_of([5], bad_words=("word",))
    with pytest.raises(RequestError, match="bad_words holds 'word'") as caught:
        tokenizer.encode(turn.request)
    failed = turn_of([], error=caught.value, bad_words=("word",))
    [request] = RequestFactory(source, tokenizer).make(failed)
    assert request.bad_words_token_ids == ()


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "is_fitting"),
    [(19, 1, True), (20, 1, False), (20, 0, True), (21, 0, False), (19, 500, True)],
)
def test_a_prompt_fits_when_there_is_room_for_what_it_asks(
    mock: tuple[RequestFactory, Tokenizer], num_tokens: int, max_tokens: int, is_fitting: bool
) -> None:
    if is_fitting:
        mock[0].check_length(num_tokens, max_tokens)
        return
    with pytest.raises(RequestError) as caught:
        mock[0].check_length(num_tokens, max_tokens)
    assert caught.value.code is RequestErrorCode.PROMPT_TOO_LONG
    assert ("one token of answer" in caught.value.message) is (max_tokens > 0)
