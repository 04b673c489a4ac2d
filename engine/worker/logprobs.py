"""Log probabilities of chosen tokens, their ranks, and the likeliest tokens beside them.

Shapes: N positions, V vocabulary, K likeliest tokens.
"""

from collections.abc import Sequence
from itertools import islice

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
    device = logprobs.device
    chosen = torch.tensor(token_ids, device=device)[:, None]  # [N, 1]
    # What is no number is less likely than everything else.
    order = logprobs.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    least = order.gather(1, chosen)  # [N, 1]
    is_tie_before = (order == least) & (torch.arange(order.shape[1], device=device) < chosen)
    ranks = ((order > least) | is_tie_before).sum(dim=1) + 1
    tops = _likeliest(order, max(num_top))
    return [
        TokenLogprob(token, logprob, rank, tuple(islice(top, count)))
        for token, logprob, rank, top, count in zip(
            token_ids,
            logprobs.gather(1, chosen)[:, 0].tolist(),
            ranks.tolist(),
            tops,
            num_top,
            strict=True,
        )
    ]


def _likeliest(order: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` likeliest tokens of each row of [N, V] and their log probabilities."""
    count = min(count, order.shape[1])
    if count == 0:
        return [[] for _ in order]
    values, ids = order.topk(count, dim=1)  # [N, K]
    num_candidates = (order >= values[:, -1:]).sum(dim=1).tolist()
    tops = []
    for row, found in enumerate(num_candidates):
        # Of tokens that tie for the last place, topk takes any.
        if found > count:
            candidates = (order[row] >= values[row, -1]).nonzero()[:, 0]
            pairs = zip(candidates.tolist(), order[row, candidates].tolist(), strict=True)
        else:
            pairs = zip(ids[row].tolist(), values[row].tolist(), strict=True)
        tops.append(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
    return tops
