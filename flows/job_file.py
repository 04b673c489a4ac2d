"""Reads a job's YAML file, with `--set` laid over it, and says what is wrong with it, and where."""

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from engine import ConfigError
from flows.config import JobConfig

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
        lines = _lines_of(yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found {type(data).__name__}, wanted a mapping of keys to values"
        )
    return validate_job_config(data, overrides, origin=str(path), lines=lines)


def validate_job_config(
    data: dict[str, Any],
    overrides: tuple[str, ...] = (),
    *,
    origin: str,
    lines: Mapping[str, int] | None = None,
) -> JobConfig:
    """Turn a mapping, with overrides laid over it, into a JobConfig.

    lines tell where the keys of a file stand.

    Raises:
        ConfigError: lists every wrong field, where it is, and what to write instead.
    """
    for override in overrides:
        _apply_override(data, override)
    try:
        return JobConfig.model_validate(data)
    except ValidationError as error:
        problems = [_describe(item, lines or {}) for item in _innermost(error.errors())]
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


def _lines_of(node: yaml.Node | None, prefix: str = "") -> dict[str, int]:
    """Return the line of each key of a document, by its dotted name."""
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return lines
    for name, key, value in children:
        lines[prefix + name] = key.start_mark.line + 1
        lines |= _lines_of(value, f"{prefix}{name}.")
    return lines


def _innermost(errors: Sequence[Any]) -> list[Any]:
    """Leave out that a section is wrong when something within it is: pydantic counts that too."""
    within = {item["loc"][:depth] for item in errors for depth in range(len(item["loc"]))}
    return [item for item in errors if item["loc"] not in within]


def _describe(item: Any, lines: Mapping[str, int]) -> str:
    location = [str(part) for part in item["loc"]]
    where = ".".join(location)
    if where in lines:
        where = f"line {lines[where]}: {where}"
    if item["type"] == "extra_forbidden":
        return f"{where}: no such key{_suggestion(location)}"
    if item["type"] == "missing":
        return f"{where}: missing; this key is required"
    if item["type"] in ("value_error", "secret"):  # our own words, which say what was found
        return f"{where}: {item['msg'].removeprefix('Value error, ')}"
    return f"{where}: found {reprlib.repr(item['input'])}: {item['msg']}"


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
