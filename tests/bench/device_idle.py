"""How long the device waits for the main process: one step in flight against two.

`python tests/bench/device_idle.py MODEL_DIR ROWS.jsonl` answers 64 prompts of the demo with each
setting, in one run, and prints the share of the wall clock in which the worker computed nothing.
Tokenising runs ahead in both. The two texts are compared too.
"""

import json
import sys
import time

from engine import EngineConfig, OfflineInference, SamplingParams

NUM_PROMPTS = 64
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def measure(model_path: str, prompts: list[list[dict[str, str]]], steps: int) -> list[str]:
    config = EngineConfig.model_validate(
        {
            "model_path": model_path,
            "cache": {"kv_cache_gib": 1.0},
            "scheduler": {"num_steps_in_flight": steps},
        }
    )
    with OfflineInference(config) as llm:
        llm.generate(prompts[:1], PARAMS)
        llm.take_stats()
        started = time.perf_counter()
        answers = llm.generate(prompts, PARAMS)
        seconds = time.perf_counter() - started
        stats = llm.take_stats()
    idle = 1 - stats.worker_forward_seconds / seconds
    print(
        f"steps in flight {steps}: {seconds:6.1f} s, worker computed "
        f"{stats.worker_forward_seconds:6.1f} s, idle or sampling {idle:5.1%}, "
        f"no step in flight {1 - stats.busy_seconds / seconds:5.1%}"
    )
    return [answer.text for answer in answers]


if __name__ == "__main__":
    model_dir, rows_path = sys.argv[1:3]
    with open(rows_path, encoding="utf-8") as rows:
        chats = [[{"role": "user", "content": json.loads(row)["prompt"]}] for row in rows]
    texts = [measure(model_dir, chats[:NUM_PROMPTS], steps) for steps in (1, 2)]
    different = sum(one != two for one, two in zip(*texts, strict=True))
    print(f"texts that differ: {different} of {NUM_PROMPTS}")
