"""Steps of every kind over a paged cache, and the comparison of a backend with the reference."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import DeviceBackend
from engine.backends.reference import reference_attention

# (tokens in this step, tokens in all) of each request.
DECODE = [(1, 1), (1, 17), (1, 100), (1, 33)]
PREFILL = [(20, 20), (2, 2), (33, 33)]
CHUNKS = [(5, 30), (16, 48), (7, 100), (2, 18)]
STEPS = {
    "decode": DECODE,
    "prefill": PREFILL,
    "chunks": CHUNKS,
    "mixed": [DECODE[1], CHUNKS[0], DECODE[2], PREFILL[0], CHUNKS[1], DECODE[0]],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 8},
    {"sliding_window": 1000},
    {"softcap": 2.0},
    {"has_sinks": True},
    {"sliding_window": 5, "softcap": 3.0, "has_sinks": True},
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
_TOLERANCE_OF_FLOAT16 = 4e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    metadata: AttentionMetadata
    options: AttentionOptions

    def on(self, device: torch.device) -> "Case":
        """Return the same case with its tensors on a device."""
        metadata, options = self.metadata, self.options
        return Case(
            query=self.query.to(device),
            caches=(self.caches[0].to(device), self.caches[1].to(device)),
            metadata=replace(
                metadata,
                slot_mapping=metadata.slot_mapping.to(device),
                block_tables=metadata.block_tables.to(device),
                seq_lens_tensor=metadata.seq_lens_tensor.to(device),
            ),
            options=replace(
                options, sinks=None if options.sinks is None else options.sinks.to(device)
            ),
        )

    @property
    def unused_slots(self) -> list[int]:
        """The slots of the pool that no request of the step has written."""
        size = self.caches[0].shape[1]
        tables = self.metadata.block_tables.tolist()
        used = {
            table[position // size] * size + position % size
            for table, seq_len in zip(tables, self.metadata.seq_lens, strict=True)
            for position in range(seq_len)
        }
        return sorted(set(range(self.caches[0].shape[0] * size)) - used)


def make_case(
    lens: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    widths: tuple[int, int] = (32, 32),
    has_sinks: bool = False,
    **options: Any,
) -> Case:
    """Return random queries over a pool whose blocks are strewn and full of other values."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    counts = [-(-seq_len // block_size) for _, seq_len in lens]
    num_blocks = sum(counts) + 3
    strewn = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([strewn.pop() for _ in range(count)])
    caches = tuple(
        torch.randn(num_blocks, block_size, num_kv_heads, width, generator=generator).to(dtype)
        for width in widths
    )
    query = torch.randn(sum(n for n, _ in lens), num_heads, widths[0], generator=generator)
    return Case(
        query=query.to(dtype),
        caches=(caches[0], caches[1]),
        metadata=AttentionMetadata(
            query_lens=[n for n, _ in lens],
            seq_lens=[seq_len for _, seq_len in lens],
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            block_tables=tables,
            seq_lens_tensor=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32),
        ),
        options=AttentionOptions(
            scale=widths[0] ** -0.5,
            sinks=torch.randn(num_heads, generator=generator) if has_sinks else None,
            **options,
        ),
    )


def attend(backend: DeviceBackend, case: Case) -> torch.Tensor:
    """Return what the backend makes of the case, on the host."""
    there = case.on(backend.device)
    return backend.attention(there.query, there.caches, there.metadata, there.options).cpu()


def assert_equals_reference(backend: DeviceBackend, case: Case) -> None:
    found = attend(backend, case)
    wanted = reference_attention(case.query, case.caches, case.metadata, case.options)
    assert found.dtype == case.query.dtype
    assert found.shape == wanted.shape
    tolerance = TOLERANCE.get(case.query.dtype, _TOLERANCE_OF_FLOAT16)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def assert_takes_strided_queries(backend: DeviceBackend, case: Case) -> None:
    """Compare a query whose heads do not lie side by side, as layers of some families have it."""
    turned = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    there = case.on(backend.device)
    found = backend.attention(
        turned.to(backend.device), there.caches, there.metadata, there.options
    )
    assert torch.equal(found.cpu(), attend(backend, case))


def assert_reads_only_its_own_blocks(backend: DeviceBackend, case: Case) -> None:
    """Fill what no request has written with what is no number, and compare."""
    before = attend(backend, case)
    for cache in case.caches:
        cache.view(-1, *cache.shape[2:])[case.unused_slots] = float("nan")
    assert torch.equal(attend(backend, case), before)
