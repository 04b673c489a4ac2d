"""Copies between host and device, by the wheel's own C++ and the simulated ACL, which counts them."""

from typing import Any

import torch

from npu_simulator.aliases import alias, is_npu
from npu_simulator.recorder import recorder


def copy(
    func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy as a device does it: bytes go over as they are, and are arranged on the device."""
    _note_access(target, source)
    if _is_alike(target, source):
        func(target, source, non_blocking)
    elif is_npu(target):
        staged = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        func(staged, source.contiguous(), False)
        alias(target).copy_(alias(staged))
    else:
        arranged = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        alias(arranged).copy_(alias(source))
        staged = torch.empty(source.shape, dtype=source.dtype)
        func(staged, arranged, False)
        target.copy_(staged)
    return target


def _note_access(target: torch.Tensor, source: torch.Tensor) -> None:
    there = target if is_npu(target) else source
    stream = torch.npu.current_stream(there.device).npu_stream
    if is_npu(target):
        recorder.note_access("a copy to the device", stream, [], [target])
    else:
        recorder.note_access("a copy to the host", stream, [source], [])


def _is_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        target.shape == source.shape
        and target.dtype == source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
    )
