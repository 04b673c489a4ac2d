"""plan_job: everything that can be wrong with the input comes out before weights load."""

import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine import (
    ConfigError,
    EngineConfig,
    GenerateRequest,
    RequestError,
    RequestErrorCode,
    SamplingParams,
)
from flows.config import JobConfig, OutputConfig, PromptConfig, SourceConfig
from flows.planner import Plan, plan_job
from flows.records import RecordReader
from flows.row_index import IndexRow


class ByteEncoder:
    """One token a byte; it refuses what a real tokenizer refuses."""

    def encode_request(self, request: GenerateRequest) -> list[int]:
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        if request.messages is not None:
            return list(json.dumps(list(request.messages)).encode())
        if not request.prompt:
            raise RequestError(RequestErrorCode.PROMPT_EMPTY, "the prompt is empty\ud800")
        return list(request.prompt.encode("utf-8"))


def make_config(
    folder: Path, *files: Iterable[Any], prefix: str = "", shards: int = 1
) -> JobConfig:
    """Write each file's rows (strings stand for raw lines) and return a job over them."""
    sources = []
    for name, rows in zip("abc", files, strict=False):
        path = folder / f"{name}.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines))
        sources.append(SourceConfig(path=path))
    return JobConfig(
        name="test",
        sources=tuple(sources),
        prompt=PromptConfig(format="text"),
        engine=EngineConfig(model_path="none", device="mock"),
        output=OutputConfig(result_prefix=prefix),
        shards=shards,
    )


def plan(
    config: JobConfig, *, max_model_len: int = 100, sampling: SamplingParams | None = None
) -> Plan:
    index_path = Path(config.sources[0].path).parent / "index.sqlite"
    with RecordReader(config.sources, config.prompt) as reader:
        return plan_job(
            config,
            reader,
            ByteEncoder(),
            max_model_len=max_model_len,
            index_path=index_path,
            default_sampling=sampling or SamplingParams(),
        )


def rows_of(plan: Plan) -> list[IndexRow]:
    with plan.open_index() as index:
        return list(index.rows_between(0, index.count))


def test_a_plan_counts_rows_and_tokens_over_all_sources(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        [{"id": "one", "prompt": "x" * 4}, "nonsense"],
        [{"prompt": "y" * 6}, {"prompt_token_ids": [1, 2]}],
        shards=2,
    )
    result = plan(config)
    assert (result.num_rows, result.num_bad_rows, result.num_prompt_tokens) == (4, 1, 12)
    assert (result.prompt_tokens_p50, result.prompt_tokens_max) == (4, 6)
    assert [(row.row_id, row.num_prompt_tokens) for row in rows_of(result)] == [
        ("one", 4),
        ("a:2", 0),
        ("b:1", 6),
        ("b:2", 2),
    ]
    assert list(result.source_hashes) == ["a", "b"]


def test_the_reader_finds_each_row_where_the_index_says(tmp_path: Path) -> None:
    config = make_config(tmp_path, [{"prompt": "a"}, "", {"prompt": "b"}], [{"prompt": "c"}])
    rows = rows_of(plan(config))
    with RecordReader(config.sources, config.prompt) as reader:
        records = [reader.read_at(row.row_index, row.location) for row in rows]
    assert [record.columns["prompt"] for record in records] == ["a", "b", "c"]
    assert [record.row_id for record in records] == [row.row_id for row in rows]


def test_percentiles_are_nearest_ranks(tmp_path: Path) -> None:
    config = make_config(tmp_path, [{"prompt": "x" * length} for length in range(1, 101)])
    result = plan(config, max_model_len=1000)
    lengths = (result.prompt_tokens_p50, result.prompt_tokens_p95, result.prompt_tokens_max)
    assert lengths == (50, 95, 100)


def test_bad_rows_become_error_rows_with_file_and_line(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        [
            "{",
            {"prompt": ""},
            {"prompt": "a", "sampling": {"max_new_tokens": 3}},
            {"prompt": "a", "sampling": {"temperature": -1}},
            {"prompt": "fine", "sampling": {"temperature": 0}},
        ],
    )
    with plan(config).open_index() as index:
        bad = list(index.bad_rows())
    assert [(row.row_index, row.error_code) for row in bad] == [
        (0, "bad_json"),
        (1, "prompt_empty"),
        (2, "invalid_sampling_params"),
        (3, "invalid_sampling_params"),
    ]
    for number, row in enumerate(bad, start=1):
        assert row.error_message is not None
        assert row.error_message.startswith(f"{tmp_path / 'a.jsonl'}, line {number}: ")
        assert row.error_message.count("line ") == 1
    assert "write max_tokens" in str(bad[2].error_message)


def test_an_override_is_checked_together_with_the_job_s_sampling(tmp_path: Path) -> None:
    config = make_config(tmp_path, [{"prompt": "a", "sampling": {"max_tokens": 5}}])
    assert plan(config).num_bad_rows == 0
    assert plan(config, sampling=SamplingParams(min_tokens=6)).num_bad_rows == 1


def test_a_prompt_that_is_only_scored_needs_no_room_for_an_answer(tmp_path: Path) -> None:
    scoring = {"max_tokens": 0, "prompt_logprobs": 0}
    config = make_config(
        tmp_path, [{"prompt": "x" * length, "sampling": scoring} for length in (9, 10, 11)]
    )
    rows = rows_of(plan(config, max_model_len=10))
    assert [row.error_code for row in rows] == [None, None, "prompt_too_long"]


def test_a_prompt_needs_room_for_one_more_token(tmp_path: Path) -> None:
    config = make_config(tmp_path, [{"prompt": "x" * length} for length in (9, 10, 11)])
    result = plan(config, max_model_len=10)
    fits, equal, longer = rows_of(result)
    assert fits.error_code is None
    assert (equal.error_code, longer.error_code) == ("prompt_too_long", "prompt_too_long")
    assert "has 10 tokens" in str(equal.error_message)
    assert "max_model_len 10" in str(equal.error_message)
    assert longer.num_prompt_tokens == 11
    assert (result.num_bad_rows, result.num_prompt_tokens) == (2, 9)


@pytest.mark.parametrize("distance", [1, 2500])
def test_two_rows_with_one_id_stop_the_job_and_name_both_lines(
    tmp_path: Path, distance: int
) -> None:
    between = [{"prompt": "x"}] * (distance - 1)
    config = make_config(
        tmp_path, [{"id": 7, "prompt": "x"}, *between], [{"id": "7", "prompt": "y"}]
    )
    wanted = rf"id '7': {tmp_path / 'a.jsonl'}, line 1 and {tmp_path / 'b.jsonl'}, line 1"
    with pytest.raises(ConfigError, match=wanted):
        plan(config)
    assert not list(tmp_path.glob("*index*"))


def test_equal_prompts_are_different_rows(tmp_path: Path) -> None:
    assert plan(make_config(tmp_path, [{"prompt": "a"}, {"prompt": "a"}])).num_rows == 2


def test_a_column_that_collides_stops_the_job_unless_a_prefix_is_set(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "text": "b"}]
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: the column 'text'.*result_prefix"):
        plan(make_config(tmp_path, rows))
    assert plan(make_config(tmp_path, rows, prefix="answer_")).num_rows == 2


def test_a_collision_in_a_bad_row_counts_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'error'"):
        plan(make_config(tmp_path, [{"error": "b"}]))


def test_no_rows_are_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no rows in .*a\.jsonl"):
        plan(make_config(tmp_path, ["", " "]))
    assert not list(tmp_path.glob("*index*"))


def test_an_output_that_would_overwrite_a_source_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, [{"prompt": "a"}])
    output = OutputConfig(path=tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="overwritten"):
        plan(config.model_copy(update={"output": output}))


def test_the_manifest_changes_with_the_input_and_with_nothing_else(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    first = plan(make_config(tmp_path, rows))
    again = plan(make_config(tmp_path, rows, shards=2, prefix="x_"), max_model_len=2)
    changed = plan(make_config(tmp_path, [{"prompt": "a"}, {"prompt": "c"}]))
    moved = plan(make_config(tmp_path, [rows[0], "", rows[1]]))
    assert again.manifest_hash == first.manifest_hash
    assert len({first.manifest_hash, changed.manifest_hash, moved.manifest_hash}) == 3


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    def peak_bytes(num_rows: int) -> int:
        config = make_config(tmp_path, ({"id": f"row-{i}", "prompt": "x"} for i in range(num_rows)))
        tracemalloc.start()
        try:
            plan(config)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)
    small, large = peak_bytes(2_000), peak_bytes(12_000)
    assert large < small + 500_000
