"""What a job was started with, and what each run that goes on with it must bring again."""

from datetime import datetime

import msgspec

from engine import LedgerError, ModelSource, SamplingParams, Tokenizer
from flows.config import JobConfig, SourceConfig
from flows.ledger_rows import JobRow


def fingerprint_of(
    config: JobConfig, source: ModelSource, tokenizer: Tokenizer, sampling: SamplingParams
) -> dict[str, str]:
    """Return what decides a job's answers, each part by its name.

    What is as by default is left out, so that a job is resumed when there are more settings.
    """
    return {
        **source.fingerprint(),
        **tokenizer.fingerprint(),
        "sampling": msgspec.json.encode(sampling.model_dump(mode="json"), order="sorted").decode(),
        "prompt": msgspec.json.encode(config.prompt.model_dump(), order="sorted").decode(),
        "seed": "drawn" if config.seed is None else str(config.seed),
        **({} if config.too_long == "error" else {"too_long": config.too_long}),
        **_sources_fingerprint(config.sources),
    }


def at_date_of(config: JobConfig, job: JobRow | None, parent: JobRow | None) -> JobConfig:
    """Return the configuration with the date that chat templates write into every row of a job.

    It is the one of the job that is gone on with, else of the one that is forked, else today's.

    Raises:
        LedgerError: the job has another date than the configuration sets.
    """
    now = config.engine.chat.now
    origin = job or parent
    stored = None if origin is None else _date_of(origin)
    if now is None:
        now = stored or datetime.now().replace(microsecond=0)
    elif job is not None and now != stored:
        raise LedgerError(
            f"job {job.job_id!r} cannot be resumed: engine.chat.now was {stored}, is now {now}, "
            "and its rows would not be of one date; leave it out, or start a new job"
        )
    chat = config.engine.chat.model_copy(update={"now": now})
    return config.model_copy(update={"engine": config.engine.model_copy(update={"chat": chat})})


def _date_of(job: JobRow) -> datetime:
    """Return the date that a job was created with, or, when it is an old one, on."""
    stored = job.config.get("engine", {}).get("chat", {}).get("now")
    return datetime.fromisoformat(stored) if stored else datetime.fromtimestamp(job.created_at)


def _sources_fingerprint(sources: tuple[SourceConfig, ...]) -> dict[str, str]:
    """Return how the sources are read; what they hold is the manifest's to say."""
    names = {"format", "columns", "sample_rows", "sample_seed"}
    return {
        f"sources.{index}.{name}": msgspec.json.encode(value, order="sorted").decode()
        for index, source in enumerate(sources)
        for name, value in source.model_dump(
            mode="json", include=names, exclude_defaults=True
        ).items()
    }
