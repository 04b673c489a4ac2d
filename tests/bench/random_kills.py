"""Kills jobs at random moments, 200 times with the mock engine and 200 times with a model.

`python tests/bench/random_kills.py [KILLS [SEED]]` checks after each kill what must be true of the
ledger, and at each job's end that its outputs are those of a run that nobody disturbed, to the
byte. It prints how the moments spread over the phases of the jobs. What the test suite does with
25 kills each, in some minutes more.
"""

# ruff: noqa: E402 - the path to the tests' own modules comes first

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import tiny_model
from job_builders import write_rows
from torture.builders import MODEL_MODULES, ROWS, WORKERS, make_mapping, with_model
from torture.random_kills import VICTIMS, Kill, spread, torture
from torture.victims import Nursery


def main(num_kills: int, seed: int) -> None:
    numbers = random.Random(seed)
    num_worker_kills = num_kills // 5  # starting a worker that loads a model takes longest
    with tempfile.TemporaryDirectory() as name, Nursery(*MODEL_MODULES) as nursery:
        folder = Path(name)
        rows_path = write_rows(folder / "rows.jsonl", ROWS)
        model = tiny_model.save_tiny_llama(folder / "model")

        def kill(settings: dict[str, Any], count: int, victims: Sequence[str]) -> list[Kill]:
            make = partial(make_mapping, rows_path=rows_path, **settings)
            place = Path(tempfile.mkdtemp(dir=folder))
            return torture(place, make, nursery, numbers, num_kills=count, victims=victims)

        started = time.monotonic()
        kills = kill(WORKERS, num_kills, VICTIMS)
        show("mock engine", kills, seed, started)
        started = time.monotonic()
        kills = kill(with_model(model, inline=True), num_kills - num_worker_kills, VICTIMS)
        kills += kill(with_model(model, inline=False), num_worker_kills, VICTIMS[1:])
        show("tiny model", kills, seed, started)


def show(title: str, kills: list[Kill], seed: int, started: float) -> None:
    seconds = time.monotonic() - started
    print(
        f"{title}: {len(kills)} kills, seed {seed}, {seconds:.0f} s\n{spread(kills)}\n", flush=True
    )


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *(200, 0)[len(given) :])
