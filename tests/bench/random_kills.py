"""Kills jobs at random moments, 200 times with the mock engine and 200 times with a model.

`python tests/bench/random_kills.py [KILLS [SEED]]` checks after each kill what must be true of the
ledger, and at each job's end that its outputs are those of a run that nobody disturbed, to the
byte. It prints how the moments spread over the phases of the jobs. What the test suite does with
25 kills each, in some minutes more.
"""

import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import tiny_model
from job_builders import write_rows
from torture.builders import MODEL_MODULES, NUM_ROWS, ROWS, WORKERS, make_mapping, with_model
from torture.random_kills import Kill, spread, torture
from torture.victims import Nursery

# Loading a model in a process of its own takes longest, so few of the kills have one.
_WORKER_SHARE = 0.2


def main(num_kills: int, seed: int) -> None:
    numbers = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows_path = write_rows(folder / "rows.jsonl", ROWS)
        make = partial(make_mapping, rows_path=rows_path)
        model = tiny_model.save_tiny_llama(folder / "model")
        num_worker_kills = round(_WORKER_SHARE * num_kills)
        with Nursery(*MODEL_MODULES) as nursery:
            for title, parts in (
                ("mock engine", [(WORKERS, num_kills)]),
                (
                    "tiny model",
                    [
                        (with_model(model, inline=True), num_kills - num_worker_kills),
                        (with_model(model, inline=False), num_worker_kills),
                    ],
                ),
            ):
                started = time.monotonic()
                kills: list[Kill] = []
                for number, (settings, count) in enumerate(parts):
                    kills += torture(
                        folder / f"{title}-{number}",
                        partial(make, **settings),
                        nursery,
                        numbers,
                        num_rows=NUM_ROWS,
                        num_kills=count,
                    )
                seconds = time.monotonic() - started
                print(
                    f"{title}: {len(kills)} kills, seed {seed}, {seconds:.0f} s\n{spread(kills)}\n"
                )


if __name__ == "__main__":
    main(*(int(word) for word in [*sys.argv[1:], *("200", "0")[len(sys.argv) - 1 :]]))
