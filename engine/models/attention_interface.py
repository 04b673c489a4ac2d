"""The one attention function that every model of transformers is given.

It finds its PagedAttention on the module that calls it, so there is no global state: two models
in one process do not meet.
"""

from typing import Any

import torch

from engine.backends.attention_metadata import AttentionOptions
from engine.backends.npu_environment import without_torch_npu
from engine.errors import ConfigError
from engine.layers.paged_attention import PagedAttention

with without_torch_npu():
    from transformers import AttentionInterface

ATTENTION_NAME = "tokenmill_paged"


def attach(model: torch.nn.Module, attention: PagedAttention) -> None:
    """Hand the attention of a whole model to `attention`.

    Causality comes from the paged layout, so there is no mask. For a name that has no function for
    masks, transformers does not even look whether the positions are those of several texts: that
    look would make the host wait for the device in each step.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "paged_attention", attention)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]


def _attention_forward(  # noqa: PLR0913 - the signature is transformers'
    module: Any,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, G, T, D]
    value: torch.Tensor,  # [1, G, T, E]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} brings an attention mask of its own, and tokenmill knows "
            "causal attention and sliding windows alone; take another model"
        )
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    states = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    attended = module.paged_attention.forward(module.layer_idx, states, options)
    return attended[None], None
