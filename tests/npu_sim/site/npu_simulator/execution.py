"""Runs an operation on the CPU's names of device tensors: at once, or each time a graph is replayed."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_simulator.aliases import alias, is_npu, to_npu
from npu_simulator.cpu_gaps import run_on_cpu

# They only work out sizes, on the host, and have no meta kernel.
_ON_HOST = ("get_max_workspace", "infer_output")
_POISON = 0xA5


def run_now(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    owners: dict[int, torch.Tensor] = {}
    named_args, named_kwargs = _named(args, owners), _named(kwargs, owners)
    result = run_on_cpu(func, named_args, named_kwargs)

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return owners[id(value)] if id(value) in owners else to_npu(value, device)

    return tree_map(up, result)


def capture(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
) -> tuple[Any, Callable[[], None] | None]:
    """Return the outputs, which hold rubbish, and what fills them; nothing is computed now.

    What is returned holds addresses, not tensors: memory may serve again within a graph, as it
    does on a device.
    """
    if func.name().endswith(_ON_HOST):
        return run_now(func, args, kwargs, device), None
    outputs, fresh = _promise(func, args, kwargs, device)
    named_args, named_kwargs = _named(args, {}), _named(kwargs, {})
    names = {place: alias(tensor) for place, tensor in fresh.items()}

    def fill() -> None:
        results = tree_leaves(run_on_cpu(func, named_args, named_kwargs))
        for place, name in names.items():
            name.copy_(results[place])

    return outputs, fill


def _promise(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device
) -> tuple[Any, dict[int, torch.Tensor]]:
    """Return the outputs of a call, and those that are new tensors by their places in it."""
    if kwargs.get("out") is not None:
        return kwargs["out"], {}
    owners: dict[int, torch.Tensor] = {}
    meta_args, meta_kwargs = _on_meta(args, owners), _on_meta(kwargs, owners)
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    results = func(*meta_args, **meta_kwargs)
    fresh = {}
    for place, result in enumerate(tree_leaves(results)):
        if isinstance(result, torch.Tensor) and id(result) not in owners:
            fresh[place] = _poisoned(result, device)
            owners[id(result)] = fresh[place]

    def up(value: Any) -> Any:
        return owners[id(value)] if isinstance(value, torch.Tensor) else value

    return tree_map(up, results), fresh


def _poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    size = tensor.untyped_storage().nbytes()
    if size > 0:
        ctypes.memset(tensor.data_ptr(), _POISON, size)
    return tensor


def _named(tree: Any, owners: dict[int, torch.Tensor]) -> Any:
    def down(value: Any) -> Any:
        if not is_npu(value):
            return value
        name = alias(value)
        owners[id(name)] = value
        return name

    return tree_map(down, tree)


def _on_meta(tree: Any, owners: dict[int, torch.Tensor]) -> Any:
    def down(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shadow = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        owners[id(shadow)] = value
        return shadow

    return tree_map(down, tree)
