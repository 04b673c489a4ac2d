"""Lines of input by chance, each with what must become of it: answered, or which error.

A line that is a good one with a few bytes changed may be either.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_WORDS = (
    "the", "quick", "fox", "naïve", "Straße", "你好", "🙂", "\u2028", "\u2029", "\x85", "\x00",
    "\x1b[0m", "\ud800", "\udfff", "\ufeff", "\\", '"', "<|im_end|>", "{{ x }}", "\t", "\r\n",
)  # fmt: skip
_BLANK = (b"", b" ", b"\t \t", b"\r", b"\x0b\x0c")
_LINE_ENDS = (b"\n",) * 8 + (b"\r\n", b" \n", b"\t\r\n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line with its end. verdict is `ok`, an error's code, `any`, or None when it is blank."""

    content: bytes
    verdict: str | None


def fuzzed_lines(seed: int, count: int) -> Iterator[Line]:
    """Yield so many lines, the same ones for a seed."""
    numbers = random.Random(seed)
    for number in range(1, count + 1):
        kind = numbers.choices((_blank, _good, _bad, _mutated), (5, 50, 25, 20))[0]
        yield kind(numbers, number)


def _blank(numbers: random.Random, number: int) -> Line:
    return Line(numbers.choice(_BLANK) + b"\n", None)


def _good(numbers: random.Random, number: int) -> Line:
    row = _row(numbers) | _id(numbers, number) | _extras(numbers)
    content = b" " * numbers.choice((0, 0, 0, 3)) + _encode(numbers, row)
    return Line(content + numbers.choice(_LINE_ENDS), "ok")


def _bad(numbers: random.Random, number: int) -> Line:
    content, verdict = numbers.choice(_FAULTS)(numbers, number)
    return Line(content + numbers.choice((b"\n", b"\n", b"\r\n")), verdict)


def _mutated(numbers: random.Random, number: int) -> Line:
    """Change a few bytes; there is no id, so that no two rows have one."""
    content = bytearray(_encode(numbers, _row(numbers) | _extras(numbers)))
    for _ in range(numbers.randint(1, 4)):
        place = numbers.randrange(len(content))
        length = numbers.choice((0, 1, 1, 5))
        content[place : place + length] = numbers.randbytes(numbers.choice((0, 1, 1, 3)))
    content = bytearray(b"{}") if not content.strip() else content
    return Line(bytes(content).replace(b"\n", b"") + b"\n", "any")


def _text(numbers: random.Random) -> str:
    return " ".join(numbers.choices(_WORDS, k=numbers.randint(1, 8)))


def _row(numbers: random.Random) -> dict[str, Any]:
    """Return what is asked, in one of the four ways."""
    way = numbers.randrange(10)
    if way < 6:
        return {"prompt": _text(numbers)}
    if way < 8:
        roles = numbers.choice((["user"], ["system", "user"], ["user", "assistant", "user"]))
        return {"messages": [{"role": role, "content": _text(numbers)} for role in roles]}
    if way < 9:
        return {"prompt_token_ids": [numbers.randint(3, 200) for _ in range(numbers.randint(1, 9))]}
    return {"turns": [_text(numbers) for _ in range(numbers.randint(1, 3))]}


def _id(numbers: random.Random, number: int) -> dict[str, Any]:
    return numbers.choice(({"id": f"Zeile-ü-{number}"}, {"id": number}, {"id": None}, {}))


def _extras(numbers: random.Random) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if numbers.random() < 0.3:
        extras["sampling"] = numbers.choice(
            ({"temperature": 0}, {"max_tokens": 2, "seed": 5}, {"stop": ["e"]}, {}, None)
        )
    if numbers.random() < 0.2:
        extras["note"] = numbers.choice(
            (None, 1e300, float("nan"), 10**30, {"a": [[{}]]}, _text(numbers))
        )
    if numbers.random() < 0.1:
        extras |= {"priority": numbers.randint(-5, 5), "timeout_seconds": 1000}
    if numbers.random() < 0.0005:
        extras["pad"] = "x" * 500_000
    return extras


def _encode(numbers: random.Random, row: dict[str, Any]) -> bytes:
    """Return JSON as any tool may write it; half surrogates also in bytes of their own."""
    text = json.dumps(row, ensure_ascii=numbers.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _nested(depth: int) -> bytes:
    return b'{"prompt":"x","a":' + b"[" * depth + b"]" * depth + b"}"


def _with(code: str, **columns: Any) -> Callable[[random.Random, int], tuple[bytes, str]]:
    """Return a fault that sits in the values of a row."""

    def fault(numbers: random.Random, number: int) -> tuple[bytes, str]:
        row = {"id": number, "prompt": _text(numbers)} | columns
        row = {name: value for name, value in row.items() if value is not _ABSENT}
        return _encode(numbers, row), code

    return fault


def _torn(numbers: random.Random, number: int) -> tuple[bytes, str]:
    content = _encode(numbers, _row(numbers) | {"id": number})
    return content[: numbers.randint(1, len(content) - 1)], "bad_json"


def _raw(code: str, *contents: bytes) -> Callable[[random.Random, int], tuple[bytes, str]]:
    """Return a fault that sits in the line itself."""
    return lambda numbers, _: (numbers.choice(contents), code)


_ABSENT = object()
_LONG = "x" * 20_000
_FAULTS = (
    _torn,
    _raw(
        "bad_json",
        b"{",
        b"}",
        b"{]",
        b"not json",
        b"\xff\xfe{}",
        b"{'id': 1}",
        b'{"a":1} {}',
        b"\x85",
    ),
    _raw("bad_json", '{"id":"ä"}'.encode("latin-1"), '{"prompt":"x"}'.encode("utf-16-le")),
    _raw("bad_json", b'\xef\xbb\xbf{"prompt":"x"}', "\u2028".encode(), b"\x00", b"{,}"),
    _raw("bad_json", b'{"prompt":"a","prompt":"b"}', b'{"prompt":"x","a":{"k":1,"k":1}}'),
    _raw("bad_json", b'{"prompt":"x","n":' + b"9" * 5000 + b"}"),
    _raw("bad_row", b"null", b"1", b'"x"', b"[1]", b"true", b"NaN", b"[]"),
    _raw("bad_row", _nested(201), _nested(5_000), _nested(200_000)),
    _with("bad_row", prompt=_ABSENT),
    _with("bad_row", prompt=None),
    _with("bad_row", prompt=5),
    _with("bad_row", prompt=["a"]),
    _with("bad_row", messages=[{"role": "user", "content": "two"}]),
    *(
        _with("bad_row", prompt=_ABSENT, messages=value)
        for value in ([], {}, "x", [5], [{"role": 1}], [{"role": "user", "content": 5}])
    ),
    *(_with("bad_row", prompt=_ABSENT, turns=value) for value in ([], "x", [1], [["x"]])),
    *(
        _with("bad_row", prompt=_ABSENT, prompt_token_ids=value)
        for value in ("x", [1.5], [True], [None], {})
    ),
    _with("token_out_of_vocabulary", prompt=_ABSENT, prompt_token_ids=[5, 10**9]),
    _with("token_out_of_vocabulary", prompt=_ABSENT, prompt_token_ids=[-1]),
    *(_with("bad_row", id=value) for value in (1.5, True, [], {}, "", "a\x00b", "\ud800")),
    *(_with("bad_row", priority=value) for value in ("x", 1.5, True)),
    *(_with("bad_row", timeout_seconds=value) for value in (0, -1, "x", True, 1e300)),
    *(
        _with("invalid_sampling_params", sampling=value)
        for value in ("x", [1], {"temperature": -1}, {"max_new_tokens": 5}, {"n": 0}, {"top_p": 2})
    ),
    _with("prompt_too_long", prompt=_LONG),
)
