"""RowIndexer: prompts that do not fit are refused, left out or cut; what is the same has one hash."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import GenerateRequest, RequestError, RequestErrorCode, SamplingParams
from flows.config import PromptConfig, SourceConfig
from flows.records import RecordReader
from flows.row_index import IndexRow, RowIndex
from flows.row_indexer import RowIndexer

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
GENERATION_PROMPT = 3


class LetterEncoder:
    """One token a letter; chats end with a generation prompt that is never cut."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    def encode_request(self, request: GenerateRequest) -> list[int]:
        self.requests.append(request)
        if request.messages is None:
            token_ids = [ord(letter) for letter in request.prompt or ""]
        else:
            text = "".join(message["content"] for message in request.messages)
            token_ids = [ord(letter) for letter in text] + [0] * GENERATION_PROMPT
        limit = request.sampling_params.truncate_prompt_tokens
        if limit is not None and request.messages is not None and limit < GENERATION_PROMPT:
            raise RequestError(RequestErrorCode.INVALID_SAMPLING_PARAMS, "the end takes 3 tokens")
        return token_ids if limit is None else token_ids[-limit:]


def index_rows(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    sampling: SamplingParams = GREEDY,
    max_model_len: int = 20,
    too_long: Any = "error",
    deduplicate: bool = True,
    text_format: Any = "text",
) -> list[IndexRow]:
    """Return the rows as the published index holds them."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = PromptConfig(format=text_format)
    with RecordReader((SourceConfig(path=path),), prompt) as reader:
        indexer = RowIndexer(
            reader,
            LetterEncoder(),
            sampling,
            max_model_len=max_model_len,
            too_long=too_long,
            deduplicate=deduplicate,
        )
        indexed = [indexer.index(row) for row in reader.read_all()]
    with RowIndex.create(folder / "index") as builder:
        builder.insert(indexed)
        builder.publish()
    with RowIndex.open(folder / "index") as index:
        return list(index.rows_between(0, len(rows)))


def prompts(*lengths: int) -> list[dict[str, Any]]:
    return [{"prompt": "x" * length} for length in lengths]


class TestTooLong:
    def test_error_refuses_what_leaves_no_room_for_a_token(self, tmp_path: Path) -> None:
        rows = index_rows(tmp_path, prompts(19, 20, 21))
        assert [row.error_code for row in rows] == [None, "prompt_too_long", "prompt_too_long"]
        assert [row.is_skipped for row in rows] == [0, 0, 0]
        assert [row.num_prompt_tokens for row in rows] == [19, 20, 21]

    def test_skip_leaves_the_same_rows_out(self, tmp_path: Path) -> None:
        rows = index_rows(tmp_path, [*prompts(19, 20), {"nothing": 1}], too_long="skip")
        assert [row.is_skipped for row in rows] == [0, 1, 0]
        assert rows[1].error_code == "prompt_too_long"
        assert "rows.jsonl, line 2: the prompt has 20 tokens" in str(rows[1].error_message)
        assert rows[2].error_code == "bad_row"

    def test_truncate_cuts_the_same_rows_and_makes_room_for_the_answer(
        self, tmp_path: Path
    ) -> None:
        rows = index_rows(tmp_path, prompts(17, 19, 20, 500), too_long="truncate")
        assert [row.error_code for row in rows] == [None] * 4
        # 17 and 19 fit, if not with every token of the answer, and are asked as they are.
        assert [row.truncate_prompt_tokens for row in rows] == [None, None, 16, 16]
        assert [row.num_prompt_tokens for row in rows] == [17, 19, 16, 16]

    def test_truncate_follows_the_max_tokens_of_the_row(self, tmp_path: Path) -> None:
        rows = [{"prompt": "x" * 50, "sampling": {"max_tokens": n}} for n in (1, 10, 19, 20, 999)]
        found = index_rows(tmp_path, rows, too_long="truncate")
        assert [row.truncate_prompt_tokens for row in found] == [19, 10, 1, 1, 1]

    def test_a_row_that_is_only_scored_may_fill_the_model(self, tmp_path: Path) -> None:
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
        rows = index_rows(tmp_path, prompts(20, 21), sampling=scoring, too_long="truncate")
        assert [row.truncate_prompt_tokens for row in rows] == [None, 20]

    def test_a_row_that_cuts_itself_is_not_cut_again(self, tmp_path: Path) -> None:
        row = {"prompt": "x" * 50, "sampling": {"truncate_prompt_tokens": 18}}
        (found,) = index_rows(tmp_path, [row], too_long="truncate")
        assert (found.truncate_prompt_tokens, found.num_prompt_tokens) == (None, 18)

    def test_a_generation_prompt_that_would_be_cut_is_too_long(self, tmp_path: Path) -> None:
        sampling = SamplingParams(max_tokens=18)
        (row,) = index_rows(
            tmp_path, prompts(30), sampling=sampling, too_long="truncate", text_format="chat"
        )
        assert row.error_code == "prompt_too_long"
        assert "max_tokens leaves room for 2 token(s) of the prompt, and the end takes 3" in str(
            row.error_message
        )
        assert row.num_prompt_tokens == 33

    def test_a_conversation_is_cut_when_long_replies_could_outgrow_it(self, tmp_path: Path) -> None:
        short, long = {"turns": ["ab", "cd"]}, {"turns": ["ab", "cd" * 30]}
        for too_long, codes, limits in (
            ("error", [None, "prompt_too_long"], [None, None]),
            ("skip", [None, "prompt_too_long"], [None, None]),
            ("truncate", [None, None], [None, 26]),
        ):
            rows = index_rows(tmp_path, [short, long], max_model_len=30, too_long=too_long)
            assert [row.error_code for row in rows] == codes
            assert [row.truncate_prompt_tokens for row in rows] == limits
        # 8 tokens in the last turn, and two replies of up to 10 do not fit.
        sampling = SamplingParams(max_tokens=10)
        rows = index_rows(
            tmp_path, [short], max_model_len=27, too_long="truncate", sampling=sampling
        )
        assert rows[0].truncate_prompt_tokens == 17


class TestRequestHash:
    def hashes(self, folder: Path, *rows: dict[str, Any], **options: Any) -> list[bytes | None]:
        return [row.request_hash for row in index_rows(folder, list(rows), **options)]

    def test_it_has_sixteen_bytes_and_bad_rows_have_none(self, tmp_path: Path) -> None:
        good, bad = self.hashes(tmp_path, {"prompt": "a"}, {"nothing": 1})
        assert good is not None
        assert len(good) == 16
        assert bad is None

    def test_it_never_changes(self, tmp_path: Path) -> None:
        # A ledger keeps it for years, and a fork compares it with what is computed then. A new
        # sampling parameter may change it: then a fork asks every row anew.
        (found,) = self.hashes(tmp_path, {"prompt": "abc"})
        assert found is not None
        assert found.hex() == "c97a08dbfa63fa63382995c5289aded2"

    @pytest.mark.parametrize(
        "other",
        [
            {"prompt": "b"},
            {"prompt": "a", "sampling": {"max_tokens": 5}},
            {"prompt": "a", "sampling": {"stop": ["x"]}},
            {"prompt": "a", "sampling": {"logprobs": 1}},
            {"prompt": "a", "sampling": {"n": 2}},
            {"prompt": "a", "sampling": {"temperature": 0.5}},
            {"prompt": "a", "timeout_seconds": 5},
        ],
        ids=repr,
    )
    def test_what_may_change_the_answer_changes_the_hash(
        self, tmp_path: Path, other: dict[str, Any]
    ) -> None:
        first, second = self.hashes(tmp_path, {"prompt": "a"}, other)
        assert first != second

    @pytest.mark.parametrize(
        "other",
        [
            {"prompt": "a", "id": "mine", "extra": 1},
            {"prompt": "a", "priority": 5},
            {"prompt": "a", "sampling": {"max_tokens": 4}},
            {"prompt": "a", "sampling": {"seed": 9}},
            {"prompt": "a", "sampling": {"temperature": 0}},
            {"prompt_token_ids": None, "prompt": "a"},
        ],
        ids=repr,
    )
    def test_what_cannot_change_it_does_not(self, tmp_path: Path, other: dict[str, Any]) -> None:
        first, second = self.hashes(tmp_path, {"prompt": "a"}, other)
        assert first == second

    def test_the_seed_counts_where_numbers_are_drawn(self, tmp_path: Path) -> None:
        rows = [{"prompt": "a", "sampling": {"temperature": 1.0, "seed": seed}} for seed in (1, 2)]
        first, second = self.hashes(tmp_path, *rows)
        assert first != second

    def test_later_turns_count(self, tmp_path: Path) -> None:
        rows = [{"turns": ["a", "b"]}, {"turns": ["a", "c"]}, {"turns": ["a"]}]
        found = self.hashes(tmp_path, *rows, max_model_len=100)
        assert None not in found
        assert len(set(found)) == 3

    def test_prompts_that_were_cut_to_one_end_are_the_same(self, tmp_path: Path) -> None:
        rows = [{"prompt": start * 9 + "x" * 30} for start in "ab"]
        first, second = self.hashes(tmp_path, *rows, too_long="truncate")
        assert first == second is not None


class TestFolding:
    def leaders(self, folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[int | None]:
        return [row.duplicate_of for row in index_rows(folder, rows, **options)]

    def test_greedy_rows_that_are_the_same_follow_the_first(self, tmp_path: Path) -> None:
        rows = [{"prompt": letter} for letter in "abacaba"]
        assert self.leaders(tmp_path, rows) == [None, None, 0, None, 0, 1, 0]

    def test_rows_that_are_only_scored_are_folded_at_any_temperature(self, tmp_path: Path) -> None:
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=1.0)
        assert self.leaders(tmp_path, prompts(5, 5), sampling=scoring) == [None, 0]

    @pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0, "n": 2}])
    def test_what_samples_is_never_folded(self, tmp_path: Path, sampling: dict[str, Any]) -> None:
        rows = [{"prompt": "a", "sampling": sampling | {"seed": 1}}] * 2
        assert self.leaders(tmp_path, rows) == [None, None]

    def test_the_switch_turns_it_off_and_keeps_the_hash(self, tmp_path: Path) -> None:
        rows = index_rows(tmp_path, prompts(5, 5), deduplicate=False)
        assert [row.duplicate_of for row in rows] == [None, None]
        assert rows[0].request_hash == rows[1].request_hash is not None

    def test_rows_that_cannot_be_asked_are_not_folded(self, tmp_path: Path) -> None:
        rows = [{"nothing": 1}, {"nothing": 1}, *prompts(90, 90)]
        assert self.leaders(tmp_path, rows) == [None] * 4
