"""From a job's configuration to something that can run: planned, and known to the ledger.

Everything that only the user can mend comes out here, before any weights load.
"""

import dataclasses
import logging
import os
import re
import secrets
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from engine import ConfigError, ModelSource, SamplingParams, Tokenizer
from flows.config import JobConfig
from flows.job_changes import refuse_fork, take_over_answers
from flows.job_driver import JobDriver
from flows.job_fingerprint import at_date_of, fingerprint_of
from flows.ledger import Ledger
from flows.ledger_rows import CompletionRow, JobRow, NewJob
from flows.ledger_url import default_ledger_url
from flows.outputs.formats import default_output_name, paths_of
from flows.planner import Plan, plan_job
from flows.ray_terms import check_ray
from flows.records import RecordReader
from flows.schema import JobState, RowState
from flows.shard_runner import ShardJob
from flows.shard_writer import STREAM_NAME, TooManyFailedRowsError, cut_torn_line
from flows.time_limit import SlowTemplateError, load_time_limit

logger = logging.getLogger(__name__)
_SHOWN_BAD_ROWS = 10
# A row index that is not in its place yet, and the process that plans it.
_PLANNED_NAME = re.compile(r"\.?rows-([0-9]+)-[0-9]+\.sqlite")


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
    if engine.cache_dir is not None:
        engine_updates["cache_dir"] = engine.cache_dir.absolute()
    job_id = config.job_id or new_job_id(config.name)
    job_dir = config.job_dir or Path("runs") / job_id
    log_dir = engine.log_dir or job_dir / "logs"
    if engine.runtime.profile_steps is not None:
        traces = {"profile_dir": (engine.runtime.profile_dir or job_dir / "profile").absolute()}
        engine_updates["runtime"] = engine.runtime.model_copy(update=traces)
    output, errors = config.output.path, config.output.errors_path
    lock_dir = config.device_lock_dir
    return config.model_copy(
        update={
            "job_id": job_id,
            "job_dir": job_dir.absolute(),
            "device_lock_dir": lock_dir and lock_dir.absolute(),
            "sources": tuple(
                source
                if source.is_url
                else source.model_copy(update={"path": str(Path(source.path).absolute())})
                for source in config.sources
            ),
            "engine": engine.model_copy(update={**engine_updates, "log_dir": log_dir.absolute()}),
            "output": config.output.model_copy(
                update={
                    "path": None if output is None else output.absolute(),
                    "errors_path": None if errors is None else errors.absolute(),
                }
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
    return config.output.path or job_dir_of(config) / default_output_name(config)


def resume_command(config: JobConfig) -> str:
    """Return what a person types to go on with the job."""
    return f"tokenmill resume {config.job_id}{ledger_option(config)}"


def ledger_option(config: JobConfig) -> str:
    """Return what a command needs besides a job's id; empty when it finds the ledger by itself."""
    if config.ledger_url in (None, default_ledger_url()):
        return ""
    return f" --ledger {shlex.quote(config.resolved_ledger_url)}"


def default_sampling(config: JobConfig, source: ModelSource) -> SamplingParams:
    """Return the sampling of a row without overrides; its seed is None unless one is given."""
    return source.sampling_defaults(config.engine).overlaid(config.sampling.given())


def check_model_and_sources(config: JobConfig) -> ModelSource:
    """Find the quick faults of a resolved configuration: a missing folder or file, a wrong template.

    Raises:
        ConfigError: names the fault and the remedy.
    """
    if config.runner == "ray":
        check_ray(config)
    RecordReader(config.sources, config.prompt).close()
    paths_of(config, output_path_of(config))
    return ModelSource.inspect(config.engine)


def prepare(config: JobConfig, ledger: Ledger, driver: JobDriver) -> tuple[ShardJob, Plan]:
    """Plan a resolved configuration, and create its job or take it up again, as its driver.

    Raises:
        ConfigError: something that only the user can mend.
        LedgerError: the job exists, but with other inputs, or another process drives it.
        TooManyFailedRowsError: more rows of the input are bad than may fail.
    """
    assert config.job_id is not None
    job = ledger.find_job(config.job_id)
    if job is not None:
        driver.take(job)
    is_fork = job is None and config.forked_from is not None
    parent = ledger.get_job(str(config.forked_from)) if is_fork else None
    config = at_date_of(config, job, parent)
    source = ModelSource.inspect(config.engine)
    tokenizer = _load_tokenizer(config, source)
    sampling = default_sampling(config, source)
    fingerprint = fingerprint_of(config, source, tokenizer, sampling)
    if parent is not None:
        refuse_fork(parent, fingerprint)
    # Its own place until the ledger has taken the job: of two runs that create one job, the one
    # that is refused must not take the index away from the other.
    planned_path = job_dir_of(config) / f"rows-{os.getpid()}-{threading.get_ident()}.sqlite"
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
        if job is None:
            job = _create(config, ledger, plan, fingerprint, parent)
            driver.take(job)
        else:
            job = _take_up(config, ledger, job, plan, fingerprint)
        index_path = planned_path.replace(job_dir_of(config) / "rows.sqlite")
    finally:
        planned_path.unlink(missing_ok=True)
    _remove_leftovers(job_dir_of(config))
    plan = dataclasses.replace(plan, index_path=index_path)
    if config.stream_output:
        cut_torn_line(job_dir_of(config) / STREAM_NAME)
    _commit_bad_rows(ledger, job, plan)
    _refuse_too_many_bad_rows(config, ledger.get_job(job.job_id))
    with plan.open_index() as index:
        take_over_answers(ledger, job, index)
    ledger.set_job_state(job.job_key, JobState.RUNNING)
    seed = sampling.seed if sampling.seed is not None else job.seed
    shard_job = ShardJob(
        config=config,
        job=job,
        index_path=plan.index_path,
        sampling=sampling.overlaid({"seed": seed}),
        job_dir=job_dir_of(config),
    )
    return shard_job, plan


def _load_tokenizer(config: JobConfig, source: ModelSource) -> Tokenizer:
    try:
        with load_time_limit:
            return Tokenizer.load(config.engine, source)
    except SlowTemplateError as error:
        raise ConfigError(
            f"{source.path}: its tokenizer cannot be loaded, which tries the chat template too: "
            f"{error.message}; or set engine.chat.chat_template"
        ) from error


def _remove_leftovers(job_dir: Path) -> None:
    """Remove what runs that were killed while they planned have left."""
    for path in job_dir.iterdir():
        planned = _PLANNED_NAME.match(path.name)
        # One that still plans the same new job will be refused, and must come as far as that.
        if planned is not None and not psutil.pid_exists(int(planned[1])):
            path.unlink(missing_ok=True)


def _refuse_too_many_bad_rows(config: JobConfig, job: JobRow) -> None:
    limit = config.max_failed_of(job.num_rows)
    if limit is not None and job.num_error > limit:
        raise TooManyFailedRowsError(job.num_error, limit)


def _create(
    config: JobConfig,
    ledger: Ledger,
    plan: Plan,
    fingerprint: dict[str, str],
    parent: JobRow | None,
) -> JobRow:
    assert config.job_id is not None
    seed = secrets.randbits(63) if parent is None else parent.seed
    return ledger.create_job(
        NewJob(
            job_id=config.job_id,
            config=_without_secrets(config),
            seed=config.seed if config.seed is not None else seed,
            fingerprint=fingerprint,
            manifest_hash=plan.manifest_hash,
            num_rows=plan.num_rows,
            num_shards=config.shards,
            forked_from=config.forked_from,
        )
    )


def _take_up(
    config: JobConfig, ledger: Ledger, job: JobRow, plan: Plan, fingerprint: dict[str, str]
) -> JobRow:
    ledger.check_resumable(
        job, fingerprint=fingerprint, manifest_hash=plan.manifest_hash, num_rows=plan.num_rows
    )
    ledger.set_job_config(job.job_key, _without_secrets(config))
    if job.num_shards != config.shards:
        ledger.reshard(job.job_key, config.shards)
    job = ledger.get_job(job.job_id)
    logger.info(
        "resuming job=%s rows_done=%d rows=%d",
        job.job_id,
        job.num_rows - job.num_pending,
        job.num_rows,
    )
    return job


def _without_secrets(config: JobConfig) -> dict[str, Any]:
    """Return what the ledger keeps of a configuration; the ledger's URL may hold a password."""
    return config.model_dump(mode="json", exclude={"ledger_url"})


def _commit_bad_rows(ledger: Ledger, job: JobRow, plan: Plan) -> None:
    if not plan.num_bad_rows + plan.num_skipped_rows:
        return
    with plan.open_index() as index:
        ledger.commit_bad_rows(
            job.job_key,
            (
                CompletionRow(
                    row_index=row.row_index,
                    row_id=row.row_id,
                    state=RowState.SKIPPED if row.is_skipped else RowState.ERROR,
                    error_code=row.error_code,
                    error_message=row.error_message,
                    finish_reason=None if row.is_skipped else "error",
                    num_prompt_tokens=row.num_prompt_tokens,
                )
                for row in index.bad_rows()
            ),
        )
        for number, row in enumerate(index.bad_rows()):
            if number == _SHOWN_BAD_ROWS:
                num_more = plan.num_bad_rows + plan.num_skipped_rows - number
                logger.warning("and %d more rows that are not asked", num_more)
                break
            kind = "skipped row" if row.is_skipped else "bad row"
            logger.warning("%s: %s: %s", kind, row.error_code, row.error_message)
