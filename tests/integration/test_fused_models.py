"""Models with fused layers: the tokens of transformers in every schedule, on ranks, to the bit."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES, generate_reference, make_model, make_prompts
from rank_threads import run_ranks

from engine import Completion, EngineConfig, OfflineInference, SamplingParams
from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.cpu import CpuBackend
from engine.layers.fused_decoder_layer import FusedDecoderLayer
from engine.layers.kv_pool import allocate_pool
from engine.models import loader, prepare_model
from engine.parallel import ParallelGroup

pytestmark = pytest.mark.integration

FUSED = ("granite", "llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3")
NUM_TOKENS = 12
BLOCK_SIZE = 4
PROMPTS = make_prompts(21, 13, 3, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)


@pytest.fixture
def fused_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many fused layers each loaded model has."""
    counts: list[int] = []

    def fuse(*args: Any) -> int:
        counts.append(original(*args))
        return counts[-1]

    original = loader.fuse_layers
    monkeypatch.setattr(loader, "fuse_layers", fuse)
    return counts


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(
    folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> list[Completion]:
    base = {
        "model_path": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "runtime": {"inline": True, "num_threads": 1},
        "cache": {"block_size": BLOCK_SIZE, "num_blocks": 200},
    }
    with OfflineInference(EngineConfig.model_validate(base | settings)) as llm:
        completions = llm.generate(prompts, params)
    assert [completion.error for completion in completions] == [None] * len(completions)
    return completions


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("family", FUSED)
def test_fused_family_gives_the_tokens_of_transformers_in_every_schedule(
    family: str, tmp_path: Path, fused_counts: list[int]
) -> None:
    expected = generate_reference(make_model(family, tmp_path), PROMPTS, NUM_TOKENS)

    assert tokens(run(tmp_path, PROMPTS)) == expected
    assert [tokens(run(tmp_path, [prompt]))[0] for prompt in PROMPTS] == expected

    chunks = {"max_num_batched_tokens": 9, "max_num_seqs": 4}
    assert tokens(run(tmp_path, PROMPTS, scheduler=chunks)) == expected

    few = {"block_size": BLOCK_SIZE, "num_blocks": 24, "enable_prefix_caching": False}
    assert tokens(run(tmp_path, PROMPTS, cache=few)) == expected
    assert set(fused_counts) == {2}


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*FUSED}))
def test_any_other_family_is_left_alone(
    family: str, tmp_path: Path, fused_counts: list[int]
) -> None:
    module = make_model(family, tmp_path)
    before = dict(module.named_modules())
    prepare_model(module, CpuBackend(), ParallelGroup(), tmp_path)
    assert fused_counts == [0]
    after = dict(module.named_modules())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


# Ranks.


def stir(module: Any) -> Any:
    """Fill in what is 0 or 1 in a new model: biases and norms; to lose one would show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def logits_of(module: Any, group: ParallelGroup) -> tuple[torch.Tensor, int]:
    """Return the logits of one prompt in one step, and how many layers are fused."""
    backend = CpuBackend()
    model = prepare_model(module, backend, group, Path("model"))
    count = len(PROMPTS[0])
    table = torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32)[None]
    caches = allocate_pool(table.numel(), BLOCK_SIZE, model.kv_layouts, model.dtype, backend)
    model.attention.bind_caches(caches)
    metadata = AttentionMetadata(
        query_lens=[count],
        seq_lens=[count],
        slot_mapping=torch.arange(count),
        block_tables=table,
        seq_lens_tensor=torch.tensor([count], dtype=torch.int32),
    )
    positions = torch.arange(count)
    with torch.inference_mode(), model.attention.step(metadata):
        logits = model.logits(torch.tensor(PROMPTS[0]), positions, positions)
    return logits, sum(isinstance(part, FusedDecoderLayer) for part in module.modules())


@pytest.mark.parametrize("world_size", [2, 4])  # with 4, two ranks share a key-value head
@pytest.mark.parametrize("family", FUSED)
def test_split_and_fused_model_gives_the_logits_of_the_whole_and_plain(
    family: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    module = stir(make_model(family, tmp_path / "model", **biases))
    monkeypatch.setattr(CpuBackend, "prefers_fused_layers", False)
    expected, num_fused = logits_of(copy.deepcopy(module), ParallelGroup())
    assert num_fused == 0

    monkeypatch.undo()
    modules = [copy.deepcopy(module) for _ in range(world_size)]
    results = run_ranks(
        tmp_path / "ranks", world_size, lambda group: logits_of(modules[group.rank], group)
    )
    for logits, num_fused in results:
        assert num_fused == 2
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits, results[0][0])


# To the bit.


def answers(completions: list[Completion]) -> list[Any]:
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_deterministic_mode_is_exact_with_fused_layers(
    family: str, dtype: str, tmp_path: Path, fused_counts: list[int]
) -> None:
    make_model(family, tmp_path)
    exact = {"dtype": dtype, "deterministic": True}
    expected = answers(run(tmp_path, PROMPTS, **exact))

    alone = {"max_num_seqs": 1}
    assert answers(run(tmp_path, PROMPTS, scheduler=alone, **exact)) == expected
    chunks = {"max_num_batched_tokens": 9, "max_num_seqs": 4, "order": "longest_first"}
    assert answers(run(tmp_path, PROMPTS, scheduler=chunks, **exact)) == expected
    assert answers(run(tmp_path, PROMPTS[::-1], **exact))[::-1] == expected
    assert set(fused_counts) == {2}
