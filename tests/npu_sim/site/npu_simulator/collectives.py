"""Collectives of ranks whose simulated devices lie in the memory of this host: gloo does them.

The wheel's own HCCL process group is not used: it is made of calls of a library that is not here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_map

from npu_simulator.aliases import alias, is_npu
from npu_simulator.graphs import graphs
from npu_simulator.recorder import recorder

# torch's own annotations leave out what is used of it here.
_c10d: Any = dist
_HOST = "127.0.0.1"
# They return what they were given first, with a work object.
_CAPTURED = ("c10d::allreduce_", "c10d::allgather_", "c10d::broadcast_")
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
    stream = torch.npu.current_stream().npu_stream
    recorder.note_operation(func.name(), stream)
    for group in (leaf for leaf in args if _is_process_group(leaf)):
        _serve_host_memory(group)
    owners: dict[int, torch.Tensor] = {}

    def down(value: Any) -> Any:
        if not is_npu(value):
            return value
        name = alias(value)
        owners[name.data_ptr()] = value
        return name

    def up(value: Any) -> Any:
        return owners.get(value.data_ptr(), value) if isinstance(value, torch.Tensor) else value

    named_args, named_kwargs = tree_map(down, args), tree_map(down, kwargs)

    def exchange() -> None:
        _, work = func(*named_args, **named_kwargs)
        _c10d.Work.unbox(work).wait()

    if func.name() in _CAPTURED and graphs.add(stream, exchange):
        return args[0], FakeWork().boxed()
    return tree_map(up, func(*named_args, **named_kwargs))


def _is_process_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _serve_host_memory(boxed: Any) -> None:
    group = _c10d.ProcessGroup.unbox(boxed)
    if "cpu" not in {device.type for device in group._device_types}:
        backend = group._get_backend(_NPU)
        group._register_backend(_CPU, _c10d.ProcessGroup.BackendType.CUSTOM, backend)
