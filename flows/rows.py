"""One row: its types, and the way from a line's bytes to its columns and typed fields.

It knows neither files nor templates; whoever reads the line adds file and line to the message.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine import GenerateRequest, RequestError, RequestErrorCode, SamplingParams
from flows.config import ColumnMapping

# json itself gives up somewhere near Python's recursion limit, which depends on who calls; a fixed
# limit gives one row the same answer in every caller, when it is read and when it is written.
MAX_NESTING = 200
_MAX_SHOWN_NAMES = 20
_MAX_SHOWN_CHARACTERS = 60
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLocation:
    """Where a row stands: byte offset of its line in the source, and its 1-based line number."""

    source_index: int
    offset: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """A row that can be asked; exactly one of prompt, messages, prompt_token_ids is set.

    row_index is the position in the whole input, over all sources, from 0. sampling holds
    overrides that nobody has validated yet. columns are the row as it was written, to be carried
    to the output.
    """

    row_index: int
    row_id: str
    location: RowLocation
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    columns: dict[str, Any] = field(default_factory=dict)

    def to_request(self, sampling_params: SamplingParams) -> GenerateRequest:
        """Return the request that asks the engine about this row."""
        return GenerateRequest(
            request_id=self.row_id,
            prompt=self.prompt,
            messages=self.messages,
            prompt_token_ids=self.prompt_token_ids,
            sampling_params=sampling_params,
            priority=self.priority,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be asked, and why; columns hold what could be read of it."""

    row_index: int
    row_id: str
    location: RowLocation
    error: RequestError
    columns: dict[str, Any] = field(default_factory=dict)


def printable(text: str) -> str:
    """Return the text with what a database refuses (lone surrogates, NUL) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


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


def parse_columns(line: bytes) -> dict[str, Any]:
    """Return the columns of a row from its line.

    Raises:
        RequestError: not UTF-8, not JSON, not an object, or nested too deep.
    """
    try:
        # surrogatepass: a lone surrogate spelt in bytes is treated like one spelt as an escape.
        value = json.loads(line.decode("utf-8", "surrogatepass"))
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
            f"found {_json_type(value)}, wanted one JSON object that holds the row's columns",
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


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", type(None): "null"}
    names |= {bool: "a boolean", int: "a number", float: "a number"}
    return names[type(value)]


def read_row_id(columns: dict[str, Any], mapping: ColumnMapping) -> str | None:
    """Return the user's id of the row, None when it has none.

    Raises:
        RequestError: the id is neither text nor a whole number, or cannot be stored.
    """
    value = None if mapping.id is None else columns.get(mapping.id)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        problem = f"is {_json_type(value)} {shown(value)}, wanted a string or a whole number"
    elif printable(text := str(value)) != text:
        problem = f"is {shown(value)}, which holds a NUL or half of a surrogate pair"
    elif not text:
        problem = "is an empty string; write null for a row without id"
    else:
        return text
    raise _bad_field(mapping.id, problem, "columns.id")


def read_messages(columns: dict[str, Any], mapping: ColumnMapping) -> list[dict[str, Any]]:
    """Return the row's chat messages.

    Raises:
        RequestError: not a list of objects with a role and, where given, readable content.
    """
    value = columns[mapping.messages]
    if not isinstance(value, list) or not value:
        problem = f"is {shown(value)}, wanted a list of at least one message"
        raise _bad_field(mapping.messages, problem, "columns.messages")
    for index, message in enumerate(value):
        place = f"{mapping.messages}[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            problem = f"is {shown(message)}, wanted an object with a string `role`"
            raise _bad_field(place, problem, "columns.messages")
        content = message.get("content")
        if not (content is None or isinstance(content, str | list)):
            problem = f"has content {shown(content)}, wanted a string or a list of parts"
            raise _bad_field(place, problem, "columns.messages")
    return value


def read_prompt_token_ids(columns: dict[str, Any], mapping: ColumnMapping) -> list[int]:
    """Return the row's ready token ids; whether the vocabulary has them is not checked here.

    Raises:
        RequestError: not a list of whole numbers.
    """
    value = columns[mapping.prompt_token_ids]
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        problem = f"is {shown(value)}, wanted a list of whole numbers"
        raise _bad_field(mapping.prompt_token_ids, problem, "columns.prompt_token_ids")
    return value


def read_prompt_text(columns: dict[str, Any], mapping: ColumnMapping) -> str:
    """Return the row's prompt string.

    Raises:
        RequestError: not a string.
    """
    value = columns[mapping.prompt]
    if not isinstance(value, str):
        problem = (
            f"is {_json_type(value)} {shown(value)}, wanted a string; chat messages belong in "
            f"{mapping.messages!r}, token ids in {mapping.prompt_token_ids!r}"
        )
        raise _bad_field(mapping.prompt, problem, "columns.prompt")
    return value


def read_sampling(columns: dict[str, Any], mapping: ColumnMapping) -> dict[str, Any]:
    """Return the row's sampling overrides; names and ranges are not checked here.

    Raises:
        RequestError: not an object.
    """
    value = columns.get(mapping.sampling)
    if value is None:
        return {}
    if not isinstance(value, dict):
        problem = f"is {shown(value)}, wanted an object such as {{'temperature': 0.5}}"
        code = RequestErrorCode.INVALID_SAMPLING_PARAMS
        raise _bad_field(mapping.sampling, problem, "columns.sampling", code=code)
    return value


def read_priority(columns: dict[str, Any], mapping: ColumnMapping) -> int:
    """Return the row's priority, 0 when it has none.

    Raises:
        RequestError: not a whole number.
    """
    value = columns.get(mapping.priority)
    if value is None:
        return 0
    if type(value) is not int:
        problem = f"is {shown(value)}, wanted a whole number"
        raise _bad_field(mapping.priority, problem, "columns.priority")
    return value


def _bad_field(
    name: str | None,
    problem: str,
    setting: str,
    *,
    code: RequestErrorCode = RequestErrorCode.BAD_ROW,
) -> RequestError:
    return RequestError(
        code,
        f"{name} {problem}; mend the row, or name another column in the source's {setting}",
    )
