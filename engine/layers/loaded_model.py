"""A model of transformers whose attention reads a paged KV cache."""

from dataclasses import dataclass
from typing import Any

import torch

from engine.layers.paged_attention import LayerShape, PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and the KV layout of each of its layers."""

    module: Any  # a transformers model for causal language modelling
    attention: PagedAttention
    kv_layouts: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def sliding_window(self) -> int | None:
        """How far back any token sees; None when a layer sees everything."""
        windows = [layout.sliding_window for layout in self.kv_layouts]
        limited = [window for window in windows if window is not None]
        return max(limited) if len(limited) == len(windows) else None

    def logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Run tokens [T] at positions [T]; return the logits of `rows`, [len(rows), vocabulary]."""
        output = self.module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
