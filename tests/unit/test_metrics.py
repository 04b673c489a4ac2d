"""Where time and tokens went, with a clock that the test turns."""

import pytest

from engine.metrics import Bucket, BucketClock, RunStats, StatsCollector, StepStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def schedule(collector: StatsCollector, step_id: int = 0, **counts: int) -> None:
    defaults = {
        "num_prefill_tokens": 0,
        "num_decode_tokens": 0,
        "num_repeated_tokens": 0,
        "num_preempted": 0,
        "num_waiting": 0,
        "num_running": 0,
        "num_free_blocks": 0,
    }
    collector.step_scheduled(step_id=step_id, schedule_seconds=0.0, **(defaults | counts))


def finish(
    collector: StatsCollector, num_sampled_tokens: int = 0, *, is_graph_replay: bool = False
) -> StepStats:
    return collector.step_done(
        num_sampled_tokens=num_sampled_tokens,
        worker_prepare_seconds=0.0,
        worker_forward_seconds=0.25,
        worker_sample_seconds=0.0,
        is_graph_replay=is_graph_replay,
    )


def test_every_second_is_charged_to_exactly_one_bucket() -> None:
    clock = Clock()
    buckets = BucketClock(clock)
    clock.advance(1)
    assert buckets.enter(Bucket.LOAD) is Bucket.IDLE
    clock.advance(2)
    buckets.enter(Bucket.SCHEDULE)
    clock.advance(4)
    buckets.enter(Bucket.LOAD)
    clock.advance(8)
    assert buckets.take() == {"idle": 1, "load": 10, "schedule": 4}


def test_hit_rate_of_graphs_counts_steps_without_a_prompt() -> None:
    collector = StatsCollector(Clock())
    for num_prefill_tokens, is_graph_replay in [
        (5, False),
        (1, True),
        (0, True),
        (0, True),
        (0, False),
    ]:
        schedule(collector, num_prefill_tokens=num_prefill_tokens)
        finish(collector, is_graph_replay=is_graph_replay)
    stats = collector.take({})
    assert (stats.num_steps, stats.num_decode_steps, stats.num_graph_steps) == (5, 3, 2)


def test_taking_starts_anew_in_the_same_bucket() -> None:
    clock = Clock()
    buckets = BucketClock(clock)
    buckets.enter(Bucket.COMMIT)
    clock.advance(1)
    buckets.take()
    clock.advance(2)
    assert buckets.take() == {"commit": 2}


def test_busy_seconds_are_those_with_a_step_in_flight_counted_once() -> None:
    clock = Clock()
    collector = StatsCollector(clock)
    schedule(collector, 0)
    clock.advance(1)
    schedule(collector, 1)  # two steps in flight
    clock.advance(1)
    assert finish(collector).execute_seconds == 2
    clock.advance(1)
    assert finish(collector).execute_seconds == 2
    clock.advance(50)  # nothing in flight
    schedule(collector, 2)
    clock.advance(1)
    finish(collector)
    assert collector.take({}).busy_seconds == 4


def test_a_run_is_the_sum_of_its_steps() -> None:
    collector = StatsCollector(Clock())
    schedule(
        collector, 0, num_prefill_tokens=7, num_repeated_tokens=5, num_running=2, num_preempted=1
    )
    first = finish(collector, 1)
    schedule(collector, 1, num_decode_tokens=2, num_running=1)
    finish(collector, 2)
    collector.num_prompt_tokens, collector.num_cached_tokens = 11, 4
    assert (first.step_id, first.num_sampled_tokens, first.num_prefill_tokens) == (0, 1, 7)
    assert collector.take({"idle": 3.0}) == RunStats(
        num_steps=2,
        num_decode_steps=1,
        num_prompt_tokens=11,
        num_cached_tokens=4,
        num_output_tokens=3,
        num_computed_tokens=9,
        num_repeated_tokens=5,
        num_preemptions=1,
        peak_running=2,
        worker_forward_seconds=0.5,
        bucket_seconds={"idle": 3.0},
    )
    assert collector.take({}) == RunStats()


def test_two_runs_add_up_but_a_peak_is_a_peak() -> None:
    one = RunStats(num_steps=1, peak_running=5, busy_seconds=1, bucket_seconds={"load": 1})
    two = RunStats(
        num_steps=2, peak_running=3, busy_seconds=2, bucket_seconds={"load": 2, "idle": 4}
    )
    both = one.plus(two)
    assert (both.num_steps, both.peak_running, both.busy_seconds) == (3, 5, 3)
    assert both.bucket_seconds == {"idle": 4, "load": 3}
    assert both.wall_seconds == pytest.approx(7)
    assert one.plus(two) == two.plus(one)
