"""The whole engine on a device with graphs, played on the CPU, answers as it does without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from graphed_cpu import GraphedCpu, GraphedCpuWithHostLengths
from model_families import generate_reference, make_model, make_prompts
from tiny_model import open_engine, save_tiny_llama

from engine import Completion, SamplingParams
from tests.late_device import LateDevice, late_device

pytestmark = pytest.mark.integration

PROMPTS: list[list[int]] = [
    [0],
    [0, 100, 101, 102, 103],
    [0, *range(50, 80)],
    [0, *range(50, 80), 200, 201],
    [0, *range(300, 359)],
    [7] * 33,
    [0, 5, 6, 7],
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
ASKED = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=24),
    "penalties": SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.3),
    "log probabilities": SamplingParams(
        temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=2
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "a batch": {},
    "odd sizes": {"scheduler": {"max_num_seqs": 5}},
    "chunks": {"scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 7}},
    "preemption": {"cache": {"block_size": 4, "num_blocks": 24}},
    "blocks of one token": {"cache": {"block_size": 1}},
}


class LateGraphedDevice(LateDevice, GraphedCpu):
    """Computes apart from its host, and replays graphs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[GraphedCpu], None]:
    def use(backend: GraphedCpu) -> None:
        monkeypatch.setattr("engine.worker.model_runner.load_backend", lambda name: backend)

    return use


@pytest.fixture
def late() -> Iterator[LateGraphedDevice]:
    device = LateGraphedDevice()
    with late_device(device):
        yield device


def assert_same(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        for scores, others in (
            (one.logprobs, other.logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            values = [s.logprob for s in scores or () if s is not None]
            wanted_values = [s.logprob for s in others or () if s is not None]
            assert values == pytest.approx(wanted_values, abs=1e-4)


@pytest.mark.parametrize("kind", [GraphedCpu, GraphedCpuWithHostLengths])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_an_engine_without_graphs(
    folder: Path,
    use: Callable[[GraphedCpu], None],
    kind: Callable[[], GraphedCpu],
    way: str,
) -> None:
    with open_engine(folder, WAYS[way]) as engine:
        wanted = {name: engine.generate(PROMPTS, params) for name, params in ASKED.items()}
    backend = kind()
    use(backend)
    with open_engine(folder, WAYS[way]) as engine:
        for name, params in ASKED.items():
            assert_same(engine.generate(PROMPTS, params), wanted[name])
        stats = engine.take_stats()
    # The last token of a prompt may be a step of its own, which is replayed too but not counted.
    assert backend.num_replays >= stats.num_graph_steps == stats.num_decode_steps > 0


@pytest.mark.parametrize("name", ASKED)
def test_a_replay_does_not_harm_what_is_still_on_its_way_to_the_host(
    folder: Path, late: LateGraphedDevice, name: str
) -> None:
    apart = {"runtime": {"inline": False}, "scheduler": {"max_num_seqs": 5}}
    with open_engine(folder, apart | {"enforce_eager": True}) as engine:
        wanted = engine.generate(PROMPTS, ASKED[name])
        assert engine.take_stats().num_graph_steps == late.num_replays == 0
    with open_engine(folder, apart) as engine:
        assert_same(engine.generate(PROMPTS, ASKED[name]), wanted)
        assert engine.take_stats().num_graph_steps == late.num_replays > 0


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gemma3_text", "gpt_neox", "gpt_oss", "mixtral", "phi3", "phimoe", "qwen3_moe"],
)
def test_models_of_other_shapes_can_be_captured_too(
    tmp_path: Path, use: Callable[[GraphedCpu], None], family: str
) -> None:
    """Experts, sinks, windows, fused projections: nothing in them asks the device for a number."""
    model = make_model(family, tmp_path)
    prompts = make_prompts(3, 20, 9)
    use(GraphedCpu())
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_engine(tmp_path, {"scheduler": {"max_num_seqs": 5}}) as engine:
        found = [list(answer.token_ids) for answer in engine.generate(prompts, params)]
        assert engine.take_stats().num_graph_steps > 0
    assert found == generate_reference(model, prompts, 12)
