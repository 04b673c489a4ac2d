"""Limits and samples: which rows of a source are taken, always the same, in their order."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_builders import read_source

from flows.sources.selection import sampled_positions


def write(folder: Path, num_rows: int) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n\n" for n in range(num_rows)))
    return path


def ids(path: Path, **source: Any) -> list[str]:
    return [row.row_id for row in read_source(path, **source)]


def test_a_sample_is_in_the_order_of_the_input_and_always_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, 100)
    everything = ids(path)
    sample = ids(path, sample_rows=10)
    assert len(sample) == len(set(sample)) == 10
    assert sample == [row_id for row_id in everything if row_id in set(sample)]
    assert sample == ids(path, sample_rows=10, sample_seed=0)
    assert sample != ids(path, sample_rows=10, sample_seed=1)


def test_the_sample_of_a_seed_never_changes() -> None:
    # A job that was planned with another Python or tokenmill must find its rows again.
    assert sorted(sampled_positions(1000, 5, 7)) == [53, 759, 789, 894, 923]


def test_a_larger_sample_holds_the_smaller_one() -> None:
    assert sampled_positions(500, 10, 3) < sampled_positions(500, 50, 3)


def test_a_sample_larger_than_the_source_is_the_source(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    assert ids(path, sample_rows=50) == ids(path)


def test_a_sample_is_taken_of_the_first_rows_when_there_is_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path, 100)
    sample = ids(path, limit=20, sample_rows=8)
    assert len(sample) == 8
    assert set(sample) < set(ids(path, limit=20))


def test_a_sample_goes_over_all_files_of_a_source(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"p{number}.csv").write_text("prompt\n" + "x\n" * 25)
    sample = ids(tmp_path / "p*.csv", sample_rows=40)
    assert len(sample) == 40
    assert {row_id.split(":")[0] for row_id in sample} == {"p0", "p1", "p2", "p3"}


@given(st.integers(0, 200), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_a_sample_has_its_size_and_stays_in_the_source(num_rows: int, size: int, seed: int) -> None:
    chosen = sampled_positions(num_rows, size, seed)
    assert len(chosen) == min(size, num_rows)
    assert chosen <= set(range(num_rows))


def test_every_row_is_taken_about_as_often() -> None:
    counts = [0] * 20
    for seed in range(2000):
        for position in sampled_positions(20, 5, seed):
            counts[position] += 1
    # 2000 draws of 5 in 20: 500 each, and six times the standard deviation of 19.4 around it.
    assert all(abs(count - 500) < 6 * 19.4 for count in counts)


@pytest.mark.parametrize("size", [10, 100])
def test_memory_grows_with_the_sample_alone(size: int) -> None:
    tracemalloc.start()
    try:
        sampled_positions(30_000, size, 1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
