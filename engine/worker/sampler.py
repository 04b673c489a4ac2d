"""From logits to token ids, each row by its own parameters and its own random numbers.

A row's token depends on that row's logits and numbers alone, never on its neighbours: rows of
different kinds go different ways, and no way mixes rows.

Shapes: R rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.messages import SamplerSpec
from engine.worker.model_input import Slot

_MASK = (1 << 64) - 1


def uniform_number(spec: SamplerSpec, position: int) -> float:
    """Return the number in [0, 1) for this output position, the same on every host and attempt.

    Source: SplitMix64 (Steele, Lea, Flood 2014) as a counter-based hash of the four keys.
    """
    state = 0
    for part in (spec.seed, spec.sampling_key, spec.sample_index, position):
        state = _mix(state ^ (part & _MASK))
    return (state >> 40) / (1 << 24)


def sample(logits: torch.Tensor, slots: Sequence[Slot]) -> list[int]:
    """Return one token id for each row of logits [R, V]."""
    logits = logits.float()
    _forbid_early_stops(logits, slots)
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, slot in enumerate(slots) if slot.sampler.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(logits[rows], [slots[row] for row in drawn])
    picked: list[int] = token_ids.tolist()
    return picked


def _forbid_early_stops(logits: torch.Tensor, slots: Sequence[Slot]) -> None:
    for row, slot in enumerate(slots):
        if slot.num_output_tokens < slot.sampler.min_tokens:
            logits[row, list(slot.sampler.forbidden_token_ids)] = float("-inf")


def _draw(logits: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
    """Draw one token a row by inverting its cumulative distribution at one uniform number."""
    device = logits.device
    specs = [slot.sampler for slot in slots]
    temperatures = torch.tensor([spec.temperature for spec in specs], device=device)
    uniforms = torch.tensor(
        [uniform_number(slot.sampler, slot.num_output_tokens) for slot in slots], device=device
    )
    probabilities = (logits / temperatures[:, None]).softmax(dim=-1)
    token_ids = torch.empty(len(specs), dtype=torch.int64, device=device)
    is_plain = np.array([spec.top_k == 0 and spec.top_p == 1 and spec.min_p == 0 for spec in specs])
    for row in np.flatnonzero(is_plain):
        token_ids[row] = _invert(probabilities[row], uniforms[row])
    for row in np.flatnonzero(~is_plain):
        kept, ids = _filter(probabilities[row], specs[row])
        token_ids[row] = ids[_invert(kept, uniforms[row])]
    return token_ids


def _filter(probabilities: torch.Tensor, spec: SamplerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what top_k, top_p and min_p leave of one row [V], likeliest first, and the ids.

    Ties are broken by the token id, so that the result does not depend on the sort.
    """
    count = min(spec.top_k or len(probabilities), len(probabilities))
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    ordered, ids = ordered[:count], ids[:count]
    # A token stays while the mass before it is below top_p, so the likeliest always stays.
    ordered = ordered / ordered.sum()
    is_kept = ordered.cumsum(0) - ordered < spec.top_p
    is_kept &= ordered >= spec.min_p * ordered[0]
    return ordered[is_kept], ids[is_kept]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight passes `uniform` of the total."""
    cumulative = weights.cumsum(0)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return index.clamp_(max=len(weights) - 1)


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
