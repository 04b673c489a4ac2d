"""to_strict_json: any value as one line that every reader takes."""

from typing import Any

from export_builders import read_strictly
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.outputs.strict_json import json_text, to_strict_json

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None) | st.sampled_from("\ud800\udc00\u2028\x85\n\r\x1c\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(line=st.dictionaries(st.text(max_size=3), _VALUES, max_size=4))
def test_any_columns_give_one_line_of_strict_json_that_reads_back(line: dict[str, Any]) -> None:
    written = to_strict_json(line)
    (text,) = written.decode("utf-8").splitlines()
    assert written.endswith(b"\n")
    again = read_strictly(text.encode())
    assert to_strict_json(again) == written


def test_json_text_of_a_value_is_the_same_without_the_line_end() -> None:
    assert json_text({"a": [1, None, "\u2028"]}) == '{"a":[1,null,"\\u2028"]}'


def test_a_surrogate_beside_a_line_end_is_escaped_too() -> None:
    line = to_strict_json({"a": "\ud800\u2028\x85", "b": float("nan")})
    assert line == b'{"a":"\\ud800\\u2028\\u0085","b":null}\n'
