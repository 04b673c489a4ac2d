"""Every family that the README lists gives transformers' tokens, however it is scheduled."""

from pathlib import Path
from typing import Any

import pytest
from model_families import (
    FAMILIES,
    every_layer_slides,
    generate_reference,
    make_model,
    make_prompts,
)

from engine import Completion, ConfigError, EngineConfig, OfflineInference, SamplingParams

pytestmark = pytest.mark.integration

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = make_prompts(21, 13, 3, 40)


def run(folder: Path, prompts: list[list[int]], **sections: Any) -> list[Completion]:
    settings = {"cache": {"block_size": 4, "num_blocks": 200}, **sections}
    config = EngineConfig.model_validate(
        {
            "model_path": str(folder),
            "dtype": "float32",
            "runtime": {"inline": True, "num_threads": 1},
            **settings,
        }
    )
    with OfflineInference(config) as llm:
        return llm.generate(prompts, PARAMS)


def tokens(completions: list[Completion]) -> list[list[int]]:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family_gives_the_tokens_of_transformers_in_every_schedule(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family, tmp_path)
    expected = generate_reference(model, PROMPTS, NUM_TOKENS)

    assert tokens(run(tmp_path, PROMPTS)) == expected
    assert [tokens(run(tmp_path, [prompt]))[0] for prompt in PROMPTS] == expected

    chunked = run(tmp_path, PROMPTS, scheduler={"max_num_batched_tokens": 9, "max_num_seqs": 4})
    assert tokens(chunked) == expected

    few_blocks = {"block_size": 4, "num_blocks": 24, "enable_prefix_caching": False}
    preempted = run(tmp_path, PROMPTS, cache=few_blocks)
    assert tokens(preempted) == expected
    # A model that forgets what left its window hardly ever runs out of blocks.
    if not every_layer_slides(model):
        assert sum(completion.num_preemptions for completion in preempted) > 0

    one_by_one = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    twice = run(tmp_path, [*PROMPTS, *PROMPTS], scheduler=one_by_one)
    assert tokens(twice) == [*expected, *expected]
    assert sum(completion.num_cached_tokens for completion in twice) > 0


def test_model_whose_attention_does_not_go_through_the_interface_is_refused(tmp_path: Path) -> None:
    make_model("falcon", tmp_path)
    with pytest.raises(ConfigError, match="attention interface"):
        run(tmp_path, PROMPTS)
