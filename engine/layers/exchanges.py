"""What ranks exchange around a module that is split; the first arguments are bound at the split."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.slices import Range
from engine.parallel import ParallelGroup


def sum_outputs(
    group: ParallelGroup, _module: nn.Module, _inputs: Any, output: torch.Tensor
) -> torch.Tensor:
    """Add up what each rank computed from its part of the inputs."""
    return group.all_reduce(output)


def gather_outputs(
    group: ParallelGroup, sizes: list[int], _module: nn.Module, _inputs: Any, output: torch.Tensor
) -> torch.Tensor:
    """Put the ranks' outputs side by side; `sizes` are their last dimensions."""
    # An exchange wants one shape from all.
    padded = F.pad(output, (0, max(sizes) - output.shape[-1]))
    parts = zip(group.all_gather(padded), sizes, strict=True)
    return torch.cat([part.narrow(-1, 0, size) for part, size in parts], dim=-1)


def narrow_input(kept: Range, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a module only this rank's part of an input that every rank has whole."""
    start, end = kept
    return (inputs[0].narrow(-1, start, end - start), *inputs[1:])


def look_up(
    group: ParallelGroup,
    forward: Callable[[torch.Tensor], torch.Tensor],
    kept: Range,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """Look up token ids in this rank's rows of the vocabulary, and add up the ranks'."""
    start, end = kept
    is_elsewhere = (token_ids < start) | (token_ids >= end)
    rows = forward((token_ids - start).masked_fill(is_elsewhere, 0))
    return group.all_reduce(rows.masked_fill(is_elsewhere[..., None], 0))
