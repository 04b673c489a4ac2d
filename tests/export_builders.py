"""Jobs that are planned over one file and answered by hand, to be exported."""

import csv
import json
from pathlib import Path
from typing import Any

from engine import EngineConfig, SamplingParams
from flows.config import ColumnMapping, JobConfig, PromptConfig, SourceConfig
from flows.exporter import ExportSummary, export_job
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow, NewJob
from flows.owner import Owner
from flows.planner import plan_job
from flows.records import RecordReader
from flows.schema import RowState


class WordEncoder:
    def encode_request(self, request: Any) -> list[int]:
        return [0] * len((request.prompt or "").split())


class ExportedJob:
    """A planned job over one file, with a ledger beside it; out/NAME is its output."""

    def __init__(
        self, folder: Path, content: bytes, *, name: str = "output.jsonl", **config: Any
    ) -> None:
        self.folder = folder
        self.output_path = folder / "out" / name
        self.source_path = folder / "rows.jsonl"
        self.source_path.write_bytes(content)
        columns = config.pop("columns", ColumnMapping())
        source_format = config.pop("source_format", None)
        engine = config.pop("engine", EngineConfig(model_path="none", device="mock"))
        self.config = JobConfig(
            name="test",
            sources=(
                SourceConfig(path=str(self.source_path), columns=columns, format=source_format),
            ),
            prompt=PromptConfig(format="text"),
            engine=engine,
            **config,
        )
        self.ledger = Ledger.open(f"sqlite:///{folder / 'ledger.sqlite'}")
        self._plan_and_create()

    def _plan_and_create(self) -> None:
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
                seed=2**62,
                fingerprint={"model": "aa11"},
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

    def answer(self, row_index: int, row_id: str, text: str | None, **fields: Any) -> None:
        defaults = {"state": RowState.OK, "finish_reason": "stop", "num_output_tokens": 3}
        values: dict[str, Any] = defaults | fields
        row = CompletionRow(row_index=row_index, row_id=row_id, text=text, **values)
        self.ledger.commit(self.lease, [row])

    def fail(self, row_index: int, row_id: str, code: str, message: str, **fields: Any) -> None:
        self.answer(
            row_index,
            row_id,
            None,
            state=RowState.ERROR,
            finish_reason="error",
            error_code=code,
            error_message=message,
            **fields,
        )

    def export(self, output_path: Path | None = None) -> ExportSummary:
        path = self.output_path if output_path is None else output_path
        with RecordReader(self.config.sources, self.config.prompt) as reader:
            return export_job(self.config, self.row, self.ledger, reader, path)

    def lines(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of the output, or of another file beside it."""
        path = self.output_path if name is None else self.output_path.with_name(name)
        data = path.read_bytes()
        assert data.endswith(b"\n") or not data
        return [read_strictly(line) for line in data.split(b"\n")[:-1]]

    def csv_lines(self) -> list[dict[str, str]]:
        with self.output_path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def manifest(self) -> dict[str, Any]:
        path = self.output_path.with_name(f"{self.output_path.name}.manifest.json")
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        return manifest

    def files(self) -> list[str]:
        return sorted(path.name for path in self.output_path.parent.iterdir())


def read_strictly(line: bytes) -> dict[str, Any]:
    """Parse JSON as strict readers do: NaN and infinity are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON: {line!r}")

    value: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return value
