"""Which KV blocks a request owns: all-or-nothing growth, prefix reuse, and nothing leaks.

Accounting only. `try_grow` changes nothing when it fails, so the scheduler can try and move on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from engine.block_pool import BlockPool
from engine.config import CacheConfig
from engine.request import InferRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Blocks by what they do: held + free = all; cached ones are among the free."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int


class CacheManager:
    """Grows, shares and frees the blocks of requests in one BlockPool."""

    def __init__(
        self,
        config: CacheConfig,
        num_blocks: int,
        *,
        block_size: int,
        sliding_window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self._sliding_window = sliding_window
        self._is_prefix_caching = config.enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._pack_block = Struct(f"<{block_size}q").pack

    @property
    def usage(self) -> CacheUsage:
        """Return the current counts."""
        return CacheUsage(
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool has room for."""
        return self._pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return True when an empty pool has room for this many tokens."""
        return self.blocks_for(num_tokens) <= self._pool.num_blocks

    def try_admit(
        self, request: InferRequest, num_tokens: int, *, num_spare_blocks: int = 0
    ) -> bool:
        """Give a waiting request its cached prefix and blocks up to `num_tokens` tokens.

        On success the request's num_computed_tokens is the length of the cached prefix. At least
        one token is always left to compute, since its logits are needed; and all of a prompt that
        is to be scored. num_spare_blocks must stay free afterwards.
        """
        assert not request.block_ids
        cached = self._find_prefix(request)
        wanted = self.blocks_for(num_tokens) - len(cached)
        # Cached blocks that nobody holds count as free; holding them uses them up.
        idle = sum(1 for block_id in cached if not self._pool.is_held(block_id))
        if wanted > self._pool.num_free - idle - num_spare_blocks:
            return False
        for block_id in cached:
            self._pool.hold(block_id)
        request.block_ids = cached + self._pool.allocate(wanted)
        request.num_published_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self.block_size
        return True

    def try_grow(self, request: InferRequest, num_tokens: int) -> list[int] | None:
        """Make room for `num_tokens` tokens; return the new blocks, or None and change nothing."""
        wanted = self.blocks_for(num_tokens) - len(request.block_ids)
        if wanted <= 0:
            return []
        if wanted > self._pool.num_free:
            return None
        new = self._pool.allocate(wanted)
        request.block_ids.extend(new)
        return new

    def shrink(self, request: InferRequest, block_ids: list[int]) -> None:
        """Take back what `try_grow` gave last: the step that it was for does not go out."""
        kept = len(request.block_ids) - len(block_ids)
        assert request.block_ids[kept:] == block_ids
        del request.block_ids[kept:]
        self._pool.release(block_ids)

    def publish(self, request: InferRequest, num_written_tokens: int) -> None:
        """Make the request's full blocks findable, up to what finished steps have written."""
        if not self._is_prefix_caching:
            return
        last = num_written_tokens // self.block_size
        if last <= request.num_published_blocks:
            return
        self._extend_hashes(request, last)
        for index in range(request.num_published_blocks, last):
            self._pool.publish(request.block_ids[index], request.block_hashes[index])
        request.num_published_blocks = last

    def release_left_behind(self, request: InferRequest, num_written_tokens: int) -> None:
        """Give back the blocks that no later token can see, when every layer has a window.

        Their ids stay in block_ids, so that a position finds its block by division.
        """
        if self._sliding_window is None:
            return
        first_seen = max(num_written_tokens - self._sliding_window + 1, 0)
        last = first_seen // self.block_size
        if last > request.num_released_blocks:
            self._pool.release(request.block_ids[request.num_released_blocks : last])
            request.num_released_blocks = last

    def free(self, request: InferRequest) -> None:
        """Give back every block of the request; what they hold stays findable for a while."""
        self._pool.release(request.block_ids[request.num_released_blocks :])
        request.block_ids = []
        request.num_published_blocks = request.num_released_blocks = 0

    def check_integrity(self, requests: Sequence[InferRequest]) -> None:
        """Raise AssertionError unless exactly these requests hold blocks and nothing leaked."""
        self._pool.check_integrity()
        held = {
            block_id
            for request in requests
            for block_id in request.block_ids[request.num_released_blocks :]
        }
        assert len(held) + self._pool.num_free == self._pool.num_blocks

    def _find_prefix(self, request: InferRequest) -> list[int]:
        if not self._is_prefix_caching or request.is_to_be_scored:
            return []
        last = (request.num_known_tokens - 1) // self.block_size
        self._extend_hashes(request, last)
        found: list[int] = []
        for block_hash in request.block_hashes[:last]:
            block_id = self._pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _extend_hashes(self, request: InferRequest, num_blocks: int) -> None:
        """Hash full blocks in a chain, each over its tokens and all before it.

        blake2b and not `hash()`: that one is salted per process, and ranks and hosts must agree.
        """
        hashes = request.block_hashes
        if len(hashes) >= num_blocks:
            return
        size = self.block_size
        last = hashes[-1] if hashes else b""
        token_ids = request.known_token_ids(len(hashes) * size, num_blocks * size)
        for start in range(0, len(token_ids), size):
            packed = self._pack_block(*token_ids[start : start + size])
            last = blake2b(last + packed, digest_size=16).digest()
            hashes.append(last)
