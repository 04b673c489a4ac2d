"""What a device is asked before anything is loaded onto it."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.backends.base import DeviceHolder, MemoryInfo
from engine.backends.cpu import CpuBackend
from engine.backends.weight_size import count_weight_bytes
from engine.errors import ConfigError, WorkerError, WorkerFailure

GIB = 1 << 30


class TwoCards(CpuBackend):
    """Two devices of a kind that one process can have for itself."""

    name = "card"

    def __init__(self, *held_by: DeviceHolder) -> None:
        super().__init__()
        self._held_by = held_by

    def count_devices(self) -> int:
        return 2

    def holders(self, device_id: int) -> tuple[DeviceHolder, ...]:
        return self._held_by if device_id == 1 else ()

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free_bytes=6 * GIB, total_bytes=8 * GIB)


@pytest.mark.parametrize("device_id", [2, -1])
def test_device_that_is_not_there_is_the_users_to_mend(device_id: int) -> None:
    with pytest.raises(ConfigError, match=rf"device_ids has {device_id}, .* has 2 device\(s\)"):
        TwoCards().check_device(device_id)


def test_device_that_another_process_holds_is_named_with_that_process() -> None:
    backend = TwoCards(DeviceHolder(pid=17, used_bytes=3 * GIB))
    with pytest.raises(WorkerError, match=r"card 1 is held by pid 17 \(3\.0 GiB\)") as caught:
        backend.check_device(1)
    assert caught.value.failure is WorkerFailure.START_FAILED
    backend.check_device(0)


def test_device_that_this_process_holds_is_free_for_it() -> None:
    TwoCards(DeviceHolder(pid=os.getpid(), used_bytes=GIB)).check_device(1)


def test_what_can_never_fit_is_told_from_what_does_not_fit_now() -> None:
    backend = TwoCards()
    backend.check_memory(6 * GIB, "weights")
    numbers = r"7\.00 GiB are needed \(weights\), and 6\.00 of 8\.00 GiB are free"
    with pytest.raises(WorkerError, match=numbers) as caught:
        backend.check_memory(7 * GIB, "weights")
    assert caught.value.failure is WorkerFailure.START_FAILED
    with pytest.raises(ConfigError, match=r"9\.00 GiB are needed"):
        backend.check_memory(9 * GIB, "weights")


def save(path: Path, dtype: torch.dtype, num_numbers: int) -> None:
    save_file(
        {"a": torch.zeros(num_numbers - 6, dtype=dtype), "b": torch.zeros(2, 3).to(dtype)}, path
    )


def test_weights_count_in_the_dtype_that_they_are_loaded_in(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", torch.bfloat16, 1000)
    assert count_weight_bytes(tmp_path, torch.bfloat16) == 2000
    assert count_weight_bytes(tmp_path, torch.float32) == 4000


def test_weights_that_ranks_convert_are_there_once_for_each_while_they_load(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", torch.bfloat16, 1000)
    assert count_weight_bytes(tmp_path, torch.bfloat16, num_copies=4) == 2000
    assert count_weight_bytes(tmp_path, torch.float32, num_copies=4) == 16000


def test_weights_that_a_folder_has_in_two_forms_count_once(tmp_path: Path) -> None:
    save(tmp_path / "part-1.safetensors", torch.float32, 100)
    save(tmp_path / "part-2.safetensors", torch.float32, 50)
    save(tmp_path / "consolidated.safetensors", torch.float32, 150)
    weight_map = {"a": "part-1.safetensors", "b": "part-2.safetensors", "c": "part-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert count_weight_bytes(tmp_path, torch.float32) == 600
    save(tmp_path / "model.safetensors", torch.float32, 10)
    assert count_weight_bytes(tmp_path, torch.float32) == 40


@pytest.mark.parametrize("content", [b"not weights", b"", b"\x05\0\0\0\0\0\0\0[1,2]"])
def test_file_that_is_no_weights_counts_with_its_size_and_is_judged_by_who_loads_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert count_weight_bytes(tmp_path, torch.float32) == len(content)
