"""What an export writes and where: the format, the names of its files and of its fields."""

from dataclasses import dataclass
from pathlib import Path

from engine import ConfigError
from flows.config import (
    JobConfig,
    OutputFormat,
    SourceFormat,
    format_of_suffix,
    problem_of_output_path,
)
from flows.records import RESULT_FIELDS, refuse_to_overwrite_a_source

_SUFFIXES = {OutputFormat.PARQUET: ".parquet", OutputFormat.CSV: ".csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPaths:
    """The files of one export."""

    output: Path
    errors: Path
    manifest: Path


def format_of(config: JobConfig, path: Path | None) -> OutputFormat:
    """Return the format of an output: by its suffix, then by the settings, then by the sources."""
    asked = config.output.format
    by_suffix = None if path is None else format_of_suffix(path)
    if by_suffix is not None and by_suffix is not OutputFormat.JSONL:
        return by_suffix
    is_json = asked in (OutputFormat.JSONL, OutputFormat.OPENAI_BATCH)
    if asked is not None and (by_suffix is None or is_json):
        return asked
    kinds = {source.format for source in config.sources}
    return OutputFormat.OPENAI_BATCH if kinds == {SourceFormat.OPENAI_BATCH} else OutputFormat.JSONL


def default_output_name(config: JobConfig) -> str:
    """Return the name of the output in the job's own folder."""
    return "output" + _SUFFIXES.get(format_of(config, None), ".jsonl")


def paths_of(config: JobConfig, output_path: Path) -> OutputPaths:
    """Return where an export writes; in the job's own folder the failed rows are errors.jsonl.

    Elsewhere their file carries the output's name, for other jobs may write there.

    Raises:
        ConfigError: two of the files would be one, one would overwrite a source, or nothing can
            be written there.
    """
    problem = problem_of_output_path(output_path)
    if problem is not None:
        raise ConfigError(f"the output {problem}")
    errors = config.output.errors_path
    if errors is None:
        is_own_folder = output_path.parent == config.job_dir
        name = "errors.jsonl" if is_own_folder else f"{output_path.stem}_errors.jsonl"
        errors = output_path.with_name(name)
    manifest = output_path.with_name(f"{output_path.name}.manifest.json")
    if len({path.absolute() for path in (output_path, errors, manifest)}) < 3:
        raise ConfigError(
            f"the output {output_path}, its failed rows {errors} and its manifest {manifest} need "
            "names of their own; change output.path or output.errors_path"
        )
    for path in (output_path, errors, manifest):
        refuse_to_overwrite_a_source(config.sources, path)
    return OutputPaths(output=output_path, errors=errors, manifest=manifest)


def planned_result_fields(config: JobConfig) -> tuple[str, ...]:
    """Return the names that the job's own output will add."""
    return result_fields(format_of(config, config.output.path))


def result_fields(output_format: OutputFormat) -> tuple[str, ...]:
    """Return the names that the format adds to a row's own columns, before the prefix."""
    if output_format is OutputFormat.OPENAI_BATCH:
        return ()
    if output_format is OutputFormat.JSONL:
        return RESULT_FIELDS
    return tuple(name for name in RESULT_FIELDS if name != "error") + (
        "error_code",
        "error_message",
    )
