"""Lines behind gzip, Zstandard and URLs: the same rows, at the same places, as of a plain file."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from source_builders import complaint, good, make_reader, read_source

from engine import ConfigError, RequestErrorCode
from flows.config import SourceConfig
from flows.records import BadRow
from flows.sources import byte_streams, jsonl

ROWS = [{"id": f"r{n}", "prompt": f"question {n} " + "x" * (n % 50)} for n in range(800)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def pack(codec: str, data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return bytes(sink.getvalue())


PACKERS: list[Any] = [
    pytest.param("rows.jsonl.gz", gzip.compress, id="gzip"),
    pytest.param("rows.jsonl.zst", lambda data: pack("zstd", data), id="zstd"),
]


@pytest.mark.parametrize(("name", "packed"), PACKERS)
def test_a_packed_file_has_the_rows_of_the_plain_one(
    tmp_path: Path, name: str, packed: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(packed(LINES))
    (tmp_path / "plain.jsonl").write_bytes(LINES)
    rows = read_source(tmp_path / name)
    assert [row.row_id for row in rows] == [row["id"] for row in ROWS]
    assert rows[-1].location == read_source(tmp_path / "plain.jsonl")[-1].location


@pytest.mark.parametrize(("name", "packed"), PACKERS)
def test_members_that_were_joined_are_one_text(
    tmp_path: Path, name: str, packed: Callable[[bytes], bytes]
) -> None:
    # A line may begin in one member and end in the next.
    parts = [LINES[:1000], b"", LINES[1000:1001], LINES[1001:]]
    (tmp_path / name).write_bytes(b"".join(packed(part) for part in parts))
    assert [row.row_id for row in read_source(tmp_path / name)] == [row["id"] for row in ROWS]


@pytest.mark.parametrize(("name", "packed"), PACKERS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 0.99])
def test_a_file_that_was_cut_off_is_named_with_the_line_reached(
    tmp_path: Path, name: str, packed: Callable[[bytes], bytes], share: float
) -> None:
    half = LINES[: LINES.index(b"\n", len(LINES) // 2) + 1]
    whole = packed(half) + packed(LINES[len(half) :])
    (tmp_path / name).write_bytes(whole[: max(3, int(len(whole) * share))])
    read: list[str] = []
    with make_reader({"path": tmp_path / name}) as reader, pytest.raises(ConfigError) as caught:
        read.extend(good(row).row_id for row in reader.read_all())
    assert f"{name}: cannot be unpacked beyond line {len(read)}: it was cut off" in str(
        caught.value
    )


@pytest.mark.parametrize(("name", "packed"), PACKERS)
def test_a_plain_file_under_a_packed_name_says_so(
    tmp_path: Path, name: str, packed: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(LINES)
    with make_reader({"path": tmp_path / name}) as reader, pytest.raises(ConfigError) as caught:
        list(reader.read_all())
    assert f"{name}: cannot be unpacked beyond line 0: it is damaged, or not " in str(caught.value)


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        (gzip.compress(LINES), "packed with gzip, wanted lines of text; .*ends in .gz"),
        (pack("zstd", LINES), "packed with Zstandard.*ends in .zst"),
        (b"PK\x03\x04" + bytes(20), "a ZIP archive"),
        (b"PAR1" + bytes(20), "a Parquet file.*format: parquet"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "UTF-16, wanted UTF-8; convert it: iconv"),
        (b"\xfe\xff" + '{"prompt": "a"}\n'.encode("utf-16-be"), "UTF-16"),
    ],
)
@pytest.mark.parametrize("file_format", ["jsonl", "csv", "openai_batch"])
def test_what_is_no_text_under_a_plain_name_stops_the_job(
    tmp_path: Path, start: bytes, wanted: str, file_format: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(start)
    source = {"path": tmp_path / "rows.jsonl", "format": file_format}
    with make_reader(source) as reader, pytest.raises(ConfigError, match=wanted):
        list(reader.read_all())


def test_a_row_that_begins_like_an_archive_elsewhere_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt":"a"}\n' + gzip.compress(b"x")[:12])
    first, second = read_source(tmp_path / "rows.jsonl")
    assert good(first).prompt == "a"
    assert "line 2: byte 0x8b at position 2" in complaint(second)


def test_reading_places_in_order_unpacks_the_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(LINES))
    opened: list[str] = []
    open_bytes = byte_streams.open_bytes
    monkeypatch.setattr(
        byte_streams, "open_bytes", lambda path: (opened.append(path), open_bytes(path))[1]
    )
    with make_reader({"path": tmp_path / "rows.jsonl.gz"}) as reader:
        rows = list(reader.read_all())
        opened.clear()
        for row in rows[100::7]:
            reader.read_at(row.row_index, row.location)
        assert len(opened) == 1
        assert good(reader.read_at(0, rows[0].location)).row_id == "r0"
        # A place within what is buffered may cost nothing.
        assert len(opened) <= 2


def test_a_six_megabyte_row_is_a_row(tmp_path: Path) -> None:
    text = "long " * 1_200_000
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": text}) + '\n{"prompt": "b"}\n')
    first, second = read_source(tmp_path / "rows.jsonl")
    assert (good(first).prompt, good(second).prompt) == (text, "b")


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_beyond_the_limit_is_a_bad_row_and_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 64)
    good_line = b'{"prompt": "a"}\n'
    exact = b'{"prompt": "' + b"x" * 985 + b'"}\n'
    assert len(exact) == 1000
    path = tmp_path / "rows.jsonl"
    path.write_bytes(good_line + exact + b"y" * 5000 + b"\n" + good_line + b"z" * 1001 + end)
    rows = read_source(path)
    assert [row.location.line for row in rows] == [1, 2, 3, 4, 5]
    assert [isinstance(row, BadRow) for row in rows] == [False, False, True, False, True]
    assert "rows.jsonl, line 3: the line is longer than 0 MiB" in complaint(rows[2])
    assert rows[2].error.code is RequestErrorCode.BAD_ROW  # type: ignore[union-attr]


def test_all_of_a_line_beyond_the_limit_counts_for_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    hashes = set()
    for last in (b"a", b"b"):
        (tmp_path / "rows.jsonl").write_bytes(b"y" * 5000 + last)
        with make_reader({"path": tmp_path / "rows.jsonl"}) as reader:
            hashes.add(reader.content_hash()["rows"])
    assert len(hashes) == 2


@pytest.fixture
def memory_files():  # noqa: ANN201
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_url_is_read_like_a_file(memory_files: Any, name: str) -> None:
    data = gzip.compress(LINES) if name.endswith("gz") else LINES
    memory_files.pipe(f"/in/{name}", data)
    rows = read_source(f"memory://in/{name}")
    assert [row.row_id for row in rows] == [row["id"] for row in ROWS]
    with make_reader({"path": f"memory://in/{name}"}) as reader:
        assert reader.describe(rows[4].location) == f"memory://in/{name}, line 5"


def test_a_pattern_in_a_url_has_its_files_in_natural_order(memory_files: Any) -> None:
    for number in (10, 9, 1):
        memory_files.pipe(f"/in/d/part-{number}.jsonl", b'{"prompt": "a"}\n')
    rows = read_source("memory://in/*/part-*.jsonl", limit=2)
    assert [row.row_id for row in rows] == ["d/part-1:1", "d/part-9:1"]


def test_a_url_of_nothing_is_named(memory_files: Any) -> None:
    with pytest.raises(ConfigError, match=r"sources\.0\.path: memory://in/a\.jsonl: no such file"):
        make_reader({"path": "memory://in/a.jsonl"})
    with pytest.raises(ConfigError, match=r"memory://in/\*\.jsonl: no file matches"):
        make_reader({"path": "memory://in/*.jsonl"})


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with make_reader({"path": f"file://{tmp_path}/rows.jsonl"}) as reader:
        assert reader.sources[0].path == str(tmp_path / "rows.jsonl")
        assert len(list(reader.read_all())) == 1


def test_a_protocol_whose_package_is_missing_names_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install adlfs"):
        make_reader({"path": "abfs://bucket/a.jsonl"})


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://.*not a URL that can be read"):
        make_reader({"path": "nosuch://bucket/a.jsonl"})


@pytest.mark.parametrize("method", ["exists", "glob", "open"])
def test_errors_of_a_store_are_told_with_the_source(
    memory_files: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    class NoCredentialsError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise NoCredentialsError("who are you?")

    memory_files.pipe("/in/a.jsonl", LINES)
    monkeypatch.setattr(type(memory_files), method, fail)
    name = "*.jsonl" if method == "glob" else "a.jsonl"
    with pytest.raises(ConfigError, match=r"memory://in/.*: .*NoCredentialsError.*who are you"):
        list(make_reader({"path": f"memory://in/{name}"}).read_all())


def test_the_query_of_a_url_is_no_pattern() -> None:
    assert not SourceConfig(path="https://host/a.jsonl?version=1").is_pattern
    assert SourceConfig(path="s3://bucket/*.jsonl").is_pattern
