"""What may be asked of sampling, how settings are laid over each other, and how faults read."""

from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import RequestError, RequestErrorCode
from engine.sampling_params import SamplingParams


def test_one_stop_string_may_be_written_without_a_list() -> None:
    assert SamplingParams.model_validate({"stop": "END"}).stop == ("END",)
    assert SamplingParams.model_validate({"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (0.0, True), (1e-6, False)])
def test_temperature_zero_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_given_tells_what_was_set_even_to_its_default() -> None:
    assert SamplingParams(top_k=0, seed=None).given() == {"top_k": 0, "seed": None}
    assert SamplingParams().given() == {}


def test_overrides_lie_over_what_was_given_and_the_rest_stays() -> None:
    job = SamplingParams(temperature=0.5, max_tokens=10)
    row = job.overlaid({"max_tokens": 20})
    assert (row.temperature, row.max_tokens) == (0.5, 20)
    assert row.given() == {"temperature": 0.5, "max_tokens": 20}
    assert job.max_tokens == 10
    assert job.overlaid({}) is job


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", 5),
        ("max_tokens", "many"),
        ("stop_token_ids", [-1]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {"5": 101.0}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"-5": 1.0}),
        ("logit_bias", {"five": 1.0}),
        ("logit_bias", [5, 1.0]),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", [5]),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", "all"),
        ("include_stop_str_in_output", "perhaps"),
        ("skip_special_tokens", None),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams().overlaid({name: value})
    assert caught.value.code is RequestErrorCode.INVALID_SAMPLING_PARAMS


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "stop_token_ids", "logit_bias"])
def test_a_number_too_large_for_a_tensor_is_refused_before_it_reaches_one(name: str) -> None:
    value: Any = {"stop_token_ids": [10**30], "logit_bias": {10**30: 1}}.get(name, 10**30)
    with pytest.raises(RequestError, match=name):
        SamplingParams().overlaid({name: value})


def test_nothing_is_generated_only_where_the_prompt_is_scored() -> None:
    scoring = SamplingParams().overlaid({"max_tokens": 0, "prompt_logprobs": 0})
    assert scoring.is_scoring_only
    assert not SamplingParams(prompt_logprobs=0).is_scoring_only
    with pytest.raises(RequestError, match="max_tokens is 0, .* set prompt_logprobs"):
        SamplingParams().overlaid({"max_tokens": 0, "logprobs": 1})


def test_a_bias_may_be_written_with_the_string_keys_of_json() -> None:
    read = SamplingParams().overlaid({"logit_bias": {"5": -100, "0": 2.5}})
    assert read.logit_bias == {5: -100.0, 0: 2.5}
    again = SamplingParams.model_validate_json(read.model_dump_json())
    assert again == read


def test_min_tokens_beyond_max_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens 4; lower it"):
        SamplingParams().overlaid({"min_tokens": 5, "max_tokens": 4})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("num_return_sequences", "n"),
    ],
)
def test_a_name_of_another_tool_is_translated_in_the_message(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' does not exist; write {meant}$"):
        SamplingParams().overlaid({name: 1})


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="'temprature' does not exist; .*temperature"):
        SamplingParams().overlaid({"temprature": 1})


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams().overlaid({"top_p": 2, "max_tokens": -1})
    assert "top_p is 2" in caught.value.message
    assert "max_tokens is -1" in caught.value.message


def test_params_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SamplingParams().max_tokens = 5  # type: ignore[misc]
