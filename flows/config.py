"""What a user writes about a job: `configs/jobs/*.yaml` -> JobConfig.

The same model is the Prefect parameter form and the validator, so every field says what it is.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine import EngineConfig, SamplingParams, Section
from flows.ledger_url import (
    PASSWORD_PATTERN,
    PASSWORD_REFUSAL,
    default_ledger_url,
    holds_password,
)
from flows.ray_config import RayConfig
from flows.source_config import ColumnMapping as ColumnMapping
from flows.source_config import PromptConfig as PromptConfig
from flows.source_config import SourceConfig as SourceConfig
from flows.source_config import SourceFormat as SourceFormat

# 30 years; an operating system cannot wait for an infinite time.
MAX_TIMEOUT_SECONDS = 1_000_000_000
DEFAULT_WARM_SECONDS = 60.0


class OutputFormat(StrEnum):
    """How the answers are written."""

    JSONL = "jsonl"
    OPENAI_BATCH = "openai_batch"
    PARQUET = "parquet"
    CSV = "csv"


_OUTPUT_SUFFIXES = {
    ".jsonl": OutputFormat.JSONL,
    ".json": OutputFormat.JSONL,
    ".ndjson": OutputFormat.JSONL,
    ".parquet": OutputFormat.PARQUET,
    ".csv": OutputFormat.CSV,
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
# A Path keeps one of the two slashes of a URL.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def format_of_suffix(path: Path) -> OutputFormat | None:
    """Return what the suffix says; jsonl stands for both formats of JSON lines."""
    return _OUTPUT_SUFFIXES.get(path.suffix.lower())


def problem_of_output_path(path: Path) -> str | None:
    """Return why nothing can be written there, None when nothing speaks against it."""
    if _URL.match(str(path)):
        return f"{path} is a URL, wanted a local path; write it here and copy it afterwards"
    if path.suffix.lower() in _COMPRESSED:
        return f"{path} would be compressed, which outputs are not; leave {path.suffix} out"
    return None


class OutputConfig(Section):
    """Where the answers go, and in which form."""

    path: Path | None = Field(
        default=None,
        description="Output file; output.jsonl (.parquet, .csv) in job_dir when left out. Beside "
        "it are the failed rows and OUTPUT.manifest.json.",
    )
    format: OutputFormat | None = Field(
        default=None,
        description="jsonl, openai_batch, parquet or csv; left out, by the suffix of path, and "
        "openai_batch when every source is.",
    )
    errors_path: Path | None = Field(
        default=None,
        description="File of the failed rows; when left out errors.jsonl in job_dir, beside an "
        "output elsewhere STEM_errors.jsonl. There is none when no row has failed.",
    )
    result_prefix: str = Field(
        default="",
        description="Put before text, finish_reason and the other result fields, where a column "
        "of the input has the same name.",
    )

    @field_validator("path", "errors_path")
    @classmethod
    def _is_a_local_file(cls, path: Path | None) -> Path | None:
        problem = None if path is None else problem_of_output_path(path)
        if problem is not None:
            raise ValueError(problem)
        return path

    @model_validator(mode="after")
    def _format_and_suffix_agree(self) -> "OutputConfig":
        by_suffix = None if self.path is None else format_of_suffix(self.path)
        asked = self.format
        if asked is OutputFormat.OPENAI_BATCH:
            asked = OutputFormat.JSONL
        if by_suffix is not None and asked is not None and by_suffix is not asked:
            raise ValueError(
                f"path ends in {self.path.suffix if self.path else ''} and format is "
                f"{self.format}; change one of them, or leave format out"
            )
        return self


def _refuse_password(url: str) -> str:
    if holds_password(url):
        raise PydanticCustomError("secret", PASSWORD_REFUSAL)
    return url


_SHARE = r"^(100|[0-9]{1,2}(\.[0-9]+)?)%$"


def _check_failed_rows(value: int | str | None) -> int | str | None:
    is_right = value >= 0 if isinstance(value, int) else value is None or re.match(_SHARE, value)
    if not is_right:
        raise ValueError(
            f"found {value!r}, wanted a number of rows, 0 or more, or a share such as 5%"
        )
    return value


class JobConfig(Section):
    """One job: what to read, how to ask, which engine, where to keep the answers."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60,
        description="Name of the job; job ids begin with it.",
    )  # fmt: skip
    job_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120,
        description="An id that exists is resumed; left out, a new one is made.",
    )  # fmt: skip
    forked_from: str | None = Field(
        default=None,
        description="A job whose answers to rows that are asked the same are taken over when this "
        "one is created; what `tokenmill run --fork` sets.",
    )
    sources: tuple[SourceConfig, ...] = Field(min_length=1, description="Input files, in order.")
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    too_long: Literal["error", "skip", "truncate"] = Field(
        default="error",
        description="What becomes of a row whose prompt does not fit max_model_len: an error row, "
        "a skipped row, or the end of the prompt that leaves room for max_tokens.",
    )
    deduplicate: bool = Field(
        default=True,
        description="Ask the engine once for rows that are the same to the last token, greedy or "
        "only scored; rows that sample are never folded.",
    )
    sampling: SamplingParams = Field(
        default_factory=SamplingParams, description="Sampling of every row; a row may override it."
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63,
        description="Seed of all draws; drawn once and stored with the job when left out.",
    )  # fmt: skip
    engine: EngineConfig
    row_timeout_seconds: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT_SECONDS,
        description="A row that is not answered so long after the engine has queued it becomes an "
        "error row; each turn of a conversation has so long.",
    )  # fmt: skip
    max_runtime_seconds: float | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT_SECONDS,
        description="A run that lasts so long stops in order, and can be resumed.",
    )  # fmt: skip
    max_failed_rows: Annotated[
        int | str | None, Field(union_mode="left_to_right"), AfterValidator(_check_failed_rows)
    ] = Field(
        default=None,
        json_schema_extra={"minimum": 0, "pattern": _SHARE},
        description="More error rows than this, a number or a share such as 5%, end the job as "
        "failed; it can be resumed. Left out, every row is tried.",
    )
    shards: int = Field(
        default=1, ge=1, le=10_000,
        description="Parts that are leased, retried and shown on their own. One is enough for any "
        "number of devices, which share its rows; a batch runs empty at the end of each.",
    )  # fmt: skip
    runner: Literal["local", "ray"] = Field(
        default="local",
        description="Where shards run: local, on the devices of this host, or ray, on the nodes of "
        "a Ray cluster; that takes a ledger in PostgreSQL and a file system that all nodes share.",
    )
    ray: RayConfig = Field(default_factory=RayConfig)
    warm_seconds: float = Field(
        default=DEFAULT_WARM_SECONDS, ge=0, le=MAX_TIMEOUT_SECONDS,
        description="A loaded model that no shard uses is closed after so long, or when another "
        "process waits for its devices; 0 loads it anew for each shard.",
    )  # fmt: skip
    device_lock_dir: Path | None = Field(
        default=None,
        description="Folder of the locks that keep the processes of a host from using one device "
        "at a time; /tmp/tokenmill-devices when left out. The cpu and the mock device, which may "
        "be shared, are locked only when it is given.",
    )
    ledger_url: Annotated[str, AfterValidator(_refuse_password)] | None = Field(
        default=None,
        json_schema_extra={"not": {"type": "string", "pattern": PASSWORD_PATTERN}},
        description="SQLAlchemy URL of the ledger; the variable TOKENMILL_LEDGER_URL, else "
        "sqlite:///runs/ledger.sqlite, when left out. One with a password belongs in the variable.",
    )
    job_dir: Path | None = Field(
        default=None,
        description="Folder of this job alone: row index, logs, output; runs/JOB_ID when left out.",
    )
    output: OutputConfig = Field(default_factory=OutputConfig)
    stream_output: bool = Field(
        default=False, description="Also append each answer to stream.jsonl as it is committed."
    )
    lease_seconds: float = Field(
        default=60, ge=1, description="A shard whose owner is silent this long may be taken over."
    )
    commit_rows: int = Field(
        default=64, ge=1, description="A commit begins when so many answers wait for it."
    )
    commit_seconds: float = Field(
        default=1.0, gt=0, description="Longest time that a finished answer waits for its commit."
    )

    partial_seconds: float = Field(
        default=10.0, gt=0,
        description="How often the tokens of unfinished answers are stored: what a kill can cost.",
    )  # fmt: skip

    @field_validator("sources")
    @classmethod
    def _have_distinct_names(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        names = [source.resolved_name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sources are named {name!r}; give one of them a `name`")
        return sources

    def max_failed_of(self, num_rows: int) -> int | None:
        """Return how many rows of so many may fail; None when all may."""
        if isinstance(self.max_failed_rows, str):
            return int(float(self.max_failed_rows.removesuffix("%")) / 100 * num_rows)
        return self.max_failed_rows

    @property
    def resolved_ledger_url(self) -> str:
        """Return the ledger's URL: the config's, else the environment's, else the default."""
        return self.ledger_url or default_ledger_url()
