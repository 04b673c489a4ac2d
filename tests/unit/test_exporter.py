"""export_job: one line for each finished row, in input order, strict JSON, all or nothing."""

import gc
import json
import tracemalloc
from collections.abc import Callable

import pytest
from export_builders import ExportedJob

from engine import ConfigError
from flows.config import ColumnMapping, OutputConfig, SourceConfig
from flows.ledger_rows import CompletionRow
from flows.schema import RowState

MakeJob = Callable[..., ExportedJob]


def test_answers_come_in_input_order_with_every_column(make_exported_job: MakeJob) -> None:
    job = make_exported_job(
        b'{"id":"b","prompt":"x y","z":[1],"a":null}\n{"id":"a","prompt":"z"}\n'
    )
    job.answer(1, "a", "second")
    job.answer(0, "b", "first", num_prompt_tokens=2, finish_reason="length")
    summary = job.export()
    first, second = job.output_path.read_text().splitlines()
    assert first == (
        '{"row_id":"b","id":"b","prompt":"x y","z":[1],"a":null,"text":"first",'
        '"finish_reason":"length","num_prompt_tokens":2,"num_output_tokens":3,"error":null}'
    )
    assert json.loads(second)["text"] == "second"
    assert (summary.num_ok, summary.num_pending, summary.num_length) == (2, 0, 1)
    assert summary.output_path == job.output_path


def test_bad_rows_are_lines_with_what_could_be_read(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"id":"a","question":1}\n{"prompt":\n{"prompt":"x"}\n')
    job.answer(2, "rows:3", "fine")
    summary = job.export()
    no_prompt, no_json, fine = job.lines()
    assert (no_prompt["row_id"], no_prompt["question"], no_prompt["text"]) == ("a", 1, None)
    assert no_prompt["error"]["code"] == "bad_row"
    assert no_prompt["finish_reason"] is None
    assert "line 2" in no_json["error"]["message"]
    assert list(no_json)[:2] == ["row_id", "text"]
    assert fine["error"] is None
    assert (summary.num_ok, summary.num_error) == (1, 2)


def test_pending_rows_are_left_out_and_counted(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n{"prompt":"b"}\n{"prompt":"c"}\n{"prompt":"d"}\n')
    job.answer(1, "rows:2", "b")
    job.answer(2, "rows:3", "", state=RowState.SKIPPED)
    summary = job.export()
    assert [line["row_id"] for line in job.lines()] == ["rows:2", "rows:3"]
    assert (summary.num_ok, summary.num_skipped, summary.num_pending) == (1, 1, 2)


def test_the_bytes_do_not_depend_on_the_order_of_the_answers(make_exported_job: MakeJob) -> None:
    content = b"".join(b'{"prompt":"%d"}\n' % number for number in range(9))
    job, other = make_exported_job(content), make_exported_job(content)
    for number in range(9):
        job.answer(number, f"rows:{number + 1}", f"answer {number}")
    for number in reversed(range(9)):
        other.answer(number, f"rows:{number + 1}", f"answer {number}")
    job.export()
    other.export()
    assert job.output_path.read_bytes() == other.output_path.read_bytes()


def test_several_samples_are_several_lines_with_their_index(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n{"prompt":"b"}\n')
    job.answer(0, "rows:1", "one", sample_index=0, num_samples=2)
    job.answer(0, "rows:1", "two", sample_index=1, num_samples=2)
    job.answer(1, "rows:2", "only")
    summary = job.export()
    assert [(line.get("sample_index"), line["text"]) for line in job.lines()] == [
        (0, "one"),
        (1, "two"),
        (None, "only"),
    ]
    assert (summary.num_rows, summary.num_ok, summary.num_samples) == (2, 2, 3)


def test_a_row_is_pending_until_all_its_samples_are_there(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n{"prompt":"b"}\n')
    job.answer(0, "rows:1", "second of three", sample_index=1, num_samples=3)
    job.answer(1, "rows:2", "only")
    summary = job.export()
    assert [line["row_id"] for line in job.lines()] == ["rows:2"]
    assert (summary.num_ok, summary.num_pending, summary.num_samples) == (1, 1, 1)


def test_a_row_is_as_bad_as_its_worst_sample(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n')
    job.answer(0, "rows:1", "fine", sample_index=0, num_samples=3)
    job.answer(0, "rows:1", None, state=RowState.SKIPPED, sample_index=1, num_samples=3)
    job.fail(0, "rows:1", "timeout", "too slow", sample_index=2, num_samples=3)
    summary = job.export()
    assert (summary.num_ok, summary.num_error, summary.num_skipped) == (0, 1, 0)
    assert [line["error"] is None for line in job.lines()] == [True, True, False]


def test_replies_of_a_conversation_come_with_the_last_one(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"turns":["Hi","And?"]}\n{"turns":["Hi","And?"]}\n')
    job.answer(0, "rows:1", "last", turns=("first",))
    job.fail(1, "rows:2", "timeout", "too slow", turns=("first",))
    job.export()
    assert [line["replies"] for line in job.lines()] == [["first", "last"], ["first"]]


def test_a_cut_prompt_is_marked_and_counted(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n{"prompt":"b"}\n')
    job.answer(0, "rows:1", "x", is_truncated=True)
    job.answer(1, "rows:2", "y")
    assert job.export().num_truncated == 1
    assert [line.get("is_truncated") for line in job.lines()] == [True, None]


def test_a_prefix_keeps_columns_and_results_apart(make_exported_job: MakeJob) -> None:
    job = make_exported_job(
        b'{"prompt":"a","text":"theirs","error":5}\n', output=OutputConfig(result_prefix="my_")
    )
    job.answer(0, "rows:1", "ours")
    job.export()
    (line,) = job.lines()
    assert (line["text"], line["error"]) == ("theirs", 5)
    assert (line["my_text"], line["my_error"]) == ("ours", None)


def test_a_column_called_row_id_is_the_id_and_written_once(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a","row_id":7}\n', columns=ColumnMapping(id="row_id"))
    job.answer(0, "7", "x")
    job.export()
    assert list(job.lines()[0])[:3] == ["row_id", "prompt", "text"]
    assert job.lines()[0]["row_id"] == "7"


def test_what_other_readers_take_for_a_line_end_is_escaped(make_exported_job: MakeJob) -> None:
    job = make_exported_job('{"prompt":"a\u2028b"}\n'.encode())
    job.answer(0, "rows:1", "c\u2029d\u0085e\r\nf \u4f60\u597d")
    job.export()
    text = job.output_path.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1
    assert "\u4f60\u597d" in text
    (line,) = job.lines()
    assert (line["prompt"], line["text"]) == ("a\u2028b", "c\u2029d\u0085e\r\nf \u4f60\u597d")


def test_what_strict_json_lacks_becomes_null_or_an_escape(make_exported_job: MakeJob) -> None:
    job = make_exported_job(
        rb'{"prompt":"a","x":[NaN,{"y":-Infinity,"z":1.5}],"big":1e999,"s":"\ud800"}'
    )
    job.answer(0, "rows:1", "t")
    job.export()
    line = json.loads(job.output_path.read_bytes(), parse_constant=lambda name: pytest.fail(name))
    assert (line["x"], line["big"], line["s"]) == ([None, {"y": None, "z": 1.5}], None, "\ud800")


def test_an_export_replaces_the_old_file_and_leaves_nothing_else(
    make_exported_job: MakeJob,
) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n')
    job.export()
    assert job.lines() == []
    job.answer(0, "rows:1", "x")
    job.export()
    assert len(job.lines()) == 1
    assert job.files() == ["output.jsonl", "output.jsonl.manifest.json"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"id":"a","prompt":"x"}\n{"id":"c","prompt":"y"}\n',
        b'{"id":"a","prompt":"x"}\n',
        b'{"id":"a","prompt":"x"}\n{"id":"b","prompt":"changed"}\n',
        b'{"id":"a","prompt":"x"}\n{"id":"b","prompt":"y"}\n{"id":"c","prompt":"z"}\n',
    ],
    ids=["other id", "row gone", "other prompt", "row more"],
)
def test_a_changed_input_is_refused_and_the_old_output_stays(
    make_exported_job: MakeJob, content: bytes
) -> None:
    job = make_exported_job(b'{"id":"a","prompt":"x"}\n{"id":"b","prompt":"y"}\n')
    job.answer(0, "a", "1")
    job.answer(1, "b", "2")
    job.export()
    before = job.output_path.read_bytes()
    job.source_path.write_bytes(content)
    with pytest.raises(ConfigError, match="input has changed since the job was planned"):
        job.export()
    assert job.output_path.read_bytes() == before
    assert job.files() == ["output.jsonl", "output.jsonl.manifest.json"]


def test_a_moved_source_is_still_the_same_input(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"id":"a","prompt":"x"}\n')
    job.answer(0, "a", "1")
    moved = job.source_path.rename(job.folder / "moved.jsonl")
    sources = (SourceConfig(path=str(moved)),)
    job.config = job.config.model_copy(update={"sources": sources})
    assert job.export().num_ok == 1


def test_a_source_is_never_overwritten(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n')
    job.output_path = job.source_path
    with pytest.raises(ConfigError, match="overwritten"):
        job.export()
    assert job.source_path.read_bytes() == b'{"prompt":"a"}\n'


def test_a_folder_that_cannot_be_written_is_named(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b'{"prompt":"a"}\n')
    job.output_path = job.source_path / "output.jsonl"
    with pytest.raises(ConfigError, match=r"rows\.jsonl/output\.jsonl: .*cannot be written"):
        job.export()


def test_memory_does_not_grow_with_the_number_of_rows(make_exported_job: MakeJob) -> None:
    job = make_exported_job(b"".join(b'{"prompt":"%d"}\n' % number for number in range(1500)))
    rows = [
        CompletionRow(
            row_index=index, row_id=f"rows:{index + 1}", state=RowState.OK, text="x" * 4000
        )
        for index in range(1500)
    ]
    job.ledger.commit(job.lease, rows)
    del rows
    job.export()
    gc.collect()
    tracemalloc.start()
    try:
        assert job.export().num_ok == 1500
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The file buffer and a part of one page of the ledger; the answers alone would be 6 MB.
    assert peak_bytes < 4_000_000
