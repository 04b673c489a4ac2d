"""The sampler of devices draws on npu:0 what the CPU's draws, from the same logits."""

import pytest
import torch
from sampled_slots import FILTERS, VOCAB_SIZE, sampled_slot

from engine.backends import load_backend
from engine.layers.device_sampler import sample_on_device, sampling_arrays
from engine.layers.sampler import sample

NUM_ROWS = 200


@pytest.mark.parametrize("name", [*FILTERS, "mixed"])
@torch.inference_mode()
def test_every_way_of_drawing_agrees_with_the_cpu(name: str) -> None:
    backend = load_backend("npu")
    backend.bind(0, None)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    kinds = list(FILTERS.values()) if name == "mixed" else [FILTERS[name]]
    slots = [sampled_slot(key, kinds[key % len(kinds)]) for key in range(NUM_ROWS)]
    arrays = backend.upload(sampling_arrays(slots))
    drawn = sample_on_device(logits.to(backend.device), slots, arrays, backend)
    assert drawn.device.type == "npu"
    assert drawn.cpu().tolist() == sample(logits.clone(), slots)
