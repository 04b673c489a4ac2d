"""Tiny models through the whole engine, on a simulated NPU and on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_families import make_model, make_prompts

from engine import Completion, EngineConfig, OfflineInference, SamplingParams
from engine.metrics import RunStats

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
DRAWN = SamplingParams(temperature=0.9, seed=7, max_tokens=MAX_TOKENS)
# On both sides of a block of 128 tokens; the last two begin with two equal blocks.
_LONG = make_prompts(300)[0]
PROMPTS = [*make_prompts(1, 5, 40, 127, 130), _LONG, [*_LONG[:256], 7, 8, 9]]


def save_model(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """Save a random model whose heads are as wide as the fused attention documents."""
    make_model(family, folder, **{"head_dim": 128, "max_position_embeddings": 512, **settings})
    return folder


def make_config(folder: Path, device: str, way: dict[str, Any] | None = None) -> EngineConfig:
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "device": device,
        "dtype": "bfloat16",
        "cache": {"block_size": 128, "num_blocks": 24},
        "scheduler": {"max_num_seqs": 8},
        "runtime": {"inline": True, "num_threads": 1},
    }
    for name, value in (way or {}).items():
        is_section = isinstance(value, dict)
        settings[name] = {**settings.get(name, {}), **value} if is_section else value
    return EngineConfig.model_validate(settings)


def answer(
    config: EngineConfig,
    params: SamplingParams = GREEDY,
    prompts: Sequence[list[int]] = PROMPTS,
) -> tuple[list[Completion], RunStats]:
    """Answer the prompts twice, with one engine; return the second answers and what they took."""
    with OfflineInference(config) as llm:
        llm.generate(prompts, params)
        llm.take_stats()
        completions = llm.generate(prompts, params)
        stats = llm.take_stats()
    return list(completions), stats


def ids_of(completions: Sequence[Completion]) -> list[list[int]]:
    assert all(completion.error is None for completion in completions)
    return [list(completion.token_ids) for completion in completions]
