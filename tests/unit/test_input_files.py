"""What a source's path names: files in their order, their formats, and how their rows are called."""

import re
from pathlib import Path
from typing import Any

import pytest
from source_builders import good, make_reader, read_source

from engine import ConfigError
from flows.config import SourceConfig, SourceFormat
from flows.records import refuse_to_overwrite_a_source
from flows.sources.input_files import find_files


def write(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    return path


def names_of(pattern: Path | str, **source: Any) -> list[str]:
    (files,) = find_files((SourceConfig(path=str(pattern), **source),))
    return [Path(file.path).name for file in files]


def test_files_of_a_pattern_come_in_natural_order(tmp_path: Path) -> None:
    names = ["a.jsonl", "part-1.jsonl", "part-2.jsonl", "part-010.jsonl", "part-10.jsonl"]
    names += ["part-10b.jsonl", "part-11.jsonl"]
    for name in reversed(names):
        write(tmp_path / name, "x")
    assert names_of(tmp_path / "*.jsonl") == names


def test_rows_of_several_files_are_called_by_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", "3")
    write(tmp_path / "a.jsonl", "1", "2")
    rows = read_source(tmp_path / "*.jsonl")
    assert [row.row_id for row in rows] == ["a:1", "a:2", "b:1"]
    assert [row.location.file_index for row in rows] == [0, 0, 1]
    assert [row.row_index for row in rows] == [0, 1, 2]
    with make_reader({"path": tmp_path / "*.jsonl"}) as reader:
        assert reader.describe(rows[2].location) == f"{tmp_path / 'b.jsonl'}, line 1"


def test_folders_that_the_pattern_leaves_open_are_part_of_the_name(tmp_path: Path) -> None:
    for day in ("day=1", "day=2"):
        write(tmp_path / day / "x" / "part-0.jsonl", "a")
    rows = read_source(tmp_path / "day=*" / "x" / "*.jsonl")
    assert [row.row_id for row in rows] == ["day=1/x/part-0:1", "day=2/x/part-0:1"]
    rows = read_source(tmp_path / "**" / "part-?.jsonl", name="mine")
    assert [row.row_id for row in rows] == ["mine/day=1/x/part-0:1", "mine/day=2/x/part-0:1"]


def test_two_files_whose_rows_would_be_called_alike_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "x")
    write(tmp_path / "a.ndjson", "x")
    with pytest.raises(ConfigError, match=r"a\.jsonl and of .*a\.ndjson .* a:LINE"):
        make_reader({"path": tmp_path / "a.*"})
    other = write(tmp_path / "other" / "a.jsonl", "x")
    with pytest.raises(ConfigError, match="would both be called a:LINE.*`name`"):
        make_reader({"path": tmp_path / "*.jsonl"}, {"path": other})
    make_reader({"path": tmp_path / "*.jsonl"}, {"path": other, "name": "b"})


def test_a_pattern_that_matches_nothing_says_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl", "x")
    pattern = tmp_path / "data" / "*.jsonl.gz"
    wanted = rf"sources\.0\.path: {re.escape(str(pattern))}: no file matches; .*data holds a\.jsonl"
    with pytest.raises(ConfigError, match=wanted):
        make_reader({"path": pattern})
    with pytest.raises(ConfigError, match=r"its folder .*gone cannot be listed"):
        make_reader({"path": tmp_path / "gone" / "*.jsonl"})


def test_folders_are_no_files_of_a_pattern(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl" / "inner.jsonl", "x")
    write(tmp_path / "b.jsonl", "x")
    assert names_of(tmp_path / "*.jsonl") == ["b.jsonl"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "data[1].jsonl", "bracket")
    write(tmp_path / "data1.jsonl", "other")
    (row,) = read_source(path)
    assert (good(row).prompt, row.row_id) == ("bracket", "data[1]:1")


def test_a_limit_counts_over_all_files(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write(tmp_path / f"p{number}.jsonl", "a", "b")
    rows = read_source(tmp_path / "p*.jsonl", limit=3)
    assert [row.row_id for row in rows] == ["p1:1", "p1:2", "p2:1"]


def test_more_files_than_a_process_may_open_are_read_at_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write(tmp_path / f"p{number}.jsonl", "a")
    opened: list[Any] = []
    path_open = Path.open

    def watched(path: Path, *args: Any, **options: Any) -> Any:
        handle = path_open(path, *args, **options)
        opened.append(handle)
        return handle

    monkeypatch.setattr(Path, "open", watched)
    with make_reader({"path": tmp_path / "*.jsonl"}) as reader:
        for row in list(reader.read_all()):
            reader.read_at(row.row_index, row.location)
            assert sum(not handle.closed for handle in opened) <= 1
    assert all(handle.closed for handle in opened)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.jsonl", SourceFormat.JSONL),
        ("a.JSONL.GZ", SourceFormat.JSONL),
        ("a.ndjson", SourceFormat.JSONL),
        ("a.b.jsonl.zst", SourceFormat.JSONL),
        ("a.csv.gz", SourceFormat.CSV),
        ("a.tsv", SourceFormat.CSV),
        ("a.parquet", SourceFormat.PARQUET),
    ],
)
def test_the_name_tells_the_format(tmp_path: Path, name: str, wanted: SourceFormat) -> None:
    write(tmp_path / name, "x")
    ((file,),) = find_files((SourceConfig(path=tmp_path / name),))
    assert file.format is wanted


@pytest.mark.parametrize("name", ["rows", "rows.txt", "rows.json", "rows.gz"])
def test_a_name_that_tells_no_format_asks_for_it(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "x")
    with pytest.raises(ConfigError, match=r"does not tell the format; write `format:`.*jsonl"):
        make_reader({"path": path})
    if name != "rows.gz":
        assert len(read_source(path, format="jsonl")) == 1


def test_a_format_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "x")
    with pytest.raises(ConfigError, match="format is dataset, which is a folder"):
        make_reader({"path": path, "format": "dataset"})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="format is csv, which is a file"):
        make_reader({"path": tmp_path / "d", "format": "csv"})
    write(tmp_path / "a.parquet.gz", "x")
    with pytest.raises(ConfigError, match="parquet is packed by itself"):
        make_reader({"path": tmp_path / "a.parquet.gz"})


def test_sources_of_several_formats_make_one_input(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "one")
    (tmp_path / "b.csv").write_text("question\ntwo\n")
    with make_reader(
        {"path": tmp_path / "a.jsonl"},
        {"path": tmp_path / "b.csv", "columns": {"prompt": "question"}},
    ) as reader:
        rows = list(reader.read_all())
    assert [(row.row_id, good(row).prompt) for row in rows] == [("a:1", "one"), ("b:2", "two")]


def test_an_output_that_the_pattern_would_read_at_the_next_start_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl", "x")
    sources = (SourceConfig(path=tmp_path / "data" / "**" / "*.jsonl"),)
    for taken in ("data/out.jsonl", "data/sub/out.jsonl"):
        with pytest.raises(ConfigError, match="overwritten"):
            refuse_to_overwrite_a_source(sources, tmp_path / taken)
    for free in ("out.jsonl", "data/out.parquet"):
        refuse_to_overwrite_a_source(sources, tmp_path / free)
    flat = (SourceConfig(path=tmp_path / "data" / "*.jsonl"),)
    refuse_to_overwrite_a_source(flat, tmp_path / "data" / "sub" / "out.jsonl")


def test_a_url_is_never_taken_for_the_output() -> None:
    sources = (SourceConfig(path="memory://in/*.jsonl"),)
    refuse_to_overwrite_a_source(sources, Path("in/out.jsonl"))
