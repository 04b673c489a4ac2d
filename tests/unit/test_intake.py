"""Reading ahead of the loop: how far, and when reading goes on."""

import threading
import time
from collections.abc import Iterator

from engine import GenerateRequest
from engine.intake import EncodedRequest, Intake

DEPTH = 8


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


def test_reading_stops_at_the_depth_and_goes_on_when_half_of_it_was_taken() -> None:
    source = Source()
    intake = Intake(
        iter(source),
        lambda request: EncodedRequest(request=request),
        depth=DEPTH,
        on_arrival=threading.Event().set,
    )
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
