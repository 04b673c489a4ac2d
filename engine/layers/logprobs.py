"""Log probabilities of chosen tokens, their ranks, and the likeliest tokens beside them.

Shapes: N positions, V vocabulary, K likeliest tokens.
"""

from collections.abc import Sequence

import torch

from engine.logprobs import TokenLogprob

# Positions that are worked on at a time: their float32 log probabilities are a copy.
_PIECE = 64


def score(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Score one token at each position of raw logits [N, V], and name its likeliest ones.

    Each position is scored by its own logits alone, in float32; equally likely tokens are ordered
    by their id, so that a result does not depend on how a device sorts.
    """
    scored: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _PIECE):
        end = start + _PIECE
        logprobs = logits[start:end].float().log_softmax(dim=-1)
        scored += _score(logprobs, token_ids[start:end], num_top[start:end])
    return scored


def _score(
    logprobs: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    chosen = torch.tensor(token_ids, device=logprobs.device)[:, None]  # [N, 1]
    of_chosen = logprobs.gather(1, chosen)[:, 0].tolist()
    # One logit that is no number makes all log probabilities of its row none.
    is_broken = logprobs[:, 0].isnan()
    if is_broken.any():
        logprobs[is_broken] = float("-inf")
    tops = _likeliest(logprobs, max(*num_top, 1))
    return [
        TokenLogprob(token, logprob, _rank(row, token, top), tuple(top[:count]))
        for row, token, logprob, top, count in zip(
            logprobs, token_ids, of_chosen, tops, num_top, strict=True
        )
    ]


def _likeliest(logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens of each row of [N, V] and their log probabilities."""
    # One more tells whether tokens tie for the last place, of which topk takes any.
    values, ids = logprobs.topk(min(count + 1, logprobs.shape[1]), dim=1)  # [N, K + 1]
    tops = []
    for row, row_values, row_ids in zip(logprobs, values.tolist(), ids.tolist(), strict=True):
        if len(row_values) > count and row_values[count - 1] == row_values[count]:
            candidates = (row >= row_values[count]).nonzero()[:, 0]
            row_ids, row_values = candidates.tolist(), row[candidates].tolist()  # noqa: PLW2901
        pairs = zip(row_ids, row_values, strict=True)
        tops.append(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
    return tops


def _rank(row: torch.Tensor, token_id: int, top: list[tuple[int, float]]) -> int:
    """Return the place of a token among all of [V]; most tokens are among the likeliest."""
    for place, (token, _) in enumerate(top, start=1):
        if token == token_id:
            return place
    own = row[token_id]
    num_ties_before = (row[:token_id] == own).sum()
    return int((row > own).sum() + num_ties_before) + 1
