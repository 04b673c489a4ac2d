"""Errors of a simulated device, from torch_npu's own text to the message of a run."""

from pathlib import Path

import pytest
import torch
from npu_simulator.acl import controls
from tiny_model import save_tiny_llama

from engine import EngineConfig, GenerateRequest, OfflineInference
from engine.backends import load_backend
from engine.backends.npu import NpuBackend
from engine.errors import WorkerError, WorkerFailure


@pytest.fixture(scope="module")
def backend() -> NpuBackend:
    backend = load_backend("npu")
    assert isinstance(backend, NpuBackend)
    backend.bind(0, None)
    return backend


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (507015, WorkerFailure.DEVICE_LOST),
        (507018, WorkerFailure.DEVICE_LOST),
        (507899, WorkerFailure.DEVICE_LOST),
        (507014, WorkerFailure.TIMEOUT),
    ],
)
def test_error_that_torch_npu_raises_is_classified_and_put_into_words(
    backend: NpuBackend, code: int, failure: WorkerFailure
) -> None:
    controls.wait_error = code
    with pytest.raises(RuntimeError) as caught:
        backend.synchronize()
    controls.wait_error = 0
    assert backend.classify_error(caught.value) is failure
    words = backend.explain_error(caught.value)
    assert f"{code}: " in words
    assert "What to do: " in words
    assert "\n" not in words


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16)


def test_words_of_a_failed_step_reach_the_error_with_the_ids_in_flight(model_folder: Path) -> None:
    way = {"cache": {"num_blocks": 8, "block_size": 128}}
    config = {"model_path": str(model_folder), "device": "npu", "runtime": {"inline": True}, **way}
    requests = [
        GenerateRequest(request_id=f"row-{number}", prompt_token_ids=[5, 6, 7 + number])
        for number in range(2)
    ]
    with OfflineInference(EngineConfig.model_validate(config)) as engine:
        assert engine.device == "npu 0 (Ascend910B1)"
        controls.wait_error = 507015
        with pytest.raises(WorkerError) as caught:
            engine.generate(requests)
        controls.wait_error = 0
    assert caught.value.failure is WorkerFailure.DEVICE_LOST
    assert "507015: AI Core exception" in str(caught.value)
    assert "ASCEND_LAUNCH_BLOCKING=1" in str(caught.value)
    assert set(caught.value.request_ids) == {"row-0", "row-1"}


def test_device_that_fails_while_it_loads_is_told_in_words(model_folder: Path) -> None:
    config = {"model_path": str(model_folder), "device": "npu", "runtime": {"inline": True}}
    controls.wait_error = 507899
    with (
        pytest.raises(WorkerError, match="507899: internal error of the driver"),
        OfflineInference(EngineConfig.model_validate(config)),
    ):
        pass
    controls.wait_error = 0


def test_full_device_is_out_of_memory_and_says_what_to_lower(backend: NpuBackend) -> None:
    controls.memory_bytes = 1 << 20
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 30, dtype=torch.uint8, device="npu")
    assert backend.classify_error(caught.value) is WorkerFailure.OUT_OF_MEMORY
    assert "max_num_batched_tokens" in backend.explain_error(caught.value)
