"""What crosses the process wall arrives as it was sent."""

import math
from typing import get_args

import msgspec
import pytest

from engine import messages
from engine.logprobs import ScoredPart, TokenLogprob
from engine.messages import (
    AllocateCache,
    CacheAllocated,
    FromWorker,
    LogLine,
    NewRequest,
    Running,
    SamplerSpec,
    ScheduleBatch,
    Shutdown,
    StartFailed,
    StartWorker,
    StepDone,
    StepFailed,
    ToWorker,
    WorkerReady,
    WorkerTimings,
)

SAMPLER = SamplerSpec(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=2**63 - 1,
    sampling_key=2**63 - 1,
    sample_index=3,
    min_tokens=2,
    forbidden_token_ids=(0, 2),
    presence_penalty=-2.0,
    frequency_penalty=0.5,
    repetition_penalty=1.25,
    logit_bias={0: -100.0, 2**31 - 1: 5.5},
    bad_words=((5,), (6, 7)),
    logprobs=0,
    prompt_logprobs=3,
    is_scoring_only=True,
)
NEW = NewRequest(
    uid=7,
    token_ids=[1, 2, 3, 2**31 - 1],
    num_prompt_tokens=3,
    num_computed_tokens=0,
    num_scheduled_tokens=4,
    block_ids=[9, 8],
    sampler=SAMPLER,
)
TO_WORKER: list[ToWorker] = [
    StartWorker(
        config={"model_path": "größe", "cache": {"block_size": 16, "kv_cache_gib": None}},
        rank=0,
        world_size=1,
        device_id=2,
    ),
    AllocateCache(num_blocks=100),
    ScheduleBatch(
        step_id=2**40,
        new=[NEW],
        running=[
            Running(uid=1, num_scheduled_tokens=1, new_block_ids=[]),
            Running(uid=2, num_scheduled_tokens=5, new_block_ids=[3]),
        ],
        preempted=[4],
        finished=[5, 6],
    ),
    Shutdown(),
]
FROM_WORKER: list[FromWorker] = [
    WorkerReady(
        num_blocks=5, block_size=16, device="cpu", dtype="float32", load_seconds=1.5, pid=42
    ),
    CacheAllocated(warmup_seconds=0.1),
    StepDone(
        step_id=3,
        uids=[1, 7],
        token_ids=[11, 0],
        timings=WorkerTimings(forward_seconds=0.5),
        logprobs={7: TokenLogprob(0, float("-inf"), 400, ((11, -0.25), (5, float("-inf"))))},
        prompt_logprobs={2**40: ScoredPart(1, [TokenLogprob(3, -1.5, 2)])},
    ),
    StepFailed(step_id=3, kind="out_of_memory", message="no\u2028room \ufffd"),
    StartFailed(is_config_error=True, message="no model"),
    LogLine(name="engine.worker", level=20, text="a line\u2028of two"),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_a_message_to_the_worker_arrives_as_it_was_sent(message: ToWorker) -> None:
    assert messages.decode_to_worker(messages.encode(message)) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_a_message_from_the_worker_arrives_as_it_was_sent(message: FromWorker) -> None:
    assert messages.decode_from_worker(messages.encode(message)) == message


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(message) for message in TO_WORKER} == set(get_args(ToWorker))
    assert {type(message) for message in FROM_WORKER} == set(get_args(FromWorker))


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        NEW.uid = 8  # type: ignore[misc]


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_from_worker(messages.encode(Shutdown()))


def test_a_decode_step_of_many_requests_is_small() -> None:
    running = [Running(uid=i, num_scheduled_tokens=1, new_block_ids=[]) for i in range(256)]
    batch = ScheduleBatch(step_id=1, new=[], running=running, preempted=[], finished=[])
    assert len(messages.encode(batch)) < 8 * len(running)


def test_a_logprob_that_is_no_number_arrives_as_one() -> None:
    score = TokenLogprob(3, float("nan"), 1)
    done = StepDone(
        step_id=1, uids=[0], token_ids=[3], timings=WorkerTimings(), logprobs={0: score}
    )
    arrived = messages.decode_from_worker(messages.encode(done))
    assert isinstance(arrived, StepDone)
    assert math.isnan(arrived.logprobs[0].logprob)


def test_what_a_plain_request_does_not_ask_for_takes_no_room() -> None:
    plain = SamplerSpec(
        temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=1, sampling_key=2, sample_index=0
    )
    assert b"penalty" not in msgspec.msgpack.encode(plain)
    done = StepDone(step_id=1, uids=[], token_ids=[], timings=WorkerTimings())
    assert b"logprobs" not in messages.encode(done)
