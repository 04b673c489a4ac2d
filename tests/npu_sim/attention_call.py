"""One call of the fused attention as an engine of ours makes it, on any device."""

import math
from typing import Any

import torch

NUM_HEADS, NUM_KV_HEADS, WIDTH, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 128, 128, 8
QUERY_ENDS, KV_LENS = [5, 6, 36], [5, 200, 130]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def make_tensors(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, and a cache of keys and one of values."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS * WIDTH)
    query = numbers(QUERY_ENDS[-1], NUM_HEADS, WIDTH)
    return query.to(device), numbers(*shape, seed=1).to(device), numbers(*shape, seed=2).to(device)


def make_options(device: str, **changes: Any) -> dict[str, Any]:
    """Return the options of a prefill, a decode step and a chunk: rows of 5, 1 and 30 queries."""
    options = {
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        "block_table": torch.tensor([[3, 0], [1, 7], [6, 4]], dtype=torch.int32),
        "input_layout": "TND",
        "block_size": BLOCK_SIZE,
        "actual_seq_lengths": QUERY_ENDS,
        "actual_seq_lengths_kv": KV_LENS,
        "num_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "scale": 1 / math.sqrt(WIDTH),
        "sparse_mode": 3,
    }
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**options, **changes}.items()
    }


_NAMES_OF_V2 = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
}


def for_v2(options: dict[str, Any]) -> dict[str, Any]:
    return {_NAMES_OF_V2.get(name, name): value for name, value in options.items()}
