"""Two models on one ledger: a job never takes the answers of another model for its own."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from job_builders import Row, make_job, read_rows, run_job, stored_rows

from engine import LedgerError
from flows.config import JobConfig
from flows.job_run import JobRun
from flows.preparation import output_path_of

pytestmark = pytest.mark.integration

ROWS: Sequence[Row] = [{"prompt": "the quick brown fox"}, {"prompt": "the quick brown fox"}]


def job_with(folder: Path, model_path: Path, **changes: Any) -> JobConfig:
    return make_job(
        folder,
        ROWS,
        engine__model_path=str(model_path),
        engine__device="cpu",
        engine__cache={"num_blocks": 64},
        engine__runtime={"inline": True, "num_threads": 1},
        sampling={"max_tokens": 4, "temperature": 0.0},
        **changes,
    )


def change_weights(folder: Path) -> None:
    """Let the numbers of the last weights, and so the answers, be others; the size stays."""
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] + data[half:][::-1])


def change_template(folder: Path) -> None:
    (path,) = folder.glob("chat_template*")
    path.write_text(path.read_text() + " ")


@pytest.fixture
def models(tiny_llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Give two folders of one model."""
    folders = tmp_path / "first" / "model", tmp_path / "second" / "model"
    for folder in folders:
        shutil.copytree(tiny_llama, folder)
    return folders


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "elsewhere"])
@pytest.mark.parametrize(
    ("change", "field"), [(change_weights, "model"), (change_template, "chat_template")]
)
def test_a_job_is_not_resumed_with_another_model(
    models: tuple[Path, Path], tmp_path: Path, change: Any, field: str, is_in_place: bool
) -> None:
    first, second = models
    with JobRun.open(job_with(tmp_path, first)) as run:
        run.stop.set()
        run.finish([], {})
    other = first if is_in_place else second
    change(other)
    with (
        pytest.raises(LedgerError, match=rf"(?s)'job-1' cannot be resumed.*\n  {field}: was "),
        JobRun.open(job_with(tmp_path, other)),
    ):
        pytest.fail("answers of two models in one job")


def test_the_same_model_in_another_folder_goes_on(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder in models:
        with JobRun.open(job_with(tmp_path, folder)) as run:
            run.stop.set()
            run.finish([], {})


def test_two_jobs_of_two_models_keep_their_answers_apart(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = models
    change_weights(second)
    one = job_with(tmp_path, first)
    run_job(one)
    before = stored_rows(one)
    other = job_with(tmp_path, second, job_id="job-2", job_dir=str(tmp_path / "runs" / "job-2"))
    run_job(other)
    assert stored_rows(one) == before
    texts = [
        {line["text"] for line in read_rows(output_path_of(config))} for config in (one, other)
    ]
    assert [len(of_job) for of_job in texts] == [1, 1]
    assert texts[0] != texts[1]
