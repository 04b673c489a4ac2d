"""What a user writes about the input: where the rows are, and how one becomes a prompt."""

import os
import re
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from engine import Section

# A user with a password before the host.
_PASSWORD_PATTERN = r"://[^/?#@]*:[^/?#]+@"


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

    @cached_property
    def prompt_columns(self) -> tuple[str, ...]:
        """Return the names of the columns of which a row holds exactly one."""
        names = (self.prompt, self.messages, self.prompt_token_ids)
        # Sources that call their chat messages `turns` are older than this column.
        return names if self.turns in names else (*names, self.turns)


class SourceFormat(StrEnum):
    """How the rows stand in a file."""

    JSONL = "jsonl"
    OPENAI_BATCH = "openai_batch"
    CSV = "csv"
    PARQUET = "parquet"
    DATASET = "dataset"


def _path_as_text(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return text.removeprefix("file://") if isinstance(text, str) else text


def _refuse_password(path: str) -> str:
    if re.search(_PASSWORD_PATTERN, path):
        raise PydanticCustomError(
            "secret",
            "the URL holds a password, which the ledger and Prefect's UI would show; fsspec takes "
            "it from ~/.config/fsspec, or from the variables of its protocol",
        )
    return path


def is_url(path: str) -> bool:
    """Tell whether fsspec has to open it."""
    return "://" in path


class SourceConfig(Section):
    """Input files of one kind: a file, a pattern, or a URL."""

    path: Annotated[str, BeforeValidator(_path_as_text), AfterValidator(_refuse_password)] = Field(
        min_length=1,
        json_schema_extra={"not": {"pattern": _PASSWORD_PATTERN}},
        description="A file, a pattern such as data/*.jsonl.gz (its files are read in natural "
        "order, part-2 before part-10), or a URL that fsspec reads, such as s3://bucket/a.jsonl.",
    )
    format: SourceFormat | None = Field(
        default=None,
        description="jsonl (also .gz and .zst), openai_batch, csv, parquet, or dataset (a folder "
        "of datasets' save_to_disk); by the file's name when left out.",
    )
    name: str | None = Field(
        default=None, description="Name in row ids and messages; the file's stem when left out."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Take only the first rows, counted over all files."
    )
    sample_rows: int | None = Field(
        default=None, ge=1,
        description="Take so many rows by chance, in the order of the input; of the first rows "
        "when there is a limit.",
    )  # fmt: skip
    sample_seed: int = Field(
        default=0, ge=0, lt=2**63, description="Which rows are taken; each seed has its own."
    )
    columns: ColumnMapping = Field(default_factory=ColumnMapping)

    @property
    def is_url(self) -> bool:
        """True when fsspec reads it."""
        return is_url(self.path)

    @property
    def is_pattern(self) -> bool:
        """True when the path stands for any number of files."""
        # In a URL a question mark begins the query.
        return any(sign in self.path for sign in ("*[" if self.is_url else "*?["))

    @property
    def resolved_name(self) -> str:
        """Return the name of the source; no two sources of a job have the same."""
        if self.name is not None:
            return self.name
        return self.path if self.is_pattern else stem_of(self.path)


def stem_of(path: str) -> str:
    """Return the name of a file or folder without what follows its first dot."""
    name = path.rstrip("/").rpartition("/")[2]
    return name.split(".")[0]


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
