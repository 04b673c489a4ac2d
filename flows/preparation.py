"""From a job's configuration to something that can run: planned, and known to the ledger.

Everything that only the user can mend comes out here, before any weights load.
"""

import dataclasses
import logging
import os
import secrets
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from engine import ModelSource, SamplingParams, Tokenizer
from flows.config import JobConfig, default_ledger_url
from flows.database import without_password
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow, NewJob
from flows.planner import Plan, plan_job
from flows.records import RecordReader, refuse_to_overwrite_a_source
from flows.schema import JobState, RowState
from flows.shard_runner import ShardJob

logger = logging.getLogger(__name__)
_SHOWN_BAD_ROWS = 10


def resolve(config: JobConfig) -> JobConfig:
    """Return the configuration with a job id and absolute paths, so that any folder can resume it."""
    engine = config.engine
    engine_updates: dict[str, Any] = {}
    if engine.device != "mock":
        engine_updates["model_path"] = str(Path(engine.model_path).absolute())
    if engine.tokenizer_path is not None:
        engine_updates["tokenizer_path"] = str(Path(engine.tokenizer_path).absolute())
    if engine.chat.template_path is not None:
        template = {"chat_template": str(engine.chat.template_path.absolute())}
        engine_updates["chat"] = engine.chat.model_copy(update=template)
    job_id = config.job_id or new_job_id(config.name)
    job_dir = config.job_dir or Path("runs") / job_id
    log_dir = engine.log_dir or job_dir / "logs"
    output = config.output.path
    return config.model_copy(
        update={
            "job_id": job_id,
            "job_dir": job_dir.absolute(),
            "sources": tuple(
                source.model_copy(update={"path": source.path.absolute()})
                for source in config.sources
            ),
            "engine": engine.model_copy(update={**engine_updates, "log_dir": log_dir.absolute()}),
            "output": config.output.model_copy(
                update={"path": None if output is None else output.absolute()}
            ),
        }
    )


def new_job_id(name: str) -> str:
    """Return a job id that sorts by time: NAME-YYYYMMDD-HHMMSS-xxxx."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def job_dir_of(config: JobConfig) -> Path:
    """Return the job's own folder: row index, logs, and the output unless it has its own path."""
    assert config.job_dir is not None, "resolve it first"
    return config.job_dir


def output_path_of(config: JobConfig) -> Path:
    """Return where the output goes."""
    return config.output.path or job_dir_of(config) / "output.jsonl"


def resume_command(config: JobConfig) -> str:
    """Return what a person types to go on with the job."""
    return f"tokenmill resume {config.job_id}{ledger_option(config)}"


def ledger_option(config: JobConfig) -> str:
    """Return what a command needs besides a job's id; empty when it finds the ledger by itself."""
    if config.ledger_url in (None, default_ledger_url()):
        return ""
    return f" --ledger {shlex.quote(without_password(config.resolved_ledger_url))}"


def check_model_and_sources(config: JobConfig) -> ModelSource:
    """Find the quick faults of a resolved configuration: a missing folder or file, a wrong template.

    Raises:
        ConfigError: names the fault and the remedy.
    """
    RecordReader(config.sources, config.prompt).close()
    refuse_to_overwrite_a_source(config.sources, output_path_of(config))
    return ModelSource.inspect(config.engine)


def prepare(config: JobConfig, ledger: Ledger) -> tuple[ShardJob, Plan]:
    """Plan a resolved configuration, and create its job or take it up again.

    Raises:
        ConfigError: something that only the user can mend.
        LedgerError: the job exists, but with other inputs.
    """
    assert config.job_id is not None
    source = ModelSource.inspect(config.engine)
    tokenizer = Tokenizer.load(config.engine, source)
    sampling = source.sampling_defaults(config.engine).overlaid(config.sampling.given())
    job_dir = job_dir_of(config)
    # Its own place until the ledger has taken the job: a run that is refused must not take the
    # index away from another process that works on the job.
    planned_path = job_dir / f"rows-{os.getpid()}-{threading.get_ident()}.sqlite"
    fingerprint = (
        source.fingerprint() | tokenizer.fingerprint() | _job_fingerprint(config, sampling)
    )
    try:
        with RecordReader(config.sources, config.prompt) as reader:
            plan = plan_job(
                config,
                reader,
                tokenizer,
                max_model_len=source.max_model_len,
                index_path=planned_path,
                default_sampling=sampling,
            )
        job = _find_or_create(config, ledger, plan, fingerprint)
        plan = dataclasses.replace(plan, index_path=planned_path.replace(job_dir / "rows.sqlite"))
    finally:
        planned_path.unlink(missing_ok=True)
    _commit_bad_rows(ledger, job, plan)
    ledger.set_job_state(job.job_key, JobState.RUNNING)
    seed = sampling.seed if sampling.seed is not None else job.seed
    shard_job = ShardJob(
        config=config,
        job=job,
        index_path=plan.index_path,
        sampling=sampling.overlaid({"seed": seed}),
        job_dir=job_dir,
    )
    return shard_job, plan


def _job_fingerprint(config: JobConfig, sampling: SamplingParams) -> dict[str, str]:
    return {
        "sampling": msgspec.json.encode(sampling.model_dump(mode="json"), order="sorted").decode(),
        "prompt": msgspec.json.encode(config.prompt.model_dump(), order="sorted").decode(),
        "seed": "drawn" if config.seed is None else str(config.seed),
    }


def _find_or_create(
    config: JobConfig, ledger: Ledger, plan: Plan, fingerprint: dict[str, str]
) -> JobRow:
    assert config.job_id is not None
    job = ledger.find_job(config.job_id)
    if job is None:
        return ledger.create_job(
            NewJob(
                job_id=config.job_id,
                config=config.model_dump(mode="json", exclude={"ledger_url"}),
                seed=config.seed if config.seed is not None else secrets.randbits(63),
                fingerprint=fingerprint,
                manifest_hash=plan.manifest_hash,
                num_rows=plan.num_rows,
                num_shards=config.shards,
            )
        )
    ledger.check_resumable(
        job, fingerprint=fingerprint, manifest_hash=plan.manifest_hash, num_rows=plan.num_rows
    )
    if job.num_shards != config.shards:
        ledger.reshard(job.job_key, config.shards)
        job = ledger.get_job(config.job_id)
    logger.info(
        "resuming job=%s rows_done=%d rows=%d",
        job.job_id,
        job.num_rows - job.num_pending,
        job.num_rows,
    )
    return job


def _commit_bad_rows(ledger: Ledger, job: JobRow, plan: Plan) -> None:
    if not plan.num_bad_rows:
        return
    with plan.open_index() as index:
        ledger.commit_bad_rows(
            job.job_key,
            (
                CompletionRow(
                    row_index=row.row_index,
                    row_id=row.row_id,
                    state=RowState.ERROR,
                    error_code=row.error_code,
                    error_message=row.error_message,
                    finish_reason="error",
                    num_prompt_tokens=row.num_prompt_tokens,
                )
                for row in index.bad_rows()
            ),
        )
        for number, row in enumerate(index.bad_rows()):
            if number == _SHOWN_BAD_ROWS:
                logger.warning("and %d more bad rows", plan.num_bad_rows - number)
                break
            logger.warning("bad row: %s: %s", row.error_code, row.error_message)
