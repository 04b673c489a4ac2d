"""A job has a folder of its own, from whichever folder it is resumed and wherever its logs go."""

from pathlib import Path

import pytest

from flows.config import JobConfig
from flows.job_file import validate_job_config
from flows.preparation import job_dir_of, output_path_of, resolve


def job(**fields: object) -> JobConfig:
    data = {
        "name": "answers",
        "sources": [{"path": "rows.jsonl"}],
        "engine": {"model_path": "none", "device": "mock"},
    }
    return validate_job_config(data | fields, origin="test")


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def test_job_lives_below_runs_under_its_id(tmp_path: Path):
    config = resolve(job(job_id="a"))
    assert job_dir_of(config) == tmp_path / "runs" / "a"
    assert output_path_of(config) == tmp_path / "runs" / "a" / "output.jsonl"
    assert config.engine.log_dir == tmp_path / "runs" / "a" / "logs"


def test_two_jobs_that_share_a_log_folder_share_nothing_else():
    engine = {"model_path": "none", "device": "mock", "log_dir": "logs/workers"}
    first, second = (resolve(job(job_id=job_id, engine=engine)) for job_id in ("a", "b"))
    assert first.engine.log_dir == second.engine.log_dir == Path("logs/workers").absolute()
    assert job_dir_of(first) != job_dir_of(second)
    assert output_path_of(first) != output_path_of(second)


def test_folder_of_a_job_can_be_chosen(tmp_path: Path):
    config = resolve(job(job_dir="elsewhere"))
    assert job_dir_of(config) == tmp_path / "elsewhere"
    assert config.engine.log_dir == tmp_path / "elsewhere" / "logs"


def test_resolved_job_stays_what_it_is_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = resolve(job(job_id="a"))
    monkeypatch.chdir("/")
    assert resolve(config) == config


def test_traces_that_are_asked_for_lie_in_the_folder_of_the_job(tmp_path: Path):
    engine = {
        "model_path": "none", "device": "mock", "log_dir": "logs/workers",
        "runtime": {"profile_steps": [3, 2]},
    }  # fmt: skip
    config = resolve(job(job_id="a", engine=engine))
    assert config.engine.runtime.profile_dir == tmp_path / "runs" / "a" / "profile"
    assert config.engine.runtime.profile_steps == (3, 2)
    elsewhere = engine | {"runtime": {"profile_steps": [3, 2], "profile_dir": "traces"}}
    assert resolve(job(engine=elsewhere)).engine.runtime.profile_dir == tmp_path / "traces"


def test_cache_is_one_folder_for_all_jobs_from_wherever_they_are_resumed(tmp_path: Path):
    engine = {"model_path": "none", "device": "mock", "cache_dir": ".cache/tokenmill"}
    assert resolve(job(engine=engine)).engine.cache_dir == tmp_path / ".cache" / "tokenmill"
    assert resolve(job()).engine.cache_dir is None
