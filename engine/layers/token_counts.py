"""What penalties need to know of a request's tokens, kept up to date as the text grows."""

from collections.abc import Sequence

import numpy as np
import torch

_FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of a request, and how often each was generated.

    The arrays grow with the text and not with the vocabulary. They are made of the tokens alone,
    so a request that comes back after a preemption gets the same ones.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._place_of = {int(token): place for place, token in enumerate(distinct)}
        capacity = max(2 * len(distinct), _FIRST_CAPACITY)
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(distinct)] = distinct
        self._num_generated = np.zeros(capacity, np.float32)
        self._num_counted = len(prompt_token_ids)

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Count what was generated since the last call; token_ids are the prompt's and those."""
        for token in token_ids[self._num_counted :]:
            place = self._place_of.setdefault(token, len(self._place_of))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                zeros = np.zeros_like(self._num_generated)
                self._num_generated = np.concatenate([self._num_generated, zeros])
            self._ids[place] = token
            self._num_generated[place] += 1
        self._num_counted = len(token_ids)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct tokens and how often each was generated, [D] int64 and float32."""
        end = len(self._place_of)
        ids, num_generated = self._ids[:end], self._num_generated[:end]
        return torch.from_numpy(ids).to(device), torch.from_numpy(num_generated).to(device)
