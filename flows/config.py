"""What a user writes about a job: `configs/jobs/*.yaml` -> JobConfig.

The same model is the Prefect parameter form and the validator, so every field says what it is.
"""

import difflib
import os
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from engine import ConfigError, EngineConfig, SamplingParams, Section

LEDGER_URL_VARIABLE = "TOKENMILL_LEDGER_URL"
DEFAULT_LEDGER_URL = "sqlite:///runs/ledger.sqlite"
# 30 years; an operating system cannot wait for an infinite time.
MAX_TIMEOUT_SECONDS = 1_000_000_000

# Other tools' names for our keys, for the message about a misspelt one.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "tp": "tensor_parallel_size",
    "num_shards": "shards",
    "batch_size": "max_num_seqs",
    "input": "sources",
    "database_url": "ledger_url",
}


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


def load_job_config(path: Path, overrides: tuple[str, ...] = ()) -> JobConfig:
    """Read a YAML file and lay `a.b=c` overrides over it.

    Raises:
        ConfigError: no such file, not YAML, or a field that is wrong, named with its remedy.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the job configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found {type(data).__name__}, wanted a mapping of keys to values"
        )
    for override in overrides:
        _apply_override(data, override)
    return validate_job_config(data, origin=str(path))


def validate_job_config(data: dict[str, Any], *, origin: str) -> JobConfig:
    """Turn a mapping into a JobConfig.

    Raises:
        ConfigError: lists every wrong field, where it is, and what to write instead.
    """
    try:
        return JobConfig.model_validate(data)
    except ValidationError as error:
        problems = [_describe(item) for item in error.errors()]
        raise ConfigError(
            f"{origin}: {len(problems)} wrong field(s)\n" + "\n".join(f"  {p}" for p in problems)
        ) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: wanted KEY.KEY=VALUE")
    *parents, last = key.split(".")
    target: Any = data
    for parent in parents:
        target = _step_into(target, parent, override)
    try:
        value_read = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from error
    if isinstance(target, list):
        target[_index(target, last, override)] = value_read
    elif isinstance(target, dict):
        target[last] = value_read
    else:
        raise ConfigError(f"--set {override!r}: {'.'.join(parents)} is not a mapping")


def _step_into(target: Any, key: str, override: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, key, override)]
    if not isinstance(target, dict):
        raise ConfigError(f"--set {override!r}: the part before {key!r} is not a mapping")
    if target.get(key) is None:
        target[key] = {}
    return target[key]


def _index(target: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(target):
        raise ConfigError(f"--set {override!r}: {key!r} is not an index below {len(target)}")
    return int(key)


def _describe(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    where = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"{where}: no such key{_suggestion(location)}"
    if item["type"] == "missing":
        return f"{where}: missing; this key is required"
    return f"{where}: found {item['input']!r}: {item['msg'].removeprefix('Value error, ')}"


def _suggestion(location: list[str]) -> str:
    wrong = location[-1]
    known = _keys_at(JobConfig, location[:-1])
    if _OTHER_NAMES.get(wrong) in known:
        return f"; did you mean {_OTHER_NAMES[wrong]}?"
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _keys_at(model: type[BaseModel], location: list[str]) -> list[str]:
    for part in location:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)
