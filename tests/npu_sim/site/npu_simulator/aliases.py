"""One memory under two names: what a simulated device holds, as a tensor of the CPU."""

import ctypes
from functools import lru_cache

import torch


def is_npu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of one of a simulated device, which must outlive it."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    result = torch.empty(0, dtype=tensor.dtype)
    if size == 0:
        return result.new_empty(tensor.shape)
    memory = _storage_at(storage.data_ptr(), size)
    return result.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def to_npu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what a kernel has computed as a tensor of a simulated device."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel() > 0:
        alias(result).copy_(tensor)
    return result


# An address may come to belong to another tensor; an alias of it is then as good as a new one.
@lru_cache(maxsize=4096)
def _storage_at(address: int, size: int) -> torch.UntypedStorage:
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
