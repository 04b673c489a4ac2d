"""OpenAI batch files: a file made for the API or `vllm run-batch` is asked as it stands."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, run_job, stored_rows
from source_builders import complaint, good, make_reader, read_source

from engine import ConfigError, RequestErrorCode, SamplingParams
from flows.config import PromptConfig
from flows.records import BadRow, PromptRecord

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> dict[str, Any]:
    return {"model": "m", "messages": USER} | body


def line(body: Any, *, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body} | fields


def read_lines(folder: Path, *lines: Any) -> list[PromptRecord | BadRow]:
    path = folder / "batch.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return read_source(path, format="openai_batch")


def read_one(folder: Path, row: Any) -> Any:
    (found,) = read_lines(folder, row)
    return found


def params_of(record: PromptRecord) -> SamplingParams:
    return SamplingParams(logprobs=7).overlaid(record.sampling)


def test_a_chat_line_is_asked_with_its_messages(tmp_path: Path) -> None:
    record = good(read_one(tmp_path, line(chat(max_tokens=5, temperature=0))))
    assert (record.row_id, record.messages) == ("a", USER)
    assert record.sampling == {"max_tokens": 5, "temperature": 0}
    assert (record.columns["url"], record.columns["body"]["model"]) == (CHAT, "m")


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ("once", "once", None),
        (["once"], "once", None),
        ([1, 2], None, [1, 2]),
        ([[1, 2]], None, [1, 2]),
        ("a\ud800", "a\ufffd", None),
    ],
)
def test_a_completion_takes_a_string_or_token_ids(
    tmp_path: Path, prompt: Any, text: str | None, token_ids: list[int] | None
) -> None:
    record = good(read_one(tmp_path, line({"prompt": prompt}, url=COMPLETIONS)))
    assert (record.prompt, record.prompt_token_ids, record.messages) == (text, token_ids, None)


def test_a_completion_is_continued_as_it_stands_whatever_the_job_does_to_prompts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps(line({"prompt": "once"}, url=COMPLETIONS)))
    (row,) = read_source(path, format="openai_batch", prompt=PromptConfig(format="chat"))
    assert (good(row).prompt, good(row).messages) == ("once", None)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
        ({"n": 2, "seed": 4, "stop": "x"}, {"n": 2, "seed": 4, "stop": ("x",)}),
        ({"stop": ["x", "y"], "top_p": 0.5}, {"stop": ("x", "y"), "top_p": 0.5}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"frequency_penalty": -1.0}),
        ({"logit_bias": {"42": -100}}, {"logit_bias": {42: -100.0}}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"logprobs": None}, {"logprobs": 7}),
        ({"top_k": -1, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"top_k": 20, "repetition_penalty": 1.1}, {"top_k": 20, "repetition_penalty": 1.1}),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5]}, {"stop_token_ids": (5,)}),
        ({"temperature": None, "max_tokens": None}, {"temperature": 1.0, "max_tokens": 256}),
    ],
    ids=repr,
)
def test_the_body_says_how_it_is_sampled(
    tmp_path: Path, body: dict[str, Any], wanted: dict[str, Any]
) -> None:
    params = params_of(good(read_one(tmp_path, line(chat(**body)))))
    assert {name: getattr(params, name) for name in wanted} == wanted


def test_logprobs_of_a_completion_are_a_number(tmp_path: Path) -> None:
    record = good(read_one(tmp_path, line({"prompt": "a", "logprobs": 2}, url=COMPLETIONS)))
    assert params_of(record).logprobs == 2


def test_parts_of_text_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]
    record = good(read_one(tmp_path, line(chat(messages=[{"role": "user", "content": parts}]))))
    assert record.messages == [{"role": "user", "content": "a\nb\ufffd"}]


def test_what_asks_for_nothing_is_passed_over(tmp_path: Path) -> None:
    neutral = {
        *(("stream", False), ("user", "u-1"), ("service_tier", "auto"), ("store", False)),
        *(("tool_choice", "none"), ("priority", -2), ("echo", False)),
    }
    body = chat(**dict(neutral), tools=[], metadata={"a": "b"}, response_format={"type": "text"})
    record = good(read_one(tmp_path, line(body)))
    assert (record.sampling, record.priority) == ({}, -2)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"stream": True}, "body.stream is True, which is not possible here"),
        ({"tools": [{"type": "function"}]}, "body.tools is"),
        ({"response_format": {"type": "json_object"}}, "body.response_format is"),
        ({"echo": True}, "body.echo is True"),
        ({"best_of": 3}, "body.best_of is 3"),
        ({"best_of": True}, "body.best_of is True"),
        ({"stream": 0}, "body.stream is 0"),
        ({"suffix": "end"}, "body.suffix is 'end'"),
        ({"use_beam_search": True}, "body.use_beam_search"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "they belong in engine.chat"),
        ({"guided_json": {}}, "body.guided_json is no field that is known here; leave it out"),
        (
            {"max_token": 3},
            "body.max_token is no field that is known here; did you mean max_tokens",
        ),
        ({"temprature": 3}, "did you mean temperature?"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ; keep one of them"),
        ({"top_logprobs": 2}, "body.top_logprobs is 2 without logprobs: true"),
        ({"logprobs": 2}, "body.logprobs is 2, wanted true or false in a chat"),
        ({"prompt": "x"}, "body.prompt does not belong in a request to /v1/chat/completions"),
        ({"messages": None}, "body.messages is missing"),
        ({"messages": "hi"}, "body.messages is 'hi', wanted a list of at least one message"),
        (
            {"messages": [{"content": "x"}]},
            "body.messages[0] is {'content': 'x'}, wanted an object",
        ),
        ({"priority": "high"}, "body.priority is 'high', wanted a whole number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "body.messages[0].content[0] is 'image_url', wanted a part of the type 'text'",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content[0] is 'x', wanted a part"),
    ],
    ids=repr,
)
def test_what_cannot_be_honoured_is_a_bad_row_that_names_the_field(
    tmp_path: Path, body: dict[str, Any], wanted: str
) -> None:
    bad = read_one(tmp_path, line(chat(**body)))
    assert f"{tmp_path / 'batch.jsonl'}, line 1: " in complaint(bad)
    assert wanted in complaint(bad)
    assert "columns" not in complaint(bad)  # there are none to be named in a batch file
    assert (bad.row_id, bad.error.code) == ("a", RequestErrorCode.BAD_ROW)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, "body.prompt is missing, wanted one string or one list of token ids"),
        ({"prompt": ["a", "b"]}, "give each prompt a line of its own"),
        ({"prompt": [[1], [2]]}, "give each prompt a line of its own"),
        ({"prompt": [1, True]}, "wanted a list of whole numbers"),
        ({"prompt": []}, "body.prompt is []"),
        ({"prompt": 5}, "body.prompt is 5"),
        ({"prompt": "a", "messages": USER}, "body.messages does not belong"),
        ({"prompt": "a", "logprobs": True}, "body.logprobs is True, wanted a number"),
        ({"prompt": "a", "top_logprobs": 1}, "write its number as logprobs"),
    ],
    ids=repr,
)
def test_a_completion_that_cannot_be_asked_is_a_bad_row(
    tmp_path: Path, body: dict[str, Any], wanted: str
) -> None:
    assert wanted in complaint(read_one(tmp_path, line(body, url=COMPLETIONS)))


@pytest.mark.parametrize(
    ("fields", "wanted", "row_id"),
    [
        ({"custom_id": None}, "custom_id is missing", "batch:1"),
        ({"custom_id": 1.5}, "custom_id is a number 1.5", "batch:1"),
        ({"custom_id": ""}, "custom_id is an empty string", "batch:1"),
        ({"method": "GET"}, "method is 'GET', wanted 'POST'", "a"),
        ({"url": "/v1/embeddings"}, "url is '/v1/embeddings'; wanted /v1/chat/completions or", "a"),
        ({"url": None}, "url is None", "a"),
        ({"url": ["x"]}, "url is ['x']", "a"),
        ({"body": None}, "body is missing, wanted an object", "a"),
        ({"body": [1]}, "body is an array, wanted an object", "a"),
    ],
    ids=repr,
)
def test_a_line_that_is_no_request_is_a_bad_row(
    tmp_path: Path, fields: dict[str, Any], wanted: str, row_id: str
) -> None:
    bad = read_one(tmp_path, line(chat()) | fields)
    assert wanted in complaint(bad)
    assert "columns" not in complaint(bad)
    assert bad.row_id == row_id


@pytest.mark.parametrize("content", [b"null", b"[1]", b"{", b"\xff", b'"x"'])
def test_a_line_that_is_no_object_is_a_bad_row(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_bytes(content + b"\n" + json.dumps(line(chat())).encode())
    bad, fine = read_source(path, format="openai_batch")
    assert "line 1: " in complaint(bad)
    assert good(fine).row_id == "a"


def test_a_batch_line_in_a_plain_source_says_which_format_it_is(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps(line(chat())))
    (bad,) = read_source(path)
    assert "write format: openai_batch in the source" in complaint(bad)


def test_templates_that_no_row_would_see_are_refused(tmp_path: Path) -> None:
    (tmp_path / "batch.jsonl").write_text(json.dumps(line(chat())))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    batch = {"path": tmp_path / "batch.jsonl", "format": "openai_batch"}
    for prompt in (PromptConfig(template="{{ text }}"), PromptConfig(system="Be brief.")):
        with pytest.raises(ConfigError, match="whole requests; leave them out"):
            make_reader(batch, prompt=prompt)
        make_reader(batch, {"path": tmp_path / "rows.jsonl"}, prompt=prompt)


def batch_job(folder: Path, rows: list[Any], **changes: Any) -> Any:
    source = {"path": str(folder / "rows.jsonl"), "format": "openai_batch"}
    return make_job(folder, rows, sources=[source], **changes)


def test_a_job_answers_good_lines_and_keeps_bad_ones_as_errors(tmp_path: Path) -> None:
    config = batch_job(
        tmp_path,
        [
            line(chat(max_tokens=3), custom_id="one"),
            line(chat(stream=True), custom_id="two"),
            "no json",
            line({"prompt": "once", "max_tokens": 2}, url=COMPLETIONS, custom_id="four"),
        ],
    )
    run_job(config)
    rows = stored_rows(config)
    assert [row.row_id for row in rows] == ["one", "two", "rows:3", "four"]
    assert [row.error_code for row in rows] == [None, "bad_row", "bad_json", None]
    assert rows[0].num_output_tokens <= 3
    assert rows[3].num_output_tokens <= 2


def test_two_lines_with_one_custom_id_stop_the_job_naming_both(tmp_path: Path) -> None:
    config = batch_job(tmp_path, [line(chat()), line(chat(n=2))])
    with pytest.raises(ConfigError, match=r"id 'a': .*rows\.jsonl, line 1 and .*line 2"):
        run_job(config)


def test_another_model_in_the_body_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [line(chat(model=name), custom_id=name) for name in ("gpt-4o", "mock", "gpt-5")]
    with caplog.at_level(logging.WARNING, "flows.planner"):
        run_job(batch_job(tmp_path, rows))
    told = [record.getMessage() for record in caplog.records if "another model" in record.message]
    assert len(told) == 1
    assert told[0].startswith("2 row(s) of batch files name another model")
    assert "line 1: 'gpt-4o'); all are answered by mock" in told[0]
