"""What an output line may be called, and which input a job had: planner and exporter agree."""

import json
from pathlib import Path
from typing import Any

import pytest
from source_builders import make_reader

from engine import ConfigError
from flows.config import ColumnMapping
from flows.records import (
    RESULT_FIELDS,
    ManifestHash,
    OutputNames,
    RecordReader,
    refuse_to_overwrite_a_source,
)


def reader_of(folder: Path, content: bytes, **source: Any) -> RecordReader:
    (folder / "rows.jsonl").write_bytes(content)
    return make_reader({"path": folder / "rows.jsonl", **source})


@pytest.mark.parametrize("field", RESULT_FIELDS)
def test_a_column_with_the_name_of_a_result_field_is_refused(tmp_path: Path, field: str) -> None:
    with reader_of(tmp_path, json.dumps({"prompt": "a", field: 1}).encode()) as reader:
        (row,) = reader.read_all()
        with pytest.raises(ConfigError, match=rf"line 1: the column '{field}'.*result_prefix"):
            OutputNames("").check(row, reader)
        OutputNames("answer_").check(row, reader)


def test_a_prefix_can_collide_as_well(tmp_path: Path) -> None:
    with reader_of(tmp_path, b'{"prompt": "a", "my_text": 1}') as reader:
        (row,) = reader.read_all()
        OutputNames("").check(row, reader)
        with pytest.raises(ConfigError, match="'my_text'"):
            OutputNames("my_").check(row, reader)


def test_a_column_called_row_id_must_be_the_id(tmp_path: Path) -> None:
    content = b'{"prompt": "a", "row_id": 5}'
    with reader_of(tmp_path, content) as reader:
        (row,) = reader.read_all()
        with pytest.raises(ConfigError, match=r"columns\.id: row_id"):
            OutputNames("").check(row, reader)
    with reader_of(tmp_path, content, columns=ColumnMapping(id="row_id")) as reader:
        (row,) = reader.read_all()
        OutputNames("").check(row, reader)


def test_the_output_may_not_be_a_source_by_another_name(tmp_path: Path) -> None:
    with reader_of(tmp_path, b"{}\n") as reader:
        (tmp_path / "link.jsonl").hardlink_to(tmp_path / "rows.jsonl")
        refuse_to_overwrite_a_source(reader.sources, tmp_path / "new.jsonl")
        with pytest.raises(ConfigError, match="overwritten"):
            refuse_to_overwrite_a_source(reader.sources, tmp_path / "link.jsonl")


def test_the_manifest_tells_rows_apart_however_their_ids_are_cut() -> None:
    def manifest(*row_ids: str, source_hash: str = "f") -> str:
        digest = ManifestHash()
        for row_id in row_ids:
            digest.add(row_id)
        return digest.finish({"source": source_hash})

    assert manifest("a", "b") == manifest("a", "b")
    assert len({manifest("a", "b"), manifest("ab"), manifest("b", "a"), manifest("a1:b")}) == 4
    assert manifest("a", source_hash="e") != manifest("a")
