"""The typed fields of a row: what its columns hold of ids, prompts, sampling and the like.

Each reader says what it found, what it wanted, and which setting names another column.
"""

from typing import Any

from engine import RequestError, RequestErrorCode
from flows.config import MAX_TIMEOUT_SECONDS, ColumnMapping
from flows.rows import json_type, printable, shown


def read_row_id(columns: dict[str, Any], mapping: ColumnMapping) -> str | None:
    """Return the user's id of the row, None when it has none.

    Raises:
        RequestError: the id is neither text nor a whole number, or cannot be stored.
    """
    value = None if mapping.id is None else columns.get(mapping.id)
    return None if value is None else check_row_id(value, str(mapping.id), "columns.id")


def check_row_id(value: object, name: str, setting: str | None) -> str:
    """Return the id as text. setting is what names another column, None where nothing does.

    Raises:
        RequestError: it is neither text nor a whole number, or cannot be stored.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        problem = f"is {json_type(value)} {shown(value)}, wanted a string or a whole number"
    elif printable(text := str(value)) != text:
        problem = f"is {shown(value)}, which holds a NUL or half of a surrogate pair"
    elif not text:
        problem = "is an empty string; write null for a row without id"
    else:
        return text
    raise _bad_field(name, problem, setting)


def read_messages(columns: dict[str, Any], mapping: ColumnMapping) -> list[dict[str, Any]]:
    """Return the row's chat messages.

    Raises:
        RequestError: not a list of objects with a role and, where given, readable content.
    """
    return check_messages(columns[mapping.messages], mapping.messages, "columns.messages")


def check_messages(value: object, name: str, setting: str | None) -> list[dict[str, Any]]:
    """Return the chat messages. setting is what names another column, None where nothing does.

    Raises:
        RequestError: not a list of objects with a role and, where given, readable content.
    """
    if not isinstance(value, list) or not value:
        problem = f"is {shown(value)}, wanted a list of at least one message"
        raise _bad_field(name, problem, setting)
    for index, message in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            problem = f"is {shown(message)}, wanted an object with a string `role`"
            raise _bad_field(place, problem, setting)
        content = message.get("content")
        if not (content is None or isinstance(content, str | list)):
            problem = f"has content {shown(content)}, wanted a string or a list of parts"
            raise _bad_field(place, problem, setting)
    return value


def read_prompt_token_ids(columns: dict[str, Any], mapping: ColumnMapping) -> list[int]:
    """Return the row's ready token ids; whether the vocabulary has them is not checked here.

    Raises:
        RequestError: not a list of whole numbers.
    """
    value = columns[mapping.prompt_token_ids]
    return check_token_ids(value, mapping.prompt_token_ids, "columns.prompt_token_ids")


def check_token_ids(value: object, name: str, setting: str | None) -> list[int]:
    """Return the token ids. setting is what names another column, None where nothing does.

    Raises:
        RequestError: not a list of whole numbers.
    """
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise _bad_field(name, f"is {shown(value)}, wanted a list of whole numbers", setting)
    return value


def read_prompt_text(columns: dict[str, Any], mapping: ColumnMapping) -> str:
    """Return the row's prompt string.

    Raises:
        RequestError: not a string.
    """
    value = columns[mapping.prompt]
    if not isinstance(value, str):
        problem = (
            f"is {json_type(value)} {shown(value)}, wanted a string; chat messages belong in "
            f"{mapping.messages!r}, token ids in {mapping.prompt_token_ids!r}"
        )
        raise _bad_field(mapping.prompt, problem, "columns.prompt")
    return value


def read_turns(columns: dict[str, Any], mapping: ColumnMapping) -> list[str]:
    """Return the user messages of the row's conversation, in the order they are asked.

    Raises:
        RequestError: not a list of at least one string.
    """
    value = columns[mapping.turns]
    if not isinstance(value, list) or not value:
        problem = f"is {shown(value)}, wanted a list of at least one user message"
        raise _bad_field(mapping.turns, problem, "columns.turns")
    for index, message in enumerate(value):
        if not isinstance(message, str):
            problem = (
                f"is {json_type(message)} {shown(message)}, wanted the text of a user message; "
                f"chat messages with roles belong in {mapping.messages!r}"
            )
            raise _bad_field(f"{mapping.turns}[{index}]", problem, "columns.turns")
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


def read_timeout_seconds(columns: dict[str, Any], mapping: ColumnMapping) -> float | None:
    """Return how long the row may take, None when it says nothing.

    Raises:
        RequestError: not a number above 0.
    """
    value = columns.get(mapping.timeout_seconds)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_TIMEOUT_SECONDS:
        problem = f"is {shown(value)}, wanted seconds above 0, at most {MAX_TIMEOUT_SECONDS}"
        raise _bad_field(mapping.timeout_seconds, problem, "columns.timeout_seconds")
    return float(value)


def _bad_field(
    name: str,
    problem: str,
    setting: str | None,
    *,
    code: RequestErrorCode = RequestErrorCode.BAD_ROW,
) -> RequestError:
    remedy = "" if setting is None else f", or name another column in the source's {setting}"
    return RequestError(code, f"{name} {problem}; mend the row{remedy}")
