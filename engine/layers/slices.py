"""Which part of a weight a rank keeps.

A Slice is known from shapes alone, before any weight is read.
"""

from dataclasses import dataclass

import torch

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Ranges along one dimension, kept in this order."""

    dim: int
    ranges: tuple[Range, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this part of `tensor`, so that the rest can be let go."""
        parts = [tensor.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return torch.cat(parts, dim=self.dim)


def range_of(size: int, rank: int, world_size: int) -> Range:
    """Return [start, end) of a rank; the first ranks have one more where `size` does not divide."""
    share, rest = divmod(size, world_size)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)


def can_share_heads(num_heads: int, num_kv_heads: int, world_size: int) -> bool:
    """Tell whether each rank can have the same number of heads, and the key heads that they ask."""
    is_even = num_kv_heads % world_size == 0 or world_size % num_kv_heads == 0
    return num_heads % world_size == 0 and is_even


def range_of_heads(size: int, num_heads: int, rank: int, world_size: int) -> Range:
    """Return the range of a rank's heads; with fewer heads than ranks, neighbours share one."""
    width = size // num_heads
    first, last = range_of(num_heads, rank, world_size)
    if num_heads < world_size:
        first = rank * num_heads // world_size
        last = first + 1
    return first * width, last * width


def packed_ranges(size: int, rank: int, world_size: int) -> tuple[Range, ...]:
    """Return a rank's ranges of two packed halves, such as gate and up."""
    half = size // 2
    start, end = range_of(half, rank, world_size)
    return (start, end), (half + start, half + end)
