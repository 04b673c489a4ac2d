"""The result fields of one sample, as JSONL has them and tables lay them out in columns."""

import math
from collections.abc import Iterable
from typing import Any

from engine import EngineConfig, ModelSource, Tokenizer, TokenLogprob
from flows.ledger_rows import CompletionRow
from flows.logprob_blob import StoredLogprobs
from flows.outputs.answers import AnsweredRow
from flows.rows import PromptRecord


class TokenTexts:
    """The text of a token id. The tokenizer is loaded when the first one is asked for."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer: Tokenizer | None = None
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            if self._tokenizer is None:
                source = ModelSource.inspect(self._config)
                self._tokenizer = Tokenizer.load(self._config, source)
            text = self._known[token_id] = self._tokenizer.token_text(token_id)
        return text


def results_of(row: AnsweredRow, sample: CompletionRow, texts: TokenTexts) -> dict[str, Any]:
    """Return the result fields; those that only some rows have are left out of the others."""
    results: dict[str, Any] = {}
    if sample.num_samples > 1:
        results["sample_index"] = sample.sample_index
    results["text"] = sample.text
    if isinstance(row.record, PromptRecord) and row.record.turns:
        last = () if sample.text is None else (sample.text,)
        results["replies"] = [*sample.turns, *last]
    results["finish_reason"] = sample.finish_reason
    results["num_prompt_tokens"] = sample.num_prompt_tokens
    results["num_output_tokens"] = sample.num_output_tokens
    if sample.is_truncated:
        results["is_truncated"] = True
    if sample.logprobs is not None:
        results |= _logprobs(sample.logprobs, texts)
    results["error"] = None
    if sample.error_code is not None:
        results["error"] = {"code": sample.error_code, "message": sample.error_message}
    return results


def _logprobs(stored: StoredLogprobs, texts: TokenTexts) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if stored.output:
        fields["logprobs"] = _tokens(stored.output, texts)
    if stored.turns:
        replies = (*stored.turns, *([stored.output] if stored.output else []))
        fields["reply_logprobs"] = [_tokens(reply, texts) for reply in replies]
    if stored.prompt:
        fields["prompt_logprobs"] = _tokens(stored.prompt, texts)
    return fields


def _tokens(
    entries: Iterable[TokenLogprob | None], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    return [None if entry is None else _token(entry, texts) for entry in entries]


def _token(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts[entry.token_id],
        "token_id": entry.token_id,
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "top": [
            {"token": texts[token_id], "token_id": token_id, "logprob": _finite(logprob)}
            for token_id, logprob in entry.top
        ],
    }


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None
