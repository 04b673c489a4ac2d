"""One decoder layer for llama-shaped blocks, of fewer and larger operations than transformers' own.

A layer is known by its structure, never by the name of a model: norm, attention with a projection
each for queries, keys and values, norm, feed-forward with a gate. Queries and keys may have a norm
for each head. Whether a layer of this structure also computes what this one computes is for
fused_layers to find out.

Shapes as in backends/base.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.backends.base import DeviceBackend
from engine.layers.paged_attention import AttentionCall, PagedAttention

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaParts:
    """The modules of one llama-shaped decoder layer of transformers."""

    layer: Any
    norms: tuple[Any, Any]  # before attention, and before the feed-forward layer
    head_norms: tuple[Any, Any] | None  # of queries and keys
    query_key_value: tuple[nn.Linear, nn.Linear, nn.Linear]
    gate_up: tuple[nn.Linear, nn.Linear]
    # Not merged, so they are called as they are, with what ranks exchange after them.
    o_proj: nn.Linear
    down_proj: nn.Linear


class FusedDecoderLayer(nn.Module):
    """Takes the place of a decoder layer: it is called the same, and returns the same."""

    def __init__(
        self,
        parts: LlamaParts,
        call: AttentionCall,
        attention: PagedAttention,
        backend: DeviceBackend,
    ) -> None:
        """Take over the weights of `parts`; `call` is how they ask for attention."""
        super().__init__()
        # A model may ask a layer for what it is, such as its kind of attention.
        vars(self).update(plain_attributes(parts.layer))
        self._attention, self._backend = attention, backend
        self._layer_index, self._options = call.layer_index, call.options
        query, key, value = call.states
        self._num_heads = [query.shape[1], key.shape[1], value.shape[1]]
        self._width = query.shape[2]
        self._epsilons = [_epsilon(norm) for norm in parts.norms]
        self.input_layernorm, self.post_attention_layernorm = parts.norms
        self.qkv_proj = _merge(parts.query_key_value)
        self.head_norms = nn.ModuleList(parts.head_norms or ())
        self.o_proj = parts.o_proj
        self.gate_up_proj = _merge(parts.gate_up)
        self.down_proj = parts.down_proj

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, M]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cosines and sines [1, T, D]
        **_kwargs: Any,  # a mask, which is None, and positions and a cache, which are the step's
    ) -> torch.Tensor:
        """Return the hidden states behind this layer, [1, T, M]."""
        residual = hidden_states[0]
        backend = self._backend
        normed = backend.rms_norm(residual, self.input_layernorm.weight, self._epsilons[0])
        attended = self._attention.forward(
            self._layer_index, self._states(normed, position_embeddings), self._options
        )
        normed, residual = backend.add_rms_norm(
            self.o_proj(attended.flatten(1)),
            residual,
            self.post_attention_layernorm.weight,
            self._epsilons[1],
        )
        added: torch.Tensor = self.down_proj(backend.silu_mul(self.gate_up_proj(normed)))
        return (residual + added)[None]

    def _states(
        self, normed: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [T, H, D], key [T, G, D] and value [T, G, D]."""
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        heads = self.qkv_proj(normed).view(len(normed), -1, self._width)
        query, key, value = heads.split(self._num_heads, dim=1)
        if self.head_norms:
            pairs = zip((query, key), self.head_norms, strict=True)
            query, key = (self._norm_heads(heads, norm) for heads, norm in pairs)
        rotary = self._backend.rotary
        return rotary(query, cos, sin), rotary(key, cos, sin), value

    def _norm_heads(self, heads: torch.Tensor, norm: Any) -> torch.Tensor:
        rows = self._backend.rms_norm(heads.reshape(-1, self._width), norm.weight, _epsilon(norm))
        return rows.view(heads.shape)


def match_llama(layer: Any, shared: Collection[int]) -> LlamaParts | None:
    """Return the parts of a decoder layer, or None when it is of another structure.

    shared holds the ids of parameters that the model has in more than one place.
    """
    if {name for name, _ in layer.named_children()} != _LAYER:
        return None
    attention, feed_forward = layer.self_attn, layer.mlp
    names = {name for name, _ in attention.named_children()}
    if names - _HEAD_NORMS != _ATTENTION or len(names & _HEAD_NORMS) == 1:
        return None
    if {name for name, _ in feed_forward.named_children()} != _FEED_FORWARD:
        return None
    parts = LlamaParts(
        layer=layer,
        norms=(layer.input_layernorm, layer.post_attention_layernorm),
        head_norms=(attention.q_norm, attention.k_norm) if names & _HEAD_NORMS else None,
        query_key_value=(attention.q_proj, attention.k_proj, attention.v_proj),
        gate_up=(feed_forward.gate_proj, feed_forward.up_proj),
        o_proj=attention.o_proj,
        down_proj=feed_forward.down_proj,
    )
    norms = [*parts.norms, *(parts.head_norms or ())]
    containers = [layer, attention, feed_forward]
    replaced = [*parts.query_key_value, *parts.gate_up, *norms, feed_forward.act_fn]
    fits = (
        all(map(_is_untouched, [*containers, *replaced]))
        and not any(_has_tensors(module) for module in containers)
        and all(map(_is_rms_norm, norms))
        and _can_merge(parts.query_key_value)
        and _can_merge(parts.gate_up)
        and type(parts.o_proj) is type(parts.down_proj) is nn.Linear
        and _is_silu(feed_forward.act_fn)
        and len({parameter.dtype for parameter in layer.parameters()}) == 1
        and not any(id(parameter) in shared for parameter in layer.parameters())
    )
    return parts if fits else None


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module carries beside torch's own registers."""
    own = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in own}


def _is_untouched(module: nn.Module) -> bool:
    """Tell whether calling a module runs its class's forward, and nothing around it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    )


def _is_rms_norm(norm: Any) -> bool:
    """Tell whether a norm has one weight and an epsilon, and calls it as a llama's does."""
    names = [name for name, _ in norm.named_parameters()]
    is_known = hasattr(norm, "variance_epsilon") or type(norm) is nn.RMSNorm
    return names == ["weight"] and norm.weight.dim() == 1 and is_known


def _epsilon(norm: Any) -> float:
    epsilon = norm.eps if type(norm) is nn.RMSNorm else norm.variance_epsilon
    return float(torch.finfo(norm.weight.dtype).eps if epsilon is None else epsilon)


def _is_silu(activation: nn.Module) -> bool:
    """Tell whether an activation is silu, whatever its class is called."""
    if any(True for _ in activation.parameters()):
        return False
    inputs = torch.linspace(-8, 8, 64)
    return torch.allclose(activation(inputs), F.silu(inputs))


def _can_merge(linears: Sequence[Any]) -> bool:
    are_plain = all(type(linear) is nn.Linear for linear in linears)
    return are_plain and len({linear.bias is None for linear in linears}) == 1


@torch.no_grad()
def _merge(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one layer with the outputs of all, one behind the other.

    The layers go on working: their weights become views of the merged ones, so that memory holds
    no weight twice.
    """
    sizes = [len(linear.weight) for linear in linears]
    has_bias = linears[0].bias is not None
    merged = nn.Linear(linears[0].in_features, sum(sizes), bias=has_bias, device="meta")
    for name, _ in [*merged.named_parameters()]:
        whole = torch.cat([getattr(linear, name) for linear in linears])
        setattr(merged, name, nn.Parameter(whole, requires_grad=False))
        for linear, part in zip(linears, torch.split(whole, sizes), strict=True):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))
    return merged
