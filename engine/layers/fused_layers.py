"""Puts fused decoder layers into a model of transformers, wherever they compute the same.

Structure does not tell everything: a layer may scale what it adds, pair other numbers of a head
for its rotation, or treat far positions otherwise. So the original and the fused layer run on one
random input before one takes the place of the other.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.backends.base import DeviceBackend
from engine.layers.fused_decoder_layer import FusedDecoderLayer, LlamaParts, match_llama
from engine.layers.paged_attention import AttentionCall, PagedAttention
from engine.parallel import ParallelGroup

logger = logging.getLogger(__name__)
_NUM_TOKENS = 8
# The input is small beside what a layer adds to it, or an error there would be lost in the
# rounding of the sum; and large beside the epsilon of a norm.
_INPUT_SCALE = 1 / 16
# How much of its length a result may differ by, and rounding alone can be the reason.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.04}
_NUM_POSITIONS = 2048  # of a model that names no last one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What a model hands to one of its layers."""

    hidden: torch.Tensor  # [1, T, M]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a layer made of its inputs, at the points where it is compared."""

    calls: list[AttentionCall]
    activated: list[torch.Tensor]  # what the last projection gets
    output: Any


def fuse_layers(
    model: Any, attention: PagedAttention, backend: DeviceBackend, group: ParallelGroup
) -> int:
    """Replace each decoder layer that can be, in place; return how many were.

    The model is split and on the device, and asks `attention`. All ranks of the group call this
    together, and decide alike.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = {key for key, count in uses.items() if count > 1}
    places = [
        (parent, name, parts)
        for parent in [*model.modules()]
        for name, child in parent.named_children()
        if (parts := match_llama(child, shared)) is not None
    ]
    inputs = _learn_inputs(model, attention, [parts for _, _, parts in places])
    errors: list[float] = []
    for parent, name, parts in places:
        tried = _try(parts, inputs.get(parts.layer), attention, backend)
        if tried is None:
            continue
        fused, error = tried
        # As a tensor's maximum, which does not pass over what is not a number.
        errors.append(torch.cat(group.all_gather(error[None])).max().item())
        if errors[-1] <= _ROUNDING[model.dtype]:
            parent.register_module(name, fused)
        # Merged weights took new memory; what they were merged from is free by now.
        backend.release_memory()
    return _report(model, errors)


def _learn_inputs(
    model: Any, attention: PagedAttention, layers: Sequence[LlamaParts]
) -> dict[Any, _Inputs]:
    """Run the model once, and return what it calls each layer with.

    Positions go up to the last that the model knows: some models treat far ones otherwise.
    """
    inputs: dict[Any, _Inputs] = {}
    if not layers:
        return inputs

    def remember(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(args) == 1:
            inputs[layer] = _Inputs(hidden=args[0], options=options)

    config = model.config.get_text_config()
    last = (getattr(config, "max_position_embeddings", None) or _NUM_POSITIONS) - 1
    positions = torch.linspace(0, last, _NUM_TOKENS).long()[None].to(model.device)
    hooks = [parts.layer.register_forward_pre_hook(remember, with_kwargs=True) for parts in layers]
    try:
        with torch.inference_mode(), attention.trial():
            model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _try(
    parts: LlamaParts, inputs: _Inputs | None, attention: PagedAttention, backend: DeviceBackend
) -> tuple[FusedDecoderLayer, torch.Tensor] | None:
    """Return the fused layer and its largest error []; None for a layer that is called otherwise."""
    if inputs is None:
        return None
    noise = torch.randn(inputs.hidden.shape, generator=torch.Generator().manual_seed(0))
    inputs = _Inputs(hidden=(noise * _INPUT_SCALE).to(inputs.hidden), options=inputs.options)
    with attention.trial() as calls:
        wanted = _run(parts.layer, inputs, parts, calls)
    if not _is_called_like_llama(wanted, inputs):
        return None
    fused = FusedDecoderLayer(parts, wanted.calls[0], attention, backend)
    with attention.trial(answer=wanted.calls[0].attended) as calls:
        found = _run(fused, inputs, parts, calls)
    pairs = zip(_points(found), _points(wanted), strict=True)
    return fused, torch.stack([_distance(*pair) for pair in pairs]).max()


@torch.inference_mode()
def _run(
    layer: nn.Module, inputs: _Inputs, parts: LlamaParts, calls: list[AttentionCall]
) -> _Outcome:
    activated: list[torch.Tensor] = []
    # The original and the fused layer have this projection in common.
    hook = parts.down_proj.register_forward_pre_hook(lambda _, args: activated.append(args[0]))
    try:
        output = layer(inputs.hidden, **inputs.options)
    finally:
        hook.remove()
    return _Outcome(calls=calls, activated=activated, output=output)


def _is_called_like_llama(outcome: _Outcome, inputs: _Inputs) -> bool:
    """Tell whether a layer gets and gives what the fused one knows, seen from one run of it."""
    hidden = inputs.hidden
    angles = inputs.options.get("position_embeddings") or ()
    is_known = (
        isinstance(outcome.output, torch.Tensor)
        and outcome.output.shape == hidden.shape
        and len(outcome.calls) == len(outcome.activated) == 1
        and len(angles) == 2
    )
    if not is_known:
        return False
    query, key, value = outcome.calls[0].states
    width = query.shape[-1]
    has_one_width = key.shape[-1] == value.shape[-1] == width
    turns_whole_heads = all(part.shape == (*hidden.shape[:2], width) for part in angles)
    # Some models turn in float32, and round afterwards.
    turns_as_it_is = all(part.dtype == hidden.dtype for part in angles)
    has_sinks = outcome.calls[0].options.sinks is not None
    return has_one_width and turns_whole_heads and turns_as_it_is and not has_sinks


def _points(outcome: _Outcome) -> tuple[torch.Tensor, ...]:
    return (*outcome.calls[0].states, outcome.activated[0], outcome.output)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return how far off a tensor is, as a share of the length of what it should be."""
    target = wanted.flatten().float()
    offset = found.flatten().float() - target
    share: torch.Tensor = offset.norm() / target.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return share


def _report(model: Any, errors: Sequence[float]) -> int:
    """Log what came of it; return how many layers are fused."""
    name, limit = type(model).__name__, _ROUNDING[model.dtype]
    fused = [error for error in errors if error <= limit]
    refused = [error for error in errors if not error <= limit]
    if refused:
        logger.info(
            "%d decoder layers of %s stay as they are: fused ones differ by %.3g, and rounding "
            "explains %.3g",
            len(refused),
            name,
            max(refused),
            limit,
        )
    logger.info("fused %d decoder layers of %s", len(fused), name)
    return len(fused)
