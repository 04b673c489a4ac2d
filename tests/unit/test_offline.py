"""The engine's front door on the mock device: streams, stop, threads, chains, lack of memory."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine import (
    Completion,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    OfflineInference,
    RequestErrorCode,
    SamplingParams,
    StreamedToken,
    WorkerError,
    WorkerFailure,
    loop,
)
from engine.messages import ScheduleBatch, StepDone
from engine.worker.mock import MockRunner

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def mock_config(**sections: Any) -> EngineConfig:
    runtime = {"inline": True, **sections.pop("runtime", {})}
    values = {"model_path": "mock", "device": "mock", "runtime": runtime, **sections}
    return EngineConfig.model_validate(values)


def prompts(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


def texts(completions: list[Completion]) -> list[str]:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [completion.text for completion in completions]


def request(request_id: str, **fields: Any) -> GenerateRequest:
    fields = {"prompt": request_id, "sampling_params": GREEDY, **fields}
    if "build_messages" in fields or "messages" in fields:
        fields["prompt"] = None
    return GenerateRequest(request_id=request_id, **fields)


def endless() -> Iterator[GenerateRequest]:
    number = 0
    while True:
        yield request(f"row {number}")
        number += 1


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with OfflineInference(mock_config()) as llm:
        return texts(llm.generate(prompts(300), GREEDY))


@pytest.mark.parametrize(
    "scheduler",
    [
        {"batching": "static", "max_batch_size": 10},
        {"batching": "dynamic", "max_wait_ms": 1},
        {"order": "longest_first"},
        {"order": "shortest_first", "max_waiting_requests": 7},
        {"order": "prefix", "max_num_seqs": 5},
        {"num_steps_in_flight": 2},
        {"max_num_batched_tokens": 64, "max_prefill_fraction": 0.1},
        {"long_request_tokens": 9, "max_long_requests": 2},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_the_policy(scheduler: dict[str, Any], expected: list[str]) -> None:
    with OfflineInference(mock_config(scheduler=scheduler)) as llm:
        assert texts(llm.generate(prompts(300), GREEDY)) == expected


@pytest.mark.parametrize("steps", [1, 2])
def test_step_without_memory_is_rolled_back_and_smaller_steps_go_on(
    steps: int, expected: list[str]
) -> None:
    config = mock_config(
        runtime={"mock_max_step_tokens": 100}, scheduler={"num_steps_in_flight": steps}
    )
    with OfflineInference(config) as llm:
        assert texts(llm.generate(prompts(300), GREEDY)) == expected
        assert llm.take_stats().num_failed_steps > 0


def test_stop_ends_an_endless_run_and_the_engine_stays_usable(expected: list[str]) -> None:
    stop = threading.Event()
    with OfflineInference(mock_config()) as llm:
        seen = []
        for completion in llm.run(endless(), stop=stop):
            seen.append(completion.request_id)
            if len(seen) == 50:
                stop.set()
        assert len(seen) == len(set(seen)) >= 50
        assert texts(llm.generate(prompts(300), GREEDY)) == expected


def test_closing_the_generator_early_leaves_nothing_behind(expected: list[str]) -> None:
    with OfflineInference(mock_config()) as llm:
        run = llm.run(endless())
        for _ in range(10):
            next(run)
        run.close()  # type: ignore[attr-defined]
        assert texts(llm.generate(prompts(300), GREEDY)) == expected


def test_error_of_the_callers_iterable_comes_out_and_the_engine_stays_usable(
    expected: list[str],
) -> None:
    def broken() -> Iterator[GenerateRequest]:
        yield request("good")
        raise LookupError("the caller's own trouble")

    with OfflineInference(mock_config()) as llm:
        with pytest.raises(LookupError, match="own trouble"):
            list(llm.run(broken()))
        assert texts(llm.generate(prompts(300), GREEDY)) == expected


def test_two_threads_get_their_own_completions(expected: list[str]) -> None:
    results: dict[int, list[str]] = {}
    with OfflineInference(mock_config()) as llm:

        def work(part: int) -> None:
            results[part] = texts(llm.generate(prompts(300)[part::2], GREEDY))

        threads = [threading.Thread(target=work, args=(part,)) for part in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {0: expected[0::2], 1: expected[1::2]}


def test_streaming_producer_is_answered_while_it_still_produces() -> None:
    answered = threading.Event()

    def producer() -> Iterator[GenerateRequest]:
        yield request("first")
        assert answered.wait(30), "the first request was not answered"
        yield request("second")

    config = mock_config(scheduler={"batching": "dynamic", "max_wait_ms": 5})
    with OfflineInference(config) as llm:
        seen = []
        for completion in llm.run(producer()):
            seen.append(completion.request_id)
            answered.set()
    assert seen == ["first", "second"]


def test_loop_that_sleeps_is_woken_by_each_request_and_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_IDLE_SECONDS", 60)
    answered = threading.Event()

    def slow_producer() -> Iterator[GenerateRequest]:
        for number in range(3):
            time.sleep(0.02)  # the loop falls asleep
            yield request(str(number))
            assert answered.wait(5), f"request {number} was not answered"
            answered.clear()

    with OfflineInference(mock_config()) as llm:
        for _ in llm.run(slow_producer()):
            answered.set()


def test_dependant_uses_the_text_it_waited_for() -> None:
    def ask(texts_by_id: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"repeat {texts_by_id['first']}"}]

    with OfflineInference(mock_config()) as llm:
        second, first = llm.generate(
            [request("second", depends_on=("first",), build_messages=ask), request("first")]
        )
        (alone,) = llm.generate([request("second", messages=ask({"first": first.text}))])
    assert second.text == alone.text


def test_dependants_of_a_failure_of_a_circle_and_of_nobody_get_an_error() -> None:
    with OfflineInference(mock_config()) as llm:
        done = llm.generate(
            [
                request("empty", prompt=""),
                request("of empty", depends_on=("empty",)),
                request("a", depends_on=("b",)),
                request("b", depends_on=("a",)),
                request("lost", depends_on=("nobody",)),
                request("good"),
            ]
        )
    errors = {c.request_id: c.error for c in done}
    assert errors["good"] is None
    for name in ("of empty", "a", "b", "lost"):
        error = errors[name]
        assert error is not None
        assert error.code is RequestErrorCode.DEPENDENCY_FAILED
    assert "'a' -> 'b' -> 'a'" in str(errors["a"])
    assert "'nobody'" in str(errors["lost"])


def test_build_messages_that_raises_fails_its_own_row() -> None:
    def broken(_texts: dict[str, str]) -> list[dict[str, str]]:
        raise LookupError("no such column")

    with OfflineInference(mock_config()) as llm:
        bad, good = llm.generate(
            [request("bad", depends_on=("good",), build_messages=broken), request("good")]
        )
    assert "no such column" in str(bad.error)
    assert good.error is None


def test_conversation_comes_out_as_one_completion_with_every_reply() -> None:
    first = [{"role": "user", "content": "one"}]
    with OfflineInference(mock_config()) as llm:
        (done,) = llm.generate([request("chat", messages=first, turns=("two", "three"))])
        asked = list(first)
        expected = []
        for question in ("two", "three", None):
            (step,) = llm.generate([request("chat", messages=list(asked))])
            expected.append(step.text)
            asked += [
                {"role": "assistant", "content": step.text},
                {"role": "user", "content": question},
            ]
    assert [*(reply.text for reply in done.replies), done.text] == expected
    assert done.num_output_tokens > len(done.token_ids)


def test_row_that_is_late_times_out_alone() -> None:
    with OfflineInference(mock_config(runtime={"mock_step_seconds": 0.002})) as llm:
        late, good = llm.generate([request("late", timeout_seconds=1e-6), request("good")])
    assert late.finish_reason is FinishReason.TIMEOUT
    assert good.error is None


def test_run_that_is_late_ends_every_row_that_is_left() -> None:
    with OfflineInference(mock_config(runtime={"mock_step_seconds": 0.01})) as llm:
        rows = (request(f"row {number}") for number in range(300))
        done = list(llm.run(rows, timeout_seconds=0.2))
    assert len({completion.request_id for completion in done}) == 300
    reasons = {completion.finish_reason for completion in done}
    assert FinishReason.TIMEOUT in reasons
    assert FinishReason.ERROR not in reasons


def test_every_sample_of_a_prompt_has_its_own_text_and_shares_the_prompts_blocks() -> None:
    params = SamplingParams(temperature=1, max_tokens=40, seed=7, n=3)
    prompt = "a prompt that is longer than one block of the cache"
    with OfflineInference(mock_config()) as llm:
        done = llm.generate([prompt, ""], params)
        again = llm.generate([prompt, ""], params)
    assert [(c.request_id, c.sample_index) for c in done] == [
        ("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1), ("1", 2),
    ]  # fmt: skip
    assert [completion.error is None for completion in done] == [True] * 3 + [False] * 3
    assert len({completion.text for completion in done[:3]}) == 3
    assert [c.num_cached_tokens > 0 for c in done[:3]] == [False, True, True]
    assert [c.text for c in done] == [c.text for c in again]


def test_callback_gets_every_token_in_order_and_the_whole_text() -> None:
    heard: dict[str, list[StreamedToken]] = {"a": [], "b": []}

    def listen(token: StreamedToken) -> None:
        heard[token.request_id].append(token)

    with OfflineInference(mock_config()) as llm:
        done = llm.generate([request(name, on_token=listen) for name in heard])
    for completion in done:
        tokens = heard[completion.request_id]
        assert tuple(t.token_id for t in tokens if t.token_id is not None) == completion.token_ids
        assert "".join(token.text for token in tokens) == completion.text


def test_callback_that_raises_is_logged_once_and_nothing_else_notices(
    expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(token: StreamedToken) -> None:
        calls.append(token)
        raise LookupError("the caller's own trouble")

    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt=prompt,
            sampling_params=GREEDY,
            on_token=broken if number == 3 else None,
        )
        for number, prompt in enumerate(prompts(20))
    ]
    with OfflineInference(mock_config()) as llm:
        assert texts(llm.generate(requests)) == expected[:20]
    assert len(calls) == 1
    (record,) = [record for record in caplog.records if record.name == "engine.listeners"]
    assert "request_id=3" in record.getMessage()


def test_mock_device_is_lost_after_so_many_steps_and_each_new_worker_begins_anew() -> None:
    llm = OfflineInference(mock_config(runtime={"mock_device_lost_after_steps": 60}))
    for _ in range(2):
        with llm:
            assert len(texts(llm.generate(["a"], GREEDY))) == 1
            with pytest.raises(WorkerError, match="the mock device is lost") as caught:
                llm.generate(prompts(200), GREEDY)
        assert caught.value.failure is WorkerFailure.DEVICE_LOST
        assert caught.value.request_ids


def test_text_that_kills_the_worker_is_refused_where_the_worker_is_this_process() -> None:
    with pytest.raises(
        ValueError, match="mock_crash_text kills the process .* set inline to false"
    ):
        mock_config(runtime={"mock_crash_text": "poison"})


def test_device_without_memory_for_one_token_names_the_rows_it_was_tried_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_runner: MockRunner, _batch: ScheduleBatch) -> StepDone:
        raise MemoryError

    monkeypatch.setattr(MockRunner, "launch", broken)
    with (
        OfflineInference(mock_config()) as llm,
        pytest.raises(WorkerError, match="no memory for a step of one token") as caught,
    ):
        llm.generate([request("a")])
    assert caught.value.failure is WorkerFailure.OUT_OF_MEMORY
    assert caught.value.request_ids == ("a",)


def test_step_that_fails_on_the_device_names_the_requests_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_runner: MockRunner, _batch: ScheduleBatch) -> StepDone:
        raise ValueError("a kernel's own trouble")

    monkeypatch.setattr(MockRunner, "launch", broken)
    with (
        OfflineInference(mock_config()) as llm,
        pytest.raises(WorkerError, match="a kernel's own trouble") as caught,
    ):
        llm.generate([request("a"), request("b")])
    assert caught.value.request_ids
    assert set(caught.value.request_ids) <= {"a", "b"}
    assert "steps_in_flight=" in str(caught.value)
