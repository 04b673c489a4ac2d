"""What a run leaves in Prefect's UI: a table of its shards and a summary with the next commands."""

import logging
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.config import JobConfig
from flows.job_run import JobOutcome, JobRun
from flows.ledger_rows import ShardRow
from flows.preparation import ledger_option, resume_command
from flows.shard_runner import ShardSummary, sum_stats

logger = logging.getLogger(__name__)
_CHART_WIDTH = 40


def publish_run(run: JobRun, outcome: JobOutcome, summaries: list[ShardSummary]) -> None:
    """Show how a run ended. A picture that fails is logged, and fails nothing."""
    try:
        shards = run.ledger.list_shards(run.job.job_key)
        create_table_artifact(
            key="shards",
            table=table_of_shards(shards, summaries),
            description=f"{outcome.job_id}: the rows of each shard; from "
            "`resumed` on the numbers are of this run alone",
        )
        create_markdown_artifact(
            key="summary",
            description=outcome.job_id,
            markdown=describe_outcome(run.config, outcome) + chart_of_time(summaries),
        )
    except Exception as error:  # noqa: BLE001 - a picture that fails must not fail the job
        logger.warning("no artifact of the run: %s", error)


def table_of_shards(shards: list[ShardRow], summaries: list[ShardSummary]) -> list[dict[str, Any]]:
    """Return a row for each shard; one that this run has not run, or that failed, has gaps."""
    by_index = {summary.shard_index: summary for summary in summaries}
    return [_row_of(shard, by_index.get(shard.shard_index)) for shard in shards]


def _row_of(shard: ShardRow, summary: ShardSummary | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shard": f"{shard.shard_index:04d}",
        "state": shard.state.value,
        "rows": shard.num_rows,
        "ok": shard.num_ok,
        "failed": shard.num_error,
        "pending": shard.num_pending,
    }
    if summary is None:
        return row
    stats = summary.stats
    return row | {
        "resumed": summary.num_resumed,
        "tokens/s": round(stats.num_output_tokens / max(summary.busy_seconds, 1e-9), 1),
        "output tokens": stats.num_output_tokens,
        "prompt tokens": stats.num_prompt_tokens,
        "cached tokens": stats.num_cached_tokens,
        "deduplicated": summary.num_deduplicated,
        "preemptions": stats.num_preemptions,
        "worker deaths": summary.num_worker_deaths,
        "device": summary.device or "",
    }


def chart_of_time(summaries: list[ShardSummary]) -> str:
    """Return in Markdown what the engines' main loops did with their seconds, the most first."""
    stats = sum_stats(summary.stats for summary in summaries)
    total = stats.wall_seconds
    if total <= 0:
        return ""
    buckets = sorted(stats.bucket_seconds.items(), key=lambda item: -item[1])
    bars = [
        f"{name:<16} {'#' * round(_CHART_WIDTH * seconds / total):<{_CHART_WIDTH}} "
        f"{seconds / total:4.0%} {seconds:.1f} s"
        for name, seconds in buckets
    ]
    return "### Where the time went\n\n```text\n" + "\n".join(bars) + "\n```\n"


def describe_outcome(config: JobConfig, outcome: JobOutcome) -> str:
    """Return the summary in Markdown, with what a person types next."""
    option = ledger_option(config)
    is_complete = outcome.output_path is not None
    commands = [
        f"tokenmill status {outcome.job_id}{option}",
        f"tokenmill export {outcome.job_id} --output answers.jsonl{option}",
    ]
    if not is_complete:
        commands[0] = resume_command(config)
    output = f"Output: `{outcome.output_path}`\n\n" if is_complete else ""
    retry = "" if is_complete else "Retry of this flow run goes on with this job too.\n"
    return (
        f"## {outcome.job_id}\n\n"
        f"{outcome.state.value}: {outcome.message}\n\n"
        f"{output}"
        "```bash\n" + "\n".join(commands) + f"\n```\n\n{retry}"
    )
