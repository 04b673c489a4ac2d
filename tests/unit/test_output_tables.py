"""Tables: which columns they have, what these hold, and that others can read them."""

import gc
import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from export_builders import ExportedJob

from engine import ConfigError, SamplingParams, TokenLogprob
from flows.config import ColumnMapping, OutputConfig
from flows.ledger_rows import CompletionRow
from flows.logprob_blob import StoredLogprobs
from flows.outputs import parquet_table, table_columns
from flows.schema import RowState

MakeJob = Callable[..., ExportedJob]
TABLES = ("output.csv", "output.parquet")


def lines_of(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def answer_all(job: ExportedJob, count: int, text: str = "answer") -> None:
    for index in range(count):
        job.answer(index, f"rows:{index + 1}", f"{text} {index}", num_prompt_tokens=2)


def column_types(job: ExportedJob) -> dict[str, str]:
    schema = pq.read_schema(job.output_path)
    return dict(zip(schema.names, map(str, schema.types), strict=True))


def column_values(job: ExportedJob, name: str) -> list[Any]:
    values: list[Any] = pq.read_table(job.output_path)[name].to_pylist()
    return values


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_id_the_columns_and_the_results_in_this_order(
    make_exported_job: MakeJob, name: str
) -> None:
    rows = lines_of({"prompt": "a", "z": 1}, {"prompt": "b", "late": True, "z": 2})
    job = make_exported_job(rows, name=name)
    answer_all(job, 2)
    job.export()
    read: Any = pd.read_csv if name.endswith("csv") else pd.read_parquet
    frame = read(job.output_path)
    assert list(frame.columns) == [
        *("row_id", "prompt", "z", "late", "text", "finish_reason", "num_prompt_tokens"),
        *("num_output_tokens", "is_truncated", "error_code", "error_message"),
    ]
    assert frame["row_id"].tolist() == ["rows:1", "rows:2"]
    assert frame["text"].tolist() == ["answer 0", "answer 1"]
    assert frame["z"].tolist() == [1, 2]
    assert frame["late"].isna().tolist() == [True, False]
    assert frame["num_output_tokens"].tolist() == [3, 3]
    assert frame["is_truncated"].tolist() == [False, False]
    assert frame["error_code"].isna().all()


@pytest.mark.parametrize("name", TABLES)
def test_failed_rows_are_lines_of_the_table_and_pending_rows_are_not(
    make_exported_job: MakeJob, name: str
) -> None:
    job = make_exported_job(lines_of({"prompt": "a"}, {"question": 1}, {"prompt": "c"}), name=name)
    job.fail(0, "rows:1", "timeout", "too\nslow")
    summary = job.export()
    frame: Any = (pd.read_csv if name.endswith("csv") else pd.read_parquet)(job.output_path)
    assert frame["error_code"].tolist() == ["timeout", "bad_row"]
    assert frame["error_message"][0] == "too\nslow"
    assert frame["text"].isna().all()
    assert (summary.num_error, summary.num_pending) == (2, 1)
    assert [line["row_id"] for line in job.lines("output_errors.jsonl")] == ["rows:1", "rows:2"]


def test_a_column_has_the_narrowest_type_that_holds_its_values(make_exported_job: MakeJob) -> None:
    rows = lines_of(
        {"prompt": "a", "flag": True, "whole": 1, "number": 1, "big": 2**62, "never": None},
        {"prompt": "b", "flag": None, "whole": -5, "number": 0.5, "big": 3, "tags": ["x", None]},
        {"prompt": "c", "score": [1, 2.5], "talk": [{"role": "user", "content": "hi"}]},
        {"prompt": "d", "score": [], "talk": [{"content": "ho", "role": "bot"}], "empty": []},
    )
    job = make_exported_job(rows, name="output.parquet")
    answer_all(job, 4)
    job.export()
    types = column_types(job)
    assert types["flag"] == "bool"
    assert types["whole"] == "int64"
    assert types["number"] == "double"
    assert types["big"] == "int64"
    assert types["never"] == "string"
    assert types["tags"] == "list<element: string>"
    assert types["score"] == "list<element: double>"
    assert types["talk"] == "list<element: struct<role: string, content: string>>"
    assert types["empty"] == "list<element: string>"
    assert column_values(job, "number") == [1.0, 0.5, None, None]
    assert column_values(job, "tags") == [None, ["x", None], None, None]
    assert column_values(job, "talk")[3] == [{"role": "bot", "content": "ho"}]


def test_a_column_of_several_kinds_holds_json_text(make_exported_job: MakeJob) -> None:
    values: list[Any] = ["text", 5, None, {"a": 1}, [1, "b"], 1e300]
    rows = lines_of(
        *({"prompt": "a", "mixed": value, "struct": {"k": 1}} for value in values),
        {"prompt": "b", "struct": {"other": 2}, "huge": 2**70, "close": 2**53 + 1},
        {"prompt": "b", "struct": {}, "huge": 1, "close": 0.5, "bare": {}},
    )
    job = make_exported_job(rows, name="output.parquet")
    answer_all(job, 8)
    job.export()
    texts = column_values(job, "mixed")
    assert texts[2] is None
    assert [None if text is None else json.loads(text) for text in texts[:6]] == values
    structs = [json.loads(text) for text in column_values(job, "struct")]
    assert structs[5:] == [{"k": 1}, {"other": 2}, {}]
    assert column_values(job, "bare")[7] == "{}"  # Parquet has no object without names
    assert column_values(job, "huge")[6:] == [str(2**70), "1"]
    # As a float the whole number would be another one.
    assert column_values(job, "close")[6:] == [str(2**53 + 1), "0.5"]


def test_a_row_that_cannot_be_asked_does_not_change_the_type_of_a_column(
    make_exported_job: MakeJob,
) -> None:
    rows = lines_of(
        {"prompt": 5, "label": "seven", "only": 1},
        {"prompt": "b", "label": 7},
    )
    job = make_exported_job(rows, name="output.parquet")
    job.answer(1, "rows:2", "x")
    job.export()
    types = column_types(job)
    assert (types["prompt"], types["label"], types["only"]) == ("string", "int64", "int64")
    assert column_values(job, "prompt") == ["5", "b"]
    assert column_values(job, "label") == [None, 7]
    assert column_values(job, "only") == [1, None]
    (error,) = job.lines("output_errors.jsonl")
    assert error["columns"] == {"prompt": 5, "label": "seven", "only": 1}


@pytest.mark.parametrize("name", TABLES)
def test_samples_replies_and_logprobs_have_columns_when_a_row_asks_for_them(
    make_exported_job: MakeJob, name: str
) -> None:
    rows = lines_of(
        {"prompt": "a", "sampling": {"n": 2, "temperature": 1.0, "logprobs": 1}},
        {"turns": ["b", "c"]},
    )
    job = make_exported_job(rows, name=name)
    logprobs = StoredLogprobs(output=(TokenLogprob(100, -0.5, 1, ((100, -0.5),)),))
    for number in range(2):
        fields: dict[str, Any] = {"sample_index": number, "num_samples": 2}
        job.answer(0, "rows:1", f"a{number}", logprobs=logprobs, **fields)
    job.answer(1, "rows:2", "last", turns=("first",))
    job.export()
    frame: Any = (pd.read_csv if name.endswith("csv") else pd.read_parquet)(job.output_path)
    results = list(frame.columns)[4:]
    assert results == [
        *("sample_index", "text", "replies", "finish_reason", "num_prompt_tokens"),
        *("num_output_tokens", "is_truncated", "logprobs", "error_code", "error_message"),
    ]
    assert frame["text"].tolist() == ["a0", "a1", "last"]
    token = {"token": "a", "token_id": 100, "logprob": -0.5, "rank": 1}
    expected = [token | {"top": [{"token": "a", "token_id": 100, "logprob": -0.5}]}]
    if name.endswith("csv"):
        assert json.loads(frame["replies"][2]) == ["first", "last"]
        assert json.loads(frame["logprobs"][0]) == expected
    else:
        assert column_values(job, "replies") == [None, None, ["first", "last"]]
        assert column_values(job, "logprobs") == [expected, expected, None]


def test_what_the_job_asks_of_every_row_has_columns_too(make_exported_job: MakeJob) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, logprobs=2, prompt_logprobs=0)
    rows = lines_of({"turns": ["a"], "prompt": None})
    job = make_exported_job(rows, name="output.parquet", sampling=sampling)
    job.export()
    assert {"sample_index", "replies", "logprobs", "reply_logprobs", "prompt_logprobs"} <= set(
        column_types(job)
    )


def test_an_unfinished_job_has_the_columns_of_the_finished_one(make_exported_job: MakeJob) -> None:
    rows = lines_of({"prompt": "a", "x": 1}, {"prompt": "b", "y": [1], "x": 0.5})
    job = make_exported_job(rows, name="output.parquet")
    job.export()
    empty = column_types(job)
    assert pq.read_metadata(job.output_path).num_rows == 0
    answer_all(job, 2)
    job.export()
    assert column_types(job) == empty


def test_infinite_logprobs_are_null_in_every_format(make_exported_job: MakeJob) -> None:
    job = make_exported_job(lines_of({"prompt": "a", "sampling": {"logprobs": 1}}))
    entry = TokenLogprob(100, -math.inf, 1, ((100, math.nan),))
    job.answer(0, "rows:1", "a", logprobs=StoredLogprobs(output=(entry,), prompt=(None, entry)))
    job.export()
    (line,) = job.lines()
    expected = {"token": "a", "token_id": 100, "logprob": None, "rank": 1}
    expected["top"] = [{"token": "a", "token_id": 100, "logprob": None}]
    assert line["logprobs"] == [expected]
    assert line["prompt_logprobs"] == [None, expected]
    job.output_path = job.output_path.with_suffix(".parquet")
    job.export()
    assert column_values(job, "logprobs") == [[expected]]


def test_csv_is_read_back_whatever_a_cell_holds(make_exported_job: MakeJob) -> None:
    texts = ['a,"b"', "line\nend", "c\r\nd", "=1+2", " space ", "\u2028", "你好", "x\0y", "", "NA"]
    rows = lines_of(*({"prompt": text} for text in texts))
    job = make_exported_job(rows, name="output.csv")
    for index, text in enumerate(texts):
        job.answer(index, f"rows:{index + 1}", text)
    job.export()
    assert [line["text"] for line in job.csv_lines()] == texts
    frame = pd.read_csv(job.output_path, dtype=str, keep_default_na=False)
    assert frame["text"].tolist() == texts
    assert frame["prompt"].tolist() == texts


def test_csv_has_json_for_what_is_not_text_and_ends_lines_as_rfc_4180(
    make_exported_job: MakeJob,
) -> None:
    job = make_exported_job(
        lines_of({"prompt": "a", "f": False, "n": None, "d": {"k": [1.5]}, "i": 3}),
        name="output.csv",
    )
    job.answer(0, "rows:1", "x")
    job.export()
    assert job.output_path.read_bytes() == (
        b"row_id,prompt,f,n,d,i,text,finish_reason,num_prompt_tokens,num_output_tokens,"
        b"is_truncated,error_code,error_message\r\n"
        b'rows:1,a,false,,"{""k"":[1.5]}",3,x,stop,0,3,false,,\r\n'
    )


@pytest.mark.parametrize("name", TABLES)
def test_half_a_surrogate_pair_is_a_replacement_character(
    make_exported_job: MakeJob, name: str
) -> None:
    rows = rb'{"prompt":"a\ud800","k":{"\udc00":"\ud800"},"l":["\ud800"]}' + b"\n"
    job = make_exported_job(rows, name=name)
    job.answer(0, "rows:1", "b\udfff")
    job.export()
    frame: Any = (pd.read_csv if name.endswith("csv") else pd.read_parquet)(job.output_path)
    assert (frame["prompt"][0], frame["text"][0]) == ("a\ufffd", "b\ufffd")
    assert frame["k"][0] == r'{"\udc00":"\ud800"}'
    expected = r'["\ud800"]' if name.endswith("csv") else ["\ufffd"]
    assert list(frame["l"][0]) == list(expected)


@pytest.mark.parametrize("name", TABLES)
def test_a_prefix_keeps_columns_and_results_of_a_table_apart(
    make_exported_job: MakeJob, name: str
) -> None:
    rows = lines_of({"prompt": "a", "text": "theirs", "error_code": 5, "row_id": 3})
    config = {"output": OutputConfig(result_prefix="my_"), "columns": ColumnMapping(id="row_id")}
    job = make_exported_job(rows, name=name, **config)
    job.answer(0, "3", "ours")
    job.export()
    frame: Any = (pd.read_csv if name.endswith("csv") else pd.read_parquet)(job.output_path)
    assert list(frame.columns)[:4] == ["row_id", "prompt", "text", "error_code"]
    assert (frame["text"][0], frame["my_text"][0], frame["error_code"][0]) == ("theirs", "ours", 5)


@pytest.mark.parametrize("name", TABLES)
def test_a_column_with_the_name_of_a_result_is_refused(
    make_exported_job: MakeJob, name: str
) -> None:
    job = make_exported_job(lines_of({"prompt": "a", "error_code": 5}))
    job.export()  # JSONL has `error`, and no such field
    job.output_path = job.output_path.with_name(name)
    with pytest.raises(ConfigError, match="column 'error_code' has the name of a result field"):
        job.export()


def test_two_names_that_utf8_spells_alike_are_refused(make_exported_job: MakeJob) -> None:
    job = make_exported_job(rb'{"prompt":"a","\ud800":1,"\\ud800":2}', name="output.csv")
    with pytest.raises(ConfigError, match="two columns"):
        job.export()


def test_more_columns_than_a_table_can_have_are_refused(
    make_exported_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_columns, "_MAX_COLUMNS", 5)
    job = make_exported_job(
        lines_of(*({"prompt": "a", f"c{number}": 1} for number in range(5))), name="output.parquet"
    )
    with pytest.raises(ConfigError, match="more than 5 different columns"):
        job.export()
    assert job.files() == []


@pytest.mark.parametrize("limit", ["_GROUP_LINES", "_GROUP_BYTES"])
def test_row_groups_are_bounded(
    make_exported_job: MakeJob, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(parquet_table, limit, 4 if limit == "_GROUP_LINES" else 4000)
    job = make_exported_job(lines_of(*({"prompt": "p" * 400} for _ in range(10))), name="o.parquet")
    answer_all(job, 10)
    job.export()
    metadata = pq.read_metadata(job.output_path)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [4, 4, 2]
    assert column_values(job, "text") == [f"answer {number}" for number in range(10)]


def test_a_parquet_output_that_fails_half_way_leaves_nothing(
    make_exported_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_table, "_GROUP_LINES", 1)
    job = make_exported_job(lines_of({"prompt": "a"}, {"prompt": "b"}), name="output.parquet")
    answer_all(job, 2)
    job.source_path.write_text(lines_of({"prompt": "a"}, {"prompt": "c"}))
    with pytest.raises(ConfigError, match="input has changed"):
        job.export()
    assert job.files() == []


def test_memory_of_a_parquet_output_does_not_grow_with_the_number_of_rows(
    make_exported_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_table, "_GROUP_BYTES", 1_000_000)
    job = make_exported_job(b"".join(b'{"prompt":"%d"}\n' % number for number in range(1500)))
    rows = [
        CompletionRow(row_index=i, row_id=f"rows:{i + 1}", state=RowState.OK, text=f"{i:04000}")
        for i in range(1500)
    ]
    job.ledger.commit(job.lease, rows)
    del rows
    job.output_path = job.output_path.with_suffix(".parquet")
    job.export()
    gc.collect()
    tracemalloc.start()
    try:
        job.export()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A row group and a part of one page of the ledger; all rows would be 7 MB.
    assert peak_bytes < 4_000_000
    assert pq.read_metadata(job.output_path).num_rows == 1500


def test_the_bytes_of_a_table_do_not_depend_on_the_order_of_the_answers(
    make_exported_job: MakeJob, tmp_path: Path
) -> None:
    rows = lines_of(*({"prompt": str(number)} for number in range(5)))
    for name in TABLES:
        job, other = (make_exported_job(rows, name=name) for _ in range(2))
        answer_all(job, 5)
        for index in reversed(range(5)):
            other.answer(index, f"rows:{index + 1}", f"answer {index}", num_prompt_tokens=2)
        job.export()
        other.export()
        assert job.output_path.read_bytes() == other.output_path.read_bytes()
