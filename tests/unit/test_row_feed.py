"""RowFeed: engines share the rows of a shard, each row goes to one of them, and none hoards them."""

import random
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import row_feed
from flows.ledger_rows import Lease
from flows.row_feed import RowFeed

BATCH = 8


def make_feed(num_rows: int, *, first: int = 0, num_engines: int = 1) -> RowFeed:
    lease = Lease(
        job_key=1, shard_index=0, epoch=1, owner="me", attempt=1,
        first_row=first, num_rows=num_rows, num_done=0,
    )  # fmt: skip
    return RowFeed(lease, stop=threading.Event(), num_engines=num_engines, batch_size=BATCH)


def take_all(feed: RowFeed) -> list[int]:
    return [row for span in iter(lambda: feed.take(lambda: 0), None) for row in span]


def test_one_engine_alone_gets_long_spans_and_never_waits() -> None:
    feed = make_feed(2500, first=10)
    spans = list(iter(lambda: feed.take(lambda: 10**6), None))
    assert spans == [range(10, 1010), range(1010, 2010), range(2010, 2510)]


@settings(deadline=None)
@given(
    num_rows=st.integers(0, 300),
    num_engines=st.integers(2, 5),
    seed=st.integers(0, 10**6),
)
def test_whatever_is_taken_and_given_back_every_row_is_answered_once(
    num_rows: int, num_engines: int, seed: int
) -> None:
    numbers = random.Random(seed)
    feed = make_feed(num_rows, first=7, num_engines=num_engines)
    held: list[list[int]] = [[] for _ in range(num_engines)]
    answered: Counter[int] = Counter()
    while feed.num_left or any(held):
        mine = numbers.choice(held)
        if len(mine) >= BATCH or not feed.num_left:
            numbers.shuffle(mine)
            if numbers.random() < 0.2:  # its engine dies
                feed.give_back(mine)
                mine.clear()
            while mine and numbers.random() < 0.7:
                answered[mine.pop()] += 1
        elif span := feed.take(lambda mine=mine: len(mine)):
            mine += span
        in_hand = sum(map(len, held))
        assert feed.num_left + in_hand + answered.total() == num_rows
    assert answered == Counter(range(7, 7 + num_rows))


@settings(deadline=None)
@given(num_rows=st.integers(1, 3000), num_engines=st.integers(2, 8))
def test_what_an_engine_holds_beside_its_batch_shrinks_with_what_is_left(
    num_rows: int, num_engines: int
) -> None:
    feed = make_feed(num_rows, num_engines=num_engines)
    num_left = num_rows
    while span := feed.take(lambda: BATCH):  # its batch is full
        assert len(span) <= max(num_left // (2 * num_engines), 1)
        num_left -= len(span)


def test_an_engine_that_has_enough_waits_until_it_has_answered_some() -> None:
    feed = make_feed(100, num_engines=2)
    num_open = 10**6
    taken: list[range | None] = []
    thread = threading.Thread(target=lambda: taken.append(feed.take(lambda: num_open)))
    thread.start()
    time.sleep(0.05)
    assert taken == []
    num_open = 0
    feed.wake()
    thread.join(0.05)
    assert taken != [None]
    assert taken


def test_one_whose_engine_died_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_feed, "_LOOK_SECONDS", 0.001)
    feed = make_feed(100, num_engines=2)
    assert feed.take(lambda: 10**6) == range(1)


def test_a_stop_ends_the_wait_and_leaves_the_rows() -> None:
    stop = threading.Event()
    feed = RowFeed(make_feed(100).lease, stop=stop, num_engines=2, batch_size=BATCH)
    threading.Timer(0.05, stop.set).start()
    started = time.monotonic()
    assert feed.take(lambda: 10**6) is None
    assert time.monotonic() - started < 0.6
    assert feed.num_left == 100


def test_what_is_given_back_comes_first_and_in_order() -> None:
    feed = make_feed(1002)
    assert feed.take(lambda: 0) == range(1000)
    feed.give_back([9, 3, 4, 5, 8])
    assert feed.num_left == 7
    assert take_all(feed) == [3, 4, 5, 8, 9, 1000, 1001]


def test_threads_that_take_at_once_get_each_row_once() -> None:
    feed = make_feed(20_000, num_engines=4)
    taken: list[list[int]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda rows=rows: rows.extend(take_all(feed))) for rows in taken
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row for rows in taken for row in rows) == list(range(20_000))
