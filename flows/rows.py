"""One row: its types, and the way from a line's bytes to its columns.

It knows neither files nor templates; whoever reads the line adds file and line to the message.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from engine import GenerateRequest, RequestError, RequestErrorCode, SamplingParams

# json itself gives up somewhere near Python's recursion limit, which depends on who calls; a fixed
# limit gives one row the same answer in every caller, when it is read and when it is written.
MAX_NESTING = 200
_MAX_SHOWN_NAMES = 20
_MAX_SHOWN_CHARACTERS = 60
_SURROGATES = re.compile("[\ud800-\udfff]")


class RowLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a row stands: the file of the source, and the place in that file.

    offset is what the file's format seeks by: bytes from the start of the text (unpacked, where it
    is compressed), or rows. line is what a person looks for, from 1: a line, or a row of a table.
    """

    source_index: int
    file_index: int = 0
    offset: int
    line: int


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row that can be asked; exactly one of prompt, messages, prompt_token_ids is set.

    row_index is the position in the whole input, over all sources, from 0. turns are the user
    messages of a conversation, empty when the row is none; messages then end with the first of
    them. sampling holds overrides that nobody has validated yet. columns are the row as it was
    written, to be carried to the output.
    """

    row_index: int
    row_id: str
    location: RowLocation
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    turns: tuple[str, ...] = ()
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: int = 0
    timeout_seconds: float | None = None
    columns: dict[str, Any] = msgspec.field(default_factory=dict)

    def to_request(
        self, sampling_params: SamplingParams, *, default_timeout_seconds: float | None = None
    ) -> GenerateRequest:
        """Return the request that asks the engine about this row."""
        own_timeout = self.timeout_seconds
        return GenerateRequest(
            request_id=self.row_id,
            prompt=self.prompt,
            messages=self.messages,
            prompt_token_ids=self.prompt_token_ids,
            sampling_params=sampling_params,
            priority=self.priority,
            timeout_seconds=default_timeout_seconds if own_timeout is None else own_timeout,
            turns=self.turns[1:],
        )


class BadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that cannot be asked, and why; columns hold what could be read of it."""

    row_index: int
    row_id: str
    location: RowLocation
    error: RequestError
    columns: dict[str, Any] = msgspec.field(default_factory=dict)


def printable(text: str) -> str:
    """Return the text with what a database refuses (lone surrogates, NUL) written as escapes."""
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text.replace("\0", "\\x00")


def without_surrogates(value: Any) -> Any:
    """Return the value with each lone surrogate in its strings replaced by U+FFFD.

    A tokenizer takes UTF-8, which cannot spell them.
    """
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def shown(value: object) -> str:
    """Return the value as an error message shows it: its repr, cut to a short piece."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."


def shown_names(names: Iterable[str]) -> str:
    """Return column names as an error message lists them."""
    listed = [shown(name) for name in names]
    more = len(listed) - _MAX_SHOWN_NAMES
    text = ", ".join(listed[:_MAX_SHOWN_NAMES]) or "none"
    return f"{text} and {more} more" if more > 0 else text


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(
            RequestErrorCode.BAD_JSON,
            f"the key {shown(twice)} is there twice in one object; keep one of them",
        )
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def parse_columns(line: bytes) -> dict[str, Any]:
    """Return the columns of a row from its line.

    Raises:
        RequestError: not UTF-8, not JSON, not an object, a key twice, or nested too deep.
    """
    try:
        # surrogatepass: a lone surrogate spelt in bytes is treated like one spelt as an escape.
        value = _DECODER.decode(line.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise RequestError(
            RequestErrorCode.BAD_JSON,
            f"byte {line[error.start]:#04x} at position {error.start + 1} of the line is not "
            "UTF-8; save the file as UTF-8 text, uncompressed",
        ) from error
    except RecursionError as error:
        raise _nested_too_deep() from error
    except ValueError as error:
        raise RequestError(RequestErrorCode.BAD_JSON, _describe_json_error(error, line)) from error
    if not isinstance(value, dict):
        raise RequestError(
            RequestErrorCode.BAD_ROW,
            f"found {json_type(value)}, wanted one JSON object that holds the row's columns",
        )
    may_be_deep = line.count(b"[") + line.count(b"{") > MAX_NESTING
    if may_be_deep and not _is_nested_within(value, MAX_NESTING):
        raise _nested_too_deep()
    return value


def _nested_too_deep() -> RequestError:
    return RequestError(
        RequestErrorCode.BAD_ROW,
        f"nested deeper than {MAX_NESTING} levels; flatten the row",
    )


def _is_nested_within(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return True
    return False


def _describe_json_error(error: ValueError, line: bytes) -> str:
    start = shown(line.decode("utf-8", "replace").strip()[: _MAX_SHOWN_CHARACTERS + 1])
    if isinstance(error, json.JSONDecodeError):
        what = f"{error.msg} at column {error.pos + 1}"
    else:
        # The other ValueError of json: a whole number with more digits than Python converts.
        what = "a number has too many digits"
    return f"not valid JSON: {what}; found {start}; write one JSON object on each line"


def json_type(value: object) -> str:
    """Return what an error message calls the kind of a value read from JSON."""
    names = {dict: "an object", list: "an array", str: "a string", type(None): "null"}
    names |= {bool: "a boolean", int: "a number", float: "a number"}
    return names[type(value)]
