"""The KV blocks by number: who is free, who is shared, which hold a known prefix.

Knows ids, reference counts and hashes; the memory itself belongs to the worker's KVPool. A block
that nobody holds but whose content is known stays findable until its number is needed: the free
list is in least-recently-used order, so the oldest content is evicted first.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockPool:
    """Hands out and takes back block numbers 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._empty: deque[int] = deque(range(num_blocks))
        self._cached_free: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty ones and those that only cache a prefix."""
        return len(self._empty) + len(self._cached_free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content can still be found."""
        return len(self._cached_free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, each held once; the caller made sure that there are enough."""
        return [self._take_one() for _ in range(count)]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that holds this prefix; does not hold it."""
        return self._block_of.get(block_hash)

    def hold(self, block_id: int) -> None:
        """Add a holder to a block that `find` returned."""
        if self._ref_counts[block_id] == 0:
            del self._cached_free[block_id]
        self._ref_counts[block_id] += 1

    def is_held(self, block_id: int) -> bool:
        """Return True when some request holds the block."""
        return self._ref_counts[block_id] > 0

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable; the first block with this content keeps the name."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder off each block.

        The last blocks of a sequence go first into the eviction order: its beginning is likelier
        to be shared.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} released twice"
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._hash_of:
                self._cached_free[block_id] = None
            else:
                self._empty.append(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held = all and the indexes agree."""
        held = sum(1 for count in self._ref_counts if count > 0)
        assert held + self.num_free == self.num_blocks
        assert all(self._ref_counts[block] == 0 for block in self._empty)
        assert all(self._ref_counts[block] == 0 for block in self._cached_free)
        assert {block: name for name, block in self._block_of.items()} == self._hash_of
        assert all(block in self._hash_of for block in self._cached_free)

    def _take_one(self) -> int:
        if self._empty:
            block_id = self._empty.popleft()
        else:
            block_id, _ = self._cached_free.popitem(last=False)
            del self._block_of[self._hash_of.pop(block_id)]
        self._ref_counts[block_id] = 1
        return block_id
