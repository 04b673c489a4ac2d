"""OpenAI's batch format: answers in one file, rows that failed or were skipped in another.

Source: OpenAI API reference, "The request output object", and the chat completion and completion
objects in it. Outputs hold no times, so `created` is 0. Ids are digests of the row's id.
"""

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from engine import TokenLogprob
from flows.ledger_rows import CompletionRow
from flows.outputs.answers import AnsweredRow
from flows.outputs.faults import fault_of
from flows.outputs.files import OutputFile
from flows.outputs.results import TokenTexts
from flows.outputs.strict_json import to_strict_json
from flows.rows import PromptRecord
from flows.schema import RowState
from flows.sources.openai_batch import CHAT_URL, COMPLETIONS_URL

# What OpenAI writes for a token that is very unlikely; its clients do not take null there.
_UNLIKELY = -9999.0


class OpenAIBatchWriter:
    """Writes one line for each row: n samples are the n choices of one answer."""

    def __init__(
        self, file: OutputFile, errors_file: OutputFile, texts: TokenTexts, *, model: str
    ) -> None:
        self._file = file
        self._errors_file = errors_file
        self._texts = texts
        self._model = model

    def write(self, row: AnsweredRow) -> None:
        """Write the row's line, to the file of answers or to that of errors."""
        row_id = row.record.row_id
        line = {"id": f"batch_req_{_digest(row_id, 'line')}", "custom_id": row_id}
        if row.worst.state is RowState.OK:
            self._file.write(to_strict_json(line | self._answer(row)))
        else:
            self._errors_file.write(to_strict_json(line | _failure(row)))

    def finish(self) -> None:
        """Nothing ends the files."""

    def _answer(self, row: AnsweredRow) -> dict[str, Any]:
        is_chat = _is_chat(row)
        num_prompt = row.samples[0].num_prompt_tokens
        num_output = sum(sample.num_output_tokens for sample in row.samples)
        body: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_digest(row.record.row_id, 'body')}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": _asked_model(row) or self._model,
            "choices": [
                self._chat_choice(row, sample) if is_chat else self._text_choice(sample)
                for sample in row.samples
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
            },
            "system_fingerprint": None,
        }
        prompt_logprobs = self._prompt_logprobs(row.samples[0])
        if prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs
        if row.samples[0].is_truncated:
            body["is_truncated"] = True
        return {"response": _response(row, 200, body), "error": None}

    def _chat_choice(self, row: AnsweredRow, sample: CompletionRow) -> dict[str, Any]:
        entries = _output_logprobs(sample)
        choice = {
            "index": sample.sample_index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": None if entries is None else self._chat_logprobs(entries),
            "finish_reason": sample.finish_reason,
        }
        if isinstance(row.record, PromptRecord) and row.record.turns:
            choice["replies"] = [*sample.turns, sample.text]
        return choice

    def _text_choice(self, sample: CompletionRow) -> dict[str, Any]:
        entries = _output_logprobs(sample)
        return {
            "index": sample.sample_index,
            "text": sample.text,
            "logprobs": None if entries is None else self._text_logprobs(entries),
            "finish_reason": sample.finish_reason,
        }

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._chat_token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._chat_token(*likely) for likely in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._texts[token_id]
        # A token may be a part of a character; then its text does not say which bytes it is.
        is_whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": _number(logprob),
            "bytes": list(text.encode("utf-8")) if is_whole else None,
        }

    def _text_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._texts[entry.token_id] for entry in entries]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": [self._by_text(_with_chosen(entry)) for entry in entries],
            "text_offset": offsets,
        }

    def _by_text(self, likely: Iterable[tuple[int, float]]) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, logprob in likely:
            # Two tokens may have one text; the likelier comes first.
            by_text.setdefault(self._texts[token_id], _number(logprob))
        return by_text

    def _prompt_logprobs(self, sample: CompletionRow) -> list[dict[str, Any] | None] | None:
        """Return the prompt's logprobs in the form of vLLM; OpenAI has none."""
        if sample.logprobs is None or not sample.logprobs.prompt:
            return None
        return [None if entry is None else self._ranked(entry) for entry in sample.logprobs.prompt]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = [(entry.rank, entry.token_id, entry.logprob)]
        ranked += [(rank, *likely) for rank, likely in enumerate(entry.top, start=1)]
        return {
            str(token_id): {
                "logprob": _number(logprob),
                "rank": rank,
                "decoded_token": self._texts[token_id],
            }
            for rank, token_id, logprob in ranked
        }


def _failure(row: AnsweredRow) -> dict[str, Any]:
    """Return response and error of a row without an answer.

    A request that was refused has an HTTP answer; one that was not executed has none.
    """
    sample = row.worst
    is_skipped = sample.state is RowState.SKIPPED
    code = sample.error_code or ("skipped" if is_skipped else "unknown")
    message = sample.error_message or "the row was left out on purpose"
    status_code = None if is_skipped else fault_of(code).status_code
    if status_code is None:
        return {"response": None, "error": {"code": code, "message": message}}
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return {"response": _response(row, status_code, {"error": error}), "error": None}


def _response(row: AnsweredRow, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    request_id = _digest(row.record.row_id, "request")
    return {"status_code": status_code, "request_id": request_id, "body": body}


def _is_chat(row: AnsweredRow) -> bool:
    url = row.record.columns.get("url")
    if url in (CHAT_URL, COMPLETIONS_URL):
        return bool(url == CHAT_URL)
    return isinstance(row.record, PromptRecord) and row.record.messages is not None


def _asked_model(row: AnsweredRow) -> str | None:
    body = row.record.columns.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else None


def _output_logprobs(sample: CompletionRow) -> Sequence[TokenLogprob] | None:
    return None if sample.logprobs is None else sample.logprobs.output or None


def _with_chosen(entry: TokenLogprob) -> list[tuple[int, float]]:
    return [*entry.top, (entry.token_id, entry.logprob)]


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _UNLIKELY


def _digest(row_id: str, purpose: str) -> str:
    person = purpose.encode("ascii")
    return blake2b(row_id.encode("utf-8"), digest_size=16, person=person).hexdigest()
