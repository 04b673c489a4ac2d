"""What the scheduler costs a step: 256 running requests, 1,000 and 10,000 waiting.

`python tests/bench/scheduler_cost.py` prints the median milliseconds of schedule + update, and
the ratio between the two. No device and no model take part.
"""

import statistics
import time

from engine.cache_manager import CacheManager
from engine.config import CacheConfig, SchedulerConfig
from engine.messages import StepDone, WorkerTimings
from engine.request import InferRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

NUM_RUNNING = 256
NUM_STEPS = 300
PROMPT_TOKENS, MAX_TOKENS = 100, 400


def make_request(uid: int) -> InferRequest:
    return InferRequest(
        uid=uid,
        request_id=str(uid),
        prompt_token_ids=[uid % 50 + 3] * PROMPT_TOKENS,
        params=SamplingParams(max_tokens=MAX_TOKENS),
        stop_token_ids=frozenset({2}),
        max_total_tokens=PROMPT_TOKENS + MAX_TOKENS,
        seed=0,
        sampling_key=uid,
    )


def median_step_ms(num_waiting: int) -> float:
    config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=32768)
    scheduler = Scheduler(config, CacheManager(CacheConfig(), NUM_RUNNING * 40, block_size=16))
    for uid in range(NUM_RUNNING + num_waiting):
        scheduler.add(make_request(uid))
    seconds = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        step = scheduler.schedule()
        spent = time.perf_counter() - started
        assert step is not None
        uids = [entry.request.uid for entry in step.entries if entry.is_sampling]
        done = StepDone(
            step_id=step.batch.step_id,
            uids=uids,
            token_ids=[5] * len(uids),
            timings=WorkerTimings(),
        )
        started = time.perf_counter()
        scheduler.update(done)
        seconds.append(spent + time.perf_counter() - started)
    assert (scheduler.num_running, scheduler.num_waiting) == (NUM_RUNNING, num_waiting)
    return statistics.median(seconds) * 1000


if __name__ == "__main__":
    few, many = median_step_ms(1_000), median_step_ms(10_000)
    print(f"waiting  1000: {few:.3f} ms a step")
    print(f"waiting 10000: {many:.3f} ms a step   ratio {many / few:.2f}")
