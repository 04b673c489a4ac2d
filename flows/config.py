"""What a user writes about a job: `configs/jobs/*.yaml` -> JobConfig.

The same model is the Prefect parameter form and the validator, so every field says what it is.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from engine import EngineConfig, SamplingParams, Section

LEDGER_URL_VARIABLE = "TOKENMILL_LEDGER_URL"
DEFAULT_LEDGER_URL = "sqlite:///runs/ledger.sqlite"
# 30 years; an operating system cannot wait for an infinite time.
MAX_TIMEOUT_SECONDS = 1_000_000_000


class ColumnMapping(Section):
    """Which column of a source holds what; a name that a row lacks is simply not there."""

    id: str | None = Field(default="id", description="The row's id; `source:line` when absent.")
    prompt: str = Field(default="prompt", description="Text that is continued as it stands.")
    messages: str = Field(default="messages", description="Chat messages in OpenAI's form.")
    prompt_token_ids: str = Field(default="prompt_token_ids", description="Ready token ids.")
    turns: str = Field(
        default="turns",
        description="User messages of a conversation, a list of strings; each is asked after the "
        "reply to the one before. A column that is named above is not read as turns.",
    )
    sampling: str = Field(default="sampling", description="Object of sampling overrides.")
    priority: str = Field(default="priority", description="Whole number; lower runs earlier.")
    timeout_seconds: str = Field(
        default="timeout_seconds", description="The row's own row_timeout_seconds."
    )

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Return the names of the columns of which a row holds exactly one."""
        names = (self.prompt, self.messages, self.prompt_token_ids)
        # Sources that call their chat messages `turns` are older than this column.
        return names if self.turns in names else (*names, self.turns)


class SourceConfig(Section):
    """One input file."""

    path: Path = Field(description="A JSONL file: one object a line.")
    name: str | None = Field(
        default=None, description="Name in row ids and messages; the file's stem when left out."
    )
    limit: int | None = Field(default=None, ge=1, description="Take only the first rows.")
    columns: ColumnMapping = Field(default_factory=ColumnMapping)

    @property
    def resolved_name(self) -> str:
        """Return the name that row ids and messages use."""
        return self.name if self.name is not None else self.path.name.split(".")[0]


class PromptConfig(Section):
    """How a row becomes a prompt; without a template the row's own columns are taken."""

    template: str | None = Field(
        default=None,
        description="Jinja template over the row's columns, such as 'Summarise: {{ text }}'.",
    )
    system: str | None = Field(
        default=None, description="Jinja template of a system message put before the user's."
    )
    format: Literal["chat", "text"] = Field(
        default="chat",
        description="chat gives a prompt string to the model's chat template as a user message; "
        "text continues the string as it stands.",
    )


class OutputConfig(Section):
    """Where the answers go."""

    path: Path | None = Field(
        default=None, description="Output JSONL file; output.jsonl in job_dir when left out."
    )
    result_prefix: str = Field(
        default="",
        description="Put before text, finish_reason and the other result fields, where a column "
        "of the input has the same name.",
    )


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
    sources: tuple[SourceConfig, ...] = Field(min_length=1, description="Input files, in order.")
    prompt: PromptConfig = Field(default_factory=PromptConfig)
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
    shards: int = Field(default=1, ge=1, le=10_000, description="Parts that run on their own.")
    ledger_url: str | None = Field(
        default=None,
        description="SQLAlchemy URL of the ledger; the variable TOKENMILL_LEDGER_URL, else "
        "sqlite:///runs/ledger.sqlite, when left out. A password belongs in the variable.",
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
    commit_rows: int = Field(default=64, ge=1, description="Most answers in one commit.")
    commit_seconds: float = Field(
        default=1.0, gt=0, description="Longest time that a finished answer waits for its commit."
    )

    @field_validator("sampling")
    @classmethod
    def _one_answer_a_row(cls, sampling: SamplingParams) -> SamplingParams:
        if sampling.n > 1:
            raise ValueError(
                f"n is {sampling.n}, and a job keeps one answer of each row so far; leave n out, "
                "and write a row several times (with ids of their own) for several answers"
            )
        return sampling

    @model_validator(mode="after")
    def _source_names_are_distinct(self) -> "JobConfig":
        names = [source.resolved_name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sources are named {name!r}; give one of them a `name`")
        return self

    @property
    def resolved_ledger_url(self) -> str:
        """Return the ledger's URL: the config's, else the environment's, else the default."""
        return self.ledger_url or default_ledger_url()


def default_ledger_url() -> str:
    """Return the ledger that commands use when nothing names one."""
    return os.environ.get(LEDGER_URL_VARIABLE) or DEFAULT_LEDGER_URL
