"""export_job: one line for each finished row, in input order, strict JSON, all or nothing."""

import gc
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import ConfigError, EngineConfig, SamplingParams
from flows.config import ColumnMapping, JobConfig, OutputConfig, PromptConfig, SourceConfig
from flows.exporter import ExportSummary, export_job, to_strict_json
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow, NewJob
from flows.owner import Owner
from flows.planner import plan_job
from flows.records import RecordReader
from flows.schema import RowState


class WordEncoder:
    def encode_request(self, request: Any) -> list[int]:
        return [0] * len((request.prompt or "").split())


class Job:
    """A planned job over one file, with a ledger beside it."""

    def __init__(self, folder: Path, content: bytes, **config: Any) -> None:
        self.folder = folder
        self.output_path = folder / "out" / "output.jsonl"
        self.source_path = folder / "rows.jsonl"
        self.source_path.write_bytes(content)
        columns = config.pop("columns", ColumnMapping())
        self.config = JobConfig(
            name="test",
            sources=(SourceConfig(path=self.source_path, columns=columns),),
            prompt=PromptConfig(format="text"),
            engine=EngineConfig(model_path="none", device="mock"),
            **config,
        )
        self.ledger = Ledger.open(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.plan_and_create()

    def plan_and_create(self) -> None:
        with RecordReader(self.config.sources, self.config.prompt) as reader:
            plan = plan_job(
                self.config,
                reader,
                WordEncoder(),
                max_model_len=100,
                index_path=self.folder / "index.sqlite",
                default_sampling=SamplingParams(),
            )
        self.row: JobRow = self.ledger.create_job(
            NewJob(
                job_id="test-1",
                config={},
                seed=0,
                fingerprint={},
                manifest_hash=plan.manifest_hash,
                num_rows=plan.num_rows,
                num_shards=1,
            )
        )
        with plan.open_index() as index:
            bad_rows = [
                CompletionRow(
                    row_index=row.row_index,
                    row_id=row.row_id,
                    state=RowState.ERROR,
                    error_code=row.error_code,
                    error_message=row.error_message,
                )
                for row in index.bad_rows()
            ]
        self.ledger.commit_bad_rows(self.row.job_key, bad_rows)
        self.lease = self.ledger.acquire_shard(
            self.row.job_key, 0, owner=Owner.current(), lease_seconds=60
        )

    def answer(self, row_index: int, row_id: str, text: str, **fields: Any) -> None:
        defaults = {"state": RowState.OK, "finish_reason": "stop", "num_output_tokens": 3}
        values: dict[str, Any] = defaults | fields
        row = CompletionRow(row_index=row_index, row_id=row_id, text=text, **values)
        self.ledger.commit(self.lease, [row])

    def export(self) -> ExportSummary:
        with RecordReader(self.config.sources, self.config.prompt) as reader:
            return export_job(self.config, self.row, self.ledger, reader, self.output_path)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output_path.read_bytes().splitlines()]


@pytest.fixture
def ledgers() -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.ledger.close()


@pytest.fixture
def make_job(tmp_path: Path, ledgers: list[Job]) -> Any:
    def make(content: bytes, **config: Any) -> Job:
        ledgers.append(Job(tmp_path, content, **config))
        return ledgers[-1]

    return make


def test_answers_come_in_input_order_with_every_column(make_job: Any) -> None:
    job = make_job(b'{"id":"b","prompt":"x y","z":[1],"a":null}\n{"id":"a","prompt":"z"}\n')
    job.answer(1, "a", "second")
    job.answer(0, "b", "first", num_prompt_tokens=2, finish_reason="length")
    summary = job.export()
    first, second = job.output_path.read_text().splitlines()
    assert first == (
        '{"row_id": "b", "id": "b", "prompt": "x y", "z": [1], "a": null, "text": "first", '
        '"finish_reason": "length", "num_prompt_tokens": 2, "num_output_tokens": 3, "error": null}'
    )
    assert json.loads(second)["text"] == "second"
    assert (summary.num_ok, summary.num_lines, summary.num_pending) == (2, 2, 0)
    assert summary.output_path == job.output_path


def test_bad_rows_are_lines_with_what_could_be_read(make_job: Any) -> None:
    job = make_job(b'{"id":"a","question":1}\n{"prompt":\n{"prompt":"x"}\n')
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


def test_pending_rows_are_left_out_and_counted(make_job: Any) -> None:
    job = make_job(b'{"prompt":"a"}\n{"prompt":"b"}\n{"prompt":"c"}\n{"prompt":"d"}\n')
    job.answer(1, "rows:2", "b")
    job.answer(2, "rows:3", "", state=RowState.SKIPPED)
    summary = job.export()
    assert [line["row_id"] for line in job.lines()] == ["rows:2", "rows:3"]
    assert (summary.num_ok, summary.num_skipped, summary.num_pending) == (1, 1, 2)


def test_the_bytes_do_not_depend_on_the_order_of_the_answers(
    make_job: Any, tmp_path_factory: pytest.TempPathFactory, ledgers: list[Job]
) -> None:
    content = b"".join(b'{"prompt":"%d"}\n' % number for number in range(9))
    job = make_job(content)
    other = Job(tmp_path_factory.mktemp("other"), content)
    ledgers.append(other)
    for number in range(9):
        job.answer(number, f"rows:{number + 1}", f"answer {number}")
    for number in reversed(range(9)):
        other.answer(number, f"rows:{number + 1}", f"answer {number}")
    job.export()
    other.export()
    assert job.output_path.read_bytes() == other.output_path.read_bytes()


def test_several_samples_are_several_lines_with_their_index(make_job: Any) -> None:
    job = make_job(b'{"prompt":"a"}\n{"prompt":"b"}\n')
    job.answer(0, "rows:1", "one", sample_index=0)
    job.answer(0, "rows:1", "two", sample_index=1)
    job.answer(1, "rows:2", "only")
    job.export()
    assert [(line.get("sample_index"), line["text"]) for line in job.lines()] == [
        (0, "one"),
        (1, "two"),
        (None, "only"),
    ]


def test_a_prefix_keeps_columns_and_results_apart(make_job: Any) -> None:
    job = make_job(
        b'{"prompt":"a","text":"theirs","error":5}\n', output=OutputConfig(result_prefix="my_")
    )
    job.answer(0, "rows:1", "ours")
    job.export()
    (line,) = job.lines()
    assert (line["text"], line["error"]) == ("theirs", 5)
    assert (line["my_text"], line["my_error"]) == ("ours", None)


def test_a_column_called_row_id_is_the_id_and_written_once(make_job: Any) -> None:
    job = make_job(b'{"prompt":"a","row_id":7}\n', columns=ColumnMapping(id="row_id"))
    job.answer(0, "7", "x")
    job.export()
    assert list(job.lines()[0])[:3] == ["row_id", "prompt", "text"]
    assert job.lines()[0]["row_id"] == "7"


def test_what_other_readers_take_for_a_line_end_is_escaped(make_job: Any) -> None:
    job = make_job('{"prompt":"a\u2028b"}\n'.encode())
    job.answer(0, "rows:1", "c\u2029d\u0085e\r\nf \u4f60\u597d")
    job.export()
    text = job.output_path.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1
    assert "\u4f60\u597d" in text
    (line,) = job.lines()
    assert (line["prompt"], line["text"]) == ("a\u2028b", "c\u2029d\u0085e\r\nf \u4f60\u597d")


def test_what_strict_json_lacks_becomes_null_or_an_escape(make_job: Any) -> None:
    job = make_job(rb'{"prompt":"a","x":[NaN,{"y":-Infinity,"z":1.5}],"big":1e999,"s":"\ud800"}')
    job.answer(0, "rows:1", "t")
    job.export()
    line = json.loads(job.output_path.read_bytes(), parse_constant=lambda name: pytest.fail(name))
    assert (line["x"], line["big"], line["s"]) == ([None, {"y": None, "z": 1.5}], None, "\ud800")


def test_an_export_replaces_the_old_file_and_leaves_nothing_else(make_job: Any) -> None:
    job = make_job(b'{"prompt":"a"}\n')
    job.export()
    assert job.lines() == []
    job.answer(0, "rows:1", "x")
    job.export()
    assert len(job.lines()) == 1
    assert os.listdir(job.output_path.parent) == ["output.jsonl"]


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
def test_a_changed_input_is_refused_and_the_old_output_stays(make_job: Any, content: bytes) -> None:
    job = make_job(b'{"id":"a","prompt":"x"}\n{"id":"b","prompt":"y"}\n')
    job.answer(0, "a", "1")
    job.answer(1, "b", "2")
    job.export()
    before = job.output_path.read_bytes()
    job.source_path.write_bytes(content)
    with pytest.raises(ConfigError, match="input has changed since the job was planned"):
        job.export()
    assert job.output_path.read_bytes() == before
    assert os.listdir(job.output_path.parent) == ["output.jsonl"]


def test_a_moved_source_is_still_the_same_input(make_job: Any) -> None:
    job = make_job(b'{"id":"a","prompt":"x"}\n')
    job.answer(0, "a", "1")
    moved = job.source_path.rename(job.folder / "moved.jsonl")
    sources = (SourceConfig(path=moved),)
    job.config = job.config.model_copy(update={"sources": sources})
    assert job.export().num_ok == 1


def test_a_source_is_never_overwritten(make_job: Any) -> None:
    job = make_job(b'{"prompt":"a"}\n')
    job.output_path = job.source_path
    with pytest.raises(ConfigError, match="overwritten"):
        job.export()
    assert job.source_path.read_bytes() == b'{"prompt":"a"}\n'


def test_a_folder_that_cannot_be_written_is_named(make_job: Any) -> None:
    job = make_job(b'{"prompt":"a"}\n')
    job.output_path = job.source_path / "output.jsonl"
    with pytest.raises(ConfigError, match=r"rows\.jsonl/output\.jsonl: .*cannot be written"):
        job.export()


def test_memory_does_not_grow_with_the_number_of_rows(make_job: Any) -> None:
    job = make_job(b"".join(b'{"prompt":"%d"}\n' % number for number in range(6000)))
    rows = [
        CompletionRow(
            row_index=index, row_id=f"rows:{index + 1}", state=RowState.OK, text="x" * 1000
        )
        for index in range(6000)
    ]
    job.ledger.commit(job.lease, rows)
    del rows
    job.export()
    gc.collect()
    tracemalloc.start()
    try:
        assert job.export().num_ok == 6000
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The file buffer and a part of one page of the ledger; the answers alone would be 6 MB.
    assert peak_bytes < 4_000_000


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None) | st.sampled_from("\ud800\udc00\u2028\x85\n\r\x1c\0")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(line=st.dictionaries(st.text(max_size=3), _VALUES, max_size=4))
def test_any_columns_give_one_line_of_strict_json_that_reads_back(line: dict[str, Any]) -> None:
    written = to_strict_json(line)
    (text,) = written.decode("utf-8").splitlines()
    assert written.endswith(b"\n")
    again = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert to_strict_json(again) == written
