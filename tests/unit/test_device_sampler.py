"""The sampler of devices draws what the CPU's draws, a whole batch at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_slots import FILTERS, VOCAB_SIZE, sampled_slot

from engine.backends import load_backend
from engine.layers.device_sampler import sample_on_device, sampling_arrays
from engine.layers.sampler import sample
from engine.layers.slot import Slot

BACKEND = load_backend("cpu")
KINDS = FILTERS | {"bias": {"logit_bias": {3: 40.0}}}


def draw_both(logits: torch.Tensor, slots: list[Slot]) -> tuple[list[int], list[int]]:
    arrays = {name: torch.from_numpy(array) for name, array in sampling_arrays(slots).items()}
    on_device = sample_on_device(logits.clone(), slots, arrays, BACKEND)
    return on_device.tolist(), sample(logits.clone(), slots)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_every_way_of_drawing_agrees_with_the_cpu(fields: dict[str, Any]) -> None:
    logits = torch.randn(400, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    slots = [sampled_slot(key, fields) for key in range(len(logits))]
    on_device, on_host = draw_both(logits, slots)
    assert on_device == on_host
    if (
        fields.get("temperature", 1.0) > 1e-20
        and fields.get("top_k") != 1
        and "logit_bias" not in fields
    ):
        assert on_device != logits.argmax(dim=-1).tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_of_a_mixed_batch_do_not_meet(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(KINDS.values())), min_size=1, max_size=12))
    seed = data.draw(st.integers(0, 1000))
    logits = torch.randn(len(kinds), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    slots = [sampled_slot(key, fields) for key, fields in enumerate(kinds)]
    together, on_host = draw_both(logits, slots)
    alone = [draw_both(logits[i : i + 1], slots[i : i + 1])[0][0] for i in range(len(slots))]
    assert together == alone == on_host


def test_a_row_without_a_likeliest_token_gets_the_cpus_and_hurts_nobody() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    slots = [sampled_slot(key, {"temperature": 0.0}) for key in range(4)]
    on_device, on_host = draw_both(logits, slots)
    assert on_device == on_host
    assert on_device[2:] == [5, int(logits[3].argmax())]


def test_a_token_that_the_host_does_not_know_yet_counts_as_a_place_in_the_text() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    known = [draw_both(logits, [sampled_slot(key, {})])[0] for key in range(20)]
    pending = [draw_both(logits, [sampled_slot(key, {}, num_pending=1)])[0] for key in range(20)]
    assert known != pending


def test_greedy_rows_send_nothing_to_the_device() -> None:
    assert sampling_arrays([sampled_slot(0, {"temperature": 0.0})]) == {}
    assert set(sampling_arrays([sampled_slot(0, {}), sampled_slot(1, {"temperature": 0.0})])) == {
        "temperature",
        "uniform",
    }
