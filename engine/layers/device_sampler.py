"""The sampler of devices: a whole batch at a time, and nothing in it waits for the device.

It draws what sampler.py draws: the same rule, the same numbers, the same order of the vocabulary.
The two are apart because the CPU wants each row alone, for its bits; a device wants few kernels,
and no result on the host before the next step is launched.

Shapes: R rows that sample, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine.backends.base import Array, DeviceBackend
from engine.layers.logits import process
from engine.layers.sampler import uniform_number
from engine.layers.slot import Slot

_EVERYTHING = np.iinfo(np.int32).max


def sampling_arrays(slots: Sequence[Slot]) -> dict[str, Array]:
    """Return what `sample_on_device` wants on the device; nothing for a greedy batch."""
    specs = [slot.sampler for slot in slots]
    if not any(spec.temperature > 0 for spec in specs):
        return {}
    arrays: dict[str, Array] = {
        "temperature": np.array([spec.temperature for spec in specs], np.float32),
        "uniform": np.array(
            [uniform_number(slot.sampler, slot.num_output_tokens) for slot in slots], np.float32
        ),
    }
    if any(spec.min_p > 0 for spec in specs):
        with np.errstate(divide="ignore"):
            arrays["log_min_p"] = np.log(np.array([spec.min_p for spec in specs], np.float32))
    if any(spec.top_k for spec in specs):
        arrays["top_k"] = np.array([_top_k(slot) for slot in slots], np.int32)
    if any(spec.top_p < 1 for spec in specs):
        arrays["top_p"] = np.array([spec.top_p for spec in specs], np.float32)
    return arrays


def sample_on_device(
    logits: torch.Tensor,
    slots: Sequence[Slot],
    tensors: Mapping[str, torch.Tensor],
    backend: DeviceBackend,
) -> torch.Tensor:
    """Return one token id for each row of logits [R, V], as [R] int64 on the device.

    tensors are those of `sampling_arrays`. The logits may be changed.
    """
    logits = logits.float()
    process(logits, slots)
    largest = torch.finfo(torch.float32).max
    # A row without any finite logit comes from a model that overflows, or has all forbidden.
    logits = logits.nan_to_num(nan=-largest / 2, posinf=largest, neginf=-largest)
    likeliest = logits.argmax(dim=-1)
    if "temperature" not in tensors:
        return likeliest
    return torch.where(
        tensors["temperature"] > 0, _draw(logits, slots, tensors, backend), likeliest
    )


def _draw(
    logits: torch.Tensor,
    slots: Sequence[Slot],
    tensors: Mapping[str, torch.Tensor],
    backend: DeviceBackend,
) -> torch.Tensor:
    """Draw one token a row by inverting its cumulative distribution at one uniform number."""
    temperature = tensors["temperature"].clamp(min=torch.finfo(torch.float32).tiny)
    # The likeliest token is at 0 before the division, so a tiny temperature makes no infinity.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    if "log_min_p" in tensors:
        scaled = scaled.masked_fill(scaled < tensors["log_min_p"][:, None], float("-inf"))
    top_k, top_p = tensors.get("top_k"), tensors.get("top_p")
    if top_k is not None or top_p is not None:
        num_tokens = logits.shape[-1]
        scaled = backend.top_k_top_p(
            scaled,
            None if top_k is None else top_k.clamp(max=num_tokens),
            top_p,
            max_top_k=min(max(_top_k(slot) for slot in slots), num_tokens),
        )
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1]
    target = tensors["uniform"] * total
    # Below the total when the product rounds up to it, so that there is a token to take. This is
    # the float32 before the total; NPUs have no kernel of nextafter.
    target = torch.minimum(target, total * (1 - 2**-24))
    return (cumulative <= target[:, None]).sum(dim=-1)


def _top_k(slot: Slot) -> int:
    """Return how many tokens of a row stay; the filters do not matter to a greedy one."""
    spec = slot.sampler
    if spec.temperature == 0:
        return 1
    return spec.top_k or _EVERYTHING
