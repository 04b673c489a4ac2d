"""Penalties, biases, bad words, stops and truncation do what transformers does, in every way."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import open_engine
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from engine import (
    FinishReason,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
)

pytestmark = pytest.mark.integration

MAX_TOKENS = 24
EOS_ID = 1
PROMPTS: list[list[int]] = [
    [0],
    [0, 100, 101, 102, 103],
    [0, *range(50, 80)],
    [0, *range(50, 80), 200, 201],
    [7] * 33,
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prefill": {"scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 7}},
    "few blocks": {"cache": {"block_size": 4, "num_blocks": 20}},
    "few blocks, two steps in flight": {
        "cache": {"block_size": 4, "num_blocks": 20},
        "scheduler": {"num_steps_in_flight": 2},
    },
    "no prefix cache": {"cache": {"enable_prefix_caching": False}},
}


class CountPenalties(LogitsProcessor):
    """Presence and frequency penalties by their definition, over the tokens after the prompt."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids[0, self._num_prompt_tokens :]
        counts = torch.bincount(generated, minlength=scores.shape[1]).float()
        return scores - self._presence * (counts > 0) - self._frequency * counts


# Ours, and the same to transformers' generate; biases keep words that a penalty would drive out.
BIAS = {50: 6.0, 51: 6.0, 120: 4.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "encouraged repetition": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "presence": ({"presence_penalty": 1.5}, {"presence": 1.5}),
    "frequency": (
        {"frequency_penalty": 0.4, "logit_bias": BIAS},
        {"frequency": 0.4, "sequence_bias": {(token,): bias for token, bias in BIAS.items()}},
    ),
    "all": (
        {
            "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.7,
            "logit_bias": BIAS, "min_tokens": 20,
        },
        {
            "repetition_penalty": 1.2, "presence": -0.5, "frequency": 0.7,
            "sequence_bias": {(token,): bias for token, bias in BIAS.items()},
            "min_new_tokens": 20,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[OfflineInference]:
    with open_engine(tiny_llama) as llm:
        yield llm


def by_transformers(
    model: LlamaForCausalLM,
    prompt: list[int],
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    **options: Any,
) -> list[int]:
    tokens = torch.tensor([prompt])
    counting = CountPenalties(len(prompt), presence, frequency)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([counting]),
        **options,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def greedy(**sampling: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": MAX_TOKENS} | sampling))


@pytest.fixture(scope="module")
def wanted(model: LlamaForCausalLM) -> dict[str, list[list[int]]]:
    return {
        name: [by_transformers(model, prompt, **theirs) for prompt in PROMPTS]
        for name, (_, theirs) in CASES.items()
    }


# Penalties and biases.


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_with_penalties_equal_those_of_transformers(
    tiny_llama: Path, wanted: dict[str, list[list[int]]], way: str
) -> None:
    names = list(CASES)
    with open_engine(tiny_llama, WAYS[way]) as llm:
        for name in names:
            completions = llm.generate(PROMPTS, greedy(**CASES[name][0]))
            assert [list(c.token_ids) for c in completions] == wanted[name], name
            assert (sum(c.num_preemptions for c in completions) > 0) is ("few blocks" in way)
        # Rows of every kind in one batch.
        mixed = llm.generate(
            [
                GenerateRequest(
                    request_id=f"{name}-{i}",
                    prompt_token_ids=prompt,
                    sampling_params=greedy(**CASES[name][0]),
                )
                for i, prompt in enumerate(PROMPTS)
                for name in names
            ]
        )
    found = {completion.request_id: list(completion.token_ids) for completion in mixed}
    assert found == {f"{name}-{i}": wanted[name][i] for name in names for i in range(len(PROMPTS))}


def test_every_penalty_changes_some_answer(
    model: LlamaForCausalLM, wanted: dict[str, list[list[int]]]
) -> None:
    plain = [by_transformers(model, prompt) for prompt in PROMPTS]
    for name, answers in wanted.items():
        assert answers != plain, name


def test_drawn_tokens_with_penalties_do_not_depend_on_how_they_were_made(
    tiny_llama: Path,
) -> None:
    params = SamplingParams(
        seed=5, max_tokens=MAX_TOKENS, repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.9
    )
    found = []
    for way in WAYS.values():
        with open_engine(tiny_llama, way) as llm:
            found.append([c.token_ids for c in llm.generate(PROMPTS, params)])
    assert all(one == found[0] for one in found)


def test_the_models_own_repetition_penalty_counts_unless_another_is_given(
    tiny_llama: Path, tmp_path: Path, wanted: dict[str, list[list[int]]]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    path = folder / "generation_config.json"
    generation = {"repetition_penalty": 1.4, "do_sample": False, "max_new_tokens": MAX_TOKENS}
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    with open_engine(folder) as llm:
        assert [list(c.token_ids) for c in llm.generate(PROMPTS)] == wanted["repetition"]


def test_bad_words_do_not_come_and_what_comes_instead_is_transformers_choice(
    engine: OfflineInference, model: LlamaForCausalLM
) -> None:
    prompt = PROMPTS[2]
    plain = by_transformers(model, prompt)
    words = tuple(engine.tokenizer.decode(plain[i : i + 1]) for i in (3, 6))
    assert all(word.strip() and word.isprintable() for word in words)
    spellings = engine.tokenizer.bad_words_token_ids(words)
    [completion] = engine.generate([prompt], greedy(bad_words=words))
    answer = list(completion.token_ids)
    assert answer == by_transformers(
        model, prompt, bad_words_ids=[list(spelling) for spelling in spellings]
    )
    assert answer != plain
    assert not any(word in completion.text for word in words)


def test_a_bias_towards_eos_ends_the_row_one_token_after_min_tokens(
    engine: OfflineInference,
) -> None:
    pushed = greedy(logit_bias={EOS_ID: 100}, min_tokens=4)
    for completion in engine.generate(PROMPTS, pushed):
        assert len(completion.token_ids) == 5
        assert completion.token_ids[-1] == EOS_ID
        assert completion.token_ids.count(EOS_ID) == 1
        assert completion.finish_reason is FinishReason.STOP
    [at_once] = engine.generate([PROMPTS[1]], greedy(logit_bias={EOS_ID: 100}))
    assert (at_once.token_ids, at_once.text) == ((EOS_ID,), "")


@pytest.mark.parametrize("min_tokens", [1, 4, MAX_TOKENS - 1, MAX_TOKENS])
def test_min_tokens_up_to_max_tokens_are_kept_to_the_token(
    engine: OfflineInference, min_tokens: int
) -> None:
    params = greedy(logit_bias={EOS_ID: 100}, min_tokens=min_tokens)
    [completion] = engine.generate([PROMPTS[1]], params)
    assert len(completion.token_ids) == min(min_tokens + 1, MAX_TOKENS)
    is_stopped = min_tokens < MAX_TOKENS
    assert completion.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


def test_ignore_eos_goes_on_past_an_eos_that_is_pushed_and_keeps_it_out_of_the_text(
    engine: OfflineInference,
) -> None:
    params = greedy(logit_bias={EOS_ID: 100}, ignore_eos=True)
    [completion] = engine.generate([PROMPTS[1]], params)
    assert completion.token_ids == (EOS_ID,) * MAX_TOKENS
    assert completion.text == ""
    [told] = engine.generate(
        [PROMPTS[1]], greedy(**params.given() | {"skip_special_tokens": False})
    )
    assert told.text == "</s>" * MAX_TOKENS
