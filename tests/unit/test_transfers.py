"""Transfers on streams: played on CPU tensors, where a missing wait gives wrong numbers."""

from collections import deque
from contextlib import nullcontext
from itertools import permutations

import numpy as np
import pytest
import torch
from stream_device import FakeStreamApi

from engine.backends.base import Fetched
from engine.backends.transfers import StreamTransfers

NAMES = ["outside", "compute", "uploading", "fetching"]
CPU = torch.device("cpu")
# Who waits for whom, when all is done inside of computing().
WAITS_INSIDE = {
    ("compute", "uploading"),
    ("uploading", "compute"),
    ("fetching", "compute"),
    ("host", "uploading"),
    ("host", "fetching"),
}
# And when transfers are made between one computing() and the next.
WAITS_OUTSIDE = {
    ("outside", "uploading"),
    ("compute", "outside"),
    ("outside", "compute"),
    ("uploading", "outside"),
    ("fetching", "outside"),
    ("host", "uploading"),
    ("host", "fetching"),
}


def run_steps(
    api: FakeStreamApi,
    order: tuple[str, ...],
    *,
    is_inside: bool,
    num_steps: int = 8,
    max_in_flight: int = 8,
) -> list[list[int]]:
    """Add 1, 2 and so on to a number on the device; return what came back.

    Nobody waits for chunks of a prompt, so more than two steps may be in flight. Each step uses
    its upload twice, the second time after the next upload, as the contract allows.
    """
    transfers = StreamTransfers(api, CPU, pin_memory=False)
    total = torch.zeros(4, dtype=torch.int64)
    outputs = [torch.zeros(4, dtype=torch.int64) for _ in range(num_steps)]
    step_input = np.zeros(4, np.int64)  # one buffer, written again for each step
    found: list[list[int]] = []
    in_flight: deque[Fetched] = deque()
    last: torch.Tensor | None = None
    with api, transfers.computing() if is_inside else nullcontext():
        for step in range(num_steps):
            step_input[:] = step + 1
            now = transfers.upload({"other": np.ones(3, np.int32), "number": step_input})["number"]
            with transfers.computing():
                if last is not None:
                    total.add_(last)
                total.add_(now)
                outputs[step].copy_(total)
            in_flight.append(transfers.fetch(outputs[step]))
            last = now
            api.run(*order)
            if len(in_flight) == max_in_flight:
                found.append(in_flight.popleft().numpy().tolist())
        found += [fetched.numpy().tolist() for fetched in in_flight]
    return found


# Nothing runs before the host waits; or streams run as far as they can, some before others.
ORDERS: list[tuple[str, ...]] = [
    (),
    ("uploading",),
    ("compute",),
    ("fetching",),
    *permutations(NAMES),
]


def wanted(num_steps: int = 8) -> list[list[int]]:
    numbers = list(range(1, num_steps + 1))
    return [[sum(numbers[: n + 1]) + sum(numbers[:n])] * 4 for n in range(num_steps)]


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 2, 8])
def test_numbers_are_right_in_whatever_order_the_streams_run(
    is_inside: bool, max_in_flight: int
) -> None:
    for order in ORDERS:
        api = FakeStreamApi(NAMES)
        found = run_steps(api, order, is_inside=is_inside, max_in_flight=max_in_flight)
        assert found == wanted(), order


@pytest.mark.parametrize("ignored", sorted(WAITS_INSIDE), ids=str)
def test_a_wait_that_is_left_out_inside_of_computing_gives_wrong_numbers(
    ignored: tuple[str, str],
) -> None:
    results = [run_steps(FakeStreamApi(NAMES, ignored), o, is_inside=True) for o in ORDERS]
    assert any(found != wanted() for found in results)


@pytest.mark.parametrize("ignored", sorted(WAITS_OUTSIDE), ids=str)
def test_a_wait_that_is_left_out_around_computing_gives_wrong_numbers(
    ignored: tuple[str, str],
) -> None:
    results = [run_steps(FakeStreamApi(NAMES, ignored), o, is_inside=False) for o in ORDERS]
    assert any(found != wanted() for found in results)


@pytest.mark.parametrize("is_inside", [True, False])
def test_no_wait_is_made_that_the_tests_do_not_leave_out(is_inside: bool) -> None:
    api = FakeStreamApi(NAMES)
    run_steps(api, (), is_inside=is_inside)
    at_the_edges = {("compute", "outside"), ("outside", "compute")}
    assert set(api.waits) == (WAITS_INSIDE | at_the_edges if is_inside else WAITS_OUTSIDE)


def test_copies_and_computing_are_on_streams_of_their_own() -> None:
    api = FakeStreamApi(NAMES)
    run_steps(api, (), is_inside=True, num_steps=2)
    found = [f"{stream} {name.split('.')[1]}" for stream, name in api.launched]
    first = ["uploading copy_", "compute add_", "compute copy_", "fetching copy_"]
    assert found == [*first, "uploading copy_", "compute add_", *first[1:]]


def test_the_host_waits_for_no_step_to_upload() -> None:
    api = FakeStreamApi(NAMES)
    transfers = StreamTransfers(api, CPU, pin_memory=False)
    with api:
        for _ in range(3):
            transfers.upload({"number": np.zeros(4, np.int64)})
        assert not [waiting for waiting, _ in api.waits if waiting == "host"]


def test_arrays_of_every_kind_arrive_and_lie_apart() -> None:
    arrays = {
        "ids": np.arange(7, dtype=np.int64),
        "tables": np.arange(6, dtype=np.int32).reshape(2, 3),
        "none": np.zeros((0, 4), np.int32),
        "flags": np.array([True, False, True]),
        "every_other": np.arange(10, dtype=np.float32)[::2],
        "one": np.array(3.5, np.float32),
    }
    transfers = StreamTransfers(FakeStreamApi(NAMES), CPU, pin_memory=False)
    found = transfers.upload(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].numpy(), array, err_msg=name)
        assert found[name].storage_offset() * found[name].itemsize % 512 == 0


def test_an_upload_that_outgrows_the_buffers_gets_larger_ones_and_harms_none_in_flight() -> None:
    api = FakeStreamApi(NAMES)
    transfers = StreamTransfers(api, CPU, pin_memory=False)
    sizes = [10, 30_000, 10, 300_000, 20, 40_000]
    seen = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    with api:
        for step, size in enumerate(sizes):
            numbers = transfers.upload({"numbers": np.full(size, step, np.int64)})["numbers"]
            with transfers.computing():
                seen[step].copy_(numbers)
            assert len({tensor.data_ptr() for tensor in seen}) == len(sizes)
        api.run("uploading", "compute")
    # New memory was somebody's too: its first copy waits like every other.
    assert api.waits["uploading", "outside"] == len(sizes)
    for step, tensor in enumerate(seen):
        assert torch.equal(tensor, torch.full((sizes[step],), step))


def test_buffers_are_used_again() -> None:
    transfers = StreamTransfers(FakeStreamApi(NAMES), CPU, pin_memory=False)
    places = [transfers.upload({"a": np.zeros(3)})["a"].data_ptr() for _ in range(9)]
    assert len(set(places)) == 3
    assert places[:3] == places[3:6] == places[6:]


def test_what_was_fetched_stays_as_it_was_when_its_buffer_is_used_again() -> None:
    transfers = StreamTransfers(FakeStreamApi(NAMES), CPU, pin_memory=False)
    first = transfers.fetch(torch.arange(5)).numpy()
    second = transfers.fetch(torch.arange(5, 10)).numpy()
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == [5, 6, 7, 8, 9]


def test_a_fetch_is_ready_when_its_copy_is_done_and_may_be_read_twice() -> None:
    api = FakeStreamApi(NAMES)
    transfers = StreamTransfers(api, CPU, pin_memory=False)
    numbers = torch.arange(6).view(2, 3)
    with api:
        fetched = transfers.fetch(numbers)
        assert not fetched.is_ready()
        api.run("fetching")
        assert fetched.is_ready()
        assert fetched.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert fetched.numpy() is fetched.numpy()
    assert fetched.is_ready()
