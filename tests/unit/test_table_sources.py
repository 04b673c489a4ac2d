"""Parquet files and folders of `datasets`: typed columns become values that JSON can say."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_builders import complaint, good, make_reader, read_source

from engine import ConfigError
from flows.config import PromptConfig
from flows.records import BadRow
from flows.sources.dataset import DatasetFolder
from flows.sources.tables import TableFile


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **options)
    return path


def write_dataset(folder: Path, *parts: pa.Table, state: dict[str, Any] | None = None) -> Path:
    """Write what save_to_disk writes: streams of Arrow, and state.json with their order."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(parts):05}.arrow" for n in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        with pa.ipc.new_stream(folder / name, part.schema) as stream:
            for batch in part.to_batches(max_chunksize=700):
                stream.write_batch(batch)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files} | (state or {})))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def numbered(first: int, end: int) -> pa.Table:
    rows = range(first, end)
    return pa.table({"id": [f"r{n}" for n in rows], "prompt": [f"question {n}" for n in rows]})


def test_rows_of_parquet_are_found_over_row_groups_and_batches(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", numbered(0, 3500), row_group_size=1100)
    rows = read_source(path)
    assert [row.row_id for row in rows] == [f"r{n}" for n in range(3500)]
    assert good(rows[-1]).prompt == "question 3499"
    with make_reader({"path": path}) as reader:
        assert reader.describe(rows[-1].location) == f"{path}, row 3500"


def test_rows_of_a_dataset_come_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = write_dataset(
        tmp_path / "mine", numbered(0, 1500), numbered(1500, 1501), numbered(1501, 3000)
    )
    rows = read_source(folder)
    assert [row.row_id for row in rows] == [f"r{n}" for n in range(3000)]
    swapped = ["data-00002-of-00003.arrow", "data-00000-of-00003.arrow"]
    state = {"_data_files": [{"filename": name} for name in swapped]}
    (folder / "state.json").write_text(json.dumps(state))
    rows = read_source(folder)
    assert (rows[0].row_id, rows[-1].row_id) == ("r1501", "r1499")


def test_a_row_without_an_id_is_called_by_its_number(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"]})
    for path in (
        write_parquet(tmp_path / "p.parquet", table),
        write_dataset(tmp_path / "d", table),
    ):
        assert [row.row_id for row in read_source(path)] == [f"{path.stem}:1", f"{path.stem}:2"]


TIME = datetime.datetime(2024, 5, 17, 12, 30, 1, 250_000, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([datetime.date(2024, 2, 29)]), "2024-02-29"),
        (pa.array([TIME], pa.timestamp("us", "UTC")), "2024-05-17T12:30:01.250000+00:00"),
        (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
        (pa.array([datetime.time(1, 2, 3)]), "01:02:03"),
        (pa.array([datetime.timedelta(seconds=90)]), 90.0),
        (pa.array([decimal.Decimal("1.50")]), "1.50"),
        (pa.array([b"\x00\xff"]), "AP8="),
        (pa.array([b"ab"], pa.binary(2)), "YWI="),
        (pa.array(["x"]).dictionary_encode(), "x"),
        (pa.array([b"x"]).dictionary_encode(), "eA=="),
        (pa.array([[datetime.date(2024, 1, 1), None]]), ["2024-01-01", None]),
        (pa.array([{"d": datetime.date(2024, 1, 1), "n": None, "k": 1}]), {"d": "2024-01-01", "n": None, "k": 1}),
        (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())), {"a": 1, "b": None}),
        (pa.array([[(3, b"x")]], pa.map_(pa.int64(), pa.binary())), {"3": "eA=="}),
        (pa.array([[1.5, 2.5]], pa.list_(pa.float32(), 2)), [1.5, 2.5]),
        (pa.array([[{"a": [b"x"]}]]), [{"a": ["eA=="]}]),
        (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        (pa.array([1.5], pa.float16()), 1.5),
        (pa.array([True]), True),
        (pa.nulls(1), None),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)  # fmt: skip
def test_every_type_becomes_what_json_can_say(
    tmp_path: Path, values: pa.Array, wanted: Any
) -> None:
    table = pa.table({"prompt": ["a"], "value": values})
    for path in (
        write_parquet(tmp_path / "p.parquet", table),
        write_dataset(tmp_path / "d", table),
    ):
        (row,) = read_source(path)
        assert row.columns["value"] == wanted
        json.dumps(row.columns, allow_nan=False)


def test_a_template_reads_nested_columns(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "p.parquet",
        {"answers": [{"text": ["x", "y"]}], "day": [datetime.date(2024, 1, 2)]},
    )
    prompt = PromptConfig(template="{{ answers.text[1] }} {{ day }}", format="text")
    (row,) = read_source(path, prompt=prompt)
    assert good(row).prompt == "y 2024-01-02"


def test_messages_lose_the_empty_fields_that_a_struct_column_gives_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "f"}]
    path = write_parquet(
        tmp_path / "p.parquet",
        {"messages": [messages], "sampling": [{"temperature": 0.5, "seed": None}]},
    )
    record = good(read_source(path)[0])
    assert record.messages == messages
    assert record.sampling == {"temperature": 0.5}
    assert record.columns["messages"][0] == {"role": "user", "content": "a", "name": None}


def test_a_text_that_is_not_utf8_costs_its_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff", b"last"])
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    path = write_parquet(tmp_path / "p.parquet", {"prompt": texts})
    rows = read_source(path)
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert "p.parquet, row 2: a value of the row cannot be read" in complaint(rows[1])


def test_two_columns_of_one_name_stop_the_job(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    for path in (
        write_parquet(tmp_path / "p.parquet", table),
        write_dataset(tmp_path / "d", table),
    ):
        with pytest.raises(ConfigError, match="two columns are called 'prompt'"):
            read_source(path)


def test_what_is_no_table_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"a\.parquet: not a Parquet file"):
        read_source(tmp_path / "a.parquet")
    folder = write_dataset(tmp_path / "d", numbered(0, 5))
    (folder / "data-00000-of-00001.arrow").write_text("no stream of Arrow at all")
    with pytest.raises(ConfigError, match=r"data-00000-of-00001\.arrow: not a stream of Arrow"):
        read_source(folder)


def test_a_dataset_that_was_cut_off_says_how_far_it_goes(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", numbered(0, 2000))
    data = folder / "data-00000-of-00001.arrow"
    data.write_bytes(data.read_bytes()[:-20_000])
    with pytest.raises(ConfigError, match=r"d: cannot be read beyond row (700|1400): "):
        read_source(folder)


def test_a_missing_part_of_a_dataset_is_named(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", numbered(0, 10), numbered(10, 20))
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"beyond row 10: .*data-00001-of-00002\.arrow"):
        read_source(folder)


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_dataset(tmp_path / "all" / split, numbered(0, 3))
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    folder = tmp_path / "all"
    with pytest.raises(
        ConfigError, match=rf"several splits; name one of them: {folder}/test, {folder}/train"
    ):
        make_reader({"path": folder})
    assert len(read_source(folder / "train")) == 3


def test_rows_that_an_index_chooses_are_refused(tmp_path: Path) -> None:
    state = {"_indices_files": [{"filename": "indices.arrow"}]}
    folder = write_dataset(tmp_path / "d", numbered(0, 3), state=state)
    with pytest.raises(ConfigError, match="flatten_indices"):
        read_source(folder)


def test_a_plain_folder_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder.*a pattern such as .*\*\.jsonl"):
        make_reader({"path": tmp_path})


def test_the_hash_does_not_depend_on_how_the_table_is_cut(tmp_path: Path) -> None:
    hashes = set()
    for size in (7, 5000):
        path = write_parquet(tmp_path / "p.parquet", numbered(0, 100), row_group_size=size)
        with make_reader({"path": path}) as reader:
            hashes.add(reader.content_hash()["p"])
    assert len(hashes) == 1
    write_parquet(tmp_path / "p.parquet", numbered(1, 101))
    with make_reader({"path": path}) as reader:
        assert reader.content_hash()["p"] not in hashes


def test_a_dataset_is_entered_at_the_batch_that_holds_the_row(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", numbered(0, 2000), numbered(2000, 4000))
    for row, first in ((0, 0), (699, 0), (700, 700), (1999, 1400), (2000, 2000), (3999, 3400)):
        assert next(DatasetFolder(str(folder)).batches_from(row))[0] == first


def test_walking_on_reads_each_batch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_dataset(tmp_path / "d", numbered(0, 7000))
    starts: list[int] = []
    guarded = TableFile._guarded
    monkeypatch.setattr(
        TableFile, "_guarded", lambda self, row: (starts.append(row), guarded(self, row))[1]
    )
    with make_reader({"path": folder}) as reader:
        rows = list(reader.read_all())
        starts.clear()
        for row in rows[1000:6000:3]:
            reader.read_at(row.row_index, row.location)
        reader.read_at(0, rows[0].location)
    assert starts == [1000, 0]
