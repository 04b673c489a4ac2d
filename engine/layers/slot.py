"""One request as the layers behind the model see it: its tokens, and how the next is picked."""

from dataclasses import dataclass

from engine.layers.token_counts import TokenCounts
from engine.messages import SamplerSpec


@dataclass(slots=True, kw_only=True)
class Slot:
    """What the worker remembers of a request between steps.

    token_ids are those that the host knows. num_pending more were drawn on the device, by a step
    whose answer the host does not have yet. place is the slot's own in LastTokens.
    """

    uid: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampler: SamplerSpec
    place: int = 0
    num_pending: int = 0
    counts: TokenCounts | None = None  # made when a penalty first asks for them

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_sampling(self) -> bool:
        """True when every token is computed, so that the next one can be picked."""
        is_computed = self.num_computed_tokens == self.num_tokens
        return is_computed and not self.sampler.is_scoring_only
