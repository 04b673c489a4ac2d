"""Which rows of a source are taken: the first ones, or some by chance."""

import heapq
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

from flows.source_config import SourceConfig

_Row = TypeVar("_Row")


def selected_rows(
    source: SourceConfig, rows: Iterator[_Row], count_rows: Callable[[], int]
) -> Iterator[_Row]:
    """Yield the rows that the source takes, in the order of the input.

    Args:
        source: the limit, and how many rows are taken by chance.
        rows: all rows of the source.
        count_rows: counts them; a sample needs their number before the first of them.
    """
    if source.limit is not None:
        rows = islice(rows, source.limit)
    if source.sample_rows is None:
        yield from rows
        return
    num_rows = count_rows()
    if source.limit is not None:
        num_rows = min(num_rows, source.limit)
    chosen = sampled_positions(num_rows, source.sample_rows, source.sample_seed)
    for position, row in enumerate(rows):
        if position in chosen:
            yield row


def sampled_positions(num_rows: int, sample_rows: int, seed: int) -> set[int]:
    """Return which of the rows 0 to num_rows - 1 are taken: those whose hash is the smallest.

    A hash and no generator of random numbers, so that each version of Python takes the same rows.
    Memory grows with sample_rows alone.
    """

    def rank(position: int) -> bytes:
        return blake2b(b"%d:%d" % (seed, position), digest_size=16).digest()

    return set(heapq.nsmallest(sample_rows, range(num_rows), key=rank))
