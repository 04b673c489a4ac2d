"""RowIndex: what a plan wrote is there to read, by shard and by what is bad."""

import sqlite3
from pathlib import Path

import pytest

from engine import ConfigError
from flows.row_index import DuplicateRowIdError, IndexRow, RowIndex
from flows.rows import RowLocation


def make_row(row_index: int, row_id: str | None = None, error_code: str | None = None) -> IndexRow:
    return IndexRow(
        row_index=row_index,
        source_index=0,
        offset=row_index * 10,
        line=row_index + 1,
        row_id=row_id or f"id-{row_index}",
        num_prompt_tokens=row_index,
        error_code=error_code,
    )


def write_index(path: Path, rows: list[IndexRow], *, num_shards: int = 1) -> None:
    with RowIndex.create(path) as builder:
        builder.insert(rows)
        builder.publish(num_rows=len(rows), num_shards=num_shards)


@pytest.mark.parametrize(("num_rows", "num_shards"), [(10, 3), (3, 3), (2, 5), (2500, 2)])
def test_every_row_is_in_one_shard_and_shards_are_contiguous(
    tmp_path: Path, num_rows: int, num_shards: int
) -> None:
    rows = [make_row(index) for index in range(num_rows)]
    write_index(tmp_path / "index", rows, num_shards=num_shards)
    with RowIndex.open(tmp_path / "index") as index:
        shards = [list(index.rows_of_shard(shard)) for shard in range(num_shards)]
        assert index.count == num_rows
    found = [row for shard in shards for row in shard]
    assert [row._replace(shard=None) for row in found] == rows
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert all(row.shard == number for number, shard in enumerate(shards) for row in shard)


def test_a_row_says_where_the_reader_finds_it(tmp_path: Path) -> None:
    write_index(tmp_path / "index", [make_row(0), make_row(1)])
    with RowIndex.open(tmp_path / "index") as index:
        row = list(index.rows_of_shard(0))[1]
    assert row.location == RowLocation(source_index=0, offset=10, line=2)


def test_bad_rows_are_found_over_all_shards_and_pages(tmp_path: Path) -> None:
    rows = [make_row(index, error_code="bad_row" if index % 2 else None) for index in range(4001)]
    write_index(tmp_path / "index", rows, num_shards=4)
    with RowIndex.open(tmp_path / "index") as index:
        assert [row.row_index for row in index.bad_rows()] == list(range(1, 4001, 2))


@pytest.mark.parametrize("batches", [[[0, 1, 2]], [[0], [1, 2]], [[0, 1], [2]]])
def test_two_rows_with_one_id_are_both_named(tmp_path: Path, batches: list[list[int]]) -> None:
    ids = ["a", "b", "a"]
    with RowIndex.create(tmp_path / "index") as builder:
        *good, last = [[make_row(index, ids[index]) for index in batch] for batch in batches]
        for batch in good:
            builder.insert(batch)
        with pytest.raises(DuplicateRowIdError) as caught:
            builder.insert(last)
    assert (caught.value.first.row_index, caught.value.second.row_index) == (0, 2)
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
        rows = index.rows_of_shard(0)
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
    write_index(tmp_path / "index", rows, num_shards=3)
    with RowIndex.open(tmp_path / "index") as index:
        assert [row.row_index for row in index.rows_between(1000, 3001)] == list(range(1000, 3001))
        assert [row.row_index for row in index.rows_between(0, 1)] == [0]
        assert list(index.rows_between(5, 5)) == []
