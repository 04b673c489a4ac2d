"""Jobs are killed at random moments, again and again, until they are finished.

The seed is printed: `TOKENMILL_TORTURE_SEED=n` draws the same moments again. What is hit at a
moment also depends on the machine, so a second run with a seed is alike and not the same.
"""

import os
import random
from functools import partial
from pathlib import Path

import pytest
import tiny_model

from torture.builders import MODEL_MODULES, WORKERS, make_mapping, with_model
from torture.random_kills import Kill, spread, torture
from torture.victims import Nursery

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
NUM_KILLS = 25
SEED = int(os.environ.get("TOKENMILL_TORTURE_SEED") or random.SystemRandom().randrange(10**6))


def show(kills: list[Kill], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{len(kills)} kills, seed {SEED}\n{spread(kills)}")


def test_a_mock_job_that_is_killed_again_and_again_loses_and_repeats_nothing(
    tmp_path: Path, rows_path: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"seed {SEED}")  # for the report of a failure
    numbers = random.Random(SEED)
    make = partial(make_mapping, rows_path=rows_path, **WORKERS)
    kills = torture(tmp_path, make, nursery, numbers, num_kills=NUM_KILLS)
    show(kills, capsys)


def test_a_job_with_a_model_that_is_killed_again_and_again_loses_and_repeats_nothing(
    tmp_path: Path, rows_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"seed {SEED}")
    numbers = random.Random(SEED)
    model = tiny_model.save_tiny_llama(tmp_path / "model")
    inline = partial(make_mapping, rows_path=rows_path, **with_model(model, inline=True))
    workers = partial(make_mapping, rows_path=rows_path, **with_model(model, inline=False))
    with Nursery(*MODEL_MODULES) as nursery:
        kills = torture(tmp_path / "inline", inline, nursery, numbers, num_kills=NUM_KILLS - 4)
        kills += torture(
            tmp_path / "workers", workers, nursery, numbers, num_kills=4, victims=["worker"]
        )
    show(kills, capsys)
