"""Where two answers to one question part: the token, both versions of it, how near a tie it was."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import Completion, TokenLogprob
from flows.ledger_rows import CompletionRow

# How far the scores of a prompt may lie apart where rounding depends on the batch.
_SCORE_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a new answer differs from the stored one; what says it in words.

    token_index is the first token of the last turn that differs, and None where something else
    does. stored_token or new_token is None where that answer had ended before. margin is how much
    likelier the new run finds its own token than the stored one, as a difference of log
    probabilities: near 0 is a near tie. It is None where the stored token is not among the
    likeliest.
    """

    row_id: str
    row_index: int
    sample_index: int
    turn_index: int
    what: str
    token_index: int | None = None
    stored_token: int | None = None
    new_token: int | None = None
    margin: float | None = None


def find_difference(stored: CompletionRow, new: Completion, *, is_exact: bool) -> Difference | None:
    """Return where a new answer first differs from the stored one; None when it does not.

    is_exact is false where the last bits of a score depend on the batch.
    """
    found = Difference(
        row_id=stored.row_id,
        row_index=stored.row_index,
        sample_index=stored.sample_index,
        turn_index=len(stored.turns),
        what="tokens",
    )
    if new.error is not None:
        return replace(found, what=f"failed with {new.error.code.value}: {new.error.message}")
    for turn_index, (text, reply) in enumerate(zip(stored.turns, new.replies, strict=True)):
        if text != reply.text:
            return replace(found, what="text of an earlier turn", turn_index=turn_index)
    index = _first_difference(stored.token_ids, new.token_ids)
    if index is not None:
        stored_token, new_token = _at(stored.token_ids, index), _at(new.token_ids, index)
        return replace(
            found,
            token_index=index,
            stored_token=stored_token,
            new_token=new_token,
            margin=_margin(new.logprobs, index, stored_token),
        )
    if stored.text != new.text:
        return replace(found, what="text, though its tokens are the same")
    if not _have_equal_scores(stored, new, 0.0 if is_exact else _SCORE_TOLERANCE):
        return replace(found, what="scores of the prompt")
    return None


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(token_ids: Sequence[int], index: int) -> int | None:
    return token_ids[index] if index < len(token_ids) else None


def _margin(
    logprobs: Sequence[TokenLogprob] | None, index: int, stored_token: int | None
) -> float | None:
    if logprobs is None or index >= len(logprobs):
        return None
    likeliest = dict(logprobs[index].top)
    other = None if stored_token is None else likeliest.get(stored_token)
    return None if other is None else logprobs[index].logprob - other


def _have_equal_scores(stored: CompletionRow, new: Completion, tolerance: float) -> bool:
    old_scores = () if stored.logprobs is None else stored.logprobs.prompt
    return all(
        _is_same_score(old, score, tolerance)
        for old, score in zip(old_scores, new.prompt_logprobs or (), strict=True)
    )


def _is_same_score(old: TokenLogprob | None, new: TokenLogprob | None, tolerance: float) -> bool:
    if old is None or new is None:
        return old is new
    is_close = math.isclose(old.logprob, new.logprob, rel_tol=0.0, abs_tol=tolerance)
    are_undefined = math.isnan(old.logprob) and math.isnan(new.logprob)
    return old.token_id == new.token_id and (is_close or are_undefined)
