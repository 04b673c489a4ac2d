"""A job as the parameter of a flow: what Prefect's server checks of it, and what the form shows."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from job_builders import job_mapping, write_job
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validation
from prefect.utilities.schema_tools.validation import ValidationError, validate

from engine import ConfigError
from engine.config import RuntimeConfig
from flows.batch_inference import batch_inference
from flows.job_form import read_job

SCHEMA = parameter_schema(batch_inference).model_dump_for_openapi()
FORM = {"name": "a", "sources": [{"path": "a.jsonl"}], "engine": {"model_path": "m"}}
MISSING = object()


@pytest.fixture(autouse=True, scope="module")
def checked_schema() -> Iterator[None]:
    """Check once that the schema is one; the server does so at every run, which takes its time."""
    validation.is_valid_schema(SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation._VALIDATOR, "check_schema", lambda _schema: None)
        yield


def changed(wrong: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job that is right but for these values, by their dotted names."""
    job: dict[str, Any] = {**FORM, "sources": [{"path": "a.jsonl"}], "engine": {"model_path": "m"}}
    for name, value in wrong.items():
        *parents, last = name.split(".")
        target: Any = job
        for parent in parents:
            target = target[int(parent)] if parent.isdigit() else target.setdefault(parent, {})
        if value is MISSING:
            del target[last]
        else:
            target[last] = value
    return job


def refusal_of(parameter: Any) -> str:
    """Return why the server makes no run with this parameter."""
    with pytest.raises(ValidationError) as refused:
        validate({"config": parameter}, SCHEMA, raise_on_error=True)
    return str(refused.value)


WRONG_VALUES = {
    "shards": 0,
    "name": "with a blank",
    "seed": "seven",
    "too_long": "cut",
    "max_failed_rows": -1,
    "commit_seconds": 0,
    "stream_output": "yes",
    "sources": [],
    "sources.0.limit": 0,
    "sources.0.format": "xml",
    "sources.0.columns.prompt": 5,
    "prompt.format": "html",
    "sampling.temperature": -0.5,
    "sampling.logprobs": "all",
    "sampling.stop": 5,
    "sampling.bad_words": [" "],
    "sampling.logit_bias": {"yes": 1},
    "output.format": "xml",
    "ray.num_cpus": 0,
    "engine.device": "tpu",
    "engine.device_ids": [0, 0],
    "engine.pipeline_parallel_size": 2,
    "engine.scheduler.max_num_seqs": "many",
    "engine.scheduler.order": "random",
    "engine.cache.memory_fraction": 1.5,
    "engine.chat.tools": "none",
    "engine.runtime.num_threads": 0,
    "engine.runtime.mock_step_seconds": -1,
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(name: str) -> None:
    refusal = refusal_of(changed({name: WRONG_VALUES[name]}))
    # Of a list or a mapping the item is named too.
    assert re.search(rf"'config\.{re.escape(name.replace('.0.', '[0].'))}(\[.*\])?['\"]", refusal)


@pytest.mark.parametrize("share", ["5", "101%", "-1%", "many", "%", ""])
def test_a_share_of_failed_rows_that_is_none_is_refused_by_the_server_as_by_the_job(share: str):
    wrong = changed({"max_failed_rows": share})
    assert "'config.max_failed_rows'" in refusal_of(wrong)
    if not share.isdigit():  # a number that stands in quotation marks in a YAML file is one
        with pytest.raises(ConfigError, match=r"max_failed_rows: found .*, wanted a number"):
            read_job(wrong)


@pytest.mark.parametrize(
    ("section", "key"),
    [("", "name"), ("", "sources"), ("", "engine"), (".engine", "model_path"),
     (".sources[0]", "path")],
)  # fmt: skip
def test_a_missing_key_is_refused_with_its_name_and_its_section(section: str, key: str) -> None:
    name = f"{section.replace('[0]', '.0')}.{key}".strip(".")
    refusal = refusal_of(changed({name: MISSING}))
    assert f"'config{section}'" in refusal
    assert f"'{key}' is a required property" in refusal


@pytest.mark.parametrize(
    "section",
    ["", "sources.0", "sources.0.columns", "prompt", "sampling", "output", "ray", "engine",
     "engine.scheduler", "engine.cache", "engine.chat", "engine.runtime"],
)  # fmt: skip
def test_a_misspelt_key_is_refused_with_its_name_and_its_section(section: str) -> None:
    refusal = refusal_of(changed({f"{section}.max_tokns".strip("."): 5}))
    assert f"'{'.'.join(filter(None, ('config', section.replace('.0', '[0]'))))}'" in refusal
    assert "'max_tokns'" in refusal


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": MISSING, "sources": MISSING},
        {"name": MISSING, "engine": MISSING},
        {"name": MISSING, "typo": 1},
        {"name": "a b" * 30},  # a wrong sign, and too long
        {"shards": 0, "seed": -1},
        {"engine.model_path": MISSING, "engine.typo": 1},
        {"sources.0.path": MISSING, "sources.0.typo": 1},
        {"engine.scheduler.order": "random", "engine.scheduler.max_num_seqs": 0},
        {"engine.scheduler.order": "random", "sampling.temperature": -1},
        {"engine.typo": 1, "sampling.typo": 1},
        {"max_failed_rows": [1], "sources.0.typo": 1},
    ],
    ids=lambda wrong: "+".join(wrong),
)
def test_of_two_wrong_fields_one_is_named(wrong: Mapping[str, Any]) -> None:
    refusal = refusal_of(changed(wrong))
    assert any(name.rpartition(".")[2] in refusal for name in wrong)
    assert "is not valid under any of the given schemas" not in refusal.replace("[1] is not", "")
    assert len(refusal) < 250


@pytest.mark.parametrize("parameter", [5, None, ["job.yaml"]])
def test_what_is_neither_a_job_nor_a_path_is_refused(parameter: Any) -> None:
    assert "'config'" in refusal_of(parameter)


@pytest.mark.parametrize(
    "parameter",
    [
        "configs/jobs/nightly.yaml",
        changed({}),
        changed({"max_failed_rows": "2.5%", "sampling.logit_bias": {"5": -1}}),
        changed({"engine.runtime.mock_step_seconds": 0.5}),
    ],
)
def test_a_job_and_a_path_are_taken(parameter: Any) -> None:
    assert validate({"config": parameter}, SCHEMA, raise_on_error=True) == []
    assert batch_inference.validate_parameters({"config": parameter})


def test_every_setting_says_what_it_is() -> None:
    definitions = SCHEMA["definitions"]
    fields = {f"{section}.{name}": field for section, name, field in settings()}
    silent = {
        name
        for name, field in fields.items()
        if not (definitions[field["$ref"].rpartition("/")[2]] if "$ref" in field else field).get(
            "description"
        )
    }
    assert silent == set()
    assert {"JobConfig.shards", "EngineConfig.log_level", "SamplingParams.top_p"} < set(fields)


def test_what_only_tests_set_is_not_in_the_form() -> None:
    assert any(name.startswith("mock_") for name in RuntimeConfig.model_fields)
    assert [name for _, name, _ in settings() if "mock" in name] == []


def settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for section, definition in SCHEMA["definitions"].items():
        for name, field in definition.get("properties", {}).items():
            yield section, name, field


TWO_BATCHES = {"max_num_seqs": 64, "max_num_batched_tokens": 4}
WRONG_TOGETHER = [
    ({"engine__scheduler": TWO_BATCHES}, "engine.scheduler: max_num_batched_tokens is 4, less"),
    ({"sources": [{"path": "a.jsonl"}] * 2}, "sources: two sources are named 'a'"),
    ({"output": {"path": "a.csv", "format": "jsonl"}}, "output: path ends in .csv and format is"),
    ({"sampling": {"max_tokens": 0}}, "sampling: max_tokens is 0, which only scores"),
    ({"engine__tensor_parallel_size": 2}, "engine: tensor_parallel_size 2 takes a process"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_TOGETHER)
def test_fields_that_do_not_agree_are_named_in_one_line_in_a_form_as_in_a_file(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    form = job_mapping(tmp_path, **wrong)
    assert validate({"config": form}, SCHEMA, raise_on_error=True) == []  # only the code can tell
    parameter = batch_inference.validate_parameters({"config": form})["config"]
    path = write_job(tmp_path, **wrong)
    for given, origin in ((parameter, "config"), (str(path), str(path))):
        with pytest.raises(ConfigError) as refused:
            read_job(given)
        first, second = str(refused.value).splitlines()
        assert first == f"{origin}: 1 wrong field(s)"
        assert words in second
        assert len(second) < 200
        assert "http" not in second
