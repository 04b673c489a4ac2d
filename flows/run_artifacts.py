"""What a run leaves in Prefect's UI: a table of its shards and a summary with the next commands."""

import logging
import textwrap
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.config import JobConfig
from flows.job_run import JobOutcome
from flows.ledger_rows import ShardRow
from flows.preparation import ledger_option, resume_command
from flows.schema import ExperimentRow
from flows.shard_runner import ShardSummary, sum_stats

logger = logging.getLogger(__name__)
_CHART_WIDTH = 40
_SHOWN_SECONDS = 0.05  # less is 0.0 in the chart
# Left out where they are zero in every shard: the page has room for some eleven columns.
_RARE_COLUMNS = ("pending", "skipped", "deduplicated", "worker deaths")


def publish_run(
    config: JobConfig, outcome: JobOutcome, shards: list[ShardRow], summaries: list[ShardSummary]
) -> None:
    """Show how a run ended. A picture that fails is logged, and fails nothing.

    A card of the UI shows some 45 characters of a description.
    """
    try:
        create_table_artifact(
            key="shards",
            table=table_of_shards(shards, summaries),
            description="rows of the job, figures of this run",
        )
        create_markdown_artifact(
            key="summary",
            description=f"{outcome.state.value}: {_count_rows(shards)}",
            markdown=describe_outcome(config, outcome) + chart_of_time(summaries),
        )
    except Exception as error:  # noqa: BLE001 - a picture that fails must not fail the job
        logger.warning("no artifact of the run: %s", error)


def _count_rows(shards: list[ShardRow]) -> str:
    num_rows = sum(shard.num_rows for shard in shards)
    num_done = num_rows - sum(shard.num_pending for shard in shards)
    return f"{num_done}/{num_rows} rows, {sum(shard.num_error for shard in shards)} failed"


def table_of_shards(shards: list[ShardRow], summaries: list[ShardSummary]) -> list[dict[str, Any]]:
    """Return a row for each shard; one that this run has not run, or that failed, has gaps.

    Rows and their states are the job's; from `resumed` on the figures are of this run alone, in
    tokens where they are of no rows: cached ones of prompts, and wasted, computed a second time.
    """
    by_index = {summary.shard_index: summary for summary in summaries}
    rows = [_row_of(shard, by_index.get(shard.shard_index)) for shard in shards]
    empty = {name for name in _RARE_COLUMNS if not any(row.get(name) for row in rows)}
    return [{name: value for name, value in row.items() if name not in empty} for row in rows]


def _row_of(shard: ShardRow, summary: ShardSummary | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shard": f"{shard.shard_index:04d}",
        "state": shard.state.value,
        "device": "" if summary is None else summary.device or "",
        "rows": shard.num_rows,
        "failed": shard.num_error,
        "skipped": shard.num_skipped,
        "pending": shard.num_pending,
    }
    if summary is None:
        return row
    stats = summary.stats
    return row | {
        "resumed": summary.num_resumed,
        "tokens": stats.num_output_tokens,
        "tokens/s": round(stats.num_output_tokens / max(summary.busy_seconds, 1e-9), 1),
        "preemptions": stats.num_preemptions,
        "cached": stats.num_cached_tokens,
        "wasted": stats.num_repeated_tokens,
        "deduplicated": summary.num_deduplicated,
        "worker deaths": summary.num_worker_deaths,
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
        if seconds >= _SHOWN_SECONDS
    ]
    return "### Where the time went\n\n```text\n" + "\n".join(bars) + "\n```\n"


def describe_outcome(config: JobConfig, outcome: JobOutcome) -> str:
    """Return the summary in Markdown, with what a person types next."""
    option = ledger_option(config)
    is_complete = outcome.output_path is not None
    resume = resume_command(config)
    commands = [
        f"tokenmill status {outcome.job_id}{option}" if is_complete else resume,
        f"tokenmill export {outcome.job_id} --output answers.jsonl{option}",
    ]
    message = outcome.message.removesuffix(f"; to go on: {resume}")
    output = f"\n\nOutput: {outcome.output_path}" if is_complete else ""
    retry = "" if is_complete else "Retry of this flow run goes on with this job too.\n\n"
    figures = "" if outcome.experiment is None else _figures_of(outcome.experiment)
    return (
        f"## {outcome.job_id}\n\n"
        f"{_as_it_stands(f'{outcome.state.value}: {message}{output}')}\n\n"
        "To type next:\n\n```bash\n" + "\n".join(commands) + f"\n```\n\n{retry}{figures}"
    )


def _as_it_stands(text: str) -> str:
    """Return an indented block, which ends at no sign in the text: Prefect's UI renders HTML too."""
    return textwrap.indent(text, "    ", lambda line: True)


def _figures_of(row: ExperimentRow) -> str:
    """Return in Markdown what stands about this run in the experiment log."""
    busy = row.busy_seconds
    num_prompt, num_output = row.num_new_prompt_tokens, row.num_new_output_tokens
    figures = [
        ("rows", row.num_new_rows, row.num_new_rows / busy if busy else None),
        ("prompt tokens", num_prompt, row.input_tokens_per_second),
        ("output tokens", num_output, row.output_tokens_per_second),
        ("total tokens", num_prompt + num_output, row.total_tokens_per_second),
    ]
    lines = [
        f"| {name} | {number} | {'-' if rate is None else f'{rate:.1f}'} |\n"
        for name, number, rate in figures
    ]
    return (
        f"| this run | number | per busy second |\n|---|---:|---:|\n{''.join(lines)}\n"
        f"It took {row.wall_seconds:.1f} s, {busy:.1f} s of them busy, and loaded "
        f"{row.stats['num_loads']} engine(s). {row.stats['num_repeated_tokens']} tokens were wasted: "
        "computed again, after a preemption or a step that the device had no memory for.\n\n"
    )
