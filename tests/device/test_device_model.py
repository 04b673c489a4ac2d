"""A tiny model through the whole engine, against transformers on the same kind of device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import save_tiny_llama
from transformers import LlamaForCausalLM

from engine import OfflineInference, SamplingParams
from engine.backends.base import DeviceBackend
from engine.config import EngineConfig

pytestmark = pytest.mark.integration

MAX_TOKENS = 24
MAX_POSITIONS = 320
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=MAX_TOKENS)
# Blocks that the longest prompt and its answer just fit in with others beside it.
FEW_TOKENS = 288
# Lengths from 1 to 250; some end just before the end of a block of 16 or of 128.
PROMPTS: list[list[int]] = [
    [0],
    [0, 100, 101, 102, 103],
    [0, *range(50, 80)],
    [0, *range(50, 80)],
    [0, *range(50, 66), 9, 9, 9],
    [0, *range(130, 250)],
    [0, *range(130, 256)],
    [7] * 250,
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kernel by kernel": {"enforce_eager": True},
    "chunked prefill": {"scheduler": {"max_num_seqs": 5, "max_num_batched_tokens": 33}},
    "one sequence": {"scheduler": {"max_num_seqs": 1}},
    "few blocks": {"cache": {"num_blocks": "few"}},
    "no prefix cache": {"cache": {"enable_prefix_caching": False}},
    "one step in flight": {"scheduler": {"num_steps_in_flight": 1}},
}


class Reference:
    """transformers' own model on the device, and in float32 on the CPU for how near a tie is."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        # eager: of plain operations, which every device has.
        load = partial(LlamaForCausalLM.from_pretrained, folder, attn_implementation="eager")
        self._model = load(dtype=dtype).to(device)
        self._exact = load(dtype=torch.float32)
        self._device = device
        self.answers = [self._generate(prompt) for prompt in PROMPTS]

    def _generate(self, prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt], device=self._device)
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer

    def assert_same(self, found: list[list[int]]) -> None:
        """Let few answers differ, and no token be another than the likeliest but at a near tie."""
        for prompt, answer, wanted in zip(PROMPTS, found, self.answers, strict=True):
            assert len(answer) == len(wanted)
            if answer != wanted:
                self._assert_likeliest(prompt, answer)
        different = [a != b for a, b in zip(found, self.answers, strict=True)]
        assert sum(different) <= len(PROMPTS) // 2

    @torch.inference_mode()
    def _assert_likeliest(self, prompt: list[int], answer: list[int]) -> None:
        """Compare how far each token is from the likeliest with what rounding does to logits."""
        ids = torch.tensor([prompt + answer[:-1]])
        exact = self._exact(ids).logits[0, len(prompt) - 1 :]
        rounded = self._model(ids.to(self._device)).logits[0, len(prompt) - 1 :].float().cpu()
        rounding = (exact - rounded).abs().amax(-1)
        gaps = exact.amax(-1) - exact.gather(1, torch.tensor(answer)[:, None])[:, 0]
        places = (gaps > 2 * rounding).nonzero()[:, 0].tolist()
        assert not places, f"{prompt[:6]}...: {gaps[places]} apart, rounding {rounding[places]}"


@pytest.fixture(scope="module")
def model_dtype(backend: DeviceBackend) -> torch.dtype:
    return torch.float32 if "float32" in backend.capabilities.dtypes else torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_dtype: torch.dtype) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("tiny-llama"),
        dtype=model_dtype,
        head_dim=128,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.1,
    )


@pytest.fixture(scope="module")
def reference(folder: Path, model_dtype: torch.dtype, backend: DeviceBackend) -> Reference:
    return Reference(folder, model_dtype, backend.device)


@pytest.fixture(scope="module")
def open_on_device(folder: Path, backend: DeviceBackend) -> Callable[[dict[str, Any]], Any]:
    """Return what opens an engine of the model in this process, on the device."""

    @contextmanager
    def open_engine(way: dict[str, Any]) -> Iterator[OfflineInference]:
        settings: dict[str, Any] = {
            "model_path": str(folder),
            "device": backend.name,
            "runtime": {"inline": True, "num_threads": 1},
            "cache": {"num_blocks": 200},
            "scheduler": {"max_num_seqs": 6},
        }
        for section, values in way.items():
            is_section = isinstance(values, dict)
            settings[section] = settings.get(section, {}) | values if is_section else values
        if settings["cache"]["num_blocks"] == "few":
            few = -(-FEW_TOKENS // backend.capabilities.default_block_size)
            settings["cache"] = settings["cache"] | {"num_blocks": few}
        with OfflineInference(EngineConfig.model_validate(settings)) as engine:
            yield engine

    return open_engine


def generate(engine: OfflineInference, params: SamplingParams) -> list[list[int]]:
    completions = engine.generate(PROMPTS, params)
    assert [completion.error for completion in completions] == [None] * len(PROMPTS)
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_transformers(
    way: str,
    backend: DeviceBackend,
    open_on_device: Callable[[dict[str, Any]], Any],
    reference: Reference,
) -> None:
    with open_on_device(WAYS[way]) as engine:
        reference.assert_same(generate(engine, GREEDY))
        stats = engine.take_stats()
    if way != "few blocks":
        assert stats.num_preemptions == 0
    elif backend.is_host:  # elsewhere blocks may be longer than answers
        assert stats.num_preemptions > 0
    if backend.has_graphs and way != "kernel by kernel":
        # Chunks of one token are replayed too.
        assert stats.num_graph_steps == stats.num_decode_steps > 0
    else:
        assert stats.num_graph_steps == 0


def test_drawn_answers_are_the_same_when_asked_for_again(
    open_on_device: Callable[[dict[str, Any]], Any],
) -> None:
    with open_on_device({}) as engine:
        first = generate(engine, DRAWN)
    with open_on_device({}) as engine:
        assert generate(engine, DRAWN) == first


def test_engines_that_are_closed_leave_no_memory_taken(
    backend: DeviceBackend, open_on_device: Callable[[dict[str, Any]], Any]
) -> None:
    if backend.is_host:
        pytest.skip("free memory of a host is an estimate")

    def run() -> None:
        with open_on_device({}) as engine:
            generate(engine, GREEDY)

    run()
    backend.release_memory()
    before = backend.memory_info().free_bytes
    for _ in range(3):
        run()
    backend.release_memory()
    assert backend.memory_info().free_bytes >= before - (8 << 20)
