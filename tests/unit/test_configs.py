"""The job files that we ship say what the code accepts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from flows.config import JobConfig
from flows.demo import MODEL_NAME, PROMPTS_NAME
from flows.job_file import load_job_config

JOBS = Path(__file__).parents[2] / "configs" / "jobs"


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from keys_of(part, f"{prefix}{name}.")


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.name)
def test_job_file_is_a_valid_job(path: Path):
    assert load_job_config(path).name


def test_example_shows_every_setting_of_a_job():
    text = (JOBS / "example.yaml").read_text(encoding="utf-8")
    shown = set(re.findall(r"^[ #-]*(\w+):", text, flags=re.MULTILINE))
    assert [key for key in keys_of(JobConfig) if key.rpartition(".")[2] not in shown] == []


def test_example_stays_valid_with_every_line_that_is_commented_out(tmp_path: Path):
    text = (JOBS / "example.yaml").read_text(encoding="utf-8")
    path = tmp_path / "job.yaml"
    path.write_text(re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE), encoding="utf-8")
    config = load_job_config(path)
    assert config.job_id is not None
    assert config.engine.cache.num_blocks == 1024


def test_demo_job_reads_what_the_demo_prepares():
    config = load_job_config(JOBS / "demo.yaml")
    path = Path(config.sources[0].path)
    folder = path.parent
    assert path.name == PROMPTS_NAME
    assert Path(config.engine.model_path) == folder / MODEL_NAME
    assert (config.sources[0].limit, config.shards) == (64, 4)
    assert config.sampling.is_greedy
    assert config.sampling.max_tokens == 128
