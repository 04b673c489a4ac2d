"""One request as the layers behind the model see it: its tokens, and how the next is picked."""

from dataclasses import dataclass

from engine.layers.token_counts import TokenCounts
from engine.messages import SamplerSpec


@dataclass(slots=True, kw_only=True)
class Slot:
    """What the worker remembers of a request between steps."""

    uid: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampler: SamplerSpec
    counts: TokenCounts | None = None  # made when a penalty first asks for them

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_sampling(self) -> bool:
        """True when every token is computed, so that the next one can be picked."""
        is_computed = self.num_computed_tokens == len(self.token_ids)
        return is_computed and not self.sampler.is_scoring_only
