"""Block numbers: who holds them, what they still remember, and which is taken next."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.check_integrity()


def test_a_released_block_is_free_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert sorted(pool.allocate(2)) == sorted(blocks)


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.publish(block, b"prefix")
    pool.hold(block)
    pool.release([block])
    assert pool.num_free == 0
    assert pool.is_held(block)
    pool.release([block])
    assert pool.num_free == 1
    assert not pool.is_held(block)


def test_a_published_block_is_found_after_its_release_and_can_be_held_again() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.publish(block, b"prefix")
    pool.release([block])
    assert pool.find(b"prefix") == block
    assert pool.num_cached == 1
    pool.hold(block)
    assert pool.num_cached == 0
    pool.check_integrity()


def test_blocks_that_remember_nothing_are_taken_before_those_that_do() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.publish(first, b"first")
    pool.release([first])
    pool.release([second, third])
    assert sorted(pool.allocate(2)) == sorted([second, third])
    assert pool.find(b"first") == first


def test_the_content_used_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, name)
        pool.release([block])
    pool.hold(blocks[0])  # a is used again
    pool.release([blocks[0]])
    pool.allocate(1)
    assert [pool.find(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    pool.allocate(1)
    assert [pool.find(name) is not None for name in (b"a", b"b", b"c")] == [True, False, False]


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(2)
    beginning, end = pool.allocate(2)
    pool.publish(beginning, b"beginning")
    pool.publish(end, b"end")
    pool.release([beginning, end])
    assert pool.allocate(1) == [end]
    assert pool.find(b"beginning") == beginning


def test_the_first_block_with_a_content_keeps_the_name() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second])
    assert pool.num_cached == 0  # the copy is an empty block like any other
    pool.check_integrity()


def test_a_block_released_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 released twice"):
        pool.release(blocks)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(1, 6),
    actions=st.lists(st.tuples(st.sampled_from("afph"), st.integers(0, 9)), max_size=60),
)
def test_any_sequence_of_uses_leaks_nothing_and_remembers_rightly(
    num_blocks: int, actions: list[tuple[str, int]]
) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []  # a block comes as often as it is held
    content: dict[int, bytes] = {}
    for action, number in actions:
        name = bytes([number % 4])
        if action == "a" and pool.num_free:
            [block] = pool.allocate(1)
            assert block not in held
            content.pop(block, None)
            held.append(block)
        elif action == "f" and held:
            pool.release([held.pop(number % len(held))])
        elif action == "p" and held:
            block = held[number % len(held)]
            if pool.find(name) is None and block not in content:
                content[block] = name
            pool.publish(block, name)
        elif action == "h" and (found := pool.find(name)) is not None:
            assert content[found] == name
            pool.hold(found)
            held.append(found)
        pool.check_integrity()
        assert pool.num_free == num_blocks - len(set(held))
    pool.release(held)
    assert pool.num_free == num_blocks
