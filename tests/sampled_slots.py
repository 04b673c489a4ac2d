"""Requests that sample, with every kind of filter, for tests of samplers."""

from typing import Any

from engine.layers.slot import Slot
from engine.messages import SamplerSpec

VOCAB_SIZE = 97
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 1e-30},
    "hot": {"temperature": 5.0},
    "one": {"top_k": 1},
}


def sampled_slot(key: int, fields: dict[str, Any], num_pending: int = 0) -> Slot:
    """Return a request with one token of answer, and draws of its own."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return Slot(
        uid=key,
        token_ids=[1, 2, 3],
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=[],
        sampler=SamplerSpec(**(plain | fields), sampling_key=key, sample_index=0),
        num_pending=num_pending,
    )
