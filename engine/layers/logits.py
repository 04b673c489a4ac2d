"""What a request's parameters do to its logits before a token is picked, greedy or not.

The order is vLLM's: what is forbidden and biased first, then penalties. Temperature and the
filters that only matter to a draw follow in sampler.py. Each row is changed by its own parameters
alone.

Shapes: R rows that sample, V vocabulary, D distinct tokens of a request.
"""

from collections.abc import Sequence

import torch

from engine.layers.slot import Slot
from engine.layers.token_counts import TokenCounts
from engine.messages import SamplerSpec

_NEVER = float("-inf")


def process(logits: torch.Tensor, slots: Sequence[Slot]) -> None:
    """Change float32 logits [R, V] in place, each row as its request wants."""
    for row, slot in zip(logits, slots, strict=True):
        spec = slot.sampler
        if spec.logit_bias:
            _add_bias(row, spec.logit_bias)
        if spec.bad_words:
            _forbid(row, _ends_of_bad_words(spec.bad_words, slot))
        if slot.num_output_tokens < spec.min_tokens:
            _forbid(row, spec.forbidden_token_ids)
        if _has_penalties(spec):
            _penalise(row, slot)


def needs_history(spec: SamplerSpec) -> bool:
    """Tell whether `process` looks at the tokens before, which the host must know for that."""
    return _has_penalties(spec) or bool(spec.bad_words)


def _add_bias(row: torch.Tensor, logit_bias: dict[int, float]) -> None:
    ids = torch.tensor(list(logit_bias), device=row.device)
    row[ids] += torch.tensor(list(logit_bias.values()), dtype=row.dtype, device=row.device)


def _forbid(row: torch.Tensor, token_ids: Sequence[int]) -> None:
    # An EOS id that a model folder names may lie outside of the vocabulary.
    known = [token for token in token_ids if token < len(row)]
    if known:
        row[torch.tensor(known, device=row.device)] = _NEVER


def _ends_of_bad_words(bad_words: Sequence[Sequence[int]], slot: Slot) -> list[int]:
    """Return the tokens that would complete a bad word; only generated tokens begin one."""
    num_output = slot.num_output_tokens
    return [
        last
        for *beginning, last in bad_words
        if len(beginning) <= num_output
        and slot.token_ids[len(slot.token_ids) - len(beginning) :] == beginning
    ]


def _has_penalties(spec: SamplerSpec) -> bool:
    return (
        spec.repetition_penalty != 1.0
        or spec.frequency_penalty != 0.0
        or spec.presence_penalty != 0.0
    )


def _penalise(row: torch.Tensor, slot: Slot) -> None:
    """Make tokens that were there before less likely.

    Source: repetition_penalty by Keskar et al. 2019 (CTRL), over prompt and generated tokens;
    frequency_penalty and presence_penalty as OpenAI's API defines them, over generated tokens.
    """
    spec = slot.sampler
    if slot.counts is None:
        slot.counts = TokenCounts(slot.token_ids[: slot.num_prompt_tokens])
    slot.counts.catch_up(slot.token_ids)
    ids, num_generated = slot.counts.on(row.device)  # [D], [D]
    seen = row[ids]
    penalty = spec.repetition_penalty
    seen = torch.where(seen > 0, seen / penalty, seen * penalty)
    seen -= spec.frequency_penalty * num_generated
    seen -= spec.presence_penalty * (num_generated > 0)
    row[ids] = seen
