"""From a model folder to modules on the device, with our attention attached."""

from pathlib import Path
from typing import Any

import torch

from engine.backends.base import DeviceBackend
from engine.errors import ConfigError
from engine.layers.fused_layers import fuse_layers
from engine.layers.loaded_model import LoadedModel
from engine.layers.paged_attention import LayerShape, PagedAttention
from engine.layers.tensor_parallel import check_plan, split_model
from engine.model_checks import reason_of
from engine.models.attention_interface import attach
from engine.parallel import ParallelGroup


def load_model(
    path: Path, *, dtype: str, backend: DeviceBackend, group: ParallelGroup, trust_remote_code: bool
) -> LoadedModel:
    """Load this rank's share of the weights, and make them a model that runs.

    Raises:
        ConfigError: not a decoder that transformers knows, unreadable weights, attention that
            does not go through transformers' attention interface, or a model that cannot be split
            over the ranks of the group.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    torch_dtype: torch.dtype = getattr(torch, dtype)
    try:
        if group.world_size > 1:
            check_plan(AutoConfig.from_pretrained(path, **options), path)
        # Each rank reads the whole state and keeps its part. A Slice is known from shapes alone,
        # so a reader of safetensors may take them from the file instead.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch_dtype, output_loading_info=True, use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{path}: the model cannot be loaded: {reason_of(error)}") from error
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would draw them at random, and every answer would be noise.
        raise ConfigError(
            f"{path}: the checkpoint lacks {len(missing)} weights of {type(module).__name__}, the "
            f"first is {missing[0]}; is it whole, and of the architecture that config.json names?"
        )
    return prepare_model(module, backend, group, path)


def prepare_model(
    module: Any, backend: DeviceBackend, group: ParallelGroup, path: Path
) -> LoadedModel:
    """Split a model of transformers over the ranks, and give its attention a paged KV cache.

    The KV layout is learnt from a pass of two tokens. Where the device prefers it, decoder layers
    are replaced by fused ones.

    Raises:
        ConfigError: see load_model.
    """
    split_model(module, group, path)
    module = module.eval().to(backend.device)
    attention = PagedAttention(backend)
    attach(module, attention)
    layouts = _learn_layouts(module, attention, path)
    if backend.prefers_fused_layers:
        fuse_layers(module, attention, backend, group)
    return LoadedModel(module=module, attention=attention, kv_layouts=layouts, dtype=module.dtype)


@torch.inference_mode()
def _learn_layouts(module: Any, attention: PagedAttention, path: Path) -> tuple[LayerShape, ...]:
    tokens = torch.zeros(2, dtype=torch.int64, device=module.device)
    positions = torch.arange(2, device=module.device)
    with attention.recording() as shapes:
        module(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
    if sorted(shapes) != list(range(len(shapes))) or not shapes:
        raise ConfigError(
            f"{path}: {type(module).__name__} does not send its attention through transformers' "
            "attention interface, so it cannot use a paged KV cache"
        )
    return tuple(shapes[index] for index in sorted(shapes))
