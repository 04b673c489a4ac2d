"""Log probabilities as they leave the worker and reach the caller; no tensor, no text."""

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely the model found one token, by its own logits before any sampling parameter.

    rank is 1 for the likeliest token; of equally likely ones the smaller id comes first. top are
    (token id, log probability) of the likeliest tokens, as many as were asked for. A logprob may
    be -inf or, when the model's logits are no numbers, NaN.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class ScoredPart(msgspec.Struct, frozen=True, array_like=True):
    """The prompt tokens from position `start` on, as far as one step has scored them."""

    start: int
    logprobs: list[TokenLogprob]
