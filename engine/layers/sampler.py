"""From logits to token ids, each row by its own parameters and its own random numbers.

A row's token depends on that row's logits and numbers alone, never on its neighbours: rows of
different kinds go different ways, and no way mixes rows.

Shapes: R rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.layers.logits import process
from engine.layers.slot import Slot
from engine.messages import SamplerSpec

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
    """Return one token id for each row of logits [R, V], which may be changed."""
    logits = logits.float()
    process(logits, slots)
    token_ids = _likeliest(logits)
    drawn = [row for row, slot in enumerate(slots) if slot.sampler.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(logits[rows], [slots[row] for row in drawn])
    picked: list[int] = token_ids.tolist()
    return picked


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row [V], after mending rows that have none.

    Such a row comes from a model that overflows, or has every token forbidden; its neighbours must
    not suffer from it. What is no number is less likely than a number, and likelier than what is
    forbidden.
    """
    token_ids = logits.argmax(dim=-1)
    best = logits.gather(1, token_ids[:, None])[:, 0]
    is_broken = ~best.isfinite()
    if is_broken.any():
        largest = torch.finfo(logits.dtype).max
        mended = logits[is_broken].nan_to_num(nan=-largest / 2, posinf=largest, neginf=-largest)
        logits[is_broken] = mended
        token_ids[is_broken] = mended.argmax(dim=-1)
    return token_ids


def _draw(logits: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
    """Draw one token a row by inverting its cumulative distribution at one uniform number."""
    device = logits.device
    specs = [slot.sampler for slot in slots]
    temperatures = torch.tensor([spec.temperature for spec in specs], device=device)
    temperatures.clamp_(min=torch.finfo(torch.float32).tiny)
    uniforms = torch.tensor(
        [uniform_number(slot.sampler, slot.num_output_tokens) for slot in slots], device=device
    )
    # The likeliest token is at 0 before the division, so a tiny temperature makes no infinity.
    centred = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = (centred / temperatures[:, None]).softmax(dim=-1)
    token_ids = torch.empty(len(specs), dtype=torch.int64, device=device)
    is_plain = np.array([spec.top_k == 0 and spec.top_p == 1 and spec.min_p == 0 for spec in specs])
    for row in np.flatnonzero(is_plain):
        token_ids[row] = _invert(probabilities[row], uniforms[row])
    for row in np.flatnonzero(~is_plain):
        kept, ids = _filter(probabilities[row], specs[row])
        token_ids[row] = ids[_invert(kept, uniforms[row])]
    return token_ids


def _filter(probabilities: torch.Tensor, spec: SamplerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what min_p, top_k and top_p leave of one row [V], and the ids, in their order.

    min_p and top_k come before top_p, as in vLLM: top_p counts the mass of what they have left.
    Ties are broken by the token id, so that the result does not depend on the sort.
    """
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    count = min(spec.top_k or len(ordered), len(ordered))
    ordered, ids = ordered[:count], ids[:count]
    is_likely = ordered >= spec.min_p * ordered[0]
    ordered, ids = ordered[is_likely], ids[is_likely]
    # A token stays while the mass before it is below top_p, so the likeliest always stays.
    ordered = ordered / ordered.sum()
    is_kept = ordered.cumsum(0) - ordered < spec.top_p
    ids, places = ids[is_kept].sort()
    return ordered[is_kept][places], ids


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight passes `uniform` of the total.

    The target stays below the total when the product rounds up to it, so there is such an index,
    and its weight is not 0.
    """
    cumulative = weights.cumsum(0)
    total = cumulative[-1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
