"""Jobs for the tests of this folder: a few rows of every kind, on the mock device."""

from pathlib import Path
from typing import Any, Protocol

from job_builders import Row, job_mapping, questions

from torture.victims import JobUnderTest

ROWS: list[Row | str] = [
    *questions(12),
    "{ broken",
    *({"id": f"t{index}", "turns": ["one", f"two {index}"]} for index in range(4)),
    *({"id": f"n{index}", "prompt": f"{index}", "sampling": {"n": 3}} for index in range(4)),
    {"id": "bad", "prompt": "x", "sampling": {"temperature": -1}},
    *({"id": f"l{index}", "prompt": f"{index}", "sampling": {"logprobs": 2}} for index in range(3)),
    # The same row but for its id: asked once in each shard.
    *(
        {"id": f"g{index}", "prompt": "greedy", "sampling": {"temperature": 0}}
        for index in range(6)
    ),
    '{"no prompt": 1}',
    *({"id": f"h{index}", "prompt": f"{index}"} for index in range(6)),
]
NUM_ROWS = len(ROWS)
NUM_SAMPLES = NUM_ROWS + 4 * 2
# One engine in the job's own process, which takes a second or so.
INLINE: dict[str, Any] = {
    "engine__scheduler": {"max_num_seqs": 4},
    "engine__runtime": {"inline": True, "mock_step_seconds": 0.001},
    "sampling": {"max_tokens": 24, "temperature": 1.0},
    "commit_rows": 3,
    "commit_seconds": 0.02,
    "partial_seconds": 0.01,
}
# Some seconds of work, so that something can happen meanwhile.
SLOW = {"engine__runtime": {"inline": True, "mock_step_seconds": 0.02}}
# A process for each engine, and two of them.
WORKERS: dict[str, Any] = INLINE | {
    "engine__device_ids": [0, 1],
    "engine__runtime": {"mock_step_seconds": 0.004},
    "shards": 3,
}

# What a process that runs a model imports, and what takes it longest.
MODEL_MODULES = ("torch", "transformers", "engine.worker.model_runner", "engine.backends.cpu")


def with_model(model_path: Path, *, inline: bool) -> dict[str, Any]:
    """Return the settings of a job with a real model, whose answers are the same to the bit."""
    return {
        "engine__model_path": str(model_path),
        "engine__device": "cpu",
        "engine__dtype": "float32",
        "engine__deterministic": True,
        "engine__cache": {"num_blocks": 128},
        "engine__runtime": {"inline": inline, "num_threads": 1},
        "sampling": {"max_tokens": 12, "temperature": 1.0},
    }


def make_mapping(folder: Path, rows_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a job's configuration with all that is its own in the folder."""
    return job_mapping(folder, **(INLINE | {"sources": [{"path": str(rows_path)}]} | changes))


class MakeJob(Protocol):
    """Makes a job in a folder of that name; all jobs read the same rows."""

    def __call__(
        self, name: str, ledger_url: str | None = None, **changes: Any
    ) -> JobUnderTest: ...
