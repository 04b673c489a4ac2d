"""A row's answer equals that of transformers, however the engine goes about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import open_engine
from transformers import LlamaForCausalLM

from engine import (
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
)

pytestmark = pytest.mark.integration

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7, max_tokens=MAX_TOKENS
)
# Lengths from 1 to 60; several begin alike, and one comes twice.
PROMPTS: list[list[int]] = [
    [0],
    [0, 100, 101, 102, 103],
    [0, *range(50, 80)],
    [0, *range(50, 80)],
    [0, *range(50, 80), 200, 201],
    [0, *range(50, 66), 9, 9, 9],
    [0, *range(300, 359)],
    [7] * 33,
    [0, 5, 6, 7],
    [0, *range(120, 140)],
]
# Every way in which the engine may go about the same work.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prefill": {"scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 7}},
    "one sequence": {"scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 16}},
    "few blocks": {
        "cache": {"block_size": 4, "num_blocks": 24},
        "scheduler": {"num_steps_in_flight": 1},
    },
    "few blocks, two steps in flight": {
        "cache": {"block_size": 4, "num_blocks": 24},
        "scheduler": {"num_steps_in_flight": 2},
    },
    "full reservation": {
        "cache": {"block_size": 8, "num_blocks": 24},
        "scheduler": {"kv_reservation": "full"},
    },
    "no prefix cache": {"cache": {"enable_prefix_caching": False}},
    "blocks of one token": {"cache": {"block_size": 1}},
    "one step in flight": {"scheduler": {"num_steps_in_flight": 1}},
    "two steps in flight": {"scheduler": {"num_steps_in_flight": 2}},
    "a process": {"runtime": {"inline": False}, "scheduler": {"num_steps_in_flight": 2}},
}
PREEMPTING = [way for way in WAYS if "few blocks" in way]


def ids_of(completions: Sequence[Completion]) -> list[list[int]]:
    assert all(completion.error is None for completion in completions)
    return [list(completion.token_ids) for completion in completions]


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> list[list[int]]:
    """Return what transformers generates, one prompt at a time."""
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def sampled(tiny_llama: Path) -> list[Completion]:
    """Return sampled answers of the plainest engine, one prompt at a time."""
    with open_engine(tiny_llama, WAYS["no prefix cache"]) as llm:
        return [llm.generate([request])[0] for request in sampled_requests()]


def sampled_requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(request_id=f"row-{i}", prompt_token_ids=prompt, sampling_params=SAMPLED)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_those_of_transformers(
    tiny_llama: Path, wanted: list[list[int]], way: str
) -> None:
    with open_engine(tiny_llama, WAYS[way]) as llm:
        completions = llm.generate(PROMPTS, GREEDY)
        stats = llm.take_stats()
        one_at_a_time = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert ids_of(completions) == wanted
    assert ids_of(one_at_a_time) == wanted
    preemptions = sum(completion.num_preemptions for completion in completions)
    assert preemptions == stats.num_preemptions
    assert (preemptions > 0) is (way in PREEMPTING)


@pytest.mark.parametrize("way", WAYS)
def test_sampled_text_does_not_depend_on_how_it_was_made(
    tiny_llama: Path, sampled: list[Completion], way: str
) -> None:
    with open_engine(tiny_llama, WAYS[way]) as llm:
        completions = llm.generate(reversed(sampled_requests()))
    found = {completion.request_id: completion for completion in completions}
    for one in sampled:
        assert found[one.request_id].token_ids == one.token_ids
        assert found[one.request_id].text == one.text


def test_the_references_are_worth_comparing_with(
    wanted: list[list[int]], sampled: list[Completion]
) -> None:
    lengths = [len(answer) for answer in wanted]
    assert min(lengths) < MAX_TOKENS == max(lengths), "no row ends by EOS, or every one does"
    assert len({tuple(answer) for answer in wanted}) == len(PROMPTS) - 1
    assert [list(one.token_ids) for one in sampled] != wanted
    # Equal prompts, but each row has draws of its own.
    assert sampled[2].token_ids != sampled[3].token_ids


def test_the_prefix_cache_is_hit_within_a_run_and_between_runs(
    tiny_llama: Path, wanted: list[list[int]]
) -> None:
    way = {"scheduler": {"max_num_seqs": 1}}
    with open_engine(tiny_llama, way) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        stats = llm.take_stats()
        second = llm.generate(PROMPTS, GREEDY)
    assert [first[i].num_cached_tokens for i in (2, 3, 4, 5)] == [0, 16, 16, 16]
    assert stats.num_cached_tokens == sum(c.num_cached_tokens for c in first)
    assert [c.num_cached_tokens for c in second] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    assert ids_of(first) == ids_of(second) == wanted


def test_without_the_prefix_cache_there_are_no_hits(tiny_llama: Path) -> None:
    with open_engine(tiny_llama, WAYS["no prefix cache"]) as llm:
        for _ in range(2):
            completions = llm.generate(PROMPTS, GREEDY)
            assert {completion.num_cached_tokens for completion in completions} == {0}


def test_a_batch_that_ends_on_a_stop_string_leaves_a_clean_cache(
    tiny_llama: Path, wanted: list[list[int]]
) -> None:
    way = {"cache": {"block_size": 2}, "scheduler": {"num_steps_in_flight": 2}}
    with open_engine(tiny_llama, way) as llm:
        words = [llm.tokenizer.decode(answer[5:7]) for answer in wanted]
        stop = tuple(word for word in words if word.isprintable() and word)
        stopped = llm.generate(PROMPTS, GREEDY.model_copy(update={"stop": stop}))
        assert FinishReason.STOP in {completion.finish_reason for completion in stopped}
        longer = [prompt + answer[:6] for prompt, answer in zip(PROMPTS, wanted, strict=True)]
        again = llm.generate(longer, GREEDY)
    for completion, answer in zip(again, wanted, strict=True):
        tail = answer[6:]
        assert list(completion.token_ids)[: len(tail)] == tail


def test_the_stats_add_up(tiny_llama: Path, wanted: list[list[int]]) -> None:
    # A second step in flight computes one token too many when the first brings EOS.
    way = WAYS["no prefix cache"] | {"scheduler": {"num_steps_in_flight": 1}}
    with open_engine(tiny_llama, way) as llm:
        llm.take_stats()
        llm.generate(PROMPTS, GREEDY)
        stats = llm.take_stats()
    num_prompt = sum(len(prompt) for prompt in PROMPTS)
    num_output = sum(len(answer) for answer in wanted)
    assert stats.num_prompt_tokens == num_prompt
    assert stats.num_output_tokens == num_output
    # The last token of an answer is never computed.
    assert stats.num_computed_tokens == num_prompt + num_output - len(PROMPTS)
    assert stats.peak_running == len(PROMPTS)
    assert stats.wall_seconds >= stats.busy_seconds >= stats.worker_forward_seconds > 0


@pytest.mark.parametrize("kind", ["list", "numpy", "tensor"])
def test_token_ids_may_come_as_list_array_or_tensor(
    tiny_llama: Path, wanted: list[list[int]], kind: str
) -> None:
    tensors = [torch.tensor(prompt) for prompt in PROMPTS]
    prompts: dict[str, list[Any]] = {
        "list": PROMPTS,
        "numpy": [tensor.numpy() for tensor in tensors],
        "tensor": tensors,
    }
    with open_engine(tiny_llama) as llm:
        assert ids_of(llm.generate(prompts[kind], GREEDY)) == wanted
