"""A device that computes apart from its host answers as the CPU does, whatever a row asks for."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from late_device import GraphedLateDevice, LateDevice, late_device
from tiny_model import open_engine, save_tiny_llama

from engine import Completion, OfflineInference, SamplingParams, WorkerError, WorkerFailure

pytestmark = pytest.mark.integration

PROMPTS = [
    "def add(left, right):",
    "the quick brown fox jumps over the lazy dog and the quick cat and the lazy dog",
    "x",
    "naive cafe, naive cafe; the quick",
    "return left * right",
    "the lazy dog",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=24)


def with_(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams.model_validate(params.model_dump(exclude_unset=True) | changes)


WAYS: dict[str, dict[str, Any]] = {
    "a batch": {},
    "few at a time": {"scheduler": {"max_num_seqs": 2}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 4}},
    "one step in flight": {"scheduler": {"num_steps_in_flight": 1}},
    "preemption": {"cache": {"num_blocks": 9, "block_size": 8, "enable_prefix_caching": False}},
}
ASKED = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": with_(DRAWN, top_k=12, top_p=0.8),
    "min_p": with_(DRAWN, min_p=0.05),
    "several samples": with_(DRAWN, n=3),
    "penalties": with_(DRAWN, repetition_penalty=1.3, frequency_penalty=0.5),
    "bad words": with_(GREEDY, bad_words=["the", "left"]),
    "minimum": with_(GREEDY, min_tokens=20, stop=["e"]),
    "bias": with_(GREEDY, logit_bias={7: 3.5, 9: -2}),
    "log probabilities": with_(DRAWN, logprobs=3, prompt_logprobs=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device(LateDevice()) as device:
        yield device


def open_late(folder: Path, way: dict[str, Any]) -> OfflineInference:
    return open_engine(folder, {**way, "runtime": {"inline": False, "num_threads": 1}})


def answers(engine: OfflineInference, params: SamplingParams) -> list[Completion]:
    with engine:
        return engine.generate(PROMPTS, params)


def found(completions: list[Completion]) -> list[list[Any]]:
    return [
        [c.token_ids, c.text, c.finish_reason, c.error, _scores(c.logprobs)] for c in completions
    ]


def wanted(folder: Path, params: SamplingParams) -> list[list[Any]]:
    """Return what the CPU answers; log probabilities up to rounding."""
    return [
        [*rest, [(token, pytest.approx(score, abs=1e-3), rank) for token, score, rank in scores]]
        for *rest, scores in found(answers(open_engine(folder), params))
    ]


def _scores(logprobs: Any) -> list[tuple[int, float, int]]:
    return [(each.token_id, each.logprob, each.rank) for each in logprobs or ()]


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED)
def test_rows_get_the_tokens_that_they_get_on_the_cpu(
    folder: Path, device: LateDevice, params: SamplingParams
) -> None:
    late = answers(open_late(folder, {}), params)
    assert device.events.count("upload") > 20
    assert found(late) == wanted(folder, params)


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED)
def test_replayed_steps_give_the_tokens_of_launched_ones(
    folder: Path, params: SamplingParams
) -> None:
    way = {"scheduler": {"max_num_seqs": 6}}
    with late_device(GraphedLateDevice()), open_late(folder, way) as engine:
        replayed = engine.generate(PROMPTS, params)
        stats = engine.take_stats()
    assert 0 < stats.num_graph_steps == stats.num_decode_steps < stats.num_steps
    assert found(replayed) == wanted(folder, params)


def test_enforce_eager_captures_nothing(folder: Path) -> None:
    with late_device(GraphedLateDevice()) as device:
        config = open_late(folder, {}).config.model_copy(update={"enforce_eager": True})
        with OfflineInference(config) as engine:
            engine.generate(PROMPTS, GREEDY)
            stats = engine.take_stats()
        assert isinstance(device, GraphedLateDevice)
        assert device.num_replays == stats.num_graph_steps == 0 < stats.num_decode_steps


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_do_not_depend_on_how_steps_are_made(
    folder: Path, device: LateDevice, way: dict[str, Any], params: SamplingParams
) -> None:
    late = answers(open_late(folder, way), params)
    assert found(late) == wanted(folder, params)
    if "preemption" in way or "num_blocks" in way.get("cache", {}):
        assert sum(completion.num_preemptions for completion in late) > 0


def test_the_next_step_is_launched_before_the_host_has_the_tokens(
    folder: Path, device: LateDevice
) -> None:
    answers(open_late(folder, {}), GREEDY)
    assert ("upload", "upload") in pairwise(device.events)


def test_a_row_whose_next_token_depends_on_its_text_waits_for_it(
    folder: Path, device: LateDevice
) -> None:
    with open_late(folder, {}) as engine:
        engine.generate(PROMPTS[:1], ASKED["penalties"])
    # The step is written and begun, but its token is drawn when the one before is known.
    late = device.events.index("fetched")
    assert device.events[:late].count("upload") == 2


def test_what_goes_wrong_on_the_device_comes_out_with_its_own_step(
    folder: Path, device: LateDevice
) -> None:
    device.errors.append(RuntimeError("the device fell over"))
    with (
        pytest.raises(WorkerError, match="the device fell over") as caught,
        open_late(folder, {}) as engine,
    ):
        engine.generate(PROMPTS, GREEDY)
    assert caught.value.failure is WorkerFailure.OTHER
    assert caught.value.request_ids


def test_steps_that_are_too_large_are_made_smaller_and_no_row_is_lost(
    folder: Path, device: LateDevice
) -> None:
    device.errors.append(MemoryError("no memory"))
    with open_late(folder, {}) as engine:
        late = engine.generate(PROMPTS, DRAWN)
        assert engine.take_stats().num_failed_steps > 0
    assert found(late) == wanted(folder, DRAWN)
