"""Who draws the next tokens, by which sampler, and how every rank and the next step learn of them.

Shapes: R rows that sample, V vocabulary.
"""

import torch

from engine.backends.base import Array, DeviceBackend
from engine.layers.device_sampler import sample_on_device, sampling_arrays
from engine.layers.last_tokens import LastTokens
from engine.layers.logits import needs_history
from engine.layers.model_input import ModelInput
from engine.layers.pending_step import PendingStep
from engine.layers.sampler import sample
from engine.layers.slot import Slot
from engine.parallel import ParallelGroup


class TokenPicker:
    """Draws on the device where that is apart from the host, else row by row on the host."""

    def __init__(self, backend: DeviceBackend, group: ParallelGroup, max_num_seqs: int) -> None:
        self._backend = backend
        self._group = group
        self._last_tokens = None if backend.is_host else LastTokens(max_num_seqs, backend.device)

    def arrays(self, sampling: list[Slot]) -> dict[str, Array]:
        """Return what `pick` wants on the device for these requests."""
        if self._last_tokens is None:
            return {}
        return {**self._last_tokens.arrays(sampling), **sampling_arrays(sampling)}

    def feed(self, step: ModelInput) -> None:
        """Give the step the input ids that the host did not know when it wrote the step."""
        if self._last_tokens is not None:
            self._last_tokens.feed(step)

    def pick(
        self, logits: torch.Tensor, step: ModelInput, before: PendingStep | None
    ) -> torch.Tensor:
        """Return the tokens that rank 0 drew from logits [R, V], [R] int64 on the device.

        The others do not draw: a plan may leave the last layer whole, and where each rank computes
        logits for itself, one that rounds otherwise would disagree on a token, and ever after.
        `before` is awaited where a token depends on the text up to it.
        """
        slots = step.sampling
        if not slots:
            return torch.zeros(0, dtype=torch.int64, device=self._backend.device)
        if self._group.rank > 0:
            drawn = torch.zeros(len(slots), dtype=torch.int64, device=self._backend.device)
        elif self._last_tokens is None:
            drawn = torch.tensor(sample(logits, slots))
        else:
            if before is not None and any(needs_history(slot.sampler) for slot in slots):
                before.result()
            drawn = sample_on_device(logits, slots, step.extra, self._backend)
        drawn = self._group.broadcast(drawn)
        if self._last_tokens is not None:
            self._last_tokens.keep(drawn, step)
        return drawn
