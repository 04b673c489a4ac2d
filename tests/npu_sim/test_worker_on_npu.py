"""A worker process on a simulated device that runs out of memory, fails, or is lost."""

from pathlib import Path
from typing import Any

import pytest
from engine_runs import GREEDY, MAX_TOKENS, PROMPTS, answer, ids_of, make_config, save_model
from npu_simulator.acl import Controls
from npu_simulator.shared_controls import make_shared_controls

from engine import EngineConfig, OfflineInference, WorkerError, WorkerFailure

MEMORY_BYTES = 1 << 30


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # So wide that the feed-forward layer of a long step does not fit in the memory of a short one.
    return save_model(tmp_path_factory.mktemp("llama"), intermediate_size=8192)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controls:
    """Give the controls of the worker processes that the test starts."""
    path = tmp_path / "controls"
    controls = make_shared_controls(path)
    controls.memory_bytes = MEMORY_BYTES
    monkeypatch.setenv("NPU_SIM_CONTROLS", str(path))
    return controls


def process_config(folder: Path, **way: Any) -> EngineConfig:
    settings = {"enforce_eager": True, "dtype": "float16", **way, "runtime": {"inline": False}}
    return make_config(folder, "npu", settings)


def test_a_process_gives_the_tokens_of_the_cpu(llama: Path, device: Controls) -> None:
    wanted, _ = answer(make_config(llama, "cpu", {"dtype": "float32"}))
    found, stats = answer(process_config(llama, enforce_eager=False))
    assert ids_of(found) == ids_of(wanted)
    assert stats.num_graph_steps > 0


def test_a_step_that_finds_no_memory_is_rolled_back_and_made_smaller(
    llama: Path, device: Controls
) -> None:
    with OfflineInference(process_config(llama)) as llm:
        short = llm.generate(PROMPTS[:3], GREEDY)
        device.memory_bytes = 1
        crowded = llm.generate(PROMPTS, GREEDY)
        stats = llm.take_stats()
    assert stats.num_failed_steps > 0
    assert ids_of(crowded[:3]) == ids_of(short)
    with OfflineInference(make_config(llama, "cpu", {"dtype": "float32"})) as llm:
        assert ids_of(crowded) == ids_of(llm.generate(PROMPTS, GREEDY))


# A kernel that trapped, and a device that its driver has lost.
@pytest.mark.parametrize("code", [507015, 507899])
def test_an_error_of_the_device_ends_the_worker_with_its_code_and_the_rows_in_flight(
    llama: Path, device: Controls, code: int
) -> None:
    with OfflineInference(process_config(llama)) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        device.wait_error = code
        with pytest.raises(WorkerError, match=str(code)) as caught:
            llm.generate(PROMPTS[:3], GREEDY)
    assert caught.value.failure is WorkerFailure.DEVICE_LOST
    assert len(caught.value.request_ids) == 3


def test_a_device_that_is_dead_at_the_start_serves_when_it_is_back(
    llama: Path, device: Controls
) -> None:
    device.wait_error = 507899
    with pytest.raises(WorkerError, match="507899"), OfflineInference(process_config(llama)) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
    device.wait_error = 0
    with OfflineInference(process_config(llama)) as llm:
        [completion] = llm.generate(PROMPTS[:1], GREEDY)
    assert len(completion.token_ids) == MAX_TOKENS


def test_two_ranks_on_two_devices_give_the_tokens_of_one(tmp_path: Path) -> None:
    # Prefill runs kernel by kernel, decode steps in graphs that the exchanges are part of.
    folder = save_model(tmp_path / "model")
    wanted, _ = answer(make_config(folder, "cpu", {"dtype": "float32"}))
    ranks = {"tensor_parallel_size": 2, "device_ids": [0, 1], "enforce_eager": False}
    found, stats = answer(process_config(folder, **ranks))
    assert ids_of(found) == ids_of(wanted)
    assert stats.num_graph_steps > 0
