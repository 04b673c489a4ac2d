"""Log probabilities equal those of transformers' logits, however the engine goes about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import make_model, make_prompts
from tiny_model import open_engine
from transformers import LlamaForCausalLM

from engine import (
    Completion,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
)

pytestmark = pytest.mark.integration

TOLERANCE = 1e-4
NUM_TOP = 3
ASKED = {"logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP, "max_tokens": 12, "ignore_eos": True}
PROMPTS: list[list[int]] = [
    [0],
    [0, 100, 101],
    [0, *range(50, 80)],
    [0, *range(50, 80), 200, 201],
    [0, *range(300, 350)],
    [7] * 33,
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prefill": {"scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 7}},
    "one sequence": {"scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 16}},
    "few blocks": {"cache": {"block_size": 4, "num_blocks": 24}},
    "few blocks, two steps in flight": {
        "cache": {"block_size": 4, "num_blocks": 24},
        "scheduler": {"num_steps_in_flight": 2},
    },
    "no prefix cache": {"cache": {"enable_prefix_caching": False}},
    "full reservation": {"scheduler": {"kv_reservation": "full"}},
    "a process": {"runtime": {"inline": False}, "scheduler": {"num_steps_in_flight": 2}},
}


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@torch.inference_mode()
def assert_scores_are_those_of(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> None:
    """Compare every score with the log probabilities of one pass over prompt and answer."""
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.error is None
        assert completion.logprobs is not None
        assert completion.prompt_logprobs is not None
        assert len(completion.prompt_logprobs) == len(prompt)
        assert completion.prompt_logprobs[0] is None
        assert len(completion.logprobs) == len(completion.token_ids)
        tokens = [*prompt, *completion.token_ids]
        logprobs = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        scores = [*completion.prompt_logprobs[1:], *completion.logprobs]
        for row, token, score in zip(logprobs[:-1], tokens[1:], scores, strict=True):
            assert score is not None
            assert score.token_id == token
            assert score.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
            better = int((row > row[token] + TOLERANCE).sum())
            as_good = int((row > row[token] - TOLERANCE).sum())
            assert better < score.rank <= as_good
            top = row.topk(NUM_TOP).values.tolist()
            assert [value for _, value in score.top] == pytest.approx(top, abs=TOLERANCE)
            assert [row[t].item() for t, _ in score.top] == pytest.approx(top, abs=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_scores_of_prompts_and_answers_are_those_of_transformers(
    tiny_llama: Path, model: LlamaForCausalLM, way: str
) -> None:
    greedy = SamplingParams(temperature=0, **ASKED)
    # Whatever changes the choice, the scores are the model's own.
    drawn = SamplingParams(
        temperature=2.0, top_k=50, seed=1, repetition_penalty=1.5, presence_penalty=1.0,
        logit_bias={9: 5.0}, bad_words=("the",), **ASKED,
    )  # fmt: skip
    with open_engine(tiny_llama, WAYS[way]) as llm:
        for params in (greedy, drawn):
            completions = llm.generate(PROMPTS, params)
            assert_scores_are_those_of(model, PROMPTS, completions)
            is_preempting = "few blocks" in way
            assert (sum(c.num_preemptions for c in completions) > 0) is is_preempting
            one_by_one = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
            assert_scores_are_those_of(model, PROMPTS, one_by_one)


@pytest.mark.parametrize("family", ["cohere2", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "opt"])
def test_scores_of_families_with_a_turn_of_their_own_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path)
    prompts = make_prompts(21, 3, 40)
    config = {
        "model_path": str(tmp_path), "dtype": "float32", "runtime": {"inline": True},
        "cache": {"block_size": 4, "num_blocks": 200},
        "scheduler": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    }  # fmt: skip
    with OfflineInference(EngineConfig.model_validate(config)) as llm:
        completions = llm.generate(prompts, SamplingParams(temperature=0, **ASKED))
    assert_scores_are_those_of(model, prompts, completions)


def test_scoring_generates_nothing_and_samples_nothing(
    tiny_llama: Path, model: LlamaForCausalLM
) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=NUM_TOP, logprobs=NUM_TOP)
    with open_engine(tiny_llama, WAYS["chunked prefill"]) as llm:
        llm.take_stats()
        completions = llm.generate(PROMPTS, params)
        stats = llm.take_stats()
    assert_scores_are_those_of(model, PROMPTS, completions)
    assert {(c.text, c.token_ids, c.finish_reason) for c in completions} == {
        ("", (), FinishReason.LENGTH)
    }
    assert stats.num_output_tokens == 0
    assert stats.num_computed_tokens == sum(len(prompt) for prompt in PROMPTS)


def test_only_rows_that_ask_for_scores_get_them_in_a_mixed_batch(
    tiny_llama: Path, model: LlamaForCausalLM
) -> None:
    kinds = [{}, {"logprobs": 0}, {"prompt_logprobs": 1}, {"logprobs": 5, "prompt_logprobs": 0}]
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0, max_tokens=6, **kinds[i % len(kinds)]),
        )
        for i, prompt in enumerate(PROMPTS * 2)
    ]
    with open_engine(tiny_llama, WAYS["chunked prefill"]) as llm:
        completions = llm.generate(requests)
        bare = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
    for i, completion in enumerate(completions):
        kind = kinds[i % len(kinds)]
        assert completion.token_ids == bare[i % len(PROMPTS)].token_ids
        for scores, name in (
            (completion.logprobs, "logprobs"), (completion.prompt_logprobs, "prompt_logprobs"),
        ):  # fmt: skip
            assert (scores is not None) is (name in kind)
            for score in scores or ():
                assert score is None or len(score.top) == kind[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_scores_are_the_same_to_the_bit_in_every_way(
    tiny_llama: Path, dtype: str
) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.2, **ASKED)

    def run(way: dict[str, Any], *, is_one_by_one: bool = False) -> list[Any]:
        settings: dict[str, Any] = {"cache": {"num_blocks": 512}} | way
        config = {
            "model_path": str(tiny_llama), "device": "cpu", "dtype": dtype, "deterministic": True,
            "runtime": {"inline": True, "num_threads": 1},
        }  # fmt: skip
        batches = [[prompt] for prompt in PROMPTS] if is_one_by_one else [PROMPTS]
        with OfflineInference(EngineConfig.model_validate(config | settings)) as llm:
            found = [c for batch in batches for c in llm.generate(batch, params)]
        return [(c.token_ids, c.logprobs, c.prompt_logprobs) for c in found]

    expected = run({}, is_one_by_one=True)
    for name in ("plain", "chunked prefill", "few blocks, two steps in flight"):
        assert run(WAYS[name]) == expected, name


@pytest.mark.multiprocess
def test_two_ranks_score_and_penalise_like_one(tiny_llama: Path, model: LlamaForCausalLM) -> None:
    config = {
        "model_path": str(tiny_llama), "device": "cpu", "dtype": "float32",
        "tensor_parallel_size": 2, "cache": {"num_blocks": 512}, "runtime": {"num_threads": 2},
    }  # fmt: skip
    params = SamplingParams(temperature=0, repetition_penalty=1.2, **ASKED)
    with OfflineInference(EngineConfig.model_validate(config)) as llm:
        completions = llm.generate(PROMPTS, params)
    assert_scores_are_those_of(model, PROMPTS, completions)
    with open_engine(tiny_llama) as llm:
        alone = llm.generate(PROMPTS, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in alone]
