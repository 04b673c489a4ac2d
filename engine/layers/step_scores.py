"""The log probabilities that the requests of one step have asked for.

Shapes: A rows that ask for those of their drawn token, P prompt tokens, V vocabulary.
"""

import torch

from engine.layers.logprobs import score
from engine.layers.model_input import ModelInput
from engine.logprobs import ScoredPart, TokenLogprob

# Of drawn tokens, and of prompt tokens; by uid.
StepScores = tuple[dict[int, TokenLogprob], dict[int, ScoredPart]]


def asking_rows(step: ModelInput) -> list[int]:
    """Return which of the sampling rows ask for the log probability of their token."""
    return [row for row, slot in enumerate(step.sampling) if slot.sampler.logprobs is not None]


def score_step(
    raw: torch.Tensor, prompt_logits: torch.Tensor, step: ModelInput, drawn: list[int]
) -> StepScores:
    """Score the drawn tokens by raw logits [A, V] of the asking rows, and prompts by [P, V]."""
    rows = asking_rows(step)
    slots = [step.sampling[row] for row in rows]
    scores = score(
        raw, [drawn[row] for row in rows], [slot.sampler.logprobs or 0 for slot in slots]
    )
    of_drawn = {slot.uid: found for slot, found in zip(slots, scores, strict=True)}
    parts: dict[int, ScoredPart] = {}
    start = 0
    for span in step.scored:
        count = len(span.token_ids)
        num_top = span.slot.sampler.prompt_logprobs or 0
        found = score(prompt_logits[start : start + count], span.token_ids, [num_top] * count)
        parts[span.slot.uid] = ScoredPart(span.start, found)
        start += count
    return of_drawn, parts
