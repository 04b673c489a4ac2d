"""Every operation on a simulated device, carried out by the CPU's kernel on the same memory.

What a real device would refuse is refused here: an operation for which the wheel has no kernel,
and no way to put it together from others, would silently run on the CPU there.
"""

from functools import cache
from typing import Any

import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_simulator import collectives
from npu_simulator.aliases import is_npu
from npu_simulator.copies import copy
from npu_simulator.graphs import graphs
from npu_simulator.recorder import recorder

# What the wheel's own C++ does without a kernel of CANN.
_NATIVE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::pin_memory",
    "aten::record_stream",
    "aten::set_.source_Storage_storage_offset",
    "aten::_local_scalar_dense",
}
_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class SimulatedNpu(TorchDispatchMode):
    """Serves one thread: each thread that computes enters one of its own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if is_npu(leaf)]
        device = _device_of(kwargs, tensors)
        if device is None:
            return func(*args, **kwargs)
        name = func.name()
        if name.startswith("c10d::"):
            return collectives.run(func, args, kwargs)
        if name in _NATIVE or (func.is_view and not _has(name, "CompositeImplicitAutograd")):
            return func(*args, **kwargs)
        parts = _composed_of(func, name)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if name == "aten::copy_" and not (is_npu(args[0]) and is_npu(args[1])):
            return copy(func, *args, **kwargs)
        return _run(func, args, kwargs, device)


def _device_of(kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.device | None:
    """Return the simulated device that an operation is about, if it is about one."""
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type == "npu":
        index = torch.device(wanted).index
        return torch.device("npu", torch.npu.current_device() if index is None else index)
    return tensors[0].device if tensors else None


def _has(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _composed_of(func: Any, name: str) -> Any:
    """Return what calls the operations that this one consists of, or None: it is one itself."""
    # The wheel's own `_to_copy` is made of the same parts.
    if _has(name, "PrivateUse1") and name != "aten::_to_copy":
        return None
    for key in _COMPOSITES:
        if _has(name, key):
            return _kernel(func, key)
    if _has(name, "CompositeImplicitAutograd"):
        return func.decompose
    raise NotImplementedError(
        f"{name}: torch_npu has no kernel for it, and would run it on the CPU, with copies there "
        "and back; use operations that it has"
    )


def _kernel(func: Any, key: str) -> Any:
    dispatch_key = getattr(torch._C.DispatchKey, key)
    return lambda *args, **kwargs: func._op_dk(dispatch_key, *args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    name = func.name()
    _check_covered(func, name, kwargs)
    _wake(device.index)
    stream = torch_npu._C._npu_getCurrentRawStream(device.index)
    recorder.note_operation(name, stream)
    given = kwargs
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = graphs.run(func, args, kwargs, device, stream)
    _note_access(func, args, given, result, stream)
    if name.startswith("npu::"):
        recorder.keep_call(name, args, kwargs, result)
    return result


def _note_access(func: Any, args: Any, kwargs: dict[str, Any], result: Any, stream: int) -> None:
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_write else read).extend(filter(is_npu, tree_leaves(value)))
    known = {id(tensor) for tensor in read + written}
    written += [leaf for leaf in tree_leaves(result) if is_npu(leaf) and id(leaf) not in known]
    recorder.note_access(func.name(), stream, read, written)


@cache
def _wake(index: int) -> None:
    """Have the wheel make a device's streams, as its own kernels would."""
    with torch.npu.device(index):
        torch.npu.current_stream()


def _check_covered(func: Any, name: str, kwargs: dict[str, Any]) -> None:
    if name.startswith("npu::") and not _has(name, "CPU"):
        raise NotImplementedError(
            f"{name} is not simulated: write a reference kernel that checks what its "
            "documentation asks for"
        )
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if is_random and "dropout_p" not in {argument.name for argument in func._schema.arguments}:
        raise NotImplementedError(
            f"{name}: random numbers on a device are not simulated; draw them on the host"
        )
