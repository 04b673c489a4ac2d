"""What a request says in token ids: is it something that the model knows, and how much is kept.

Knows no tokenizer; what has to encode a text is given the means.
"""

import operator
from collections.abc import Callable, Sequence

from engine.errors import RequestError, RequestErrorCode
from engine.sampling_params import SamplingParams


def as_integers(token_ids: Sequence[int]) -> list[int]:
    """Return the numbers of a list, a numpy array or a tensor of one dimension.

    Raises:
        RequestError: it holds something else.
    """
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError as error:
        raise RequestError(
            RequestErrorCode.BAD_ROW, f"prompt_token_ids holds something else: {error}"
        ) from error


def check_vocabulary(source: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for; a tokenizer may know more tokens.

    Raises:
        RequestError: an id is out of the vocabulary, with its number.
    """
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        raise RequestError(
            RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
            f"{source} holds token {lowest if lowest < 0 else highest}; the model knows 0 to "
            f"{vocab_size - 1}",
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens which the model has not.

    Raises:
        RequestError: names the parameter and the token.
    """
    if not (params.stop_token_ids or params.logit_bias):
        return  # as in most of a million rows
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        highest = max(token_ids, default=0)
        if highest >= vocab_size:
            raise _refusal(f"{name} names token {highest}; the model knows 0 to {vocab_size - 1}")


def truncate(
    token_ids: list[int], limit: int, *, num_fixed: int, bos_token_id: int | None
) -> list[int]:
    """Return the end of a prompt that is longer than `limit`, and a leading BOS before it.

    Args:
        token_ids: the whole prompt.
        limit: most tokens that are kept.
        num_fixed: tokens at the end that must stay, those of a generation prompt.
        bos_token_id: the token that begins a text, if there is one.

    Raises:
        RequestError: what must stay is longer than the limit.
    """
    beginning = token_ids[:1] if token_ids[0] == bos_token_id else []
    needed = len(beginning) + num_fixed if num_fixed else 1
    if needed > limit:
        raise _refusal(
            f"truncate_prompt_tokens is {limit}, but the generation prompt of the chat template, "
            f"which is never cut, takes {needed} tokens; raise it"
        )
    if limit == 1:
        return token_ids[-1:]
    return beginning + token_ids[len(beginning) - limit :]


def spell_bad_words(
    words: Sequence[str], encode: Callable[[str], Sequence[int]], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell words, at the beginning of a text and inside of it.

    Source: vLLM's SamplingParams.update_from_tokenizer. The spelling with a space before it
    counts only where it has as many tokens and another first one: else the space is a token of
    its own, and what follows is the first spelling.

    Raises:
        RequestError: the model cannot spell a word.
    """
    spellings: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (tuple(encode(space + word.lstrip())) for space in ("", " "))
        if not plain or max(plain) >= vocab_size:
            raise _refusal(f"bad_words holds {word!r}, which the model cannot spell; remove it")
        spellings.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            spellings.append(spaced)
    return tuple(spellings)


def _refusal(problem: str) -> RequestError:
    return RequestError(RequestErrorCode.INVALID_SAMPLING_PARAMS, f"sampling parameter {problem}")
