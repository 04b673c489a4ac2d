"""Which blocks a request owns: growth, shared beginnings, and what stays findable."""

import subprocess
import sys

import pytest
from engine_builders import infer_request, scores_of

from engine.cache_manager import CacheManager
from engine.config import CacheConfig
from engine.logprobs import ScoredPart
from engine.request import InferRequest


def make_cache(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> CacheManager:
    config = CacheConfig(block_size=4, enable_prefix_caching=enable_prefix_caching)
    return CacheManager(config, num_blocks, block_size=config.block_size or 16)


def run_to_the_end(cache: CacheManager, request: InferRequest) -> None:
    """Admit a request, write its prompt, and free it, as a request of one token goes."""
    assert cache.try_admit(request, request.num_known_tokens)
    cache.publish(request, request.num_known_tokens)
    cache.free(request)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_are_counted_up(num_tokens: int, num_blocks: int) -> None:
    assert make_cache().blocks_for(num_tokens) == num_blocks


def test_what_fits_an_empty_pool_fits_for_ever_and_no_more_does() -> None:
    cache = make_cache(num_blocks=2)
    assert cache.try_admit(infer_request(prompt=[1] * 8), 8)
    assert cache.can_ever_fit(8)
    assert not cache.can_ever_fit(9)


def test_growth_gives_new_blocks_only_when_a_border_is_crossed() -> None:
    cache = make_cache()
    request = infer_request(prompt=[1] * 3)
    assert cache.try_admit(request, 3)
    assert cache.try_grow(request, 4) == []
    new = cache.try_grow(request, 9)
    assert new is not None
    assert request.block_ids[1:] == new
    assert len(new) == 2
    cache.check_integrity([request])


def test_a_prompt_that_is_to_be_scored_uses_no_hits_but_leaves_its_blocks_to_others() -> None:
    cache = make_cache()
    run_to_the_end(cache, infer_request(0, [1] * 9))
    scored = infer_request(1, [1] * 9, prompt_logprobs=0)
    assert cache.try_admit(scored, 9)
    assert scored.num_computed_tokens == 0
    cache.publish(scored, 9)
    cache.check_integrity([scored])
    cache.free(scored)
    run_to_the_end(cache, infer_request(2, [2] * 29))  # whatever was cached before is evicted
    scored = infer_request(3, [3] * 9, prompt_logprobs=0)
    run_to_the_end(cache, scored)
    plain = infer_request(4, [3] * 9)
    assert cache.try_admit(plain, 9)
    assert plain.num_computed_tokens == 8


def test_a_prompt_whose_scores_are_complete_uses_hits_again() -> None:
    cache = make_cache()
    request = infer_request(0, [1] * 9, prompt_logprobs=0)
    run_to_the_end(cache, request)
    request.add_scores(ScoredPart(1, scores_of(request)))
    assert cache.try_admit(request, 9)
    assert request.num_computed_tokens == 8


def test_growth_that_fails_changes_nothing() -> None:
    cache = make_cache(num_blocks=3)
    request, other = infer_request(0, [1] * 4), infer_request(1, [2] * 4)
    assert cache.try_admit(request, 4)
    assert cache.try_admit(other, 4)
    before = list(request.block_ids)
    assert cache.try_grow(request, 12) is None
    assert request.block_ids == before
    assert cache.usage.num_free_blocks == 1
    cache.check_integrity([request, other])


def test_admission_that_fails_changes_nothing() -> None:
    cache = make_cache(num_blocks=3)
    run_to_the_end(cache, infer_request(0, [1] * 5))
    request = infer_request(1, [1] * 5)
    assert not cache.try_admit(request, 13)
    assert (request.block_ids, request.num_computed_tokens) == ([], 0)
    assert cache.usage.num_free_blocks == 3
    assert cache.usage.num_cached_blocks == 1
    cache.check_integrity([])


def test_growth_that_came_to_nothing_is_taken_back() -> None:
    cache = make_cache(4)
    request = infer_request(1, [1] * 4)
    assert cache.try_admit(request, 4)
    kept = list(request.block_ids)
    new = cache.try_grow(request, 9)
    assert new is not None
    cache.shrink(request, new)
    assert request.block_ids == kept
    assert cache.usage.num_free_blocks == 3
    cache.shrink(request, [])
    assert request.block_ids == kept


def test_an_equal_beginning_is_taken_from_the_cache() -> None:
    cache = make_cache()
    run_to_the_end(cache, infer_request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    request = infer_request(1, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert cache.try_admit(request, 9)
    assert request.num_computed_tokens == 8


def test_two_running_requests_share_the_blocks_of_their_beginning() -> None:
    cache = make_cache(num_blocks=4)
    first, second = infer_request(0, [1] * 9), infer_request(1, [1] * 9)
    assert cache.try_admit(first, 9)
    cache.publish(first, 9)
    assert cache.try_admit(second, 9)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert cache.usage.num_free_blocks == 0
    cache.free(first)
    assert cache.usage.num_free_blocks == 1  # what they share is still held
    cache.free(second)
    assert cache.usage.num_free_blocks == 4


def test_one_token_is_always_left_to_compute() -> None:
    cache = make_cache()
    run_to_the_end(cache, infer_request(0, [1] * 8))
    again = infer_request(1, [1] * 8)
    assert cache.try_admit(again, 8)
    assert again.num_computed_tokens == 4


def test_a_block_counts_for_what_came_before_it_too() -> None:
    cache = make_cache()
    run_to_the_end(cache, infer_request(0, [1, 1, 1, 1, 2, 2, 2, 2, 0]))
    other = infer_request(1, [3, 3, 3, 3, 2, 2, 2, 2, 0])
    assert cache.try_admit(other, 9)
    assert other.num_computed_tokens == 0


def test_only_what_a_finished_step_has_written_is_findable() -> None:
    cache = make_cache()
    writer = infer_request(0, [1] * 12)
    assert cache.try_admit(writer, 12)
    cache.publish(writer, 7)  # one full block and three tokens of the second
    reader = infer_request(1, [1] * 12)
    assert cache.try_admit(reader, 12)
    assert reader.num_computed_tokens == 4


def test_generated_tokens_are_shared_like_those_of_a_prompt() -> None:
    cache = make_cache()
    writer = infer_request(0, [1, 2, 3])
    assert cache.try_admit(writer, 3)
    writer.output_token_ids += [4, 5, 6]
    assert cache.try_grow(writer, 5) is not None
    cache.publish(writer, 5)
    reader = infer_request(1, [1, 2, 3, 4, 9])
    assert cache.try_admit(reader, 5)
    assert reader.num_computed_tokens == 4


def test_cached_blocks_are_given_up_when_room_is_needed() -> None:
    cache = make_cache(num_blocks=2)
    run_to_the_end(cache, infer_request(0, [1] * 8))
    assert cache.usage.num_cached_blocks == 2
    assert cache.try_admit(infer_request(1, [2] * 8), 8)
    assert cache.usage.num_cached_blocks == 0


def test_the_cached_beginning_is_not_counted_twice_as_room() -> None:
    cache = make_cache(num_blocks=2)
    run_to_the_end(cache, infer_request(0, [1] * 5))
    # One block of two is the beginning itself; the rest needs two more.
    assert not cache.try_admit(infer_request(1, [1] * 12), 12)
    assert cache.try_admit(infer_request(2, [1] * 8), 8)


def test_without_prefix_caching_nothing_is_ever_shared() -> None:
    cache = make_cache(enable_prefix_caching=False)
    run_to_the_end(cache, infer_request(0, [1] * 9))
    assert cache.usage.num_cached_blocks == 0
    again = infer_request(1, [1] * 9)
    assert cache.try_admit(again, 9)
    assert again.num_computed_tokens == 0


def test_a_leaked_block_is_noticed() -> None:
    cache = make_cache()
    request = infer_request()
    assert cache.try_admit(request, 3)
    request.block_ids = []
    with pytest.raises(AssertionError):
        cache.check_integrity([request])


def test_block_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from engine_builders import infer_request\n"
        "from engine.cache_manager import CacheManager\n"
        "from engine.config import CacheConfig\n"
        "cache = CacheManager(CacheConfig(), 4, block_size=2)\n"
        "request = infer_request(prompt=[1, 2, 3, 4, 5])\n"
        "cache.try_admit(request, 5)\n"
        "print([h.hex() for h in request.block_hashes])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 2 * 32


def test_blocks_that_have_left_the_window_of_every_layer_are_given_back() -> None:
    cache = CacheManager(CacheConfig(), 8, block_size=4, sliding_window=5)
    request = infer_request(prompt=list(range(20)))
    assert cache.try_admit(request, 20)
    # The next token is at position 16 and sees 12 to 16: blocks 0 to 2 are behind it.
    cache.publish(request, 16)
    cache.release_left_behind(request, 16)
    assert request.num_released_blocks == 3
    assert cache.usage.num_free_blocks == 8 - 2
    cache.check_integrity([request])
    cache.free(request)
    assert cache.usage.num_free_blocks == 8
    cache.check_integrity([])


def test_without_a_window_nothing_is_given_back_early() -> None:
    cache = CacheManager(CacheConfig(), 8, block_size=4)
    request = infer_request(prompt=list(range(20)))
    assert cache.try_admit(request, 20)
    cache.release_left_behind(request, 16)
    assert cache.usage.num_free_blocks == 3
