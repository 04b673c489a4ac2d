"""Rows that have their scores told: what they cost, where they fit, and what they never break."""

import math
from pathlib import Path

import pytest
import torch
from tiny_model import MAX_POSITIONS, open_engine
from transformers import LlamaForCausalLM

from engine import (
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    RequestErrorCode,
    SamplingParams,
)

pytestmark = pytest.mark.integration

PROMPTS: list[list[int]] = [[0], [0, 100, 101], [0, *range(50, 80)], [7] * 33]


def test_a_scored_prompt_bypasses_the_prefix_cache_and_fills_it_for_others(
    tiny_llama: Path,
) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = [0, *range(50, 80)]
    with open_engine(tiny_llama) as llm:
        cached = [
            llm.generate([prompt], params)[0].num_cached_tokens
            for params in (scored, scored, plain, scored)
        ]
    assert cached == [0, 0, 16, 0]


@pytest.mark.parametrize("num_steps_in_flight", [1, 2])
@pytest.mark.parametrize("kv_reservation", ["full", "grow"])
def test_prompts_around_the_models_length_are_scored_answered_or_refused(
    tiny_llama: Path, kv_reservation: str, num_steps_in_flight: int
) -> None:
    limit = MAX_POSITIONS
    way = {
        "cache": {"block_size": 16, "num_blocks": limit // 16},
        "scheduler": {
            "kv_reservation": kv_reservation, "num_steps_in_flight": num_steps_in_flight,
        },
    }  # fmt: skip
    scoring = {"max_tokens": 0, "prompt_logprobs": 0}
    answering = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    both = answering | {"prompt_logprobs": 0}
    found = {}
    with open_engine(tiny_llama, way) as llm:
        for length in (limit - 1, limit, limit + 1):
            for name, params in (("score", scoring), ("answer", answering), ("both", both)):
                prompt = [7] * length
                [completion] = llm.generate([prompt], SamplingParams(**params))
                scores = completion.prompt_logprobs
                found[length - limit, name] = (
                    completion.error.code
                    if completion.error is not None
                    else (len(completion.token_ids), None if scores is None else len(scores))
                )
    too_long = RequestErrorCode.PROMPT_TOO_LONG
    assert found == {
        (-1, "score"): (0, limit - 1),
        (-1, "answer"): (1, None),
        (-1, "both"): (1, limit - 1),
        (0, "score"): (0, limit),
        (0, "answer"): too_long,
        (0, "both"): too_long,
        (1, "score"): too_long,
        (1, "answer"): too_long,
        (1, "both"): too_long,
    }


def test_samples_of_a_prompt_share_its_scores(tiny_llama: Path) -> None:
    prompt = [0, *range(50, 80)]
    params = SamplingParams(n=3, seed=3, max_tokens=4, prompt_logprobs=0, logprobs=0)
    with open_engine(tiny_llama) as llm:
        samples = llm.generate([prompt], params)
        [alone] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert [sample.num_cached_tokens for sample in samples] == [0, 16, 16]
    assert {sample.prompt_logprobs for sample in samples} == {alone.prompt_logprobs}
    assert len({sample.logprobs for sample in samples}) == 3


def test_every_turn_of_a_conversation_has_its_scores(tiny_llama: Path) -> None:
    request = GenerateRequest(
        request_id="talk",
        messages=[{"role": "user", "content": "the quick fox"}],
        turns=("and the dog", "and the cat"),
        sampling_params=SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True),
    )
    with open_engine(tiny_llama) as llm:
        [completion] = llm.generate([request])
    assert completion.error is None
    for answer in (*completion.replies, completion):
        assert answer.logprobs is not None
        assert [score.token_id for score in answer.logprobs] == list(answer.token_ids)
        assert all(score.rank == 1 for score in answer.logprobs)


def test_the_mock_scores_too_so_that_a_job_of_scores_runs_on_any_machine() -> None:
    config = EngineConfig.model_validate(
        {"model_path": "none", "device": "mock", "runtime": {"inline": True},
         "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 7}}
    )  # fmt: skip
    with OfflineInference(config) as llm:
        [scored] = llm.generate(["x" * 20], SamplingParams(max_tokens=0, prompt_logprobs=1))
        [answered] = llm.generate(["x" * 20], SamplingParams(logprobs=0))
    assert scored.prompt_logprobs is not None
    assert [score and score.logprob for score in scored.prompt_logprobs] == [None, *[0.0] * 19]
    assert scored.token_ids == ()
    assert answered.logprobs is not None
    assert [score.token_id for score in answered.logprobs] == list(answered.token_ids)


def test_a_model_that_overflows_gives_rows_and_no_crash(tiny_llama: Path, tmp_path: Path) -> None:
    broken = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
        broken.lm_head.weight[6] = float("inf")
    folder = tmp_path / "model"
    for file in tiny_llama.iterdir():
        if file.suffix != ".safetensors":
            folder.mkdir(exist_ok=True)
            (folder / file.name).write_bytes(file.read_bytes())
    broken.save_pretrained(folder)
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=3, logprobs=2, prompt_logprobs=2)
        for t in (0.0, 1.0)
    ]
    with open_engine(folder) as llm:
        for one in params:
            completions = llm.generate(PROMPTS, one)
            assert all(c.error is None for c in completions)
            first = completions[0].logprobs
            assert first is not None
            assert math.isnan(first[0].logprob)
