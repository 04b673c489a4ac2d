"""Columns of formats that have no JSON values of their own, as the fields that a row is read by."""

import json
from typing import Any

from engine import RequestError, RequestErrorCode
from flows.rows import shown
from flows.source_config import ColumnMapping


def of_csv(columns: dict[str, Any], mapping: ColumnMapping) -> dict[str, Any]:
    """Return the cells that hold something; what is no text by its meaning is read as JSON.

    Raises:
        RequestError: such a cell is not JSON.
    """
    fields = {name: cell for name, cell in columns.items() if cell}
    for setting in ("messages", "prompt_token_ids", "turns", "sampling", "priority") + (
        "timeout_seconds",
    ):
        name = getattr(mapping, setting)
        if name in fields and name not in (mapping.id, mapping.prompt):
            fields[name] = _parse_cell(fields[name], name, setting)
    return fields


def of_table(columns: dict[str, Any], mapping: ColumnMapping) -> dict[str, Any]:
    """Return the columns, without the empty fields that a table adds to each of its structs."""
    return columns | {
        name: _without_empty(columns[name])
        for name in (mapping.messages, mapping.sampling)
        if isinstance(columns.get(name), list | dict)
    }


def _parse_cell(cell: str, name: str, setting: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            RequestErrorCode.BAD_ROW,
            f"{name} is {shown(cell)}, wanted JSON in the cell ({error}); mend the row, or name "
            f"another column in the source's columns.{setting}",
        ) from error


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_empty(item) for name, item in value.items() if item is not None}
    return value
