"""What a device must be able to do, and a plain torch reference of each kernel.

Shapes: T scheduled tokens, R requests, B blocks per row, N blocks in the pool, S block size,
H query heads, G key-value heads, D width of a key, E width of a value.
"""

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from engine.errors import ConfigError, WorkerError, WorkerFailure

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Bytes of the device."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHolder:
    """A process that has a device for itself."""

    pid: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can run; checked before anything is loaded."""

    dtypes: tuple[str, ...]
    default_memory_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step as attention sees it. Lists are on the host, tensors on the device."""

    query_lens: list[int]  # R, tokens of each request in this step
    seq_lens: list[int]  # R, computed and scheduled tokens of each request
    slot_mapping: torch.Tensor  # [T] int64, flat KV slot of each token
    block_tables: torch.Tensor  # [R, B] int32, rows padded with 0
    seq_lens_tensor: torch.Tensor  # [R] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a layer asks of attention beside the tensors."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [H], one extra logit for each head


class DeviceBackend(ABC):
    """Runtime, KV memory and kernels of one kind of device."""

    name: str
    dist_backend: str  # what joins ranks on this kind of device, in torch.distributed's names
    capabilities: Capabilities

    @abstractmethod
    def count_devices(self) -> int:
        """Return how many devices of this kind there are; their ids count from 0."""

    def holders(self, device_id: int) -> tuple[DeviceHolder, ...]:
        """Return the other processes that hold a device.

        Nobody holds the CPU: processes share it, and its free memory says what they leave.
        """
        return ()

    def check_device(self, device_id: int) -> None:
        """Refuse a device that cannot be had, before it is bound.

        Raises:
            ConfigError: there is no such device.
            WorkerError: another process holds it.
        """
        count = self.count_devices()
        if not 0 <= device_id < count:
            raise ConfigError(
                f"engine.device_ids has {device_id}, but this machine has {count} device(s) of "
                f"kind {self.name}, counted from 0; change engine.device_ids"
            )
        holders = [holder for holder in self.holders(device_id) if holder.pid != os.getpid()]
        if holders:
            names = ", ".join(
                f"pid {holder.pid} ({holder.used_bytes / _GIB:.1f} GiB)" for holder in holders
            )
            raise WorkerError(
                f"{self.name} {device_id} is held by {names}; end that, or take another one in "
                "engine.device_ids",
                failure=WorkerFailure.START_FAILED,
            )

    def check_memory(self, needed_bytes: int, purpose: str) -> None:
        """Refuse to load what the bound device has no room for, before anything is loaded.

        Raises:
            ConfigError: there will never be room.
            WorkerError: there is none now.
        """
        memory = self.memory_info()
        found = (
            f"not enough memory on {self.name}: {needed_bytes / _GIB:.2f} GiB are needed "
            f"({purpose}), and {memory.free_bytes / _GIB:.2f} of {memory.total_bytes / _GIB:.2f} "
            "GiB are free"
        )
        if needed_bytes > memory.total_bytes:
            raise ConfigError(
                f"{found}; take a smaller model, or a smaller engine.dtype or KV cache (engine.cache)"
            )
        if needed_bytes > memory.free_bytes:
            raise WorkerError(
                f"{found}; end what else runs there, or give the KV cache less (engine.cache)",
                failure=WorkerFailure.START_FAILED,
            )

    @abstractmethod
    def bind(self, device_id: int, num_threads: int | None) -> str:
        """Take the device for this process; return what was really bound, in words."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The bound device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return free and total memory."""

    @abstractmethod
    def classify_error(self, error: BaseException) -> WorkerFailure:
        """Say what kind of trouble an exception of a step is."""

    def warm_up(self, caches: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Run each attention kernel once on a layer's empty caches, which compiles it."""
        num_heads, width = caches[0].shape[2:]
        query = torch.zeros(3, num_heads, width, dtype=caches[0].dtype, device=self.device)
        lens = [1, 2]
        metadata = AttentionMetadata(
            query_lens=lens,
            seq_lens=lens,
            slot_mapping=torch.zeros(3, dtype=torch.int64, device=self.device),
            block_tables=torch.zeros(2, 2, dtype=torch.int32, device=self.device),
            seq_lens_tensor=torch.tensor(lens, dtype=torch.int32, device=self.device),
        )
        self.attention(query, caches, metadata, AttentionOptions(scale=1.0))

    def row_exact(self) -> AbstractContextManager[None]:
        """Serve forward passes in which a row's bits depend on that row's own tokens only.

        Raises:
            ConfigError: this kind of device cannot do it.
        """
        raise ConfigError(
            f"engine.deterministic is true, but on device {self.name} the last bits of a row "
            "depend on the rows beside it; set engine.device to cpu, or engine.deterministic to "
            "false"
        )

    def allocate_kv(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed KV memory [N, S, G, D]."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def write_kv(
        self, states: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write states [T, G, D] to their slots of cache [N, S, G, D]."""
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, states)

    @abstractmethod
    def attention(
        self,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend query [T, H, D] to caches ([N, S, G, D], [N, S, G, E]); return [T, H, E].

        Row i of a request with n tokens in this step and L in all sees keys 0 to L - n + i. The
        step's own keys and values are written already.
        """


def reference_attention(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend request by request in float32; the measure of every other kernel."""
    outputs = []
    start = 0
    for row, (query_len, seq_len) in enumerate(
        zip(metadata.query_lens, metadata.seq_lens, strict=True)
    ):
        keys, values = (
            gather_blocks(cache, metadata.block_tables[row], seq_len) for cache in caches
        )
        outputs.append(_attend(query[start : start + query_len], keys, values, options))
        start += query_len
    return torch.cat(outputs)


def gather_blocks(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return the first `seq_len` entries of a paged row, [seq_len, G, D]."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    return cache[blocks].flatten(0, 1)[:seq_len]


def causal_mask(
    query_len: int, seq_len: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Return [query_len, seq_len] bool, True where a row may look."""
    rows = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    columns = torch.arange(seq_len, device=device)[None, :]
    mask = columns <= rows
    if sliding_window is not None:
        mask &= rows - columns < sliding_window
    return mask


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    query_len, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    repeats = num_heads // num_kv_heads
    keys, values = (t.float().repeat_interleave(repeats, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = causal_mask(query_len, seq_len, options.sliding_window, query.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(-1, 1, 1).expand(-1, query_len, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, values).to(query.dtype)
