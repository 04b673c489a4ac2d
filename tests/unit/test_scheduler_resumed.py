"""How the scheduler treats a request that begins with tokens of an earlier run."""

import pytest
from engine_builders import Rig, answer_of, infer_request, make_rig

from engine.errors import RequestErrorCode
from engine.request import InferRequest, PartialOutput, RequestState


def begun(uid: int, count: int, *, max_tokens: int = 10, prompt_size: int = 5) -> InferRequest:
    """Return a request whose first `count` tokens are there already."""
    request = infer_request(uid, ([1, 2, 3, 4] * 5)[:prompt_size], max_tokens)
    tokens = tuple(answer_of(request)[:count])
    request.go_on_from(PartialOutput(request_id=request.request_id, token_ids=tokens))
    return request


def run(rig: Rig, *requests: InferRequest) -> list[list[int]]:
    rig.add(*requests)
    rig.run()
    assert [request.state for request in requests] == [RequestState.DONE] * len(requests)
    return [request.output_token_ids for request in requests]


def test_its_tokens_are_computed_like_a_prompt_and_the_next_is_sampled() -> None:
    rig, request = make_rig(), begun(0, 6)
    rig.add(request)
    batch = rig.submit()
    assert batch is not None
    [new] = batch.new
    assert (new.num_prompt_tokens, new.num_scheduled_tokens) == (5, 11)
    assert new.token_ids == request.prompt_token_ids + answer_of(request)[:6]
    [update] = rig.collect()
    assert update.token_id == answer_of(request)[6]


def test_its_tokens_come_in_chunks_where_a_step_is_small() -> None:
    rig, request = make_rig(max_num_batched_tokens=4, max_num_seqs=2), begun(0, 6)
    assert run(rig, request) == [answer_of(request)]
    assert rig.worker.num_computed_tokens == 5 + 10 - 1


@pytest.mark.parametrize("count", [0, 1, 9])
def test_it_takes_no_more_room_than_if_it_had_never_been_interrupted(count: int) -> None:
    # 5 + 10 - 1 tokens are written: exactly fourteen slots.
    for reservation in ("full", "grow"):
        rig = make_rig(num_blocks=7, block_size=2, kv_reservation=reservation)  # type: ignore[arg-type]
        request = begun(0, count)
        assert run(rig, request) == [answer_of(request)]
        assert request.num_preemptions == 0
    rig = make_rig(num_blocks=6, block_size=2)
    request = begun(1, count)
    rig.add(request)
    assert request.error is not None
    assert request.error.code is RequestErrorCode.KV_CAPACITY


def test_full_reservation_holds_back_who_could_run_out() -> None:
    rig = make_rig(num_blocks=10, block_size=2, kv_reservation="full")  # type: ignore[arg-type]
    requests = [begun(uid, 8, prompt_size=5 + uid) for uid in range(3)]
    assert run(rig, *requests) == [answer_of(request) for request in requests]
    assert [request.num_preemptions for request in requests] == [0, 0, 0]


def test_it_finds_the_blocks_of_its_own_tokens_and_calls_only_the_prompts_cached() -> None:
    rig = make_rig(block_size=2)
    run(rig, begun(0, 0))
    computed = rig.worker.num_computed_tokens
    again = begun(1, 8)
    run(rig, again)
    # Of 13 tokens 12 lie in full blocks; the last is computed, and the one that comes of it.
    assert rig.worker.num_computed_tokens - computed == 2
    assert again.num_cached_tokens == again.num_prompt_tokens == 5


def test_a_preemption_after_it_went_on_loses_nothing() -> None:
    rig = make_rig(num_blocks=12, block_size=2, enable_prefix_caching=False, kv_reservation="grow")  # type: ignore[arg-type]
    requests = [begun(uid, 4 + uid, max_tokens=12, prompt_size=5 + uid) for uid in range(3)]
    assert run(rig, *requests) == [answer_of(request) for request in requests]
    assert sum(request.num_preemptions for request in requests) > 0
