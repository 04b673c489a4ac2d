"""A row that goes on from what a killed run has left ends as if nothing had happened, to the bit.

Deterministic mode: whatever the rest of the batch is, a row's numbers are its own, so every cut
of a row runs in one batch, and log probabilities are compared without a tolerance.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from partial_builders import continued, cuts_of, uninterrupted, what_counts
from tiny_model import open_engine

from engine import (
    Completion,
    FinishReason,
    GenerateRequest,
    OfflineInference,
    PartialOutput,
    SamplingParams,
)

pytestmark = pytest.mark.integration

PROMPT = [0, *range(50, 71)]
FEW_BLOCKS = {"block_size": 4, "num_blocks": 32, "enable_prefix_caching": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"cache": {"block_size": 4}},
    "small steps": {
        "cache": {"enable_prefix_caching": False},
        "scheduler": {"num_steps_in_flight": 2, "max_num_batched_tokens": 9, "max_num_seqs": 4},
    },
    "preemptions": {"cache": FEW_BLOCKS, "scheduler": {"num_steps_in_flight": 2}},
}


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.5},
    "drawn from a few": {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    # Few tokens to choose from, so that each one's count decides when it comes again.
    "penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 2.0,
        "presence_penalty": 1.0,
        "logit_bias": {60: 60.0, 61: 60.0, 200: 60.0},
    },
    "min_tokens": {"min_tokens": 12, "logit_bias": {1: 100.0}, "ignore_eos": False},
    "samples": {"temperature": 1.5, "n": 3},
    "scored prompt": {"prompt_logprobs": 1},
    "no logprobs": {"logprobs": None},
    # Made of what the greedy answer has in its middle.
    "stop string": {},
    "stop string that stays": {"include_stop_str_in_output": True},
    "stop token": {},
    "bad words": {},
}
CHAT = [{"role": "user", "content": "the fox"}]


def row(request_id: str = "row", **sampling: Any) -> GenerateRequest:
    defaults = {"temperature": 0, "max_tokens": 16, "logprobs": 2, "ignore_eos": True, "seed": 11}
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(**(defaults | sampling)),
    )


def conversation(request_id: str = "chat", **sampling: Any) -> GenerateRequest:
    request = row(request_id, max_tokens=7, **sampling)
    return replace(request, prompt_token_ids=None, messages=CHAT, turns=("a dog", "a cat"))


Story = tuple[GenerateRequest, list[Completion]]


@pytest.fixture(scope="module")
def stories(tiny_llama: Path) -> dict[str, Story]:
    """Return, for each case, the request and its answers in a run that nobody interrupts."""
    with open_engine(tiny_llama, deterministic=True) as llm:
        [greedy] = uninterrupted(llm, row())
        stop = {"stop": greedy.text[len(greedy.text) // 2 :][:3]}
        [bad_word] = [llm.tokenizer.decode(greedy.token_ids[6:7])]
        more = {
            "stop string": stop,
            "stop string that stays": stop,
            "stop token": {"stop_token_ids": greedy.token_ids[9:10]},
            "bad words": {"bad_words": bad_word},
        }
        requests = {name: row(**case, **more.get(name, {})) for name, case in CASES.items()}
        for name, case in (("chat", {}), ("chats", {"temperature": 1.5, "n": 2})):
            requests[name] = conversation(**case)
        return {name: (item, uninterrupted(llm, item)) for name, item in requests.items()}


@pytest.fixture(scope="module", params=WAYS)
def engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[OfflineInference]:
    with open_engine(tiny_llama, WAYS[request.param], deterministic=True) as llm:
        yield llm


@pytest.mark.parametrize("name", [*CASES, "chat", "chats"])
def test_a_row_ends_the_same_to_the_bit_at_whatever_token_it_was_cut(
    engine: OfflineInference, stories: dict[str, Story], name: str
) -> None:
    request, answers = stories[name]
    for expected in answers:
        assert expected.error is None
        assert len(expected.token_ids) > 5
        cuts = cuts_of(expected)
        assert continued(engine, request, cuts) == [what_counts(expected)] * len(cuts)


def test_the_cases_are_what_they_are_called(stories: dict[str, Story]) -> None:
    found = {name: answers[0] for name, (_, answers) in stories.items()}
    plain = found["greedy"]
    assert {name for name, done in found.items() if done.finish_reason is FinishReason.STOP} == {
        "min_tokens", "stop string", "stop string that stays", "stop token",
    }  # fmt: skip
    assert found["stop string"].text == plain.text[: len(plain.text) // 2]
    assert len(found["min_tokens"].token_ids) == 13
    others = ("drawn", "drawn from a few", "penalties", "bad words")
    assert len({plain.token_ids, *(found[name].token_ids for name in others)}) == 5
    assert [len(done.replies) for done in (found["chat"], found["chats"])] == [2, 2]


def test_rows_that_go_on_are_preempted_and_find_blocks_like_others(
    tiny_llama: Path, stories: dict[str, Story]
) -> None:
    request, [expected] = stories["penalties"]
    cuts = cuts_of(expected)
    requests = [replace(request, partials=(cut,)) for cut in cuts]
    with open_engine(tiny_llama, WAYS["preemptions"], deterministic=True) as llm:
        done = list(llm.run(requests))
        assert sum(completion.num_preemptions for completion in done) > 0
    with open_engine(tiny_llama, WAYS["plain"], deterministic=True) as llm:
        for _ in range(2):
            done = list(llm.run(requests))
            assert [what_counts(completion) for completion in done] == [what_counts(expected)] * 16
        # All of the prompt's, but never more, although later tokens are found too.
        assert {completion.num_cached_tokens for completion in done} == {20, len(PROMPT)}


@pytest.mark.parametrize("way", ["plain", "preemptions"])
def test_a_run_that_is_stopped_again_and_again_ends_like_one_that_is_not(
    tiny_llama: Path, way: str
) -> None:
    requests = [
        request
        for number in range(4)
        for request in (
            row(f"row {number}", temperature=1.5, repetition_penalty=1.2, max_tokens=10 + number),
            conversation(f"chat {number}", temperature=1.5),
        )
    ]
    with open_engine(tiny_llama, deterministic=True) as llm:
        expected = {c.request_id: what_counts(c) for c in llm.run(requests)}
        num_tokens = llm.take_stats().num_output_tokens
    done: dict[str, Any] = {}
    kept: dict[str, PartialOutput] = {}
    num_runs = num_sampled = 0
    while len(done) < len(requests):
        num_runs += 1
        assert num_runs < 60
        left = [
            replace(r, partials=(kept[r.request_id],) if r.request_id in kept else ())
            for r in requests
            if r.request_id not in done
        ]
        # Every run is one of a new engine, and is stopped at its third look around.
        with open_engine(tiny_llama, WAYS[way], deterministic=True) as llm:
            stop, snapshots = threading.Event(), []

            def look(
                snapshot: list[PartialOutput], stop: Any = stop, seen: Any = snapshots
            ) -> None:
                seen.append(snapshot)
                if len(seen) == 3:
                    stop.set()

            for completion in llm.run(left, stop=stop, on_partials=look, partial_seconds=0):
                assert completion.request_id not in done
                done[completion.request_id] = what_counts(completion)
            num_sampled += llm.take_stats().num_output_tokens
        kept |= {p.request_id: p for p in (snapshots[-1] if snapshots else [])}
    assert num_runs > 3
    assert done == expected
    assert num_sampled == num_tokens
