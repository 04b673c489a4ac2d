"""Tokens to text while they come: a growing list of tokens, a growing text."""

from engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Turns a growing list of tokens into a growing text.

    Decodes from a token that began a piece of text of its own, so that the cost of a token does
    not grow with the text, and holds back a tail that is not yet a whole character. At the end
    the text equals decoding the whole sequence.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._prefix_start = 0
        self._read_until = 0

    def push(self, token_id: int) -> str:
        """Add one token and return the text that became certain, often the token's own."""
        self._token_ids.append(token_id)
        return self._advance(is_end=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> str:
        window = self._token_ids[self._prefix_start :]
        known = self._decode(window[: self._read_until - self._prefix_start])
        text = self._decode(window)
        if len(text) <= len(known) or (text.endswith(_REPLACEMENT) and not is_end):
            return ""
        self._prefix_start, self._read_until = self._read_until, len(self._token_ids)
        return text[len(known) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
