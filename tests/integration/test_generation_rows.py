"""How a row ends: stop strings, EOS, lengths, faults; and that it ends nobody else."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_model import MAX_POSITIONS, open_engine

from engine import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    OfflineInference,
    RequestErrorCode,
    SamplingParams,
)

pytestmark = pytest.mark.integration

PROMPT = [0, *range(50, 80)]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[OfflineInference]:
    with open_engine(tiny_llama) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(engine: OfflineInference) -> tuple[int, ...]:
    """Return twenty tokens that the model generates after PROMPT."""
    [completion] = engine.generate([PROMPT], GREEDY)
    assert completion.finish_reason is FinishReason.LENGTH
    return completion.token_ids


def greedy(**sampling: Any) -> SamplingParams:
    return SamplingParams(**(GREEDY.given() | sampling))


@pytest.fixture(scope="module")
def with_eos(
    tiny_llama: Path, answer: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OfflineInference]:
    """The same model, whose generation_config says that the answer's fifth token is an EOS."""
    folder = tmp_path_factory.mktemp("eos") / "model"
    shutil.copytree(tiny_llama, folder)
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    assert answer[4] not in answer[:4]
    path.write_text(json.dumps(generation | {"eos_token_id": [1, answer[4]]}))
    with open_engine(folder) as llm:
        yield llm


# Stops.


def test_a_stop_string_cuts_the_text_and_ends_the_row_at_once(
    engine: OfflineInference, answer: tuple[int, ...]
) -> None:
    text = engine.tokenizer.decode(answer)
    stop = text[9:12]
    [completion] = engine.generate([PROMPT], greedy(stop=stop))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.text == text[: text.index(stop)]
    assert completion.token_ids == answer[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(answer)


def test_every_eos_of_the_model_ends_a_row(
    with_eos: OfflineInference, answer: tuple[int, ...]
) -> None:
    [completion] = with_eos.generate([PROMPT], GREEDY)
    assert completion.token_ids == answer[:5]
    assert completion.finish_reason is FinishReason.STOP


def test_ignore_eos_ignores_every_eos_of_the_model(
    with_eos: OfflineInference, answer: tuple[int, ...]
) -> None:
    [completion] = with_eos.generate([PROMPT], greedy(ignore_eos=True))
    assert completion.token_ids == answer


def test_a_stop_token_of_the_row_ends_it_even_when_eos_is_ignored(
    with_eos: OfflineInference, answer: tuple[int, ...]
) -> None:
    params = greedy(ignore_eos=True, stop_token_ids=(answer[7],))
    [completion] = with_eos.generate([PROMPT], params)
    assert completion.token_ids == answer[: answer.index(answer[7]) + 1]


def test_no_eos_before_min_tokens(with_eos: OfflineInference, answer: tuple[int, ...]) -> None:
    [completion] = with_eos.generate([PROMPT], greedy(min_tokens=8))
    assert len(completion.token_ids) >= 8
    assert completion.token_ids[:4] == answer[:4]
    assert not {1, answer[4]} & set(completion.token_ids[:8])


def test_max_tokens_is_a_length(engine: OfflineInference, answer: tuple[int, ...]) -> None:
    [completion] = engine.generate([PROMPT], greedy(max_tokens=3))
    assert completion.token_ids == answer[:3]
    assert completion.finish_reason is FinishReason.LENGTH


def test_an_answer_ends_where_the_model_has_no_more_positions(engine: OfflineInference) -> None:
    for room in (1, 2, 5):
        prompt = [7] * (MAX_POSITIONS - room)
        [completion] = engine.generate([prompt], greedy(ignore_eos=True))
        assert len(completion.token_ids) == room
        assert completion.finish_reason is FinishReason.LENGTH


def test_text_and_messages_are_encoded_and_the_text_is_that_of_the_tokens(
    engine: OfflineInference,
) -> None:
    message = {"role": "user", "content": "def add(left, right):"}
    text, chat = engine.generate(["def add(left, right):", [message]], GREEDY)
    for completion in (text, chat):
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
    assert chat.num_prompt_tokens > text.num_prompt_tokens


# Faults of a row.

FAULTS: dict[RequestErrorCode, dict[str, Any]] = {
    RequestErrorCode.PROMPT_TOO_LONG: {"prompt_token_ids": [5] * MAX_POSITIONS},
    RequestErrorCode.PROMPT_EMPTY: {"prompt_token_ids": []},
    RequestErrorCode.TOKEN_OUT_OF_VOCABULARY: {"prompt_token_ids": [5, 10**6]},
    RequestErrorCode.KV_CAPACITY: {
        "prompt_token_ids": [5] * 60,
        "sampling_params": SamplingParams(max_tokens=60),
    },
    RequestErrorCode.BAD_ROW: {},
    RequestErrorCode.BAD_TEMPLATE: {"messages": [["not a message"]]},
    RequestErrorCode.TIMEOUT: {
        "prompt_token_ids": [5],
        "timeout_seconds": 0.0,
        "sampling_params": GREEDY,
    },
}


def test_rows_that_cannot_be_answered_say_why_and_the_others_are_answered(
    tiny_llama: Path, answer: tuple[int, ...]
) -> None:
    good = {"prompt_token_ids": PROMPT, "sampling_params": GREEDY}
    rows = [row for fault in FAULTS.values() for row in (good, fault)] + [good]
    requests = [GenerateRequest(request_id=str(i), **row) for i, row in enumerate(rows)]
    with open_engine(tiny_llama, {"cache": {"block_size": 4, "num_blocks": 24}}) as llm:
        completions = llm.generate(requests)
    assert [completion.request_id for completion in completions] == [r.request_id for r in requests]
    assert all(completion.token_ids == answer for completion in completions[::2])
    for code, completion in zip(FAULTS, completions[1::2], strict=True):
        assert completion.error is not None
        assert completion.error.code is code
        assert completion.text == ""
        is_timeout = code is RequestErrorCode.TIMEOUT
        reason = FinishReason.TIMEOUT if is_timeout else FinishReason.ERROR
        assert completion.finish_reason is reason


def test_a_top_k_larger_than_the_vocabulary_is_no_fault(
    engine: OfflineInference, answer: tuple[int, ...]
) -> None:
    [completion] = engine.generate([PROMPT], greedy(top_k=10**6))
    assert completion.token_ids == answer


# The engine goes on.


def rows(count: int, **fields: Any) -> Iterator[GenerateRequest]:
    for i in range(count):
        yield GenerateRequest(
            request_id=f"row-{i}", prompt_token_ids=[5, i % 300], sampling_params=GREEDY, **fields
        )


def assert_is_as_new(engine: OfflineInference, answer: tuple[int, ...]) -> None:
    completions = engine.generate([PROMPT], GREEDY)
    assert [completion.token_ids for completion in completions] == [answer]


def test_a_source_that_raises_does_so_in_the_callers_hands_and_the_engine_stays_usable(
    engine: OfflineInference, answer: tuple[int, ...]
) -> None:
    def broken() -> Iterator[GenerateRequest]:
        yield from rows(3)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(engine.run(broken()))
    assert_is_as_new(engine, answer)


def test_a_caller_that_has_enough_may_go_and_the_engine_stays_usable(
    engine: OfflineInference, answer: tuple[int, ...]
) -> None:
    run = engine.run(rows(100))
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert_is_as_new(engine, answer)


def test_stop_ends_a_run_with_what_was_finished(
    engine: OfflineInference, answer: tuple[int, ...]
) -> None:
    stop = threading.Event()
    found = []
    for completion in engine.run(rows(1000), stop=stop):
        found.append(completion)
        stop.set()
    assert 0 < len(found) < 1000
    assert all(completion.error is None for completion in found)
    assert_is_as_new(engine, answer)


def test_an_endless_source_is_read_as_it_is_worked_off(engine: OfflineInference) -> None:
    taken = 0

    def endless() -> Iterator[GenerateRequest]:
        nonlocal taken
        while True:
            taken += 1
            prompt = [5, taken % 50] if taken % 2 else [10**6]
            yield GenerateRequest(
                request_id=str(taken), prompt_token_ids=prompt, sampling_params=GREEDY
            )

    run = engine.run(endless())
    for _ in range(200):
        next(run)
    run.close()  # type: ignore[attr-defined]
    assert taken < 10_000


def test_an_engine_must_be_open_and_opens_once(tiny_llama: Path, answer: tuple[int, ...]) -> None:
    llm = open_engine(tiny_llama)
    with pytest.raises(ConfigError, match="not open"):
        llm.generate([PROMPT])
    for _ in range(2):
        with llm:
            with pytest.raises(ConfigError, match="open already"):
                llm.start()
            assert_is_as_new(llm, answer)
    with pytest.raises(ConfigError, match="not open"):
        llm.generate([PROMPT])


def test_a_checkpoint_that_lacks_a_weight_is_refused_not_filled_with_noise(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of .*layers\.1\.mlp\.up_proj\.weight"):
        open_engine(folder).start()


def test_two_requests_with_one_id_are_refused(engine: OfflineInference) -> None:
    twice = [GenerateRequest(request_id="a", prompt="x")] * 2
    with pytest.raises(ConfigError, match="two requests have one request_id"):
        engine.generate(twice)
