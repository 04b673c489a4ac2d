"""The CPU: torch for matrix products and prefill attention, our own kernel for decode."""

import os

import numba
import psutil
import torch
import torch.nn.functional as F

from engine.backends import cpu_kernels
from engine.backends.base import (
    AttentionMetadata,
    AttentionOptions,
    Capabilities,
    DeviceBackend,
    MemoryInfo,
    causal_mask,
    gather_blocks,
    reference_attention,
)
from engine.errors import WorkerFailure


class CpuBackend(DeviceBackend):
    """One process on the cores that the operating system allows it."""

    name = "cpu"
    capabilities = Capabilities(dtypes=("float32", "bfloat16"), default_memory_fraction=0.25)

    def bind(self, device_id: int, num_threads: int | None) -> str:
        """Set the number of threads; the CPU has one device, number 0."""
        cores = len(os.sched_getaffinity(0))
        threads = min(num_threads or cores, cores)
        torch.set_num_threads(threads)
        numba.set_num_threads(min(threads, numba.get_num_threads()))
        return f"cpu ({threads} threads)"

    @property
    def device(self) -> torch.device:
        """The one CPU device."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Do nothing: every operation is done when it returns."""

    def memory_info(self) -> MemoryInfo:
        """Return the memory that the host could give away."""
        memory = psutil.virtual_memory()
        return MemoryInfo(free_bytes=memory.available, total_bytes=memory.total)

    def classify_error(self, error: BaseException) -> WorkerFailure:
        """Tell a failed allocation from everything else."""
        is_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return WorkerFailure.OUT_OF_MEMORY if is_memory else WorkerFailure.OTHER

    def attention(
        self,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend rows with one token by the paged kernel, rows with more by torch."""
        output = query.new_empty(*query.shape[:2], caches[1].shape[3])
        decode_rows: list[int] = []
        decode_tokens: list[int] = []
        start = 0
        for row, query_len in enumerate(metadata.query_lens):
            if query_len == 1:
                decode_rows.append(row)
                decode_tokens.append(start)
            else:
                end = start + query_len
                output[start:end] = _prefill(query[start:end], caches, metadata, options, row)
            start += query_len
        if decode_rows:
            rows, tokens = torch.tensor(decode_rows), torch.tensor(decode_tokens)
            output[tokens] = _decode(query[tokens], caches, metadata, options, rows)
        return output


def _prefill(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    row: int,
) -> torch.Tensor:
    """Attend one request's tokens [n, H, D] to its KV; return [n, H, E]."""
    query_len, seq_len = query.shape[0], metadata.seq_lens[row]
    table = metadata.block_tables[row]
    if options.softcap is not None or options.sinks is not None:
        alone = AttentionMetadata(
            query_lens=[query_len],
            seq_lens=[seq_len],
            slot_mapping=metadata.slot_mapping,
            block_tables=table[None],
            seq_lens_tensor=metadata.seq_lens_tensor[row : row + 1],
        )
        return reference_attention(query, caches, alone, options)
    keys, values = (gather_blocks(cache, table, seq_len).transpose(0, 1) for cache in caches)
    is_plain = query_len == seq_len and (
        options.sliding_window is None or seq_len <= options.sliding_window
    )
    mask = (
        None if is_plain else causal_mask(query_len, seq_len, options.sliding_window, query.device)
    )
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=is_plain,
        scale=options.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _decode(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Attend one token of each of these rows, [R, H, D], to its KV; return [R, H, E]."""
    num_heads = query.shape[1]
    output = torch.empty(query.shape[0], num_heads, caches[1].shape[3])
    sinks = (
        torch.full((num_heads,), float("-inf")) if options.sinks is None else options.sinks.float()
    )
    is_bfloat16 = caches[0].dtype == torch.bfloat16
    keys, values = (
        (cache.view(torch.uint16) if is_bfloat16 else cache).numpy() for cache in caches
    )
    cpu_kernels.decode(
        query.float().contiguous().numpy(),
        keys,
        values,
        metadata.block_tables[rows].numpy(),
        metadata.seq_lens_tensor[rows].numpy(),
        sinks.numpy(),
        options.scale,
        options.sliding_window or torch.iinfo(torch.int32).max,
        options.softcap or 0.0,
        output.numpy(),
    )
    return output.to(query.dtype)
