"""RowIndex: what a plan wrote is there to read, by range, by what is bad and by what is the same."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import ConfigError
from flows.row_index import DuplicateRowIdError, IndexRow, RowIndex
from flows.rows import RowLocation


def make_row(row_index: int, row_id: str | None = None, error_code: str | None = None) -> IndexRow:
    return IndexRow(
        row_index=row_index,
        source_index=0,
        file_index=2,
        offset=row_index * 10,
        line=row_index + 1,
        row_id=row_id or f"id-{row_index}",
        num_prompt_tokens=row_index,
        error_code=error_code,
    )


def write_index(path: Path, rows: list[IndexRow]) -> int:
    with RowIndex.create(path) as builder:
        builder.insert(rows)
        return builder.publish()


def all_rows(index: RowIndex) -> Iterator[IndexRow]:
    return index.rows_between(0, index.count)


def test_a_row_says_where_the_reader_finds_it(tmp_path: Path) -> None:
    write_index(tmp_path / "index", [make_row(0), make_row(1)])
    with RowIndex.open(tmp_path / "index") as index:
        row = list(all_rows(index))[1]
    assert row.location == RowLocation(source_index=0, file_index=2, offset=10, line=2)


def test_bad_rows_are_found_over_all_pages(tmp_path: Path) -> None:
    rows = [make_row(index, error_code="bad_row" if index % 2 else None) for index in range(4001)]
    write_index(tmp_path / "index", rows)
    with RowIndex.open(tmp_path / "index") as index:
        assert [row.row_index for row in index.bad_rows()] == list(range(1, 4001, 2))


def test_the_first_two_rows_with_one_id_are_named(tmp_path: Path) -> None:
    ids = ["z", "b", "a", "c", "a", "b", "b"]
    with RowIndex.create(tmp_path / "index") as builder:
        for start in (0, 3):
            builder.insert([make_row(n, ids[n]) for n in range(start, min(start + 3, 7))])
        builder.insert([make_row(6, ids[6])])
        with pytest.raises(DuplicateRowIdError) as caught:
            builder.publish()
    assert (caught.value.first.row_index, caught.value.second.row_index) == (1, 5)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_was_not_published_leaves_the_old_one(tmp_path: Path) -> None:
    write_index(tmp_path / "index", [make_row(0)])
    with RowIndex.create(tmp_path / "index") as builder:
        builder.insert([make_row(0), make_row(1)])
    with RowIndex.open(tmp_path / "index") as index:
        assert index.count == 1
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_reader_goes_on_with_the_old_index_while_a_new_one_takes_its_place(
    tmp_path: Path,
) -> None:
    write_index(tmp_path / "index", [make_row(index) for index in range(1500)])
    with RowIndex.open(tmp_path / "index") as index:
        rows = all_rows(index)
        next(rows)
        write_index(tmp_path / "index", [make_row(0)])
        assert len(list(rows)) == 1499
    with RowIndex.open(tmp_path / "index") as index:
        assert index.count == 1


def test_a_path_with_url_characters_is_opened_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "job #1?mode=x%20" / "index"
    write_index(path, [make_row(0)])
    with RowIndex.open(path) as index:
        assert index.count == 1


def test_what_is_no_index_says_to_plan_again(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, long enough to be read as a page" * 100)
    sqlite3.connect(tmp_path / "empty").close()
    (tmp_path / "empty").touch()
    for name in ("missing", "text", "empty"):
        with pytest.raises(ConfigError, match="plan the job again"):
            RowIndex.open(tmp_path / name)
    assert not (tmp_path / "missing").exists()


def test_an_index_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/index: the row index cannot be written"):
        RowIndex.create(tmp_path / "file" / "index")


def test_a_disk_that_fills_up_is_an_error_of_the_user(tmp_path: Path) -> None:
    def fill_the_disk() -> None:
        with RowIndex.create(tmp_path / "index") as builder:
            builder._connection.execute("PRAGMA max_page_count = 10")
            builder.insert([make_row(index) for index in range(5000)])

    with pytest.raises(ConfigError, match="cannot be written: database or disk is full"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


def test_a_range_of_rows_is_read_whatever_the_shards_are(tmp_path: Path) -> None:
    rows = [
        make_row(index, error_code="bad_row" if index == 1500 else None) for index in range(4000)
    ]
    write_index(tmp_path / "index", rows)
    with RowIndex.open(tmp_path / "index") as index:
        assert [row.row_index for row in index.rows_between(1000, 3001)] == list(range(1000, 3001))
        assert [row.row_index for row in index.rows_between(0, 1)] == [0]
        assert list(index.rows_between(5, 5)) == []


def foldable(row_index: int, request_hash: bytes, *, may_fold: int = 1) -> IndexRow:
    return make_row(row_index)._replace(request_hash=request_hash, may_fold=may_fold)


def test_rows_of_one_hash_follow_the_first_that_may_be_folded(tmp_path: Path) -> None:
    rows = [
        foldable(0, b"same", may_fold=0),
        foldable(1, b"same"),
        foldable(2, b"other"),
        foldable(3, b"same"),
        foldable(4, b"same", may_fold=0),
        foldable(5, b"same"),
    ]
    assert write_index(tmp_path / "index", rows) == 2
    with RowIndex.open(tmp_path / "index") as index:
        leaders = [row.duplicate_of for row in all_rows(index)]
        assert leaders == [None, None, None, 1, None, 1]
        assert [row.row_index for row in index.followers_of(1, 0, 6)] == [3, 5]
        assert [row.row_index for row in index.followers_of(1, 4, 6)] == [5]
        assert [row.row_index for row in index.followers_of(1, 3, 5)] == [3]
        assert list(index.followers_of(2, 0, 6)) == []


def test_followers_are_found_over_all_pages(tmp_path: Path) -> None:
    write_index(tmp_path / "index", [foldable(index, b"same") for index in range(3501)])
    with RowIndex.open(tmp_path / "index") as index:
        followers = [row.row_index for row in index.followers_of(0, 0, 3501)]
    assert followers == list(range(1, 3501))


def test_every_field_of_a_row_comes_back(tmp_path: Path) -> None:
    row = IndexRow(
        *(0, 1, 2, 3, 4, "id", 5, "bad_row", "why"),
        is_skipped=1,
        truncate_prompt_tokens=6,
        request_hash=b"h" * 16,
    )
    write_index(tmp_path / "index", [row])
    with RowIndex.open(tmp_path / "index") as index:
        assert list(all_rows(index)) == [row]
