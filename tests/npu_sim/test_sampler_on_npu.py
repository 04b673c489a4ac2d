"""The sampler of devices draws on npu:0 what the CPU's draws, from the same logits."""

from typing import Any

import pytest
import torch

from engine.backends import load_backend
from engine.layers.device_sampler import sample_on_device, sampling_arrays
from engine.layers.sampler import sample
from engine.layers.slot import Slot
from engine.messages import SamplerSpec

NUM_ROWS, VOCAB_SIZE = 200, 97
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


def make_slot(key: int, fields: dict[str, Any]) -> Slot:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return Slot(
        uid=key,
        token_ids=[1, 2, 3],
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=[],
        sampler=SamplerSpec(**(plain | fields), sampling_key=key, sample_index=0),
    )


@pytest.mark.parametrize("name", [*FILTERS, "mixed"])
@torch.inference_mode()
def test_every_way_of_drawing_agrees_with_the_cpu(name: str) -> None:
    backend = load_backend("npu")
    backend.bind(0, None)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    kinds = list(FILTERS.values()) if name == "mixed" else [FILTERS[name]]
    slots = [make_slot(key, kinds[key % len(kinds)]) for key in range(NUM_ROWS)]
    arrays = backend.upload(sampling_arrays(slots))
    drawn = sample_on_device(logits.to(backend.device), slots, arrays, backend)
    assert drawn.device.type == "npu"
    assert drawn.cpu().tolist() == sample(logits.clone(), slots)
