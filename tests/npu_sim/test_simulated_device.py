"""What the simulated device itself does: memory, streams, errors, and what it refuses."""

import subprocess
import sys
import threading

import pytest
import torch
import torch_npu
from npu_simulator.acl import NoteKind, controls
from npu_simulator.recorder import DEVICE_TO_HOST, HOST_TO_DEVICE, recorder

MIB = 1 << 20
BLOCK_BYTES = 512 * MIB  # more than any memory that an earlier test has left to be used again


def pinned(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).pin_memory()


def test_operations_run_on_the_memory_of_the_device() -> None:
    numbers = torch.arange(6.0).npu().view(2, 3)
    numbers[0] = 7
    numbers += 1
    assert numbers.device.type == "npu"
    assert numbers.t().cpu().tolist() == [[8, 4], [8, 5], [8, 6]]


def test_an_operation_that_the_wheel_has_no_kernel_for_is_refused() -> None:
    numbers = torch.ones(2).npu()
    with pytest.raises(NotImplementedError, match="nextafter.*would run it on the CPU"):
        torch.nextafter(numbers, numbers)


def test_what_consists_of_operations_with_kernels_is_served_by_them() -> None:
    with recorder.recording():
        torch.full_like(torch.empty(3, device="npu"), 2.0)
    assert recorder.operations == ["aten::empty_like", "aten::fill_.Scalar"]


def test_random_numbers_on_the_device_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="draw them on the host"):
        torch.rand(3, device="npu")


def test_memory_has_an_end_and_comes_back() -> None:
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="npu")
    left = torch.npu.mem_get_info()[0]
    assert left <= free - BLOCK_BYTES // 2
    controls.memory_bytes = total - left + BLOCK_BYTES // 2
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="npu")
    del block
    torch.npu.empty_cache()
    torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="npu")


def test_expandable_segments_are_counted_too() -> None:
    code = (
        "import torch, torch_npu; x = torch.ones(64 << 20, dtype=torch.uint8, device='npu');"
        "free, total = torch.npu.mem_get_info(); assert free <= total - (64 << 20), (free, total);"
        "assert int(x.sum()) == 64 << 20"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
        subprocess.run([sys.executable, "-c", code], check=True)


def test_devices_have_memory_of_their_own() -> None:
    there = torch.ones(MIB, device="npu:1")
    assert torch.npu.device_count() == 2
    assert there.to("npu:0").device == torch.device("npu", 0)
    with torch.npu.device(1):
        torch.npu.empty_cache()
        before = torch.npu.mem_get_info()[0]
        kept = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="npu:1")
        assert torch.npu.mem_get_info()[0] <= before - kept.nbytes // 2


def test_a_pinned_copy_arrives_when_it_has_been_waited_for() -> None:
    controls.late_queries = 2
    source, target = torch.ones(3).npu(), pinned(0, 0, 0)
    target.copy_(source, non_blocking=True)
    event = torch.npu.current_stream().record_event()
    assert [event.query(), event.query()] == [False, False]
    assert target.tolist() != [1, 1, 1]
    assert event.query()
    assert target.tolist() == [1, 1, 1]
    target.copy_(source * 2, non_blocking=True)
    torch.npu.current_stream().record_event().synchronize()
    assert target.tolist() == [2, 2, 2]


def test_what_a_stream_waits_for_has_arrived_when_the_stream_has() -> None:
    source, target = torch.ones(3).npu(), pinned(0, 0, 0)
    copying, waiting = torch.npu.Stream(), torch.npu.Stream()
    with torch.npu.stream(copying):
        target.copy_(source, non_blocking=True)
    torch.npu.current_stream().synchronize()
    assert target.tolist() != [1, 1, 1]
    waiting.wait_event(copying.record_event())
    waiting.synchronize()
    assert target.tolist() == [1, 1, 1]


def test_a_source_that_is_overwritten_before_its_copy_is_done_is_noted() -> None:
    def overwritten(*, waits: bool) -> list[NoteKind]:
        source, target = pinned(1, 2), torch.empty(2, device="npu")
        with recorder.recording():
            target.copy_(source, non_blocking=True)
            if waits:
                torch.npu.synchronize()
            source.zero_()
            torch.npu.synchronize()
        return [note.kind for note in recorder.notes if note.kind is NoteKind.HOST_OVERWRITE]

    assert overwritten(waits=True) == []
    assert overwritten(waits=False) == [NoteKind.HOST_OVERWRITE]


def test_copies_events_and_operations_are_noted_with_their_streams() -> None:
    source, numbers = pinned(1, 2, 3), torch.empty(3, device="npu")
    first, second = torch.npu.Stream(), torch.npu.Stream()
    with recorder.recording():
        with torch.npu.stream(first):
            numbers.copy_(source, non_blocking=True)
        second.wait_event(first.record_event())
        with torch.npu.stream(second):
            (numbers * 2).cpu()
    up, record, wait, multiplied = recorder.notes[:4]
    assert [note.kind for note in recorder.notes[:4]] == [
        NoteKind.PINNED_COPY,
        NoteKind.RECORD,
        NoteKind.WAIT,
        NoteKind.OP,
    ]
    assert (up.stream, wait.stream) == (record.stream, multiplied.stream)
    assert up.stream != wait.stream
    assert record.value == wait.value
    assert multiplied.name == "aten::mul.Tensor"
    [up], [down] = recorder.copies(HOST_TO_DEVICE), recorder.copies(DEVICE_TO_HOST)
    assert (up.num_bytes, down.num_bytes) == (12, 12)


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_that_is_missing_between_streams_is_found(waits: bool) -> None:
    source, numbers = pinned(1, 2, 3), torch.empty(3, device="npu")
    first, second = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with recorder.recording():
        with torch.npu.stream(first):
            numbers.copy_(source, non_blocking=True)
        if waits:
            second.wait_event(first.record_event())
        with torch.npu.stream(second):
            numbers * 2
        second.record_event()
    ordering = recorder.find_races()
    assert len(ordering.races) == (0 if waits else 1)
    assert sum(ordering.ordered.values()) == (1 if waits else 0)


@pytest.mark.parametrize("code", [507015, 507018, 507899])
def test_an_error_of_the_device_comes_out_where_the_host_waits(code: int) -> None:
    numbers = torch.ones(3).npu()
    controls.wait_error = code
    with pytest.raises(RuntimeError, match=str(code)):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match=str(code)):
        numbers.cpu()


def test_threads_that_are_started_later_compute_too() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append((torch.ones(2).npu() + 1).cpu()))
    thread.start()
    thread.join()
    assert found[0].tolist() == [2, 2]


def test_a_device_that_does_not_exist_is_refused() -> None:
    # In a process of its own, which this ends.
    code = "import torch, torch_npu; torch.empty(2, device='npu:3')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "107001" in result.stderr or "invalid device" in result.stderr.lower()


def test_a_process_that_does_not_import_torch_npu_is_left_alone() -> None:
    code = "import sys, torch; torch.ones(1) + 1; assert 'npu_simulator' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_wheel_is_the_one_that_the_project_names() -> None:
    assert torch_npu.__version__.startswith("2.13.0")
