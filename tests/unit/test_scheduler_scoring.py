"""Prompts that are scored: each token once, whatever happens to the request."""

import pytest
from engine_builders import Rig, answer_of, infer_request, make_rig, scores_of

from engine.config import SchedulerConfig
from engine.errors import RequestErrorCode
from engine.request import FinishReason, RequestState


@pytest.mark.parametrize("length", [1, 4, 5, 17])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 64])
def test_a_prompt_that_is_only_scored_ends_when_it_is_computed(
    length: int, max_num_batched_tokens: int
) -> None:
    rig = make_rig(max_num_seqs=2, max_num_batched_tokens=max_num_batched_tokens)
    request = infer_request(prompt=list(range(length)), max_tokens=0, prompt_logprobs=0)
    rig.add(request)
    rig.run()
    assert request.state is RequestState.DONE
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == []
    assert request.prompt_logprobs == scores_of(request)
    assert rig.worker.num_computed_tokens == length


@pytest.mark.parametrize("kv_reservation", ["full", "grow"])
def test_a_prompt_that_fills_the_pool_can_be_scored_but_not_one_that_is_longer(
    kv_reservation: str,
) -> None:
    rig = Rig(SchedulerConfig(kv_reservation=kv_reservation), num_blocks=2, block_size=4)
    fitting, longer = (
        infer_request(uid, [1] * length, 0, prompt_logprobs=0) for uid, length in ((0, 8), (1, 9))
    )
    rig.add(fitting, longer)
    rig.run()
    assert fitting.prompt_logprobs == scores_of(fitting)
    assert longer.error is not None
    assert longer.error.code is RequestErrorCode.KV_CAPACITY


def test_scores_are_complete_and_single_when_the_prompt_is_preempted_half_way() -> None:
    rig = make_rig(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=2)
    old = infer_request(0, [1] * 12, max_tokens=12)
    scored = infer_request(1, list(range(2, 14)), max_tokens=4, prompt_logprobs=0)
    rig.add(old)
    while not old.output_token_ids:
        rig.step()
    rig.add(scored)
    while scored.num_preemptions == 0:
        rig.step()
    assert 0 < len(scored.prompt_logprobs) < scored.num_prompt_tokens - 1
    rig.run()
    assert scored.prompt_logprobs == scores_of(scored)
    assert scored.output_token_ids == answer_of(scored)


def test_samples_of_one_prompt_have_it_scored_once_and_share_its_blocks() -> None:
    rig = make_rig()
    first = infer_request(0, [1] * 9, prompt_logprobs=0)
    second = infer_request(1, [1] * 9, prompt_logprobs=0)
    second.prompt_token_ids = first.prompt_token_ids
    rig.add(first)
    rig.requests.append(second)
    rig.scheduler.add(second, after=first)
    rig.run()
    assert second.num_cached_tokens == 8
    assert first.prompt_logprobs == second.prompt_logprobs == scores_of(first)


def test_scores_survive_a_step_that_was_rolled_back() -> None:
    rig = make_rig(max_num_seqs=1, max_num_batched_tokens=8)
    request = infer_request(0, list(range(20)), prompt_logprobs=0)
    rig.add(request)
    rig.step()
    rig.submit()
    rig.worker.collect()
    rig.worker.slots.clear()
    rig.scheduler.roll_back()
    assert len(request.prompt_logprobs) == 8
    rig.run()
    assert request.prompt_logprobs == scores_of(request)
    assert request.output_token_ids == answer_of(request)
