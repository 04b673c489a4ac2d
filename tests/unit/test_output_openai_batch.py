"""OpenAI's batch format: the shape of answers and errors, and which file they are in."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from export_builders import ExportedJob

from engine import TokenLogprob
from flows.config import OutputConfig
from flows.logprob_blob import StoredLogprobs
from flows.schema import RowState

MakeJob = Callable[..., ExportedJob]
ERRORS = "output_errors.jsonl"
A, B, HALF = ord("a") + 3, ord("b") + 3, 0xE4 + 3  # ids of the mock's tokens


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "gpt-x", "prompt": "Hi"} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def make_batch(make_exported_job: MakeJob) -> Callable[..., ExportedJob]:
    def make(*rows: Any) -> ExportedJob:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        content = "".join(f"{line}\n" for line in lines)
        return make_exported_job(content, source_format="openai_batch")

    return make


def test_a_chat_answer_has_the_shape_that_openai_documents(make_batch: MakeJob) -> None:
    job = make_batch(chat("a"))
    job.answer(0, "a", "Hello", num_prompt_tokens=7)
    job.export()
    (line,) = job.lines()
    response = line["response"]
    assert line == {
        "id": line["id"],
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": response["request_id"],
            "body": {
                "id": response["body"]["id"],
                "object": "chat.completion",
                "created": 0,
                "model": "gpt-x",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
                "system_fingerprint": None,
            },
        },
        "error": None,
    }
    assert line["id"].startswith("batch_req_")
    assert response["body"]["id"].startswith("chatcmpl-")
    assert job.files() == ["output.jsonl", "output.jsonl.manifest.json"]


def test_a_text_completion_has_its_own_shape(make_batch: MakeJob) -> None:
    job = make_batch(completion("a"))
    job.answer(0, "a", " there", finish_reason="length")
    job.export()
    body = job.lines()[0]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": " there", "logprobs": None, "finish_reason": "length"}
    ]


def test_ids_are_of_the_row_alone_and_differ_from_each_other(make_batch: MakeJob) -> None:
    one, other = make_batch(chat("a"), chat("b")), make_batch(chat("b"))
    one.answer(0, "a", "x")
    one.answer(1, "b", "y")
    other.answer(0, "b", "z")
    one.export()
    other.export()
    (line_a, line_b), (again,) = one.lines(), other.lines()

    def ids(line: dict[str, Any]) -> list[str]:
        return [line["id"], line["response"]["request_id"], line["response"]["body"]["id"]]

    assert ids(line_b) == ids(again)
    digests = {name.rpartition("_")[2].rpartition("-")[2] for name in ids(line_a) + ids(line_b)}
    assert len(digests) == 6


def test_samples_are_choices_of_one_answer_and_the_prompt_counts_once(make_batch: MakeJob) -> None:
    job = make_batch(chat("a", n=2, temperature=1))
    for index, reason in enumerate(("stop", "length")):
        fields = {"finish_reason": reason, "num_prompt_tokens": 5, "num_samples": 2}
        job.answer(0, "a", f"text {index}", sample_index=index, **fields)
    summary = job.export()
    (line,) = job.lines()
    body = line["response"]["body"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "text 0", "stop"),
        (1, "text 1", "length"),
    ]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert (summary.num_ok, summary.num_samples, summary.num_length) == (1, 2, 1)


def test_a_row_with_one_failed_sample_is_an_error_line(make_batch: MakeJob) -> None:
    job = make_batch(chat("a", n=2, temperature=1))
    job.answer(0, "a", "fine", sample_index=0, num_samples=2)
    job.fail(0, "a", "engine_crash", "died", sample_index=1, num_samples=2)
    job.export()
    assert job.lines() == []
    assert [line["custom_id"] for line in job.lines(ERRORS)] == ["a"]


def test_logprobs_of_a_chat_are_numbers_bytes_and_alternatives(make_batch: MakeJob) -> None:
    job = make_batch(chat("a", logprobs=True, top_logprobs=2))
    first = TokenLogprob(A, -0.5, 1, ((A, -0.5), (B, -math.inf)))
    second = TokenLogprob(HALF, math.nan, 3, ())
    job.answer(0, "a", "x", logprobs=StoredLogprobs(output=(first, second)))
    job.export()
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    # OpenAI's clients want a number; -9999.0 is what its API documents for "very unlikely".
    b = {"token": "b", "logprob": -9999.0, "bytes": [98]}
    half = {"token": "\ufffd", "logprob": -9999.0, "bytes": None}
    assert job.lines()[0]["response"]["body"]["choices"][0]["logprobs"] == {
        "content": [a | {"top_logprobs": [a, b]}, half | {"top_logprobs": []}],
        "refusal": None,
    }


def test_logprobs_of_a_completion_are_parallel_lists(make_batch: MakeJob) -> None:
    job = make_batch(completion("a", logprobs=1))
    first = TokenLogprob(A, -2.0, 7, ((B, -0.25),))
    second = TokenLogprob(B, -0.25, 1, ((B, -0.25),))
    job.answer(0, "a", "ab", logprobs=StoredLogprobs(output=(first, second)))
    job.export()
    assert job.lines()[0]["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-2.0, -0.25],
        "top_logprobs": [{"b": -0.25, "a": -2.0}, {"b": -0.25}],
        "text_offset": [0, 1],
    }


def test_of_two_tokens_with_one_text_the_likelier_is_shown(make_batch: MakeJob) -> None:
    job = make_batch(completion("a", logprobs=2))
    entry = TokenLogprob(HALF + 1, -0.75, 2, ((HALF, -0.5), (HALF + 1, -0.75)))
    job.answer(0, "a", "x", logprobs=StoredLogprobs(output=(entry,)))
    job.export()
    logprobs = job.lines()[0]["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.5}]


def test_prompt_logprobs_have_the_form_of_vllm(make_batch: MakeJob) -> None:
    job = make_batch(completion("a", prompt_logprobs=1))
    entry = TokenLogprob(A, -3.0, 9, ((B, -0.125),))
    job.answer(0, "a", "x", logprobs=StoredLogprobs(prompt=(None, entry)))
    job.export()
    body = job.lines()[0]["response"]["body"]
    assert body["prompt_logprobs"] == [
        None,
        {
            str(A): {"logprob": -3.0, "rank": 9, "decoded_token": "a"},
            str(B): {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
        },
    ]
    assert body["choices"][0]["logprobs"] is None


def test_a_refused_request_is_an_error_line_with_an_http_answer(make_batch: MakeJob) -> None:
    job = make_batch(chat("a"), chat("b"))
    job.fail(0, "a", "prompt_too_long", "the prompt has 200 tokens, the limit is 100")
    job.fail(1, "b", "engine_crash", "the row ends the worker")
    summary = job.export()
    assert job.lines() == []
    refused, crashed = job.lines(ERRORS)
    assert refused == {
        "id": refused["id"],
        "custom_id": "a",
        "response": {
            "status_code": 400,
            "request_id": refused["response"]["request_id"],
            "body": {
                "error": {
                    "message": "the prompt has 200 tokens, the limit is 100",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "prompt_too_long",
                }
            },
        },
        "error": None,
    }
    assert crashed["response"]["status_code"] == 500
    assert crashed["response"]["body"]["error"]["type"] == "server_error"
    assert (summary.num_error, summary.errors_path) == (2, job.output_path.with_name(ERRORS))


def test_a_request_that_was_not_executed_has_an_error_and_no_answer(make_batch: MakeJob) -> None:
    job = make_batch(chat("a"), chat("b"))
    job.fail(0, "a", "timeout", "not answered in 5 seconds")
    job.answer(1, "b", None, state=RowState.SKIPPED, finish_reason=None)
    job.export()
    late, skipped = job.lines(ERRORS)
    assert late["response"] is None
    assert late["error"] == {"code": "timeout", "message": "not answered in 5 seconds"}
    assert skipped["response"] is None
    assert skipped["error"]["code"] == "skipped"


def test_bad_lines_are_error_lines_with_the_id_that_could_be_read(make_batch: MakeJob) -> None:
    job = make_batch(chat("a"), '{"custom_id":', chat("c") | {"url": "/v1/audio"}, "null")
    job.answer(0, "a", "fine")
    job.export()
    assert [line["custom_id"] for line in job.lines()] == ["a"]
    errors = job.lines(ERRORS)
    # A line without a readable id goes by source and line.
    assert [line["custom_id"] for line in errors] == ["rows:2", "c", "rows:4"]
    assert {line["response"]["status_code"] for line in errors} == {400}
    messages = [line["response"]["body"]["error"]["message"] for line in errors]
    assert [f"line {number}" in text for number, text in zip((2, 3, 4), messages, strict=True)] == [
        True
    ] * 3


def test_a_line_whose_model_is_left_out_names_the_model_of_the_job(make_batch: MakeJob) -> None:
    row = chat("a")
    del row["body"]["model"]
    job = make_batch(row)
    job.answer(0, "a", "x")
    job.export()
    assert job.lines()[0]["response"]["body"]["model"] == "none"


def test_rows_of_other_formats_can_be_answered_in_this_form(make_exported_job: MakeJob) -> None:
    job = make_exported_job(
        '{"id":"t","prompt":"Hi","text":"a column"}\n'
        '{"id":"m","messages":[{"role":"user","content":"Hi"}]}\n'
        '{"id":"d","turns":["Hi","And?"]}\n',
        output=OutputConfig(format="openai_batch"),
    )
    job.answer(0, "t", "1")
    job.answer(1, "m", "2", is_truncated=True)
    job.answer(2, "d", "4", turns=("3",))
    job.export()
    bodies = [line["response"]["body"] for line in job.lines()]
    assert [body["object"] for body in bodies] == ["text_completion", *["chat.completion"] * 2]
    assert [body.get("is_truncated") for body in bodies] == [None, True, None]
    assert bodies[2]["choices"][0]["message"]["content"] == "4"
    assert bodies[2]["choices"][0]["replies"] == ["3", "4"]
