"""Going on from partial outputs on the mock device, and what cannot be gone on from."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from partial_builders import (
    continued,
    conversation,
    cuts_of,
    mock_config,
    params,
    request,
    uninterrupted,
    what_counts,
)

from engine import OfflineInference, PartialOutput, Reply, SamplingParams, StreamedToken


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineInference]:
    with OfflineInference(mock_config()) as llm:
        yield llm


# Going on.


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.integers(1, 40))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "temperature": draw(st.sampled_from([0.0, 1.0])),
        "seed": draw(st.integers(0, 3)),
        "n": draw(st.integers(1, 3)),
        "logprobs": draw(st.sampled_from([None, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, 1])),
        "ignore_eos": draw(st.booleans()),
        "include_stop_str_in_output": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=40)
@given(sampling=samplings(), prompt=st.text("abc", min_size=1, max_size=40), data=st.data())
def test_a_sample_ends_the_same_wherever_it_was_cut(
    engine: OfflineInference, sampling: dict[str, Any], prompt: str, data: st.DataObject
) -> None:
    plain = request(prompt=prompt, sampling_params=SamplingParams(**sampling))
    if data.draw(st.booleans(), label="with a stop string"):
        text = uninterrupted(engine, plain)[0].text
        start = data.draw(st.integers(0, max(len(text) - 1, 0)))
        stop = text[start : start + data.draw(st.integers(1, 3))] or "never"
        plain = replace(plain, sampling_params=SamplingParams(**sampling, stop=stop))
    for expected in uninterrupted(engine, plain):
        cuts = cuts_of(expected)
        assert continued(engine, plain, cuts) == [what_counts(expected)] * len(cuts)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "logprobs": 1}], ids=str)
def test_a_conversation_ends_the_same_in_whatever_turn_it_was_cut(
    engine: OfflineInference, sampling: dict[str, Any]
) -> None:
    chat = conversation(n=2, **sampling)
    for expected in uninterrupted(engine, chat):
        cuts = cuts_of(expected)
        assert {len(cut.replies) for cut in cuts} == {0, 1, 2}
        assert continued(engine, chat, cuts) == [what_counts(expected)] * len(cuts)


def test_samples_of_one_row_go_on_each_from_where_it_was(engine: OfflineInference) -> None:
    chat = conversation(temperature=1, seed=3, n=4)
    done = uninterrupted(engine, chat)
    first = [cut for cut in cuts_of(done[3]) if len(cut.replies) == 1]
    partials = (cuts_of(done[0])[7], cuts_of(done[2])[-1], first[9])
    again = uninterrupted(engine, replace(chat, partials=partials))
    assert [what_counts(c) for c in again] == [what_counts(c) for c in done]


def test_only_the_samples_that_are_wanted_are_answered(engine: OfflineInference) -> None:
    plain = request(sampling_params=params(temperature=1, seed=3, n=4))
    done = uninterrupted(engine, plain)
    some = uninterrupted(engine, replace(plain, sample_indices=(3, 1)))
    assert [what_counts(c) for c in some] == [what_counts(done[1]), what_counts(done[3])]
    assert uninterrupted(engine, replace(plain, sample_indices=())) == []


def test_a_row_that_cannot_be_encoded_fails_for_each_sample_that_is_wanted(
    engine: OfflineInference,
) -> None:
    begun = PartialOutput(request_id="row", sample_index=3, replies=(Reply(text="", token_ids=()),))
    bad = conversation(n=4)
    bad = replace(bad, messages=[], sample_indices=(2, 3), partials=(begun,))
    failed = uninterrupted(engine, bad)
    assert [(f.sample_index, f.replies, f.error is None) for f in failed] == [
        (2, (), False),
        (3, (), False),
    ]
    [failed] = uninterrupted(engine, replace(bad, sample_indices=(3,)))
    assert (failed.sample_index, failed.replies, failed.error is None) == (3, (), False)


def test_a_later_turn_that_no_longer_fits_fails_the_row_with_the_replies_it_had() -> None:
    chat = conversation(max_tokens=20, min_tokens=20)
    with OfflineInference(mock_config()) as llm:
        [expected] = uninterrupted(llm, chat)
    with OfflineInference(mock_config(max_model_len=60)) as llm:
        [failed] = uninterrupted(llm, chat)
        assert failed.error is not None
        assert len(failed.replies) == 1
        assert continued(llm, chat, cuts_of(expected)[-1:]) == [what_counts(failed)]


def test_a_row_that_waited_for_another_goes_on_too(engine: OfflineInference) -> None:
    def ask(texts: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"repeat {texts['first']}"}]

    first = request("first")
    second = replace(
        request("second"), prompt=None, depends_on=("first",), build_messages=ask, turns=("why?",)
    )
    expected = engine.generate([first, second])
    for cut in cuts_of(expected[1])[::7]:
        done = engine.generate([first, replace(second, partials=(cut,))])
        assert [what_counts(c) for c in done] == [what_counts(c) for c in expected]


def test_only_tokens_of_this_run_count_as_its_work(engine: OfflineInference) -> None:
    [expected] = uninterrupted(engine, request())
    cut = cuts_of(expected)[15]
    engine.take_stats()
    [done] = uninterrupted(engine, replace(request(), partials=(cut,)))
    stats = engine.take_stats()
    assert done.num_output_tokens == expected.num_output_tokens
    assert stats.num_output_tokens == expected.num_output_tokens - 15
    assert done.num_cached_tokens <= done.num_prompt_tokens
    assert stats.num_cached_tokens <= stats.num_prompt_tokens


def test_listeners_hear_new_tokens_alone_and_whole_characters() -> None:
    heard: list[StreamedToken] = []
    crab = [byte + 3 for byte in "a🦀".encode()]
    row = request(on_token=heard.append, sampling_params=params(min_tokens=0, max_tokens=8))
    cut = PartialOutput(request_id="row", token_ids=tuple(crab[:-1]))
    with OfflineInference(mock_config()) as llm:
        [done] = llm.generate([replace(row, partials=(cut,))])
    new = tuple(token.token_id for token in heard if token.token_id is not None)
    assert done.token_ids == cut.token_ids + new
    # The mock does not end the crab: what was held back comes with the first new character.
    assert "".join(token.text for token in heard) == done.text.removeprefix("a")


# What cannot be gone on from.

UNUSABLE: dict[str, dict[str, Any]] = {
    "40 tokens are all that may be generated": {"token_ids": (100,) * 40},
    "50 tokens are all that may be generated": {"token_ids": (100,) * 50},
    "outside of the vocabulary": {"token_ids": (100, 10**6)},
    "outside of the vocabulary of": {"token_ids": (100, -1)},
    "a stop token is among its tokens": {"token_ids": (100, 2, 100)},
    "a stop string is in its text": {"token_ids": tuple(byte + 3 for byte in b"x STOP y")},
    "log probabilities are missing": {"token_ids": (100, 100), "logprobs": ()},
    "log probabilities of a reply are missing": {
        "replies": (Reply(text="x", token_ids=(100, 100)),)
    },
    "no such sample is wanted": {"sample_index": 7, "token_ids": (100,)},
    "it belongs to 'another'": {"request_id": "another", "token_ids": (100,)},
    "all 3 turns have a reply": {"replies": (Reply(text="", token_ids=(), logprobs=()),) * 3},
}


@pytest.mark.parametrize("problem", UNUSABLE)
def test_a_partial_output_that_does_not_fit_is_not_used_and_a_warning_says_why(
    engine: OfflineInference, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"request_id": "row", "logprobs": None} | UNUSABLE[problem]
    if fields["logprobs"] is None and "log probabilities" not in problem:
        [score] = engine.generate([request(sampling_params=params(logprobs=0, max_tokens=20))])
        assert score.logprobs is not None
        fields["logprobs"] = score.logprobs[:1] * len(fields.get("token_ids", ()))
    chat = conversation(logprobs=0, stop="STOP", min_tokens=0)
    [expected] = uninterrupted(engine, chat)
    [done] = uninterrupted(engine, replace(chat, partials=(PartialOutput(**fields),)))
    assert what_counts(done) == what_counts(expected)
    [record] = [r for r in caplog.records if r.name == "engine.partials"]
    assert record.levelno == logging.WARNING
    assert "sample_index=" in record.getMessage()
    assert problem in record.getMessage()


def test_a_later_turn_that_cannot_be_gone_on_with_starts_over_after_its_replies(
    engine: OfflineInference,
) -> None:
    chat = conversation()
    [expected] = uninterrupted(engine, chat)
    cut = replace(cuts_of(expected)[-1], token_ids=(10**6,))
    engine.take_stats()
    [done] = uninterrupted(engine, replace(chat, partials=(cut,)))
    assert what_counts(done) == what_counts(expected)
    assert engine.take_stats().num_output_tokens == len(expected.token_ids)


def test_stop_strings_before_min_tokens_are_no_obstacle(
    engine: OfflineInference, caplog: pytest.LogCaptureFixture
) -> None:
    [plain] = uninterrupted(engine, request())
    row = request(sampling_params=params(min_tokens=30, max_tokens=40, stop=plain.text[3:5]))
    [expected] = uninterrupted(engine, row)
    cuts = cuts_of(expected)
    assert continued(engine, row, cuts) == [what_counts(expected)] * len(cuts)
    assert caplog.records == []


def test_the_first_token_that_may_complete_a_stop_string_is_one_that_ends_a_row(
    engine: OfflineInference, caplog: pytest.LogCaptureFixture
) -> None:
    [plain] = uninterrupted(engine, request())
    # One token a letter, and so many tokens before the letter that stops.
    count = plain.text.index(plain.text[15])
    row = request(sampling_params=params(min_tokens=count, stop=plain.text[15]))
    [expected] = uninterrupted(engine, row)
    assert len(expected.token_ids) == count + 1
    ended = PartialOutput(request_id="row", token_ids=expected.token_ids)
    assert continued(engine, row, [ended]) == [what_counts(expected)]
    assert "a stop string is in its text" in caplog.text
