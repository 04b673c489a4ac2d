"""The manifest beside an output: which files there are, of which job, and how many rows.

It holds no time, host or attempt: two runs of one job write the same bytes.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from flows.config import JobConfig, OutputFormat
from flows.experiments import collect_versions
from flows.ledger_rows import JobRow
from flows.outputs.answers import ExportSummary
from flows.outputs.files import OutputFile

_COUNTS = (
    "num_rows",
    "num_ok",
    "num_error",
    "num_skipped",
    "num_pending",
    "num_samples",
    "num_length",
    "num_truncated",
)


def render_manifest(
    config: JobConfig,
    job: JobRow,
    output_format: OutputFormat,
    summary: ExportSummary,
    files: Iterable[OutputFile],
) -> bytes:
    """Return the manifest's bytes; all files are complete."""
    own_seed = config.sampling.seed
    manifest = {
        "job_id": job.job_id,
        "model": Path(config.engine.model_path).name,
        "format": output_format.value,
        "files": {
            os.path.relpath(file.path, summary.manifest_path.parent): {
                "num_bytes": file.num_bytes,
                "sha256": file.sha256,
            }
            for file in files
        },
        "counts": {name: getattr(summary, name) for name in _COUNTS},
        "seed": job.seed if own_seed is None else own_seed,
        "manifest_hash": job.manifest_hash,
        "fingerprint": job.fingerprint,
        "versions": collect_versions(),
    }
    return json.dumps(manifest, indent=2).encode("ascii") + b"\n"
