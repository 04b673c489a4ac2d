"""What a device's kernels must compute, in plain torch: the measure of every backend's own.

Shapes: T tokens, R requests or rows, S block size, H query heads, G key-value heads, D width of
a key, E width of a value, M hidden size, I width of the feed-forward layer, V vocabulary.
"""

import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions


def reference_attention(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend request by request in float32; the measure of every other kernel."""
    outputs = []
    start = 0
    for row, (query_len, seq_len) in enumerate(
        zip(metadata.query_lens, metadata.seq_lens, strict=True)
    ):
        keys, values = (
            gather_blocks(cache, metadata.block_tables[row], seq_len) for cache in caches
        )
        outputs.append(_attend(query[start : start + query_len], keys, values, options))
        start += query_len
    return torch.cat(outputs)


def attend_without_cache(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor], options: AttentionOptions
) -> torch.Tensor:
    """Attend the tokens of one request, query [T, H, D], to key [T, G, D] and value [T, G, E]."""
    return _attend(*states, options)


def gather_blocks(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return the first `seq_len` entries of a paged row, [seq_len, G, D]."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    return cache[blocks].flatten(0, 1)[:seq_len]


def causal_mask(
    query_len: int, seq_len: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor:
    """Return [query_len, seq_len] bool, True where a row may look."""
    rows = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    columns = torch.arange(seq_len, device=device)[None, :]
    mask = columns <= rows
    if sliding_window is not None:
        mask &= rows - columns < sliding_window
    return mask


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    query_len, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    repeats = num_heads // num_kv_heads
    keys, values = (t.float().repeat_interleave(repeats, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    mask = causal_mask(query_len, seq_len, options.sliding_window, query.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(-1, 1, 1).expand(-1, query_len, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, values).to(query.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return hidden [T, M] over its root mean square, times weight [M].

    Source: Zhang and Sennrich 2019; rounded where transformers' LlamaRMSNorm rounds.
    """
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(hidden.dtype)


def rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn states [T, H, D] by the angles of their positions, cos and sin [T, D].

    Source: Su et al. 2021; the halves of a head are the two coordinates, as in GPT-NeoX.
    """
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return states * cos[:, None] + turned * sin[:, None]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [T, I] of the two halves of [T, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Return logits [R, V] with minus infinity where top_k [R], then top_p [R] leave a token out.

    A token stays while the mass of likelier ones is below top_p, so the likeliest always does.
    Equal logits are ordered by token id.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[-1], device=logits.device)
    if top_k is not None:
        ordered = ordered.masked_fill(places >= top_k[:, None], float("-inf"))
    if top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        mass_before = probabilities.cumsum(dim=-1) - probabilities
        is_left_out = (mass_before >= top_p[:, None]) & (places > 0)
        ordered = ordered.masked_fill(is_left_out, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
