"""Kinds of values that a table's column can hold, the narrowest that holds several, and the fit."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from flows.outputs.strict_json import json_text
from flows.rows import printable, without_surrogates

# Deeper values are JSON text.
_MAX_NESTING = 8
_INT64 = 2**63
# Whole numbers up to here are floats too, without loss.
_EXACT_IN_FLOAT = 2**53


class Simple(Enum):
    """A kind without parts. JSON is any value, written as JSON text."""

    NULL = auto()
    BOOL = auto()
    INT = auto()
    BIG_INT = auto()
    FLOAT = auto()
    TEXT = auto()
    JSON = auto()


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of values of one kind."""

    item: "Kind"


@dataclass(frozen=True, slots=True)
class StructOf:
    """An object that has always the same names."""

    fields: tuple[tuple[str, "Kind"], ...]


Kind = Simple | ListOf | StructOf

_WIDER = {
    frozenset((Simple.INT, Simple.BIG_INT)): Simple.BIG_INT,
    frozenset((Simple.INT, Simple.FLOAT)): Simple.FLOAT,
}


def widened(kind: Kind, value: Any) -> Kind:
    """Return the narrowest kind that holds the value and what the given kind holds."""
    if kind is Simple.JSON or (kind is Simple.TEXT and isinstance(value, str)):
        return kind
    return _merged(kind, _kind_of(value))


def _kind_of(value: Any, *, depth: int = 0) -> Kind:
    if isinstance(value, str):
        return Simple.TEXT
    if isinstance(value, list | dict):
        return Simple.JSON if depth == _MAX_NESTING else _kind_of_parts(value, depth + 1)
    if value is None:
        return Simple.NULL
    if isinstance(value, bool):
        return Simple.BOOL
    if isinstance(value, float):
        return Simple.FLOAT
    if isinstance(value, int):
        if abs(value) <= _EXACT_IN_FLOAT:
            return Simple.INT
        return Simple.BIG_INT if -_INT64 <= value < _INT64 else Simple.JSON
    return Simple.JSON


def _merged(first: Kind, second: Kind) -> Kind:
    if first == second or second is Simple.NULL:
        return first
    if first is Simple.NULL:
        return second
    if isinstance(first, ListOf) and isinstance(second, ListOf):
        return ListOf(_merged(first.item, second.item))
    if isinstance(first, StructOf) and isinstance(second, StructOf):
        others = dict(second.fields)
        if others.keys() == dict(first.fields).keys():
            return StructOf(
                tuple((name, _merged(kind, others[name])) for name, kind in first.fields)
            )
    if isinstance(first, Simple) and isinstance(second, Simple):
        return _WIDER.get(frozenset((first, second)), Simple.JSON)
    return Simple.JSON


def fitted(value: Any, kind: Kind) -> Any:
    """Return the value as a column of the kind holds it; None when it does not fit.

    Text and JSON hold everything. A lone surrogate is U+FFFD.
    """
    if value is None:
        return None
    if isinstance(kind, ListOf):
        return [fitted(item, kind.item) for item in value] if isinstance(value, list) else None
    if isinstance(kind, StructOf):
        return _fitted_struct(value, kind)
    if kind is Simple.JSON or kind is Simple.NULL:
        return json_text(value)
    if kind is Simple.TEXT:
        return without_surrogates(value) if isinstance(value, str) else json_text(value)
    return _fitted_number(value, kind)


def _kind_of_parts(value: list[Any] | dict[str, Any], depth: int) -> Kind:
    if isinstance(value, list):
        item: Kind = Simple.NULL
        for part in value:
            item = _merged(item, _kind_of(part, depth=depth))
        return ListOf(item)
    # A file format has no object without names, and no name that is not UTF-8.
    if not value or any(printable(name) != name for name in value):
        return Simple.JSON
    return StructOf(tuple((name, _kind_of(part, depth=depth)) for name, part in value.items()))


def _fitted_struct(value: Any, kind: StructOf) -> dict[str, Any] | None:
    if not isinstance(value, dict) or value.keys() != dict(kind.fields).keys():
        return None
    return {name: fitted(value[name], part) for name, part in kind.fields}


def _fitted_number(value: Any, kind: Simple) -> Any:
    if kind is Simple.BOOL or isinstance(value, bool):
        return value if kind is Simple.BOOL and isinstance(value, bool) else None
    if isinstance(value, float):
        return value if kind is Simple.FLOAT else None
    limit = _EXACT_IN_FLOAT if kind is Simple.FLOAT else _INT64 - 1
    return value if isinstance(value, int) and abs(value) <= limit else None
