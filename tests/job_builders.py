"""Small jobs on the mock device, as tests run them: no model, no Prefect, no process of their own."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine import Completion, GenerateRequest, OfflineInference
from flows.config import JobConfig
from flows.job_file import validate_job_config
from flows.job_run import JobOutcome, JobRun
from flows.ledger import CompletionRow, Ledger
from flows.shard_runner import ShardSummary

Row = Mapping[str, Any]


def questions(count: int) -> list[Row]:
    return [{"id": f"q{index}", "prompt": f"question {index}"} for index in range(count)]


def write_rows(path: Path, rows: Iterable[Row | str]) -> Path:
    """Write JSONL; a string is written as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def job_mapping(folder: Path, rows: Iterable[Row | str] = (), **changes: Any) -> dict[str, Any]:
    """Return what a YAML file would hold; `engine__device="cpu"` changes a field of a section."""
    if rows:
        write_rows(folder / "rows.jsonl", rows)
    mapping: dict[str, Any] = {
        "name": "job",
        "job_id": "job-1",
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "sampling": {"max_tokens": 8, "temperature": 1.0},
        "seed": 7,
        "engine": {
            "model_path": "mock",
            "device": "mock",
            "scheduler": {"max_num_seqs": 4},
            "runtime": {"inline": True},
        },
        "shards": 2,
        "ledger_url": f"sqlite:///{folder / 'ledger.sqlite'}",
        "job_dir": str(folder / "runs" / "job-1"),
        "commit_rows": 4,
    }
    for name, value in changes.items():
        *parents, last = name.split("__")
        target = mapping
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return mapping


def make_job(folder: Path, rows: Iterable[Row | str] = (), **changes: Any) -> JobConfig:
    return validate_job_config(job_mapping(folder, rows, **changes), origin="test")


def write_job(folder: Path, rows: Iterable[Row | str] = (), **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_mapping(folder, rows, **changes)), encoding="utf-8")
    return path


def run_job(config: JobConfig) -> tuple[JobOutcome, list[ShardSummary]]:
    """Run a whole job, one shard after the other."""
    with JobRun.open(config) as run:
        summaries = [run.run_shard(index) for index in run.pending_shards()]
        return run.finish(summaries, {}), summaries


def stored_rows(config: JobConfig) -> list[CompletionRow]:
    assert config.job_id is not None
    with Ledger.open(config.resolved_ledger_url) as ledger:
        return list(ledger.iter_completions(ledger.get_job(config.job_id).job_key))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def note_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the id of each row that an engine of this process is asked, as often as it is."""
    asked: list[str] = []
    run = OfflineInference.run

    def noted_run(
        self: OfflineInference, requests: Iterable[GenerateRequest], **options: Any
    ) -> Iterator[Completion]:
        def noted() -> Iterator[GenerateRequest]:
            for request in requests:
                asked.append(request.request_id)
                yield request

        return run(self, noted(), **options)

    monkeypatch.setattr(OfflineInference, "run", noted_run)
    return asked
