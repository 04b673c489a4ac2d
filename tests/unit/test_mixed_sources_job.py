"""A job over sources of every format: the rows are answered as if they stood in one file."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_builders import job_mapping, read_rows, run_job, stored_rows, write_rows

from engine import ExitCode, LedgerError
from flows.config import JobConfig
from flows.job_file import validate_job_config
from flows.job_run import JobRun
from flows.preparation import output_path_of
from flows.schema import RowState


def question(number: int) -> dict[str, Any]:
    return {"id": f"q{number:02}", "prompt": f"question {number}"}


def make_mixed_job(folder: Path, **changes: Any) -> JobConfig:
    """Rows q00 to q11: JSONL, two packed files, CSV, Parquet, and a batch file."""
    write_rows(folder / "a.jsonl", [question(0), question(1)])
    for number in (2, 3):
        packed = gzip.compress(json.dumps(question(number)).encode())
        (folder / f"part-{number}.jsonl.gz").write_bytes(packed)
    (folder / "b.csv").write_text("key,ask\nq04,question 4\nq05,question 5\n")
    table = pa.table({"id": ["q06", "q07", "q08"], "prompt": [f"question {n}" for n in (6, 7, 8)]})
    pq.write_table(table, folder / "c.parquet")
    batch = [
        {
            "custom_id": question(number)["id"],
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"question {number}"}]},
        }
        for number in (9, 10, 11)
    ]
    write_rows(folder / "d.jsonl", batch)
    sources = [
        {"path": str(folder / "a.jsonl")},
        {"path": str(folder / "part-*.jsonl.gz")},
        {"path": str(folder / "b.csv"), "columns": {"id": "key", "prompt": "ask"}},
        {"path": str(folder / "c.parquet")},
        {"path": str(folder / "d.jsonl"), "format": "openai_batch"},
    ]
    mapping = job_mapping(folder, sources=sources, **changes)
    return validate_job_config(mapping, origin="test")


def texts_of(config: JobConfig) -> dict[str, str | None]:
    return {row.row_id: row.text for row in stored_rows(config)}


@pytest.mark.parametrize("shards", [1, 5])
def test_rows_of_every_format_are_answered_alike(tmp_path: Path, shards: int) -> None:
    mixed = make_mixed_job(tmp_path, shards=shards)
    outcome, _ = run_job(mixed)
    assert outcome.exit_code is ExitCode.OK
    write_rows(tmp_path / "plain.jsonl", [question(number) for number in range(12)])
    plain = validate_job_config(
        job_mapping(
            tmp_path,
            sources=[{"path": str(tmp_path / "plain.jsonl")}],
            job_id="job-2",
            job_dir=str(tmp_path / "runs" / "job-2"),
        ),
        origin="test",
    )
    run_job(plain)
    assert texts_of(mixed) == texts_of(plain)
    lines = read_rows(output_path_of(mixed))
    assert [line["row_id"] for line in lines] == [f"q{number:02}" for number in range(12)]
    assert (lines[4]["key"], lines[4]["ask"]) == ("q04", "question 4")


def test_a_file_that_joins_a_pattern_is_refused_at_the_next_start(tmp_path: Path) -> None:
    config = make_mixed_job(tmp_path)
    with JobRun.open(config) as run:
        run.run_shard(0)
    (tmp_path / "part-9.jsonl.gz").write_bytes(gzip.compress(b'{"id": "new", "prompt": "x"}\n'))
    with pytest.raises(LedgerError, match="number of rows: was 12, is now 13"):
        run_job(config)
    (tmp_path / "part-9.jsonl.gz").unlink()
    outcome, _ = run_job(config)
    assert outcome.exit_code is ExitCode.OK


def test_a_packed_copy_of_a_file_is_the_same_input(tmp_path: Path) -> None:
    config = make_mixed_job(tmp_path)
    with JobRun.open(config) as run:
        run.run_shard(0)
    plain = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    sources = (config.sources[0].model_copy(update={"path": f"{tmp_path}/a.jsonl.gz"}),)
    outcome, _ = run_job(config.model_copy(update={"sources": sources + config.sources[1:]}))
    assert outcome.exit_code is ExitCode.OK


@pytest.mark.parametrize(
    ("too_long", "state", "exit_code"),
    [
        ("error", RowState.ERROR, ExitCode.ROWS_FAILED),
        ("skip", RowState.SKIPPED, ExitCode.OK),
        ("truncate", RowState.OK, ExitCode.OK),
    ],
)
def test_a_row_that_is_too_long_ends_as_the_job_says(
    tmp_path: Path, too_long: str, state: RowState, exit_code: ExitCode
) -> None:
    rows = [question(0), {"id": "long", "prompt": "x" * 500}]
    mapping = job_mapping(tmp_path, rows, too_long=too_long, engine__max_model_len=100)
    config = validate_job_config(mapping, origin="test")
    outcome, _ = run_job(config)
    assert outcome.exit_code is exit_code
    short, long = stored_rows(config)
    assert (short.state, long.state) == (RowState.OK, state)
    if too_long == "truncate":
        assert (long.num_prompt_tokens, long.is_truncated) == (92, True)
        assert not short.is_truncated
    else:
        assert long.error_code == "prompt_too_long"
    before = stored_rows(config)
    _, summaries = run_job(config)
    assert (stored_rows(config), summaries) == (before, [])
