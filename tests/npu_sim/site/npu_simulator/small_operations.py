"""The other fused operations that an engine of ours may call, and what their documentation asks.

Where they round is not documented; they round where the engine's own references do.
Source: torch_npu's documentation of each operation.
"""

import torch

from npu_simulator.contract import require, require_absent, require_tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MAX_TOP_K = 1024


def dtype_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the wheel makes of `to(dtype)` where gradients may be wanted."""
    return tensor.to(dtype, copy=True)


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write keys [T, G, D] and values [T, G, E] to the slots of caches [N, S, G, D or E]."""
    require_absent(
        compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens
    )
    require(cache_mode in (None, "Norm"), f"cache_mode {cache_mode!r}: the cache is not NZ")
    require(key.shape[:2] == value.shape[:2], f"key {key.shape} beside value {value.shape}")
    for name, state, cache in (("key", key, key_cache), ("value", value, value_cache)):
        require_tensor(name, state, _FLOATS, (None, None, None))
        require_tensor(f"{name}_cache", cache, (state.dtype,), (None, None, *state.shape[1:]))
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    require_tensor("slot_mapping", slot_mapping, (torch.int32, torch.int64), (len(key),))
    slots = slot_mapping.long()
    is_known = bool(((slots >= 0) & (slots < num_slots)).all())
    require(is_known, f"slot_mapping leaves the {num_slots} slots: {slots.tolist()}")
    require(len(slots.unique()) == len(slots), f"slot_mapping repeats slots: {slots.tolist()}")
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value


def rms_norm(
    hidden: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    require(hidden.dtype in _FLOATS, f"input is {hidden.dtype}")
    require(2 <= hidden.dim() <= 8, f"input has {hidden.dim()} dimensions")
    require_tensor("gamma", gamma, (hidden.dtype,), tuple(hidden.shape[-1:]))
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return gamma * (wide * scale).to(hidden.dtype), scale


def add_rms_norm(
    first: torch.Tensor, second: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    is_alike = first.shape == second.shape and first.dtype == second.dtype
    require(is_alike, f"x1 {first.shape} {first.dtype}, x2 {second.shape} {second.dtype}")
    summed = first + second
    normalised, scale = rms_norm(summed, gamma, epsilon)
    return normalised, scale, summed


def rotary_mul(
    states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    require_absent(rotate=rotate)
    require(rotary_mode == "half", f"rotary_mode {rotary_mode!r}: only half is simulated")
    require(states.dtype in _FLOATS, f"input is {states.dtype}")
    require(states.dim() == 4, f"input has {states.dim()} dimensions, wanted 4")
    width = states.shape[-1]
    require(width < 896 and width % 2 == 0, f"heads of width {width}")
    for name, angles in (("r1", cos), ("r2", sin)):
        require(angles.dtype is states.dtype, f"{name} is {angles.dtype}, input {states.dtype}")
        require(_is_spread(angles, states), f"{name} {angles.shape} for input {states.shape}")
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def _is_spread(angles: torch.Tensor, states: torch.Tensor) -> bool:
    """Tell whether the angles are one of the documented shapes, which leave the width whole."""
    return (
        angles.dim() == 4
        and angles.shape[-1] == states.shape[-1]
        and all(
            found in (1, wanted)
            for found, wanted in zip(angles.shape[:-1], states.shape[:-1], strict=True)
        )
    )


def swiglu(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    require(gate_up.dtype in _FLOATS, f"input is {gate_up.dtype}")
    require(gate_up.shape[dim] % 2 == 0, f"{gate_up.shape} cannot be halved at {dim}")
    gate, up = gate_up.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """Filter logits [R, V]: what is below the k-th largest, then the least likely mass of 1 - p."""
    require(logits.dtype in _FLOATS, f"logits is {logits.dtype}")
    require(logits.dim() == 2, f"logits has {logits.dim()} dimensions, wanted 2")
    rows = (len(logits),)
    ordered, ids = logits.sort(dim=-1, stable=True)
    if k is not None:
        require_tensor("k", k, (torch.int32,), rows)
        largest = min(_MAX_TOP_K, logits.shape[1])
        require(bool(((k >= 1) & (k <= largest)).all()), f"k leaves 1..{largest}: {k.tolist()}")
        threshold = ordered.gather(1, (logits.shape[1] - k.long())[:, None])
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if p is not None:
        require_tensor("p", p, (logits.dtype,), rows)
        require(bool(((p >= 0) & (p <= 1)).all()), f"p leaves 0..1: {p.tolist()}")
        is_left_out = ordered.softmax(-1).cumsum(-1) <= 1 - p[:, None]
        is_left_out[:, -1] = False
        ordered = ordered.masked_fill(is_left_out, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
