"""The last token of each request, on the device: the next step is launched before the host has it.

Shapes: P places, one for each request that may run at a time.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.backends.base import Array
from engine.layers.model_input import ModelInput
from engine.layers.slot import Slot


class LastTokens:
    """Carries drawn tokens from one step to the next without a way through the host."""

    def __init__(self, num_places: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(num_places, dtype=torch.int64, device=device)  # [P]

    @staticmethod
    def arrays(sampling: Sequence[Slot]) -> dict[str, Array]:
        """Return what `keep` wants on the device."""
        places = np.array([slot.place for slot in sampling], np.int64)
        return {"sampled_places": places} if sampling else {}

    def feed(self, step: ModelInput) -> None:
        """Write the input ids that the host did not know when it wrote the step."""
        if "fed_rows" in step.extra:
            fed = self._token_ids.index_select(0, step.extra["fed_places"])
            step.input_ids.index_copy_(0, step.extra["fed_rows"], fed)

    def keep(self, token_ids: torch.Tensor, step: ModelInput) -> None:
        """Remember the tokens [R] that the step's sampling requests have drawn."""
        if step.sampling:
            self._token_ids.index_copy_(0, step.extra["sampled_places"], token_ids)
