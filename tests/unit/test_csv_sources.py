"""CSV: records with quoted line ends are rows, cells are strings, and nothing is lost in silence."""

import csv
import gzip
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_builders import complaint, good, make_reader, read_source

from engine import ConfigError, RequestErrorCode
from flows.config import PromptConfig
from flows.records import BadRow, PromptRecord


def read_csv(folder: Path, content: str | bytes, **source: Any) -> list[PromptRecord | BadRow]:
    path = folder / source.pop("file_name", "rows.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_source(path, **source)


def test_each_record_is_a_row_of_strings(tmp_path: Path) -> None:
    first, second = read_csv(tmp_path, "id,prompt,year\na,hello,2024\n7,bye,\n")
    assert (good(first).row_id, good(first).prompt) == ("a", "hello")
    assert first.columns == {"id": "a", "prompt": "hello", "year": "2024"}
    assert (second.row_id, second.columns["year"]) == ("7", "")


def test_a_quoted_cell_may_hold_line_ends_commas_and_quotes(tmp_path: Path) -> None:
    content = 'prompt,id\r\n"a\r\nb, ""c""\n\nd",x\r\nlast,y\r\n'
    first, last = read_csv(tmp_path, content)
    assert good(first).prompt == 'a\r\nb, "c"\n\nd'
    assert good(last).prompt == "last"
    assert [row.location.line for row in (first, last)] == [2, 6]
    assert [row.row_id for row in (first, last)] == ["x", "y"]


def test_rows_without_an_id_are_called_by_the_line_they_begin_at(tmp_path: Path) -> None:
    rows = read_csv(tmp_path, 'id,prompt\n,"a\nb"\n\n,c\n')
    assert [row.row_id for row in rows] == ["rows:2", "rows:5"]


def test_a_byte_order_mark_and_crlf_leave_no_trace(tmp_path: Path) -> None:
    (row,) = read_csv(tmp_path, b"\xef\xbb\xbfprompt,n\r\nhello,1\r\n")
    assert row.columns == {"prompt": "hello", "n": "1"}


def test_what_is_no_line_end_of_csv_stays_in_the_text(tmp_path: Path) -> None:
    rows = read_csv(tmp_path, "prompt\na\u2028b\u0085c\x0bd\n")
    assert [good(row).prompt for row in rows] == ["a\u2028b\u0085c\x0bd"]


def test_an_empty_cell_is_no_prompt(tmp_path: Path) -> None:
    rows = read_csv(tmp_path, 'prompt,messages\n,"[{""role"": ""user"", ""content"": ""a""}]"\n,\n')
    assert good(rows[0]).messages == [{"role": "user", "content": "a"}]
    assert "no prompt: wanted one of the columns" in complaint(rows[1])


def test_a_template_sees_every_cell_as_a_string(tmp_path: Path) -> None:
    prompt = PromptConfig(template="{{ a }}|{{ b }}|{{ n + n }}", format="text")
    (row,) = read_csv(tmp_path, "a,b,n\nx,,1\n", prompt=prompt)
    assert good(row).prompt == "x||11"


def test_typed_columns_are_read_as_json_and_carried_as_they_stand(tmp_path: Path) -> None:
    content = 'prompt_token_ids,sampling,priority,timeout_seconds\n"[1, 2]","{""n"": 2}",-3,1.5\n'
    (row,) = read_csv(tmp_path, content)
    record = good(row)
    assert (record.prompt_token_ids, record.sampling) == ([1, 2], {"n": 2})
    assert (record.priority, record.timeout_seconds) == (-3, 1.5)
    assert record.columns["sampling"] == '{"n": 2}'


@pytest.mark.parametrize(
    ("header", "cell", "wanted"),
    [
        ("sampling", "temperature=0", "sampling is 'temperature=0', wanted JSON in the cell"),
        ("priority", "high", "columns.priority"),
        ("priority", "1.5", "wanted a whole number"),
        ("turns", "hello", "columns.turns"),
    ],
)
def test_a_typed_cell_that_is_no_json_is_a_bad_row(
    tmp_path: Path, header: str, cell: str, wanted: str
) -> None:
    bad, fine = read_csv(tmp_path, f"prompt,{header}\na,{cell}\nb,\n")
    assert f"{tmp_path / 'rows.csv'}, line 2: " in complaint(bad)
    assert wanted in complaint(bad)
    assert good(fine).prompt == "b"


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (b"a", "found 1 cell(s), the header has 2 column(s)"),
        (b"a,b,c", "found 3 cell(s)"),
        (b'"a"x,b', "cannot be read as CSV: ',' expected after '\"'"),
        (b"a\xff,b", "byte 0xff at position 2 of the row is not UTF-8"),
    ],
)
def test_a_broken_record_costs_itself_alone(tmp_path: Path, record: bytes, wanted: str) -> None:
    rows = read_csv(tmp_path, b"prompt,x\ngood,1\n" + record + b"\nlast,2\n")
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert "rows.csv, line 3: " in complaint(rows[1])
    assert wanted in complaint(rows[1])
    assert rows[1].error.code is RequestErrorCode.BAD_ROW  # type: ignore[union-attr]
    assert good(rows[2]).prompt == "last"


def test_a_stray_quote_names_all_the_lines_it_took(tmp_path: Path) -> None:
    rows = read_csv(tmp_path, 'prompt,x\n"a,1\n"b",2\nc,3\n')
    assert [isinstance(row, BadRow) for row in rows] == [True, False]
    assert "line 2: lines 2 to 3 cannot be read as CSV" in complaint(rows[0])
    assert good(rows[1]).prompt == "c"


def test_a_quote_that_is_never_closed_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rows\.csv, line 3: a quoted cell is not closed in 3 lines"
    ):
        read_csv(tmp_path, 'prompt,x\na,1\n"b,2\nc,3\nd,4\n')


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"a,b,a\n1,2,3\n", "two columns called 'a'"),
        (b"a,\xff\n1,2\n", "the header is not UTF-8"),
        (b"a\rb\n", "line 1 is no header of CSV"),
    ],
)
def test_a_header_that_names_no_columns_stops_the_job(
    tmp_path: Path, content: bytes, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        read_csv(tmp_path, content)


def test_a_cell_longer_than_the_limit_of_the_module_is_read(tmp_path: Path) -> None:
    (row,) = read_csv(tmp_path, f'prompt\n"{"x" * 500_000}"\n')
    assert len(good(row).prompt or "") == 500_000


@pytest.mark.parametrize("content", ["", "prompt,id\n"])
def test_a_file_without_records_has_no_rows(tmp_path: Path, content: str) -> None:
    assert read_csv(tmp_path, content) == []


def test_tabs_part_the_cells_of_a_tsv_file_packed_or_not(tmp_path: Path) -> None:
    content = "prompt\tid\na, b\tx\n"
    for name, data in (("a.tsv", content.encode()), ("b.tsv.gz", gzip.compress(content.encode()))):
        (row,) = read_csv(tmp_path, data, file_name=name)
        assert (good(row).prompt, row.row_id) == ("a, b", "x")


def test_the_hash_holds_the_header_and_no_line_ends(tmp_path: Path) -> None:
    def hash_of(content: bytes) -> dict[str, str]:
        (tmp_path / "rows.csv").write_bytes(content)
        with make_reader({"path": tmp_path / "rows.csv"}) as reader:
            return reader.content_hash()

    plain = hash_of(b"prompt,x\na,1\n")
    assert hash_of(b"prompt,x\r\na,1\r\n\r\n") == plain
    assert hash_of(b"prompt,y\na,1\n") != plain
    assert hash_of(b"prompt,x\na,2\n") != plain


def test_a_file_that_changed_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt\na\nb\n")
    with make_reader({"path": path}) as reader:
        last = list(reader.read_all())[-1]
        path.write_text("prompt\na\n")
        with pytest.raises(ConfigError, match=r"rows\.csv, line 3: the row is gone"):
            reader.read_at(last.row_index, last.location)


_CELLS = st.text(st.sampled_from('ab",\n\r\u2028\x85\t \x00;'), max_size=6)


@settings(deadline=None, max_examples=100)
@given(
    records=st.lists(st.lists(_CELLS, min_size=2, max_size=2), max_size=6),
    line_end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_what_a_writer_of_csv_has_written_comes_back(
    records: list[list[str]], line_end: str, mark: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerows([["prompt", "x"], *records])
    with tempfile.TemporaryDirectory() as folder:
        rows = read_csv(Path(folder), (mark + text.getvalue()).encode())
    assert [list(row.columns.values()) for row in rows] == records


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.sampled_from([b'"', b",", b"\n", b"a", b"\xff", b"\r", b"\xef\xbb\xbf"]), max_size=30
    )
)
def test_any_bytes_are_rows_or_a_reason_to_stop(pieces: list[bytes]) -> None:
    rows: list[PromptRecord | BadRow] = []
    reason = "a quoted cell is not closed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = read_csv(Path(folder), b"prompt,x\n" + b"".join(pieces))
        except ConfigError as error:
            reason = str(error)
    assert "a quoted cell is not closed" in reason
    lines = [row.location.line for row in rows]
    assert lines == sorted(set(lines))
