"""RecordReader: every line of every source is one record or one bad row, whatever it holds."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from source_builders import comparable

from engine import ConfigError, RequestErrorCode, SamplingParams
from flows.config import ColumnMapping, PromptConfig, SourceConfig
from flows.records import (
    BadRow,
    PromptRecord,
    RecordReader,
    RowLocation,
)

TEXT = PromptConfig(format="text")


def make_reader(
    folder: Path, content: bytes, prompt: PromptConfig = TEXT, **source: Any
) -> RecordReader:
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    return RecordReader((SourceConfig(path=path, **source),), prompt)


def read_rows(
    folder: Path, content: bytes, prompt: PromptConfig = TEXT, **source: Any
) -> list[PromptRecord | BadRow]:
    with make_reader(folder, content, prompt, **source) as reader:
        return list(reader.read_all())


def read_one(folder: Path, row: Any, prompt: PromptConfig = TEXT, **source: Any) -> Any:
    (found,) = read_rows(folder, json.dumps(row).encode(), prompt, **source)
    return found


def test_a_plain_row_becomes_a_record_with_its_columns_in_order(tmp_path: Path) -> None:
    row = {"extra": [1, {"a": None}], "prompt": "hello", "id": "a", "priority": -2}
    record = read_one(tmp_path, row | {"sampling": {"temperature": 0}})
    assert (record.row_index, record.row_id, record.prompt) == (0, "a", "hello")
    assert (record.messages, record.prompt_token_ids) == (None, None)
    assert (record.sampling, record.priority) == ({"temperature": 0}, -2)
    assert list(record.columns) == ["extra", "prompt", "id", "priority", "sampling"]
    assert record.location == RowLocation(source_index=0, offset=0, line=1)


def test_a_record_becomes_the_request_that_asks_about_it(tmp_path: Path) -> None:
    record = read_one(tmp_path, {"id": 7, "prompt_token_ids": [1, 2], "priority": 3})
    params = SamplingParams(max_tokens=5)
    request = record.to_request(params)
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("7", [1, 2], 3)
    assert request.sampling_params is params
    assert (request.prompt, request.messages) == (None, None)


def test_rows_are_counted_over_sources_and_lines_within_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"prompt":"x"}\n\n{"prompt":"y"}\n')
    sources = tuple(SourceConfig(path=tmp_path / f"{name}.jsonl") for name in ("a", "b"))
    with RecordReader(sources, TEXT) as reader:
        rows = list(reader.read_all())
        assert reader.describe(rows[3].location) == f"{tmp_path / 'b.jsonl'}, line 3"
    assert [row.row_index for row in rows] == [0, 1, 2, 3]
    assert [row.row_id for row in rows] == ["a:1", "a:3", "b:1", "b:3"]
    assert [row.location.offset for row in rows] == [0, 16, 0, 16]


def test_each_source_has_its_own_column_names(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "one", "key": 5}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "two", "key": 5}\n')
    sources = (
        SourceConfig(path=tmp_path / "a.jsonl", columns=ColumnMapping(prompt="question", id="key")),
        SourceConfig(path=tmp_path / "b.jsonl", columns=ColumnMapping(prompt="text", id=None)),
    )
    with RecordReader(sources, TEXT) as reader:
        rows = list(reader.read_all())
    assert [(row.row_id, row.prompt) for row in rows if isinstance(row, PromptRecord)] == [
        ("5", "one"),
        ("b:1", "two"),
    ]


def test_a_line_ends_at_newline_alone(tmp_path: Path) -> None:
    content = '{"prompt":"a\u2028b\u2029c\u0085d\\u000be"}\r\n{"prompt":"last"}'.encode()
    rows = read_rows(tmp_path, content)
    assert [row.prompt for row in rows if isinstance(row, PromptRecord)] == [
        "a\u2028b\u2029c\u0085d\x0be",
        "last",
    ]


def test_a_byte_order_mark_is_skipped_at_the_start_only(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    first, second = read_rows(tmp_path, mark + b'{"prompt":"a"}\n' + mark + b'{"prompt":"b"}\n')
    assert isinstance(first, PromptRecord)
    assert isinstance(second, BadRow)


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    rows = read_rows(tmp_path, b'\n  \t\r\n{"prompt":"a"}\n\r\n\n{"prompt":"b"}\n\n')
    assert [row.row_id for row in rows] == ["rows:3", "rows:6"]


def test_a_limit_counts_bad_rows_and_skips_blank_lines(tmp_path: Path) -> None:
    rows = read_rows(tmp_path, b'\n{"prompt":"a"}\nnonsense\n\n{"prompt":"b"}\n', limit=2)
    assert [type(row) for row in rows] == [PromptRecord, BadRow]


@pytest.mark.parametrize(
    ("line", "code", "wanted"),
    [
        (b'{"prompt": "a"', RequestErrorCode.BAD_JSON, "not valid JSON"),
        (b'{"prompt": "a"},', RequestErrorCode.BAD_JSON, "column 16"),
        (b'{"prompt": "\xff"}', RequestErrorCode.BAD_JSON, "0xff at position 13"),
        (b"\x1f\x8b\x08\x00", RequestErrorCode.BAD_JSON, "UTF-8"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", RequestErrorCode.BAD_JSON, "too many digits"),
        (b'{"prompt": "a", "prompt": "b"}', RequestErrorCode.BAD_JSON, "the key 'prompt' is there"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 1}}', RequestErrorCode.BAD_JSON, "the key 'y' is"),
        (b'{"prompt": "a", "x": "\\ud8"}', RequestErrorCode.BAD_JSON, "Invalid \\uXXXX escape"),
        (b'{"prompt": "a\tb"}', RequestErrorCode.BAD_JSON, "Invalid control character"),
        (b'{"prompt": "a\x00b"}', RequestErrorCode.BAD_JSON, "Invalid control character"),
        (b'{"prompt": "a"}{"prompt": "b"}', RequestErrorCode.BAD_JSON, "Extra data at column 16"),
        (b"{'prompt': 'a'}", RequestErrorCode.BAD_JSON, "double quotes"),
        (b'\xef\xbb\xbf{"prompt": "a"}', RequestErrorCode.BAD_JSON, "not valid JSON"),
        (b"null", RequestErrorCode.BAD_ROW, "found null"),
        (b"[1]", RequestErrorCode.BAD_ROW, "found an array"),
        (b"true", RequestErrorCode.BAD_ROW, "found a boolean"),
        (b"NaN", RequestErrorCode.BAD_ROW, "found a number"),
        (b"[" * 100_000, RequestErrorCode.BAD_ROW, "nested deeper"),
        (
            b'{"prompt": "a", "x": ' + b"[" * 250 + b"]" * 250 + b"}",
            RequestErrorCode.BAD_ROW,
            "nested deeper",
        ),
        (b'{"question": "a", "b": 1}', RequestErrorCode.BAD_ROW, "found 'question', 'b'"),
        (b"{}", RequestErrorCode.BAD_ROW, "found none"),
        (
            b'{"prompt": "a", "messages": []}',
            RequestErrorCode.BAD_ROW,
            "several prompts: 'prompt', 'messages'",
        ),
        (b'{"prompt": 5}', RequestErrorCode.BAD_ROW, "wanted a string"),
        (b'{"prompt": ["a", "b"]}', RequestErrorCode.BAD_ROW, "'messages'"),
        (b'{"messages": "hi"}', RequestErrorCode.BAD_ROW, "wanted a list"),
        (b'{"messages": []}', RequestErrorCode.BAD_ROW, "at least one message"),
        (b'{"messages": [{"content": "a"}]}', RequestErrorCode.BAD_ROW, "messages[0]"),
        (
            b'{"messages": [{"role": "user", "content": 5}]}',
            RequestErrorCode.BAD_ROW,
            "has content 5",
        ),
        (b'{"prompt_token_ids": [1, true]}', RequestErrorCode.BAD_ROW, "whole numbers"),
        (b'{"prompt_token_ids": [1, 2.5]}', RequestErrorCode.BAD_ROW, "whole numbers"),
        (b'{"prompt_token_ids": "12"}', RequestErrorCode.BAD_ROW, "whole numbers"),
        (b'{"prompt": "a", "id": 1.5}', RequestErrorCode.BAD_ROW, "columns.id"),
        (b'{"prompt": "a", "id": true}', RequestErrorCode.BAD_ROW, "a boolean"),
        (b'{"prompt": "a", "id": {}}', RequestErrorCode.BAD_ROW, "an object"),
        (b'{"prompt": "a", "id": ""}', RequestErrorCode.BAD_ROW, "empty string"),
        (b'{"prompt": "a", "id": "\\ud800"}', RequestErrorCode.BAD_ROW, "surrogate"),
        (b'{"prompt": "a", "id": "x\\u0000"}', RequestErrorCode.BAD_ROW, "NUL"),
        (b'{"prompt": "a", "priority": "high"}', RequestErrorCode.BAD_ROW, "columns.priority"),
        (b'{"prompt": "a", "priority": true}', RequestErrorCode.BAD_ROW, "columns.priority"),
        (
            b'{"prompt": "a", "sampling": [1]}',
            RequestErrorCode.INVALID_SAMPLING_PARAMS,
            "columns.sampling",
        ),
    ],
)
def test_a_bad_line_is_a_bad_row_that_names_file_line_and_remedy(
    tmp_path: Path, line: bytes, code: RequestErrorCode, wanted: str
) -> None:
    good, bad, last = read_rows(tmp_path, b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert isinstance(good, PromptRecord)
    assert isinstance(last, PromptRecord)
    assert isinstance(bad, BadRow)
    assert bad.error.code is code
    assert bad.error.message.startswith(f"{tmp_path / 'rows.jsonl'}, line 2: ")
    assert wanted in bad.error.message
    assert len(bad.error.message) < 600
    assert (bad.row_index, bad.row_id, last.row_index) == (1, "rows:2", 2)


def test_a_bad_row_keeps_the_id_and_the_columns_that_could_be_read(tmp_path: Path) -> None:
    bad = read_one(tmp_path, {"id": 12, "question": "a"})
    assert (bad.row_id, bad.columns) == ("12", {"id": 12, "question": "a"})


def test_a_null_column_is_a_column_that_is_not_there(tmp_path: Path) -> None:
    row = {"id": None, "prompt": None, "messages": None, "prompt_token_ids": [1]}
    record = read_one(tmp_path, row | {"sampling": None, "priority": None})
    assert (record.row_id, record.prompt_token_ids) == ("rows:1", [1])
    assert (record.sampling, record.priority) == ({}, 0)


def test_a_lone_surrogate_reaches_the_model_as_a_replacement_character(tmp_path: Path) -> None:
    content = rb'{"prompt":"a\ud800b \ud83d\ude00"}' + b'\n{"prompt":"\xed\xa0\x80"}\n'
    content += rb'{"messages":[{"role":"user","content":[{"text":"\udfff"}]}]}'
    first, second, third = read_rows(tmp_path, content)
    assert isinstance(first, PromptRecord)
    assert isinstance(second, PromptRecord)
    assert isinstance(third, PromptRecord)
    assert first.prompt == "a\ufffdb \U0001f600"
    assert first.columns["prompt"] == "a\ud800b \U0001f600"
    assert second.prompt == "\ufffd"
    assert third.messages == [{"role": "user", "content": [{"text": "\ufffd"}]}]


def test_escapes_of_escapes_stay_what_they_are(tmp_path: Path) -> None:
    content = rb'{"prompt": "a\\u0041 \\\\n \"{\\\"b\\\": 1}\" \u0041\u0000\n"}'
    (row,) = read_rows(tmp_path, content)
    assert isinstance(row, PromptRecord)
    assert row.prompt == 'a\\u0041 \\\\n "{\\"b\\": 1}" A\x00\n'


def test_a_torn_last_line_costs_that_row_alone(tmp_path: Path) -> None:
    first, torn = read_rows(tmp_path, b'{"id": 1, "prompt": "a"}\n{"id":2,"te')
    assert isinstance(first, PromptRecord)
    assert isinstance(torn, BadRow)
    assert (torn.row_id, torn.error.code) == ("rows:2", RequestErrorCode.BAD_JSON)
    assert "rows.jsonl, line 2: not valid JSON" in torn.error.message


def test_error_messages_hold_nothing_that_a_database_refuses(tmp_path: Path) -> None:
    bad = read_one(tmp_path, {"\ud800\x00": 1, "prompt": {"\udfff\x00": 1}})
    bad.error.message.encode("utf-8")
    assert "\x00" not in bad.error.message


def test_the_same_answer_comes_at_one_place_as_in_order(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"prompt":"a"}\r\n\n{"id":"x"}\n\xff\n{"prompt":"b"}'
    with make_reader(tmp_path, content) as reader:
        rows = list(reader.read_all())
        again = [reader.read_at(row.row_index, row.location) for row in reversed(rows)]
    assert [comparable(row) for row in reversed(again)] == [comparable(row) for row in rows]


def test_a_row_that_is_gone_says_that_the_file_has_changed(tmp_path: Path) -> None:
    with make_reader(tmp_path, b'{"prompt":"a"}\n{"prompt":"b"}\n') as reader:
        last = list(reader.read_all())[-1]
        (tmp_path / "rows.jsonl").write_bytes(b'{"prompt":"a"}\n')
        with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: .*changed"):
            reader.read_at(last.row_index, last.location)


def test_a_missing_source_is_named_with_what_is_close(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    missing = SourceConfig(path=tmp_path / "promts.jsonl")
    with pytest.raises(
        ConfigError, match=r"sources\.0\.path: .*promts\.jsonl.*did you mean prompt"
    ):
        RecordReader((missing,), TEXT)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its folder .*gone cannot be listed"):
        RecordReader((SourceConfig(path=tmp_path / "gone" / "a.jsonl"),), TEXT)


def test_a_source_that_is_no_regular_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="not a regular file"):
            RecordReader((SourceConfig(path=path),), TEXT)


def test_the_content_hash_is_of_the_rows_that_count(tmp_path: Path) -> None:
    rows = b'{"prompt":"a"}\n{"prompt":"b"}\n'
    whole = make_reader(tmp_path, rows).content_hash()
    assert make_reader(tmp_path, rows + b'{"prompt":"c"}\n', limit=2).content_hash() == whole
    assert make_reader(tmp_path, rows.rstrip() + b"\n\n").content_hash() == whole
    assert make_reader(tmp_path, rows, limit=1).content_hash() != whole
    assert make_reader(tmp_path, rows.replace(b"b", b"c")).content_hash() != whole
    assert list(whole) == ["rows"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "id"]) | st.text(max_size=3), inner, max_size=3
        )
    ),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    ["id", "prompt", "messages", "prompt_token_ids", "turns", "sampling", "priority"]
    + ["timeout_seconds"]
)
_LINES = (
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b""))
    | _JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(_NAMES, _JSON, max_size=3).map(lambda row: json.dumps(row).encode())
    | st.sampled_from([b"", b" \t", b"\r", b"\xef\xbb\xbf", b'{"prompt":"a\xe2\x80\xa8b"}'])
)


@settings(deadline=None, max_examples=150)
@given(
    lines=st.lists(_LINES, max_size=6),
    tail=st.sampled_from([b"", b"\n", b"\r\n"]),
    template=st.sampled_from([None, "{{ prompt }}", "{{ id.x[0] + 1 }}", "{{ 1 // priority }}"]),
)
@example(lines=[b"\xef\xbb\xbf", b"\xef\xbb\xbf{}"], tail=b"", template=None)
@example(lines=[b'{"prompt":"\\ud800","id":"\\udfff"}'], tail=b"", template="{{ id }}")
def test_any_bytes_give_one_row_for_each_line_that_is_not_blank(
    lines: list[bytes], tail: bytes, template: str | None
) -> None:
    content = b"\n".join(lines) + tail
    # What is packed is refused as a whole, and has tests of its own.
    assume(
        not content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03"))
    )
    assume(not content.startswith((b"PAR1", b"ARROW1", b"\xff\xfe", b"\xfe\xff")))
    wanted = [
        number
        for number, line in enumerate(content.split(b"\n"), start=1)
        if (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
    ]
    with tempfile.TemporaryDirectory() as folder:
        prompt = PromptConfig(template=template, format="chat")
        with make_reader(Path(folder), content, prompt) as reader:
            rows = list(reader.read_all())
            again = [reader.read_at(row.row_index, row.location) for row in rows]
    assert [row.location.line for row in rows] == wanted
    assert [row.row_index for row in rows] == list(range(len(wanted)))
    assert [comparable(row) for row in again] == [comparable(row) for row in rows]
    for row in rows:
        row.row_id.encode("utf-8")
        if isinstance(row, BadRow):
            row.error.message.encode("utf-8")
        else:
            json.dumps(row.messages, ensure_ascii=False).encode("utf-8")
            given_kinds = (row.prompt, row.messages, row.prompt_token_ids)
            assert sum(kind is not None for kind in given_kinds) == 1
