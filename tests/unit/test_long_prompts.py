"""A long prompt does not stall the others: its share of a step, and a lane for the very long."""

from engine_builders import infer_request, make_rig

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
