"""A long prompt does not stall the others: its share of a step, and a lane for the very long.

Nor do many of them fill the memory: what is read ahead is bounded in tokens too.
"""

import pytest
from engine_builders import infer_request, make_rig

from engine import EngineConfig, GenerateRequest, OfflineInference, SamplingParams
from engine.request import RequestState


def test_long_prompt_leaves_room_for_those_who_came_after_it() -> None:
    rig = make_rig(
        num_blocks=64, max_num_seqs=4, max_num_batched_tokens=8, max_prefill_fraction=0.5
    )
    long, short = infer_request(0, [1] * 64, max_tokens=2), infer_request(1, [2] * 4, max_tokens=2)
    rig.add(long)
    rig.add(short)
    rig.step()
    assert (long.num_computed_tokens, short.num_computed_tokens) == (4, 4)
    assert len(short.output_token_ids) == 1


def test_long_prompt_gets_the_whole_step_when_nobody_else_wants_it() -> None:
    rig = make_rig(
        num_blocks=64, max_num_seqs=4, max_num_batched_tokens=8, max_prefill_fraction=0.5
    )
    long = infer_request(0, [1] * 64, max_tokens=2)
    rig.add(long)
    rig.step()
    assert long.num_computed_tokens == 8


def test_only_so_many_very_long_requests_run_at_a_time() -> None:
    rig = make_rig(
        num_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        long_request_tokens=8,
        max_long_requests=1,
    )
    first, second = infer_request(0, [1] * 16), infer_request(1, [2] * 16)
    short = infer_request(2, [3] * 4)
    for request in (first, second, short):
        rig.add(request)
    rig.step()
    assert [first.state, second.state, short.state] == [
        RequestState.RUNNING,
        RequestState.WAITING,
        RequestState.RUNNING,
    ]
    rig.run()
    assert second.state is RequestState.DONE


@pytest.mark.parametrize("num_tokens", [300, 3000])
def test_what_is_read_ahead_does_not_grow_with_the_length_of_prompts(num_tokens: int) -> None:
    scheduler = {"max_num_seqs": 1, "max_waiting_requests": 16, "max_num_batched_tokens": 4000}
    config = EngineConfig.model_validate(
        {
            "model_path": "mock",
            "device": "mock",
            "scheduler": scheduler,
            "cache": {"enable_prefix_caching": False},
            "runtime": {"inline": True, "mock_step_seconds": 0.002},
        }
    )
    most = config.scheduler.max_waiting_tokens
    assert 16 * 300 < most < 16 * 3000 / 2
    rows = (
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=[3] * num_tokens,
            sampling_params=SamplingParams(max_tokens=1, temperature=0),
        )
        for number in range(40)
    )
    waiting: list[int] = []
    ahead: list[int] = []
    with OfflineInference(config) as llm:
        for completion in llm.run(rows):
            assert completion.error is None
            loop, (session,) = llm._loop, llm._sessions  # noqa: SLF001
            waiting.append(loop._scheduler._waiting.num_prompt_tokens)  # type: ignore[union-attr]  # noqa: SLF001
            ahead.append(session.intake._num_tokens)  # noqa: SLF001
    assert len(waiting) == 40
    assert 0 < max(*waiting, *ahead) < most + num_tokens


def test_a_batch_that_waits_to_be_filled_starts_when_no_more_is_read_ahead() -> None:
    rig = make_rig(
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_waiting_requests=2,
        batching="static",
        max_wait_ms=1e6,
    )
    requests = [infer_request(uid, max_tokens=2) for uid in range(2)]
    rig.add(requests[0])
    assert rig.scheduler.schedule() is None
    rig.add(requests[1])
    rig.step()
    assert [request.state for request in requests] == [RequestState.RUNNING] * 2
