"""JSON that every reader takes: no NaN, no line end inside a line, valid UTF-8."""

import json
import math
import re
from typing import Any

import msgspec

# JSON allows them raw, but many readers end a line there.
_LINE_ENDS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
# UTF-8 cannot spell a lone surrogate.
_SURROGATES = re.compile("[\ud800-\udfff]")
_encode = msgspec.json.Encoder().encode


def to_strict_json(value: Any) -> bytes:
    """Return the value as one line of UTF-8; what JSON cannot say (NaN, infinity) is null."""
    return _on_one_line(value) + b"\n"


def json_text(value: Any) -> str:
    """Return the value as the JSON text that a table holds where its column has no type."""
    return _on_one_line(value).decode("utf-8")


def _on_one_line(value: Any) -> bytes:
    try:
        encoded = _encode(value)
    except UnicodeEncodeError:
        encoded = _with_escaped_surrogates(value)
    if not encoded.isascii():
        for raw, escape in _LINE_ENDS:
            encoded = encoded.replace(raw, escape)
    return encoded


def _with_escaped_surrogates(value: Any) -> bytes:
    text = json.dumps(_with_finite_numbers(value), ensure_ascii=False, separators=(",", ":"))
    escaped = _SURROGATES.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    return escaped.encode("utf-8")


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_finite_numbers(item) for key, item in value.items()}
    return value
