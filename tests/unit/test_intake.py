"""Reading ahead of the loop: how far, and when reading goes on."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine import GenerateRequest
from engine.config import SchedulerConfig
from engine.intake import EncodedRequest, Intake

DEPTH = 8
SHORT = [1]
LONG = [1] * 128 * 1024


class Source:
    """Requests without end, and how many of them were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[GenerateRequest]:
        while True:
            self.num_read += 1
            yield GenerateRequest(request_id=str(self.num_read), prompt="x")

    def wait_for(self, num_read: int) -> None:
        deadline = time.monotonic() + 10
        while self.num_read < num_read:
            assert time.monotonic() < deadline, f"{self.num_read} of {num_read} were read"
            time.sleep(0.001)


def intake_of(source: Source, prompt: list[int], max_waiting_requests: int) -> Intake:
    return Intake(
        iter(source),
        lambda request: EncodedRequest(request=request, token_ids=prompt),
        SchedulerConfig(max_waiting_requests=max_waiting_requests),
        threading.Event().set,
    )


@pytest.mark.parametrize(("prompt", "max_waiting_requests"), [(SHORT, DEPTH), (LONG, 128 * DEPTH)])
def test_reading_stops_at_the_depth_and_goes_on_when_half_of_it_was_taken(
    prompt: list[int], max_waiting_requests: int
) -> None:
    source = Source()
    intake = intake_of(source, prompt, max_waiting_requests)
    taken = []
    for _ in range(5):
        source.wait_for(len(taken) + DEPTH + 1)  # the last of them waits for room
        for _ in range(DEPTH // 2):
            item = intake.poll()
            assert item is not None
            taken.append(item.request.request_id)
            assert source.num_read <= len(taken) + DEPTH + 1
    intake.close()
    assert taken == [str(number + 1) for number in range(5 * DEPTH // 2)]


def test_a_prompt_that_is_longer_than_all_that_may_be_read_ahead_is_read() -> None:
    source = Source()
    intake = intake_of(source, LONG, DEPTH)
    for number in range(1, 4):
        source.wait_for(number + 1)
        item = intake.poll()
        assert item is not None
        assert item.request.request_id == str(number)
    intake.close()


class BrokenEnd:
    """Has no request, and cannot be closed."""

    def __iter__(self) -> Iterator[GenerateRequest]:
        return self

    def __next__(self) -> GenerateRequest:
        raise StopIteration

    def close(self) -> None:
        raise OSError("cannot be closed")


def test_a_source_that_cannot_be_closed_is_an_error_and_not_a_run_without_end() -> None:
    arrived = threading.Event()
    intake = Intake(
        BrokenEnd(),
        lambda request: EncodedRequest(request=request),
        SchedulerConfig(),
        arrived.set,
    )
    assert arrived.wait(10)
    with pytest.raises(OSError, match="cannot be closed"):
        intake.poll()
    assert intake.is_exhausted
