"""Crowds of requests in pools that are too small for them, by seed: bugs that take three to meet."""

import random

import pytest
from engine_builders import EOS, Rig, answer_of, infer_request, scores_of

from engine.config import SchedulerConfig
from engine.request import InferRequest, RequestState

NUM_CROWDS = 500
ORDERS = ("fcfs", "priority", "shortest_first", "longest_first", "prefix")


def make_crowded_rig(dice: random.Random) -> Rig:
    max_num_seqs = dice.randint(1, 8)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + dice.randint(0, 30),
        max_prefill_fraction=dice.choice([0.2, 0.5, 1.0]),
        num_steps_in_flight=dice.choice([1, 2, 2]),
        order=dice.choice(ORDERS),
    )
    block_size = dice.choice([1, 1, 2, 3, 4])
    return Rig(
        config,
        num_blocks=max(dice.randint(6, 40) // block_size, 2),
        block_size=block_size,
        enable_prefix_caching=dice.random() < 0.5,
    )


def add_crowd(rig: Rig, dice: random.Random) -> None:
    """Queue up to a dozen requests; some are further samples of the one before."""
    leader: InferRequest | None = None
    for uid in range(dice.randint(2, 12)):
        if leader is not None and dice.random() < 0.35:
            request = infer_request(
                uid,
                max_tokens=leader.params.max_tokens,
                prompt=leader.prompt_token_ids,
                stop_token_ids=leader.stop_token_ids,
            )
            request.prompt_token_ids = leader.prompt_token_ids
            rig.requests.append(request)
            rig.scheduler.add(request, after=leader)
            continue
        alike = [1, 2, 3, 4] * dice.randint(1, 3)
        request = leader = infer_request(
            uid,
            prompt=dice.choice([alike, dice.choices(range(5), k=dice.randint(1, 14))]),
            max_tokens=dice.randint(1, 12),
            stop_token_ids=dice.choice([frozenset(), frozenset({EOS})]),
            priority=dice.randint(0, 2),
            prompt_logprobs=dice.choice([None, None, 0]),
        )
        rig.add(request)


@pytest.mark.parametrize("part", range(4))
def test_everybody_in_a_crowd_gets_the_answer_of_one_who_is_alone(part: int) -> None:
    num_preemptions = 0
    for seed in range(part, NUM_CROWDS, 4):
        dice = random.Random(seed)
        rig = make_crowded_rig(dice)
        add_crowd(rig, dice)
        rig.run()
        for request in rig.requests:
            if request.state is RequestState.ERROR:
                assert not rig.cache.can_ever_fit(request.max_written_tokens), seed
                continue
            assert request.output_token_ids == answer_of(request), seed
            if request.params.prompt_logprobs is not None:
                assert request.prompt_logprobs == scores_of(request), seed
            num_preemptions += request.num_preemptions
    assert num_preemptions > 20
