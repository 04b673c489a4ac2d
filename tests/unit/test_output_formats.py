"""Which format an output has, where its files lie, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest
from job_builders import job_mapping

from engine import ConfigError
from flows.config import JobConfig, OutputFormat
from flows.job_file import validate_job_config
from flows.outputs.formats import default_output_name, format_of, paths_of

JSONL, OPENAI, PARQUET, CSV = OutputFormat


def config_of(source_formats: tuple[str | None, ...] = (None,), **output: Any) -> JobConfig:
    mapping = job_mapping(Path("folder"), output=output)
    mapping["sources"] = [
        {"path": f"{number}.jsonl", "format": source_format}
        for number, source_format in enumerate(source_formats)
    ]
    return validate_job_config(mapping, origin="job.yaml")


@pytest.mark.parametrize(
    ("path", "asked", "sources", "expected"),
    [
        ("a.jsonl", None, (None,), JSONL),
        ("a.csv", None, (None,), CSV),
        ("a.CSV", None, (None,), CSV),
        ("a.parquet", None, ("openai_batch",), PARQUET),
        ("a.txt", None, (None,), JSONL),
        (None, None, ("openai_batch", "openai_batch"), OPENAI),
        ("a.jsonl", None, ("openai_batch",), OPENAI),
        ("a.jsonl", None, ("openai_batch", None), JSONL),
        ("a.jsonl", "jsonl", ("openai_batch",), JSONL),
        ("a.jsonl", "openai_batch", (None,), OPENAI),
        ("a.txt", "parquet", (None,), PARQUET),
        (None, "csv", (None,), CSV),
    ],
)
def test_the_format_comes_from_the_suffix_the_setting_or_the_sources(
    path: str | None, asked: str | None, sources: tuple[str | None, ...], expected: OutputFormat
) -> None:
    config = config_of(sources, path=path, format=asked)
    assert format_of(config, config.output.path) is expected


@pytest.mark.parametrize(
    ("asked", "path", "expected"),
    [
        ("jsonl", "x.csv", CSV),
        ("parquet", "x.jsonl", JSONL),
        ("openai_batch", "x.jsonl", OPENAI),
        ("csv", "x.data", CSV),
    ],
)
def test_an_export_to_another_path_goes_by_its_suffix(
    asked: str, path: str, expected: OutputFormat
) -> None:
    assert format_of(config_of(format=asked), Path(path)) is expected


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (None, "output.jsonl"),
        ("openai_batch", "output.jsonl"),
        ("csv", "output.csv"),
        ("parquet", "output.parquet"),
    ],
)
def test_an_output_without_a_path_has_the_suffix_of_its_format(
    asked: str | None, name: str
) -> None:
    assert default_output_name(config_of(format=asked)) == name


def test_failed_rows_have_the_name_of_the_output_where_other_jobs_may_write() -> None:
    config = config_of()
    assert config.job_dir is not None
    own = paths_of(config, config.job_dir / "output.csv")
    assert own.errors == config.job_dir / "errors.jsonl"
    assert own.manifest == config.job_dir / "output.csv.manifest.json"
    elsewhere = paths_of(config, Path("results/a.b.csv"))
    assert elsewhere.errors == Path("results/a.b_errors.jsonl")
    assert paths_of(config_of(errors_path="bad.jsonl"), Path("a/b.csv")).errors == Path("bad.jsonl")


@pytest.mark.parametrize("path", ["bad.jsonl", "bad.jsonl.manifest.json"])
def test_two_files_of_an_output_with_one_name_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="need names of their own"):
        paths_of(config_of(errors_path=path), Path("bad.jsonl"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"path": "s3://bucket/a.jsonl"}, "output.path: .*is a URL, wanted a local path"),
        ({"errors_path": "gs://bucket/a"}, "output.errors_path: .*is a URL"),
        ({"path": "a.jsonl.gz"}, "output.path: .*leave .gz out"),
        ({"path": "a.parquet", "format": "csv"}, "path ends in .parquet and format is csv"),
        ({"path": "a.csv", "format": "openai_batch"}, "ends in .csv and format is openai_batch"),
        ({"path": "a.jsonl", "format": "parquet"}, "path ends in .jsonl and format is parquet"),
        ({"format": "xml"}, "output.format: found 'xml'"),
    ],
)
def test_an_output_that_cannot_be_is_refused_with_the_remedy(
    output: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**output)


@pytest.mark.parametrize("path", ["s3://bucket/a.jsonl", "https://host/a.csv", "a.jsonl.zst"])
def test_an_export_to_a_url_or_a_packed_file_is_refused_too(path: str) -> None:
    with pytest.raises(ConfigError, match="wanted a local path|leave .zst out"):
        paths_of(config_of(), Path(path))


@pytest.mark.parametrize(
    ("source", "output"),
    [("a.jsonl", "a.jsonl"), ("a.jsonl.manifest.json", "a.jsonl"), ("a_errors.jsonl", "a.jsonl")],
)
def test_no_file_of_an_output_may_be_a_source(tmp_path: Path, source: str, output: str) -> None:
    (tmp_path / source).touch()
    mapping = job_mapping(tmp_path)
    mapping["sources"] = [{"path": str(tmp_path / source)}]
    config = validate_job_config(mapping, origin="job.yaml")
    with pytest.raises(ConfigError, match="would be overwritten"):
        paths_of(config, tmp_path / output)
