"""Rows of several user turns: read, bounded at plan, answered in a chain, exported as one line."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, read_rows, run_job, stored_rows

from engine import EngineConfig, ExitCode, GenerateRequest, RequestErrorCode, SamplingParams
from flows.config import ColumnMapping, JobConfig, PromptConfig, SourceConfig
from flows.job_run import JobRun
from flows.planner import Plan, plan_job
from flows.preparation import output_path_of
from flows.records import PromptRecord, RecordReader
from flows.row_index import IndexRow
from flows.schema import RowState

GREEDY = {"max_tokens": 8, "temperature": 0.0}


def read_one(folder: Path, row: dict[str, Any], *, columns: Any = None, **prompt: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    source = SourceConfig(path=path, columns=ColumnMapping.model_validate(columns or {}))
    with RecordReader((source,), PromptConfig(**prompt)) as reader:
        (found,) = reader.read_all()
    return found


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


class TestReading:
    def test_the_first_turn_is_asked_and_the_others_follow(self, tmp_path: Path) -> None:
        record = read_one(tmp_path, {"id": "a", "turns": ["one", "two\ud800", "three"]})
        assert (record.prompt, record.messages) == (None, [user("one")])
        request = record.to_request(SamplingParams())
        assert (request.messages, request.turns) == ([user("one")], ("two\ufffd", "three"))

    def test_a_system_message_comes_before_the_first_turn(self, tmp_path: Path) -> None:
        row = {"turns": ["one", "two"], "role": "poet"}
        record = read_one(tmp_path, row, system="You are a {{ role }}.")
        assert record.messages == [{"role": "system", "content": "You are a poet."}, user("one")]
        assert record.to_request(SamplingParams()).turns == ("two",)

    def test_a_template_is_the_prompt_of_a_row_with_turns_too(self, tmp_path: Path) -> None:
        record = read_one(tmp_path, {"turns": ["one", "two"]}, template="{{ turns | join }}")
        assert (record.messages, record.turns) == ([user("onetwo")], ())

    @pytest.mark.parametrize(
        ("row", "wanted"),
        [
            ({"turns": []}, "turns is [], wanted a list of at least one user message"),
            ({"turns": "one"}, "turns is 'one', wanted a list"),
            ({"turns": ["one", 2]}, "turns[1] is a number 2, wanted the text of a user message"),
            ({"turns": [user("one")]}, "chat messages with roles belong in 'messages'"),
            ({"turns": ["one"], "prompt": "two"}, "several prompts: 'prompt', 'turns'"),
            ({"turns": ["one"], "messages": [user("two")]}, "several prompts"),
            ({"turns": ["one"], "prompt_token_ids": [1]}, "several prompts"),
        ],
    )
    def test_what_is_no_conversation_is_a_bad_row(
        self, tmp_path: Path, row: dict[str, Any], wanted: str
    ) -> None:
        bad = read_one(tmp_path, row)
        assert bad.error.code is RequestErrorCode.BAD_ROW
        assert "rows.jsonl, line 1: " in bad.error.message
        assert wanted in bad.error.message

    def test_chat_messages_in_a_column_called_turns_stay_chat_messages(
        self, tmp_path: Path
    ) -> None:
        record = read_one(tmp_path, {"turns": [user("one")]}, columns={"messages": "turns"})
        assert isinstance(record, PromptRecord)
        assert (record.messages, record.turns) == ([user("one")], ())

    def test_a_conversation_may_stand_in_another_column(self, tmp_path: Path) -> None:
        row = {"questions": ["one", "two"], "turns": 2, "prompt": None}
        record = read_one(tmp_path, row, columns={"turns": "questions"})
        assert record.turns == ("one", "two")


class LetterEncoder:
    """One token a letter of each message, and nothing around them."""

    def encode_request(self, request: GenerateRequest) -> list[int]:
        return [0] * sum(len(message["content"]) for message in request.messages or ())


def plan(folder: Path, *rows: dict[str, Any], max_model_len: int = 10, max_tokens: int = 1) -> Plan:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = JobConfig(
        name="test",
        sources=(SourceConfig(path=path),),
        engine=EngineConfig(model_path="none", device="mock"),
    )
    with RecordReader(config.sources, config.prompt) as reader:
        return plan_job(
            config,
            reader,
            LetterEncoder(),
            max_model_len=max_model_len,
            index_path=folder / "index.sqlite",
            default_sampling=SamplingParams(max_tokens=max_tokens),
        )


def indexed(plan: Plan) -> list[IndexRow]:
    with plan.open_index() as index:
        return list(index.rows_between(0, index.count))


class TestPlanning:
    def test_the_first_prompt_is_counted(self, tmp_path: Path) -> None:
        assert [
            row.num_prompt_tokens for row in indexed(plan(tmp_path, {"turns": ["ab", "c"]}))
        ] == [2]

    def test_the_last_turn_needs_room_after_the_shortest_replies(self, tmp_path: Path) -> None:
        # 3 + 3 + 1 letters, two replies of one token before the last prompt ends: 9, and its answer.
        fits, longer = indexed(
            plan(tmp_path, {"turns": ["abc", "def", "g"]}, {"turns": ["abc", "def", "gh"]})
        )
        assert fits.error_code is None
        assert longer.error_code == "prompt_too_long"
        message = str(longer.error_message)
        assert "line 2: the last of its 3 turns has a prompt of 10 tokens or more" in message
        assert "max_model_len 10" in message

    def test_long_replies_may_outgrow_the_model_and_the_plan_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        row = {"turns": ["abc", "d"]}
        with caplog.at_level(logging.WARNING, logger="flows"):
            assert plan(tmp_path, row, max_tokens=2).num_bad_rows == 0
            assert "outgrow" not in caplog.text
            assert plan(tmp_path, row, max_tokens=3).num_bad_rows == 0
        assert "1 conversation(s) outgrow max_model_len 10" in caplog.text

    def test_a_conversation_that_is_only_scored_is_refused(self, tmp_path: Path) -> None:
        scoring = {"max_tokens": 0, "prompt_logprobs": 0}
        (row,) = indexed(plan(tmp_path, {"turns": ["a", "b"], "sampling": scoring}))
        assert row.error_code == "invalid_sampling_params"
        assert "a conversation needs replies" in str(row.error_message)


def conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"c{index}", "turns": [f"question {index}", "why?", "who says so?"]}
        for index in range(count)
    ]


def output_of(config: JobConfig) -> list[dict[str, Any]]:
    return read_rows(output_path_of(config))


class TestRunning:
    def test_each_reply_feeds_the_next_turn(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, conversations(1), shards=1, sampling=GREEDY)
        run_job(config)
        (line,) = output_of(config)
        first, second, third = line["replies"]
        assert third == line["text"]
        # The same prompts asked one by one: greedy answers of the mock depend on the prompt alone.
        chat = [user("question 0")]
        chats = [list(chat)]
        for reply, question in ((first, "why?"), (second, "who says so?")):
            chat += [assistant(reply), user(question)]
            chats.append(list(chat))
        one_by_one = make_job(
            tmp_path, [{"messages": chat} for chat in chats], shards=1, sampling=GREEDY,
            job_id="job-2", job_dir=str(tmp_path / "2"),
        )  # fmt: skip
        run_job(one_by_one)
        alone = output_of(one_by_one)
        assert [each["text"] for each in alone] == [first, second, third]
        assert "replies" not in alone[0]
        assert line["num_prompt_tokens"] == alone[-1]["num_prompt_tokens"]
        assert line["num_output_tokens"] == sum(each["num_output_tokens"] for each in alone)

    def test_a_conversation_of_one_turn_has_one_reply(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, [{"turns": ["one"]}], shards=1)
        run_job(config)
        (line,) = output_of(config)
        assert line["replies"] == [line["text"]]
        assert list(line)[:4] == ["row_id", "turns", "text", "replies"]

    def test_a_job_that_was_stopped_in_the_middle_gives_the_same_output(
        self, tmp_path: Path
    ) -> None:
        undisturbed = make_job(tmp_path, conversations(9), shards=3)
        run_job(undisturbed)
        stopped = make_job(tmp_path, shards=3, job_id="job-2", job_dir=str(tmp_path / "2"))
        with JobRun.open(stopped) as run:
            summary = run.run_shard(1)
            run.stop.set()
            assert run.finish([summary], {}).exit_code is ExitCode.INTERRUPTED
        assert [row.row_id for row in stored_rows(stopped)] == ["c3", "c4", "c5"]
        assert all(len(row.turns) == 2 for row in stored_rows(stopped))
        outcome, _ = run_job(stopped)
        assert outcome.exit_code is ExitCode.OK
        assert output_path_of(stopped).read_bytes() == output_path_of(undisturbed).read_bytes()

    def test_a_turn_that_outgrows_the_model_fails_the_row_and_keeps_the_replies(
        self, tmp_path: Path
    ) -> None:
        row = {"turns": ["one", "two", "three"], "sampling": {"max_tokens": 30, "min_tokens": 30}}
        short = {"turns": ["one", "two"], "sampling": {"max_tokens": 1}}
        # The mock's template writes role and text; replies of 30 tokens leave no room for a third.
        config = make_job(tmp_path, [row, short], shards=1, engine__max_model_len=110)
        outcome, _ = run_job(config)
        assert outcome.exit_code is ExitCode.ROWS_FAILED
        failed, fine = output_of(config)
        assert failed["error"]["code"] == "prompt_too_long"
        assert failed["text"] is None
        kept = failed["replies"]
        assert 1 <= len(kept) < 3
        assert all(kept)
        assert failed["num_output_tokens"] == 30 * len(kept)
        assert (fine["error"], len(fine["replies"])) == (None, 2)
        assert [row.state for row in stored_rows(config)] == [RowState.ERROR, RowState.OK]
