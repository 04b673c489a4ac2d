"""Where a row's text ends, how much of its prompt is kept, and what it may not ask for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import open_engine

from engine import (
    FinishReason,
    GenerateRequest,
    OfflineInference,
    RequestErrorCode,
    SamplingParams,
)

pytestmark = pytest.mark.integration

PROMPT = [0, *range(50, 80)]


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[OfflineInference]:
    with open_engine(tiny_llama) as llm:
        yield llm


def greedy(**sampling: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24} | sampling))


# Stops.


def test_a_stop_string_may_stay_in_the_text(engine: OfflineInference) -> None:
    [plain] = engine.generate([PROMPT], greedy(ignore_eos=True))
    stop = plain.text[9:12]
    end = plain.text.index(stop) + len(stop)
    [without] = engine.generate([PROMPT], greedy(stop=stop))
    [within] = engine.generate([PROMPT], greedy(stop=stop, include_stop_str_in_output=True))
    assert without.text == plain.text[: end - len(stop)]
    assert within.text == plain.text[:end]
    assert within.token_ids == without.token_ids
    assert within.finish_reason is FinishReason.STOP


def test_a_stop_token_is_left_out_of_the_text_but_not_of_the_tokens(
    engine: OfflineInference,
) -> None:
    [plain] = engine.generate([PROMPT], greedy(ignore_eos=True))
    stop = plain.token_ids[7]
    count = plain.token_ids.index(stop) + 1
    [without] = engine.generate([PROMPT], greedy(stop_token_ids=(stop,)))
    assert without.token_ids == plain.token_ids[:count]
    assert without.text == engine.tokenizer.decode(plain.token_ids[: count - 1])
    within = greedy(stop_token_ids=(stop,), include_stop_str_in_output=True)
    assert engine.generate([PROMPT], within)[0].text == engine.tokenizer.decode(
        plain.token_ids[:count]
    )


# Truncation.


def test_a_truncated_prompt_is_answered_like_its_end_and_says_so(
    engine: OfflineInference,
) -> None:
    prompt = [*PROMPT, 200, 201]
    kept = [0, *prompt[-9:]]
    [cut] = engine.generate([prompt], greedy(truncate_prompt_tokens=10))
    [short] = engine.generate([kept], greedy(truncate_prompt_tokens=10))
    assert cut.token_ids == short.token_ids
    assert (cut.num_prompt_tokens, short.num_prompt_tokens) == (10, 10)
    assert (cut.is_truncated, short.is_truncated) == (True, False)


def test_a_prompt_that_is_too_long_is_answered_when_it_is_truncated(
    engine: OfflineInference,
) -> None:
    [completion] = engine.generate([[7] * 5000], greedy(truncate_prompt_tokens=100))
    assert completion.error is None
    assert completion.is_truncated


def test_a_later_turn_that_is_truncated_marks_the_row(engine: OfflineInference) -> None:
    request = GenerateRequest(
        request_id="talk",
        messages=[{"role": "user", "content": "the fox"}],
        turns=("and the quick brown dog and the lazy cat",),
        sampling_params=greedy(truncate_prompt_tokens=40, ignore_eos=True),
    )
    [completion] = engine.generate([request])
    assert completion.error is None
    assert completion.num_prompt_tokens == 40
    assert completion.is_truncated


# Faults of a row.

FAULTS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {10**6: 1.0}},
    "stop_token_ids": {"stop_token_ids": (10**6,)},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 1},
}


def test_a_row_that_asks_for_what_the_model_has_not_fails_alone_and_names_the_field(
    engine: OfflineInference,
) -> None:
    chat = [{"role": "user", "content": "the quick brown fox"}]
    requests = [
        GenerateRequest(request_id=name, messages=chat, sampling_params=greedy(**params))
        for name, params in FAULTS.items()
    ]
    good = GenerateRequest(request_id="good", messages=chat, sampling_params=greedy())
    *failed, answered = engine.generate([*requests, good])
    assert answered.error is None
    for completion in failed:
        assert completion.error is not None
        assert completion.error.code is RequestErrorCode.INVALID_SAMPLING_PARAMS
        assert completion.request_id in completion.error.message
        assert completion.logprobs is None
