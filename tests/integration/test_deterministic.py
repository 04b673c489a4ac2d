"""`deterministic: true`: tokens and log probabilities to the bit, however the work is scheduled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import make_model, make_prompts

from engine import Completion, ConfigError, EngineConfig, OfflineInference, SamplingParams
from engine.backends import load_backend
from engine.layers.kv_pool import allocate_pool
from engine.layers.row_check import check_rows
from engine.models import load_model
from engine.parallel import ParallelGroup

pytestmark = pytest.mark.integration

# Every kind of operation: grouped heads, soft caps, windows, norms of heads, experts, addmm.
FAMILIES = ["gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen3"]
# A window that is passed, and yet wide enough for the KV cache to be too small.
SETTINGS = {"mistral": {"sliding_window": 24}}
DTYPES = ["float32", "bfloat16"]
PROMPTS = make_prompts(21, 13, 3, 40, 1, 8, 33, 2)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
BLOCK_SIZE = 4

Answer = tuple[Any, Any, Any]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(folder: Path, dtype: str, **settings: Any) -> EngineConfig:
    base = {
        "model_path": str(folder),
        "device": "cpu",
        "dtype": dtype,
        "deterministic": True,
        "runtime": {"inline": True, "num_threads": 1},
        "cache": {"block_size": BLOCK_SIZE, "num_blocks": 200},
    }
    return EngineConfig.model_validate(base | settings)


def run(
    config: EngineConfig, prompts: list[list[int]], params: SamplingParams = PARAMS
) -> list[Completion]:
    with OfflineInference(config) as llm:
        completions = llm.generate(prompts, params)
    assert [completion.error for completion in completions] == [None] * len(prompts)
    return completions


def answers(completions: list[Completion]) -> list[Answer]:
    """Return what has to be the same: floats are compared as they are, without a tolerance."""
    return [(c.token_ids, c.logprobs, c.prompt_logprobs) for c in completions]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probabilities_are_the_same_to_the_bit_in_every_schedule(
    family: str, dtype: str, tmp_path: Path
) -> None:
    make_model(family, tmp_path, **SETTINGS.get(family, {}))
    expected = answers(run(config(tmp_path, dtype), PROMPTS))
    assert all(logprobs for _, logprobs, _ in expected)

    alone = config(tmp_path, dtype, scheduler={"max_num_seqs": 1})
    assert answers(run(alone, PROMPTS)) == expected
    assert answers(run(config(tmp_path, dtype), PROMPTS[::-1]))[::-1] == expected

    chunks = {"max_num_batched_tokens": 9, "max_num_seqs": 4, "order": "longest_first"}
    assert answers(run(config(tmp_path, dtype, scheduler=chunks), PROMPTS)) == expected

    two_steps = config(tmp_path, dtype, scheduler={"num_steps_in_flight": 2})
    assert answers(run(two_steps, PROMPTS)) == expected

    few = {"block_size": BLOCK_SIZE, "num_blocks": 14, "enable_prefix_caching": False}
    preempted = run(config(tmp_path, dtype, cache=few), PROMPTS)
    assert answers(preempted) == expected
    assert sum(completion.num_preemptions for completion in preempted) > 0

    three = {"max_num_seqs": 3, "max_num_batched_tokens": 64}
    twice = run(config(tmp_path, dtype, scheduler=three), [*PROMPTS, *PROMPTS])
    assert answers(twice) == [*expected, *expected]
    assert sum(completion.num_cached_tokens for completion in twice) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_prompt_token_is_scored_the_same_to_the_bit(dtype: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=3)
    expected = answers(run(config(tmp_path, dtype), PROMPTS, params))
    chunks = config(tmp_path, dtype, scheduler={"max_num_batched_tokens": 7, "max_num_seqs": 2})
    assert answers(run(chunks, PROMPTS[::-1], params))[::-1] == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_tokens_are_the_same_in_every_schedule(dtype: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    params = SamplingParams(
        temperature=2.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=1
    )
    expected = answers(run(config(tmp_path, dtype), PROMPTS, params))
    alone = config(tmp_path, dtype, scheduler={"max_num_seqs": 1})
    assert answers(run(alone, PROMPTS, params)) == expected
    chunks = config(tmp_path, dtype, scheduler={"max_num_batched_tokens": 9, "max_num_seqs": 4})
    assert answers(run(chunks, PROMPTS, params)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_gives_the_answers_of_the_fast_mode_but_for_rounding(dtype: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    exact = run(config(tmp_path, dtype), PROMPTS, params)
    fast = run(config(tmp_path, dtype, deterministic=False), PROMPTS, params)
    for one, other in zip(exact, fast, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        likelihoods = [pair[1] for pair in one.logprobs[0].top]
        others = [pair[1] for pair in other.logprobs[0].top]
        tolerance = {"float32": 1e-3, "bfloat16": 0.5}[dtype]
        assert likelihoods == pytest.approx(others, abs=tolerance)


@pytest.mark.multiprocess
def test_a_worker_of_its_own_gives_the_same_bits(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    inline = config(tmp_path, "float32")
    apart = config(tmp_path, "float32", runtime={"num_threads": 1}, log_dir=str(tmp_path))
    assert answers(run(apart, PROMPTS)) == answers(run(inline, PROMPTS))


class TestWhatCannotBeExact:
    def test_positions_that_depend_on_the_longest_request_are_refused(self, tmp_path: Path) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        make_model("llama", tmp_path, rope_parameters=rope)
        with pytest.raises(ConfigError, match="rope_type is dynamic"):
            run(config(tmp_path, "float32"), PROMPTS)

    def test_a_model_that_mixes_rows_is_refused(self, tmp_path: Path) -> None:
        make_model("llama", tmp_path)
        backend = load_backend("cpu")
        backend.bind(0, 1)
        model = load_model(
            tmp_path,
            dtype="float32",
            backend=backend,
            group=ParallelGroup(),
            trust_remote_code=False,
        )
        model.attention.bind_caches(
            allocate_pool(20, BLOCK_SIZE, model.kv_layouts, model.dtype, backend)
        )
        check_rows(model, backend, block_size=BLOCK_SIZE, num_tokens=40)

        def add_mean(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + 1e-3 * output.mean(dim=-2, keepdim=True)

        model.module.model.layers[0].down_proj.register_forward_hook(add_mean)
        with pytest.raises(ConfigError, match="LlamaForCausalLM computes something"):
            check_rows(model, backend, block_size=BLOCK_SIZE, num_tokens=40)
