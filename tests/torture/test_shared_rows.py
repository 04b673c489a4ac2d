"""Three engines share the rows of one shard while they, or their job, are killed at random."""

import os
import random
from functools import partial
from pathlib import Path

import pytest

from torture.builders import WORKERS, make_mapping
from torture.random_kills import spread, torture
from torture.victims import Nursery

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
NUM_KILLS = 12
SEED = int(os.environ.get("TOKENMILL_TORTURE_SEED") or random.SystemRandom().randrange(10**6))
SHARED = WORKERS | {
    "engine__device_ids": [0, 1, 2],
    "engine__runtime": {"mock_step_seconds": 0.02},
    "shards": 1,
}


def test_a_shard_that_engines_share_loses_and_repeats_nothing(
    tmp_path: Path, rows_path: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"seed {SEED}")  # for the report of a failure
    make = partial(make_mapping, rows_path=rows_path, **SHARED)
    kills = torture(tmp_path, make, nursery, random.Random(SEED), num_kills=NUM_KILLS)
    with capsys.disabled():
        print(f"\n{len(kills)} kills, seed {SEED}\n{spread(kills)}")
