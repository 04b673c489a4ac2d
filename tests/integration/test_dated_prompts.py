"""A chat template that writes today's date writes the one on which the job was created."""

from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from interrupted_jobs import ONE_BY_ONE, die_after
from job_builders import make_job, questions, run_job, stored_rows

from flows.config import JobConfig
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.row_choice import SampleSize
from flows.verify import verify_job

pytestmark = pytest.mark.integration

# Llama 3's manner.
TEMPLATE = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    '{% set date_string = strftime_now("%A %d %b %Y") %}{% else %}'
    "{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}"
    "{{ bos_token }}Today: {{ date_string }}\n{% for m in messages %}{{ m.content }}{% endfor %}"
)
MONDAY, TUESDAY = datetime(2026, 11, 30, 23, 50), datetime(2026, 12, 1, 0, 10)
CLOCKS = ("engine.chat_template", "flows.job_fingerprint", "transformers.utils.chat_template_utils")


def freeze_clock(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return moment

    for module in CLOCKS:
        monkeypatch.setattr(f"{module}.datetime", Frozen)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("model"))


def dated_job(folder: Path, model: Path, **changes: Any) -> JobConfig:
    folder.mkdir(exist_ok=True)
    engine = {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "deterministic": True,
        "cache": {"num_blocks": 64},
        "runtime": {"inline": True, "num_threads": 1},
        "chat": {"chat_template": TEMPLATE},
    }
    return make_job(folder, questions(4), engine=engine, **ONE_BY_ONE, **changes)


def tokens_of(config: JobConfig) -> list[tuple[str, list[int]]]:
    return [(row.row_id, list(row.token_ids)) for row in stored_rows(config)]


def test_a_job_that_is_gone_on_with_the_next_day_answers_as_if_it_had_not_been_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    freeze_clock(monkeypatch, MONDAY)
    undisturbed = dated_job(tmp_path / "undisturbed", model)
    run_job(undisturbed)
    killed = dated_job(tmp_path / "killed", model)
    die_after(killed, 2)
    freeze_clock(monkeypatch, TUESDAY)
    assert len(tokens_of(killed)) == 2
    run_job(killed)
    assert tokens_of(killed) == tokens_of(undisturbed)
    tuesdays = dated_job(tmp_path / "tuesday", model)
    run_job(tuesdays)
    assert tokens_of(tuesdays) != tokens_of(undisturbed), "the date is no part of the prompt"


def test_answers_of_yesterday_are_verified_and_forked_with_the_date_of_yesterday(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    freeze_clock(monkeypatch, MONDAY)
    config = dated_job(tmp_path, model)
    run_job(config)
    freeze_clock(monkeypatch, TUESDAY)
    with Ledger.open(config.resolved_ledger_url) as ledger:
        job = ledger.get_job("job-1")
        stored = JobConfig.model_validate(job.config | {"ledger_url": config.ledger_url})
        report = verify_job(stored, job, ledger, size=SampleSize(number=4), seed=0, tolerance=0.0)
    assert (report.num_verified, report.differences) == (4, ())
    fork = config.model_copy(
        update={"job_id": "fork", "job_dir": tmp_path / "fork", "forked_from": "job-1"}
    )
    with JobRun.open(fork) as run:
        assert run.pending_shards() == []
