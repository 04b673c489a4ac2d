"""Work done twice when KV blocks are short: least computed victim against newest first.

`python tests/bench/recompute_waste.py` runs 300 requests with 1600, 800 and 400 KV blocks through
the scheduler alone, and prints preemptions and tokens computed again under both rules, with and
without the headroom of a block for each running request that admission leaves. Prefix caching is
off, so that a preempted request is computed again from its start.
"""

import random
from collections.abc import Callable

from engine.cache_manager import CacheManager
from engine.config import CacheConfig, SchedulerConfig
from engine.messages import StepDone, WorkerTimings
from engine.request import InferRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler.running import RunningSet

NUM_REQUESTS = 300
NUM_SEQS = 64


def newest_first(running: RunningSet) -> InferRequest | None:
    quiet = [request for request in running if request.num_inflight_steps == 0]
    return max(quiet, key=lambda request: (request.priority, request.uid), default=None)


def make_requests() -> list[InferRequest]:
    numbers = random.Random(0)
    requests = []
    for uid in range(NUM_REQUESTS):
        num_prompt, num_output = numbers.randint(20, 400), numbers.randint(10, 200)
        requests.append(
            InferRequest(
                uid=uid,
                request_id=str(uid),
                prompt_token_ids=[3] * num_prompt,
                params=SamplingParams(max_tokens=num_output),
                stop_token_ids=frozenset(),
                max_total_tokens=num_prompt + num_output,
                seed=0,
                sampling_key=uid,
            )
        )
    return requests


class WithoutHeadroom(CacheManager):
    """Admits a request as soon as its own blocks are free."""

    def try_admit(
        self, request: InferRequest, num_tokens: int, *, num_spare_blocks: int = 0
    ) -> bool:
        return super().try_admit(request, num_tokens)


def run(
    num_blocks: int,
    rule: Callable[[RunningSet], InferRequest | None],
    kind: type[CacheManager] = CacheManager,
) -> tuple[int, int, int, int]:
    """Return preemptions, tokens computed again, tokens that had to be computed, and steps."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=2048),
        kind(CacheConfig(enable_prefix_caching=False), num_blocks),
    )
    original = RunningSet.choose_victim
    RunningSet.choose_victim = rule  # type: ignore[method-assign]
    try:
        requests = make_requests()
        for request in requests:
            scheduler.add(request)
        computed = num_steps = 0
        while scheduler.has_unfinished:
            step = scheduler.schedule()
            assert step is not None
            num_steps += 1
            computed += sum(entry.num_scheduled_tokens for entry in step.entries)
            uids = [entry.request.uid for entry in step.entries if entry.is_sampling]
            scheduler.update(
                StepDone(
                    step_id=step.batch.step_id,
                    uids=uids,
                    token_ids=[5] * len(uids),
                    timings=WorkerTimings(),
                )
            )
    finally:
        RunningSet.choose_victim = original  # type: ignore[method-assign]
    needed = sum(request.max_total_tokens - 1 for request in requests)
    preemptions = sum(request.num_preemptions for request in requests)
    return preemptions, computed - needed, needed, num_steps


if __name__ == "__main__":
    print("blocks  headroom  rule            preemptions  computed again  share  steps")
    for num_blocks in (1600, 800, 400):
        for kind, headroom in ((WithoutHeadroom, "no"), (CacheManager, "yes")):
            rules = (("least computed", RunningSet.choose_victim), ("newest first", newest_first))
            for name, rule in rules:
                preemptions, again, needed, num_steps = run(num_blocks, rule, kind)
                print(
                    f"{num_blocks:6d}  {headroom:8s}  {name:14s}  {preemptions:11d}  "
                    f"{again:14d}  {again / needed:5.1%}  {num_steps:5d}"
                )
