"""The pipe to a worker: large messages both ways, and a worker that does not read."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine import EngineConfig
from engine.messages import (
    AllocateCache,
    CacheAllocated,
    NewRequest,
    SamplerSpec,
    ScheduleBatch,
    Shutdown,
    StartWorker,
    StepDone,
    WorkerReady,
)
from engine.worker.channel import Channel, ChannelClosedError, ChannelStuckError
from engine.worker.model_worker import serve

# Far more than the kernel keeps for a reader that is late.
NUM_TOKENS = 100_000
PATIENCE_SECONDS = 20


def large_step(step_id: int) -> ScheduleBatch:
    """Return a step that is large as a question and as an answer."""
    sampler = SamplerSpec(
        temperature=0, top_k=0, top_p=1, min_p=0, seed=0, sampling_key=0, sample_index=0,
        prompt_logprobs=1,
    )  # fmt: skip
    request = NewRequest(
        uid=step_id,
        token_ids=[400] * NUM_TOKENS,
        num_prompt_tokens=NUM_TOKENS,
        num_computed_tokens=0,
        num_scheduled_tokens=NUM_TOKENS,
        block_ids=[],
        sampler=sampler,
    )
    return ScheduleBatch(step_id=step_id, new=[request], running=[], preempted=[], finished=[])


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Return our end of the pipe to a mock worker in a thread of this process."""
    ours, theirs = Channel.pair(PATIENCE_SECONDS)
    worker = threading.Thread(target=serve, args=(theirs,), daemon=True)
    worker.start()
    config = EngineConfig(model_path="mock", device="mock").model_dump(mode="json")
    ours.send(StartWorker(config=config, rank=0, world_size=1, device_id=0))
    assert isinstance(ours.receive_from_worker(), WorkerReady)
    ours.send(AllocateCache(num_blocks=1))
    assert isinstance(ours.receive_from_worker(), CacheAllocated)
    yield ours
    ours.send(Shutdown())
    worker.join(PATIENCE_SECONDS)
    ours.close()
    theirs.close()


def test_large_answers_and_large_questions_do_not_wait_for_each_other(channel: Channel) -> None:
    # The worker cannot get rid of an answer before the next step is sent.
    started = time.monotonic()
    for step_id in range(3):
        channel.send(large_step(step_id))
        assert time.monotonic() - started < PATIENCE_SECONDS / 2
    for step_id in range(3):
        reply = channel.receive_from_worker()
        assert isinstance(reply, StepDone)
        assert reply.step_id == step_id
        assert len(reply.prompt_logprobs[step_id].logprobs) == NUM_TOKENS - 1


def test_worker_that_does_not_read_is_not_waited_for_for_ever() -> None:
    ours, theirs = Channel.pair(send_timeout_seconds=0.2)
    with pytest.raises(ChannelStuckError):
        ours.send(large_step(0))
    theirs.close()
    ours.close()


def test_worker_that_is_gone_is_told_from_one_that_does_not_read() -> None:
    ours, theirs = Channel.pair(send_timeout_seconds=0.2)
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.send(large_step(0))
    ours.close()
