"""Which request runs when: one story a test; the laws are in test_scheduler_properties.py."""

import sys
import time

import pytest
from engine_builders import EOS, Rig, answer_of, infer_request, make_rig

from engine.config import SchedulerConfig
from engine.errors import RequestError, RequestErrorCode
from engine.messages import ScheduleBatch
from engine.request import FinishReason, RequestState


def scheduled(batch: ScheduleBatch | None) -> dict[int, int]:
    """Return the number of tokens of each uid in a step."""
    assert batch is not None
    return {item.uid: item.num_scheduled_tokens for item in (*batch.running, *batch.new)}


# A request's life.


def test_a_request_is_waiting_until_its_first_step_and_done_after_its_last() -> None:
    rig = make_rig()
    request = infer_request(max_tokens=2)
    rig.add(request)
    assert request.state is RequestState.WAITING
    rig.step()
    assert request.state is RequestState.RUNNING
    rig.step()
    assert request.state is RequestState.DONE
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == answer_of(request)
    assert not rig.scheduler.has_unfinished
    assert rig.scheduler.schedule() is None


def test_a_stop_token_ends_a_request_and_is_its_last_token() -> None:
    rig = make_rig()
    request = infer_request(max_tokens=50, stop_token_ids=frozenset({EOS}))
    rig.add(request)
    rig.run()
    assert request.output_token_ids[-1] == EOS
    assert EOS not in request.output_token_ids[:-1]
    assert request.finish_reason is FinishReason.STOP


def test_each_step_after_the_prompt_computes_one_token() -> None:
    rig = make_rig()
    rig.add(infer_request(prompt=[1] * 9, max_tokens=4, stop_token_ids=frozenset()))
    counts = []
    while rig.scheduler.has_unfinished:
        counts.append(scheduled(rig.submit())[0])
        rig.collect()
    assert counts == [9, 1, 1, 1]


def test_the_worker_is_told_once_who_finished() -> None:
    rig = make_rig()
    rig.add(infer_request(0, max_tokens=1), infer_request(1, max_tokens=3))
    batches = []
    while rig.scheduler.has_unfinished:
        batches.append(rig.submit())
        rig.collect()
    assert [batch.finished for batch in batches if batch] == [[], [0], []]


# Limits.


def test_a_long_prompt_is_computed_in_chunks_that_add_up() -> None:
    rig = make_rig(max_num_batched_tokens=8, max_num_seqs=4)
    request = infer_request(prompt=[1] * 21, max_tokens=2)
    rig.add(request)
    counts = []
    while not request.output_token_ids:
        counts.append(scheduled(rig.submit())[0])
        rig.collect()
    assert counts == [8, 8, 5]


def test_a_running_request_is_not_kept_waiting_by_a_long_prompt() -> None:
    rig = make_rig(max_num_batched_tokens=8, max_num_seqs=4)
    first = infer_request(0, max_tokens=20)
    rig.add(first)
    rig.step()
    rig.add(infer_request(1, [1] * 40))
    for _ in range(5):
        before = len(first.output_token_ids)
        rig.step()
        assert len(first.output_token_ids) == before + 1


def test_no_more_than_max_num_seqs_run_and_the_next_moves_up() -> None:
    rig = make_rig(max_num_seqs=2)
    rig.add(*(infer_request(uid, max_tokens=uid + 1) for uid in range(4)))
    assert set(scheduled(rig.submit())) == {0, 1}
    rig.collect()
    assert set(scheduled(rig.submit())) == {1, 2}
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)


def test_a_request_that_can_never_fit_fails_alone_with_the_numbers() -> None:
    rig = make_rig(num_blocks=4)
    giant, small = infer_request(0, [1] * 10, max_tokens=8), infer_request(1)
    rig.add(giant, small)
    assert giant.state is RequestState.ERROR
    assert rig.scheduler.take_failed() == [giant]
    assert giant.error is not None
    assert giant.error.code is RequestErrorCode.KV_CAPACITY
    for number in ("10 tokens", "max_tokens 8", "up to 18", "which has 16"):
        assert number in giant.error.message
    rig.run()
    assert small.output_token_ids == answer_of(small)


def test_a_request_that_fits_to_the_last_slot_is_answered() -> None:
    rig = make_rig(num_blocks=4)
    request = infer_request(prompt=[1] * 10, max_tokens=7)  # the last token is never written
    rig.add(request)
    rig.run()
    assert request.output_token_ids == answer_of(request)


# Running out of blocks.


def test_a_preempted_request_keeps_its_tokens_and_goes_on() -> None:
    rig = make_rig(num_blocks=5)
    requests = [infer_request(uid, [uid] * 6, max_tokens=12) for uid in range(2)]
    rig.add(*requests)
    rig.run()
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        assert request.output_token_ids == answer_of(request)
        assert request.epoch == request.num_preemptions


@pytest.mark.parametrize("num_steps_in_flight", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_what_is_computed_again_after_a_preemption_is_counted(
    num_steps_in_flight: int, enable_prefix_caching: bool
) -> None:
    rig = make_rig(
        num_blocks=5,
        enable_prefix_caching=enable_prefix_caching,
        num_steps_in_flight=num_steps_in_flight,
        max_num_seqs=2,
        max_num_batched_tokens=3,  # so that it is computed again in several steps
    )
    rig.add(*(infer_request(uid, [uid] * 6, max_tokens=12) for uid in range(2)))
    rig.run()
    num_needed = 2 * (6 + 12 - 1)  # the last token is never computed
    assert rig.num_repeated_tokens == rig.worker.num_computed_tokens - num_needed > 0


@pytest.mark.parametrize("num_steps_in_flight", [1, 2])
def test_the_victim_is_the_one_with_the_least_computed_work(num_steps_in_flight: int) -> None:
    rig = make_rig(
        num_blocks=6, enable_prefix_caching=False, num_steps_in_flight=num_steps_in_flight
    )
    short = infer_request(0, [0] * 2, max_tokens=14)
    long = infer_request(1, [1] * 12, max_tokens=8)
    rig.add(short, long)
    rig.run()
    assert short.num_preemptions > 0
    assert long.num_preemptions == 0


@pytest.mark.parametrize("num_steps_in_flight", [1, 2])
def test_the_victim_is_of_the_lowest_priority_whatever_it_has_done(
    num_steps_in_flight: int,
) -> None:
    rig = make_rig(
        num_blocks=6, enable_prefix_caching=False, num_steps_in_flight=num_steps_in_flight
    )
    urgent = infer_request(0, [0] * 2, max_tokens=14, priority=0)
    patient = infer_request(1, [1] * 12, max_tokens=8, priority=5)
    rig.add(urgent, patient)
    rig.run()
    assert patient.num_preemptions > 0
    assert urgent.num_preemptions == 0


def test_a_victim_whose_step_is_in_flight_is_held_back_until_it_can_be_preempted() -> None:
    rig = make_rig(num_blocks=6, enable_prefix_caching=False, num_steps_in_flight=2)
    short = infer_request(0, [0] * 2, max_tokens=14)
    long = infer_request(1, [1] * 12, max_tokens=8)
    rig.add(short, long)
    steps: list[set[int]] = []
    while not long.state.is_terminal:
        while rig.scheduler.can_schedule and (batch := rig.submit()) is not None:
            steps.append(set(scheduled(batch)))
        rig.collect()
    assert short.num_preemptions == 1
    assert {0} not in steps, "the victim went on while the other waited for its blocks"


def test_a_victim_that_is_held_back_gives_up_the_block_that_it_was_given_for_this_step() -> None:
    rig = make_rig(num_blocks=15, block_size=1, enable_prefix_caching=False, num_steps_in_flight=2)
    # The first takes the last block, and is held back for the second, which lacks one; before it
    # can be preempted the third ends, and it goes on after all.
    requests = [
        infer_request(0, [1], max_tokens=6),
        infer_request(1, [2] * 5, max_tokens=4),
        infer_request(2, [3] * 5, max_tokens=2),
    ]
    rig.add(*requests)
    rig.run()
    assert [request.output_token_ids for request in requests] == list(map(answer_of, requests))


def test_a_preempted_request_comes_back_before_those_that_came_later() -> None:
    rig = make_rig(num_blocks=5, max_num_seqs=2, enable_prefix_caching=False)
    early = [infer_request(uid, [uid] * 6, max_tokens=12) for uid in range(2)]
    late = infer_request(9, [4] * 6, max_tokens=2)
    rig.add(*early, late)
    seen: list[int] = []
    while rig.scheduler.has_unfinished:
        batch = rig.submit()
        assert batch is not None
        seen += [new.uid for new in batch.new]
        rig.collect()
    assert seen.count(1) > 1
    assert seen[-1] == 9


def test_full_reservation_admits_only_what_cannot_run_out() -> None:
    rig = Rig(SchedulerConfig(kv_reservation="full"), num_blocks=5)
    requests = [infer_request(uid, [uid] * 6, max_tokens=12) for uid in range(3)]
    rig.add(*requests)
    rig.submit()
    assert rig.scheduler.num_running == 1
    rig.collect()
    rig.run()
    assert [request.num_preemptions for request in requests] == [0, 0, 0]


def test_a_preemption_that_leaves_no_step_is_still_told_to_the_worker() -> None:
    rig = make_rig(num_blocks=2, num_steps_in_flight=2, enable_prefix_caching=False)
    one = infer_request(0, [0] * 3, max_tokens=2)
    two = infer_request(1, [1] * 4, max_tokens=2)
    rig.add(one)
    rig.step()  # its second token is its last
    rig.add(two)
    rig.submit()
    rig.run()  # the worker refuses a request that it still knows
    for request in (one, two):
        assert request.output_token_ids == answer_of(request)


# The prefix cache.


def test_an_equal_prompt_is_not_computed_twice() -> None:
    rig = make_rig()
    first, second = infer_request(0, [1] * 13), infer_request(1, [1] * 13)
    rig.add(first)
    rig.run()
    rig.add(second)
    assert scheduled(rig.submit()) == {1: 1}
    assert second.num_cached_tokens == 12
    assert first.num_cached_tokens == 0
    rig.collect()
    rig.run()
    assert second.output_token_ids == first.output_token_ids


def test_cached_tokens_count_those_found_at_first_not_those_found_again() -> None:
    rig = make_rig(num_blocks=7)
    old = infer_request(0, [0] * 10, max_tokens=8)
    new = infer_request(1, [1] * 9, max_tokens=8)
    rig.add(old, new)
    rig.run()
    assert new.num_preemptions > 0
    # Some of its own blocks were still there when it came back.
    assert rig.worker.num_computed_tokens < 17 + 16 + new.num_prompt_tokens
    assert new.num_cached_tokens == 0


# Two steps in flight.


def test_a_second_step_goes_out_before_the_first_is_back() -> None:
    rig = make_rig(num_steps_in_flight=2)
    request = infer_request(max_tokens=3)
    rig.add(request)
    assert scheduled(rig.submit()) == {0: 3}
    assert scheduled(rig.submit()) == {0: 1}
    assert not rig.scheduler.can_schedule
    assert request.num_inflight_steps == 2
    rig.run()
    assert request.output_token_ids == answer_of(request)


def test_no_third_token_is_scheduled_when_only_two_are_wanted() -> None:
    rig = make_rig(num_steps_in_flight=2)
    rig.add(infer_request(max_tokens=2))
    rig.submit()
    rig.submit()
    rig.collect()
    assert rig.submit() is None
    assert rig.worker.num_computed_tokens == 4


def test_what_was_generated_beyond_the_end_is_dropped() -> None:
    rig = make_rig(num_steps_in_flight=2)
    request = infer_request(max_tokens=10)
    rig.add(request)
    rig.submit()
    rig.submit()
    [update] = rig.collect()
    rig.scheduler.finish(request, FinishReason.STOP)  # a stop string was found
    assert request.block_ids  # a step in flight writes to them
    assert rig.collect() == []
    assert request.output_token_ids == [update.token_id]
    rig.check_all_is_free()


# How a request ends from outside.


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    rig = make_rig(max_num_seqs=1)
    running = infer_request(0, max_tokens=50, deadline=time.monotonic() + 3600)
    waiting = infer_request(1, deadline=time.monotonic() - 1)
    bystander = infer_request(2)
    rig.add(running, waiting, bystander)
    rig.step()
    assert waiting.state is RequestState.ERROR
    assert waiting.finish_reason is FinishReason.TIMEOUT
    assert waiting.error is not None
    assert waiting.error.code is RequestErrorCode.TIMEOUT
    assert rig.scheduler.take_failed() == [waiting]
    assert running.state is RequestState.RUNNING
    rig.run()
    assert bystander.output_token_ids == answer_of(bystander)


def test_a_request_that_ended_in_time_is_not_kept_until_its_deadline() -> None:
    rig = make_rig()
    requests = [infer_request(0, deadline=time.monotonic() + 3600), infer_request(1)]
    rig.add(*requests)
    rig.run()
    assert len({sys.getrefcount(request) for request in requests}) == 1


def test_a_failed_request_gives_back_its_blocks_and_is_reported_once() -> None:
    rig = make_rig()
    request = infer_request(max_tokens=50)
    rig.add(request)
    rig.step()
    error = RequestError(RequestErrorCode.ABORTED, "stopped")
    rig.scheduler.fail(request, error, FinishReason.ABORT)
    assert rig.scheduler.take_failed() == [request]
    assert rig.scheduler.take_failed() == []
    rig.check_all_is_free()
    assert not rig.scheduler.has_unfinished


def test_a_step_that_comes_back_out_of_order_is_a_bug_that_shows() -> None:
    rig = make_rig(num_steps_in_flight=2)
    rig.add(infer_request(max_tokens=3))
    rig.submit()
    rig.submit()
    rig.worker.outputs.rotate()
    with pytest.raises(AssertionError, match="in order"):
        rig.scheduler.update(rig.worker.collect())


def test_requests_in_flight_are_those_with_a_step_out_and_no_others():
    rig = make_rig(
        num_steps_in_flight=2, max_num_batched_tokens=4, max_num_seqs=4, max_prefill_fraction=1
    )
    rig.add(*(infer_request(uid, [1, 2, 3, 4]) for uid in range(3)))
    assert rig.scheduler.in_flight_request_ids() == ()
    rig.submit()
    assert rig.scheduler.in_flight_request_ids() == ("request-0",)
    rig.submit()  # a token of the first, and the beginning of the second
    assert rig.scheduler.in_flight_request_ids() == ("request-0", "request-1")
    rig.collect()
    rig.collect()
    assert rig.scheduler.in_flight_request_ids() == ()
