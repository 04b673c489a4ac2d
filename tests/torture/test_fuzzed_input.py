"""A hundred thousand lines by chance: each bad one is reported with its line, each good answered."""

import json
from collections import Counter
from pathlib import Path

import pytest
from job_builders import make_job, run_job

from flows.preparation import output_path_of
from torture.fuzzed_rows import fuzzed_lines
from torture.invariants import check_state, read_state

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
NUM_LINES = 100_000


def test_no_line_is_lost_answered_twice_or_refused_without_a_reason(tmp_path: Path) -> None:
    lines = list(fuzzed_lines(seed=0, count=NUM_LINES))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(line.content for line in lines))
    config = make_job(
        tmp_path,
        engine__scheduler={"max_num_seqs": 256},
        sampling={"max_tokens": 3},
        commit_rows=1000,
        shards=3,
    )
    outcome, _ = run_job(config)

    asked = [(number, line) for number, line in enumerate(lines, 1) if line.verdict is not None]
    state = read_state(config.resolved_ledger_url)
    check_state(state, len(asked))
    codes: Counter[str] = Counter()
    for row_index, (number, line) in enumerate(asked):
        row = state.completions[row_index, 0]
        found = row["error_code"] or row["state"]
        codes[found] += 1
        assert line.verdict in (found, "any"), (number, line, row)
        if row["state"] != "ok":
            assert row["error_message"].startswith(f"{path}, line {number}: "), row
    assert outcome.message.split(";")[0] == f"{codes['ok']} ok, {len(asked) - codes['ok']} failed"
    assert state.job is not None
    assert state.job["num_ok"] == codes["ok"] > 0.5 * NUM_LINES

    output = output_path_of(config).read_bytes().split(b"\n")
    assert output.pop() == b""
    assert len(output) == len(asked)
    assert sum(json.loads(text)["error"] is None for text in output) == codes["ok"]
    print(dict(codes))
