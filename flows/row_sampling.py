"""How one row is sampled: its overrides over the job's sampling, worked out once for equal ones.

Planner and shards lay the same things over each other here, so that a row is asked as it was
planned.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from engine import SamplingParams
from flows.rows import PromptRecord

# Rows of a file have few different overrides, or as many as there are rows.
_MAX_KNOWN = 1000
_IDENTITY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """The parameters of a row, and what they say of rows that are the same.

    identity is a hash, equal for parameters that give the same answer. may_fold is true when the answer
    depends on nothing but prompt and identity: nothing is drawn, and there is one sample.
    """

    params: SamplingParams
    identity: bytes
    may_fold: bool


class RowSampling:
    """Lays rows' overrides over a default. One thread each."""

    def __init__(self, default: SamplingParams) -> None:
        self._default = default
        self._of_the_job = _resolve(default)
        self._known: dict[str, ResolvedSampling] = {}

    def of(
        self, record: PromptRecord, *, truncate_prompt_tokens: int | None = None
    ) -> ResolvedSampling:
        """Return how the row is sampled; truncate_prompt_tokens is laid over all else.

        Raises:
            RequestError: an override does not exist or is out of range.
        """
        overrides = record.sampling
        if truncate_prompt_tokens is not None:
            overrides = overrides | {"truncate_prompt_tokens": truncate_prompt_tokens}
        if not overrides:
            return self._of_the_job
        key = json.dumps(overrides)
        known = self._known.get(key)
        if known is None:
            known = _resolve(self._default.overlaid(overrides))
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            self._known[key] = known
        return known


def _resolve(params: SamplingParams) -> ResolvedSampling:
    draws_nothing = params.is_greedy or params.is_scoring_only
    asked = params.model_dump(mode="json", exclude={"seed"} if draws_nothing else None)
    sorted_json = msgspec.json.encode(asked, order="sorted")
    return ResolvedSampling(
        params=params,
        identity=blake2b(sorted_json, digest_size=_IDENTITY_BYTES).digest(),
        may_fold=draws_nothing and params.n == 1,
    )
