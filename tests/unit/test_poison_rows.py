"""One row that cannot be answered is one error row, whatever is wrong with it; nobody waits for it."""

from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions, run_job, stored_rows

from engine import (
    Completion,
    EngineConfig,
    ExitCode,
    FinishReason,
    GenerateRequest,
    OfflineInference,
    RequestErrorCode,
    SamplingParams,
)

SHORT = SamplingParams(max_tokens=8)


def mock_config(**sections: Any) -> EngineConfig:
    settings: dict[str, Any] = {"model_path": "none", "device": "mock", "runtime": {"inline": True}}
    return EngineConfig.model_validate(settings | sections)


def answer_between_good_rows(config: EngineConfig, *poison: GenerateRequest) -> list[Completion]:
    """Return the completions of the poison; the rows around it must be answered as without it."""
    good = [
        GenerateRequest(request_id=f"good-{i}", prompt="the fox", sampling_params=SHORT)
        for i in range(len(poison) + 1)
    ]
    mixed = [good[0]]
    for bad, following in zip(poison, good[1:], strict=True):
        mixed += [bad, following]
    with OfflineInference(config) as llm:
        wanted = [completion.text for completion in llm.generate(good)]
        completions = llm.generate(mixed)
    assert [c.text for c in completions if c.request_id.startswith("good")] == wanted
    return [c for c in completions if not c.request_id.startswith("good")]


def codes_of(completions: list[Completion]) -> list[RequestErrorCode | None]:
    return [None if c.error is None else c.error.code for c in completions]


# Too long for the model.


def test_one_prompt_that_is_far_too_long_costs_nobody_else_anything(tmp_path: Path) -> None:
    rows = [{"id": "hi", "prompt": "hi"}, {"id": "long", "prompt": "x " * 10**5}]
    config = make_job(tmp_path, rows, engine__max_model_len=2048)
    outcome, _ = run_job(config)
    assert (outcome.exit_code, outcome.message.split(";")[0]) == (
        ExitCode.ROWS_FAILED,
        "1 ok, 1 failed",
    )
    fine, failed = stored_rows(config)
    assert fine.text
    assert (failed.error_code, failed.finish_reason) == ("prompt_too_long", "error")
    assert f"{failed.num_prompt_tokens} tokens" in str(failed.error_message)
    assert "2048" in str(failed.error_message)
    assert failed.num_prompt_tokens > 2 * 10**5


@pytest.mark.parametrize("reservation", ["full", "grow"])
def test_lengths_around_the_models_are_scored_answered_or_refused_each_for_itself(
    reservation: str,
) -> None:
    limit = 64
    config = mock_config(max_model_len=limit, scheduler={"kv_reservation": reservation})
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    cases = [
        (length, p) for length in (63, 64, 65) for p in (scoring, SamplingParams(max_tokens=1))
    ]
    found = answer_between_good_rows(
        config,
        *(
            GenerateRequest(request_id=str(i), prompt="x" * length, sampling_params=params)
            for i, (length, params) in enumerate(cases)
        ),
    )
    too_long = RequestErrorCode.PROMPT_TOO_LONG
    assert codes_of(found) == [None, None, None, too_long, too_long, too_long]
    for completion, (length, _) in zip(found, cases, strict=True):
        if completion.error is not None:
            assert f"has {length} tokens" in completion.error.message
            assert f"at most {limit}" in completion.error.message


# Too long for the KV cache.


@pytest.mark.parametrize("reservation", ["full", "grow"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_that_can_never_fit_the_kv_cache_is_refused_and_nothing_hangs(
    reservation: str, caching: bool
) -> None:
    config = mock_config(
        cache={"block_size": 16, "num_blocks": 50, "enable_prefix_caching": caching},
        max_model_len=2048,
        scheduler={"kv_reservation": reservation},
    )
    prompt = "x" * 1002
    found = answer_between_good_rows(
        config,
        GenerateRequest(request_id="answer", prompt=prompt, sampling_params=SHORT),
        GenerateRequest(
            request_id="score",
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=0, prompt_logprobs=0),
        ),
        GenerateRequest(
            request_id="samples", prompt=prompt, sampling_params=SHORT.overlaid({"n": 2})
        ),
        GenerateRequest(
            request_id="growing", prompt="x" * 700, sampling_params=SamplingParams(max_tokens=300)
        ),
        GenerateRequest(request_id="whole pool", prompt="x" * 793, sampling_params=SHORT),
    )
    assert codes_of(found) == [RequestErrorCode.KV_CAPACITY] * 5 + [None]
    assert found[0].error is not None
    for number in ("1002 tokens", "max_tokens 8", "which has 800"):
        assert number in found[0].error.message
    assert [c.finish_reason for c in found[:5]] == [FinishReason.ERROR] * 5


def test_a_later_turn_that_outgrows_the_kv_cache_fails_its_row_and_keeps_the_replies() -> None:
    config = mock_config(cache={"block_size": 16, "num_blocks": 8}, max_model_len=2048)
    [failed] = answer_between_good_rows(
        config,
        GenerateRequest(
            request_id="talk",
            messages=[{"role": "user", "content": "hi"}],
            turns=("y" * 120,),
            sampling_params=SHORT,
        ),
    )
    assert codes_of([failed]) == [RequestErrorCode.KV_CAPACITY]
    assert len(failed.replies) == 1


# What makes no sense.

NONSENSE: dict[str, tuple[RequestErrorCode, dict[str, Any]]] = {
    "no prompt": (RequestErrorCode.BAD_ROW, {}),
    "empty text": (RequestErrorCode.PROMPT_EMPTY, {"prompt": ""}),
    "a number": (RequestErrorCode.BAD_ROW, {"prompt": 5}),
    "bytes": (RequestErrorCode.BAD_ROW, {"prompt": b"the fox"}),
    "no messages": (RequestErrorCode.PROMPT_EMPTY, {"messages": []}),
    "messages of text": (RequestErrorCode.BAD_TEMPLATE, {"messages": ["the fox"]}),
    "a number of messages": (RequestErrorCode.BAD_TEMPLATE, {"messages": 5}),
    "messages of nothing": (RequestErrorCode.BAD_TEMPLATE, {"messages": [None]}),
    "no token ids": (RequestErrorCode.PROMPT_EMPTY, {"prompt_token_ids": []}),
    "token ids of text": (RequestErrorCode.BAD_ROW, {"prompt_token_ids": "the fox"}),
    "tokens from elsewhere": (
        RequestErrorCode.TOKEN_OUT_OF_VOCABULARY, {"prompt_token_ids": [5, 10**6]}
    ),
    "negative tokens": (RequestErrorCode.TOKEN_OUT_OF_VOCABULARY, {"prompt_token_ids": [-1]}),
}  # fmt: skip


def test_rows_that_make_no_sense_fail_one_by_one_in_one_run() -> None:
    found = answer_between_good_rows(
        mock_config(),
        *(
            GenerateRequest(request_id=name, sampling_params=SHORT, **fields)
            for name, (_, fields) in NONSENSE.items()
        ),
    )
    assert dict(zip(NONSENSE, codes_of(found), strict=True)) == {
        name: code for name, (code, _) in NONSENSE.items()
    }


# What this engine has not: a grammar. And what each row brings of its own.


@pytest.mark.parametrize(
    "wish",
    [{"guided_json": "{"}, {"structured_outputs": {"json": "{"}}, {"response_format": {"type": "?"}},
     {"guided_regex": "("}],
    ids=lambda wish: next(iter(wish)),
)  # fmt: skip
def test_one_row_among_ten_that_wants_a_grammar_fails_by_name_and_nine_are_answered(
    tmp_path: Path, wish: dict[str, Any]
) -> None:
    rows = [dict(row) for row in questions(10)]
    rows[4]["sampling"] = wish
    config = make_job(tmp_path, rows)
    outcome, _ = run_job(config)
    assert outcome.message.split(";")[0] == "9 ok, 1 failed"
    failed = stored_rows(config)[4]
    assert failed.error_code == "invalid_sampling_params"
    assert repr(next(iter(wish))) in str(failed.error_message)
    assert "line 5" in str(failed.error_message)


def test_rows_of_one_batch_keep_their_own_rules() -> None:
    params = {
        "plain": SHORT,
        "bad words": SHORT.overlaid({"bad_words": ["fox"]}),
        "bias": SHORT.overlaid({"logit_bias": {300: 1.0}}),
        "outside": SHORT.overlaid({"logit_bias": {10**6: 1.0}}),
        "stop": SHORT.overlaid({"stop": ["e"]}),
        "stop outside": SHORT.overlaid({"stop_token_ids": [10**6]}),
    }
    found = answer_between_good_rows(
        mock_config(),
        *(
            GenerateRequest(request_id=name, prompt="the fox", sampling_params=one)
            for name, one in params.items()
        ),
    )
    refused = RequestErrorCode.INVALID_SAMPLING_PARAMS
    assert codes_of(found) == [None, None, None, refused, None, refused]
