"""Collectives of ranks whose simulated devices lie in the memory of this host: gloo does them.

The wheel's own HCCL process group is not used: it is made of calls of a library that is not here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from npu_simulator.aliases import alias, is_npu
from npu_simulator.recorder import recorder

# torch's own annotations leave out what is used of it here.
_c10d: Any = dist
_HOST = "127.0.0.1"
_CPU, _NPU = torch.device("cpu"), torch.device("npu")


def install() -> None:
    """Serve the name hccl in torch.distributed."""
    dist.Backend.register_backend("hccl", _make_gloo, extended_api=True, devices=["npu"])


def _make_gloo(options: Any, _hccl_options: Any) -> Any:
    gloo = _c10d.ProcessGroupGloo._Options()
    gloo._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_HOST)]
    gloo._timeout = options.timeout
    return _c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size, gloo)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a `c10d::` operation on the CPU's names of its tensors, which it changes in place."""
    recorder.note_operation(func.name(), torch.npu.current_stream().npu_stream)
    for group in (leaf for leaf in args if _is_process_group(leaf)):
        _serve_host_memory(group)
    named: dict[int, torch.Tensor] = {}

    def down(value: Any) -> Any:
        if not is_npu(value):
            return value
        renamed = alias(value)
        named[renamed.data_ptr()] = value
        return renamed

    def up(value: Any) -> Any:
        return named.get(value.data_ptr(), value) if isinstance(value, torch.Tensor) else value

    result = func(*tree_map(down, args), **tree_map(down, kwargs))
    return tree_map(up, result)


def _is_process_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _serve_host_memory(boxed: Any) -> None:
    group = _c10d.ProcessGroup.unbox(boxed)
    if "cpu" not in {device.type for device in group._device_types}:
        backend = group._get_backend(_NPU)
        group._register_backend(_CPU, _c10d.ProcessGroup.BackendType.CUSTOM, backend)
