"""Laws of the scheduler, under random requests, pools, limits and interruptions.

The worker of these tests checks each message it gets (see engine_builders.py).
"""

from dataclasses import dataclass

from engine_builders import EOS, VOCAB_SIZE, Rig, answer_of, infer_request, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.errors import RequestError, RequestErrorCode
from engine.request import FinishReason, InferRequest, PartialOutput, RequestState


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """Something that befalls a request from outside, once it has this many tokens."""

    uid: int
    num_tokens: int
    is_failure: bool


@st.composite
def scheduler_configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 6))
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
        kv_reservation=draw(st.sampled_from(["full", "grow"])),
        num_steps_in_flight=draw(st.sampled_from([1, 2])),
    )


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    return Rig(
        draw(scheduler_configs()),
        num_blocks=draw(st.integers(1, 12)),
        block_size=draw(st.sampled_from([1, 2, 3, 8])),
        enable_prefix_caching=draw(st.booleans()),
    )


# A small vocabulary, and prompts that begin alike, so that prefixes are shared.
prompts = st.builds(
    lambda repeats, tail: [1, 2, 3, 4] * repeats + tail,
    st.integers(0, 4),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
)


@st.composite
def request_lists(draw: st.DrawFn) -> list[InferRequest]:
    # Some have their prompts scored; of these, some generate nothing.
    are_scored = draw(st.lists(st.booleans(), min_size=1, max_size=8))
    requests = [
        infer_request(
            uid,
            draw(prompts),
            draw(st.integers(0 if is_scored else 1, 12)),
            stop_token_ids=draw(st.sampled_from([frozenset(), frozenset({EOS})])),
            priority=draw(st.integers(0, 2)),
            prompt_logprobs=0 if is_scored else None,
        )
        for uid, is_scored in enumerate(are_scored)
    ]
    for request in requests:
        # Some go on from what an earlier run has left, up to all but the last token.
        answer = answer_of(request)
        count = draw(st.integers(0, max(len(answer) - 1, 0)))
        begun = PartialOutput(request_id=request.request_id, token_ids=tuple(answer[:count]))
        request.go_on_from(begun)
    return requests


interruptions = st.lists(
    st.builds(
        Interruption,
        uid=st.integers(0, 7),
        num_tokens=st.integers(0, 6),
        is_failure=st.booleans(),
    ),
    max_size=4,
)


def _fits(rig: Rig, request: InferRequest) -> bool:
    return rig.cache.can_ever_fit(request.max_written_tokens)


@settings(deadline=None, max_examples=120)
@given(rig=rigs(), requests=request_lists())
def test_every_request_ends_with_the_tokens_of_a_machine_without_limits(
    rig: Rig, requests: list[InferRequest]
) -> None:
    rig.add(*requests)
    rig.run()
    for request in requests:
        if not _fits(rig, request):
            assert request.error is not None
            assert request.error.code is RequestErrorCode.KV_CAPACITY
            continue
        assert request.state is RequestState.DONE
        assert request.output_token_ids == answer_of(request)
        if request.params.prompt_logprobs is not None:
            assert request.prompt_logprobs == scores_of(request)
        is_stopped = bool(request.stop_token_ids.intersection(request.output_token_ids[-1:]))
        assert request.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        if rig.config.kv_reservation == "full":
            assert request.num_preemptions == 0


@settings(deadline=None, max_examples=120)
@given(rig=rigs(), requests=request_lists(), blows=interruptions)
def test_requests_that_end_early_disturb_nobody(
    rig: Rig, requests: list[InferRequest], blows: list[Interruption]
) -> None:
    rig.add(*requests)
    pending = [blow for blow in blows if blow.uid < len(requests)]
    for _ in range(10_000):
        while rig.scheduler.can_schedule and rig.submit() is not None:
            pass
        pending = [blow for blow in pending if not _strike(rig, requests[blow.uid], blow)]
        if rig.scheduler.num_in_flight:
            rig.collect()
        if not rig.scheduler.has_unfinished:
            break
    assert not rig.scheduler.has_unfinished
    rig.check_all_is_free()
    struck = {blow.uid for blow in blows}
    for request in requests:
        assert request.state.is_terminal
        if request.uid not in struck and _fits(rig, request):
            assert request.output_token_ids == answer_of(request)
        # One that was struck stopped somewhere on the same way.
        assert request.output_token_ids == answer_of(request)[: len(request.output_token_ids)]


def _strike(rig: Rig, request: InferRequest, blow: Interruption) -> bool:
    """End the request if its time has come; a stop string can only end one that runs."""
    if request.state.is_terminal:
        return True
    if len(request.output_token_ids) < blow.num_tokens:
        return False
    if blow.is_failure:
        error = RequestError(RequestErrorCode.TIMEOUT, "out of time")
        rig.scheduler.fail(request, error, FinishReason.TIMEOUT)
    elif request.state is RequestState.RUNNING:
        rig.scheduler.finish(request, FinishReason.STOP)
    else:
        return False
    rig.check()
    return True


@settings(deadline=None, max_examples=60)
@given(rig=rigs(), batches=st.lists(request_lists(), min_size=2, max_size=3))
def test_a_second_and_third_run_find_the_engine_as_if_new(
    rig: Rig, batches: list[list[InferRequest]]
) -> None:
    uid = 0
    for batch in batches:
        for request in batch:
            request.uid = uid
            uid += 1
        rig.add(*batch)
        rig.run()
        for request in batch:
            if _fits(rig, request):
                assert request.output_token_ids == answer_of(request)


@settings(deadline=None, max_examples=60)
@given(config=scheduler_configs(), requests=request_lists())
def test_who_asks_first_among_equals_is_never_overtaken_at_admission(
    config: SchedulerConfig, requests: list[InferRequest]
) -> None:
    rig = Rig(config, num_blocks=200)
    rig.add(*requests)
    first_seen: list[int] = []
    while rig.scheduler.has_unfinished:
        while rig.scheduler.can_schedule and (batch := rig.submit()) is not None:
            first_seen += [new.uid for new in batch.new]
        rig.collect()
    assert first_seen == sorted(first_seen, key=lambda uid: (requests[uid].priority, uid))
