"""Lines, ids, characters and order that broke jobs elsewhere; each through a whole job."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_builders import Row, make_job, questions, read_rows, run_job, write_rows

from engine import Completion, ConfigError, ExitCode, LedgerError, OfflineInference
from flows.job_run import JobRun
from flows.ledger import Ledger
from flows.preparation import output_path_of

NASTY_TEXT = "a\u2028b\u2029c\x85d\x00e\x1b[0m\ud800f \U0001f600 \ufeff\r\n\x1a0000 end"


@pytest.fixture
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a model is loaded."""
    monkeypatch.setattr(OfflineInference, "start", None)


@pytest.fixture
def _nasty_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every answer hold what has broken readers of files."""
    run = OfflineInference.run

    def nasty_run(*arguments: Any, **options: Any) -> Iterator[Completion]:
        for completion in run(*arguments, **options):
            text = f"{completion.request_id} {NASTY_TEXT}"
            yield msgspec.structs.replace(completion, text=text)

    monkeypatch.setattr(OfflineInference, "run", nasty_run)


@pytest.mark.usefixtures("_no_engine")
class TestEqualIds:
    """Two lines with one id got one answer, or hung the job."""

    @pytest.mark.parametrize(
        ("rows", "row_id"),
        [
            ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], "a"),
            ([{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "y"}], "1"),
            ([{"id": "a", "prompt": "x"}, {"id": "a"}], "a"),
            ([{"id": "a", "prompt": 5}, {"id": "a", "prompt": "y"}], "a"),
            ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "x"}], "a"),
            ([{"id": "rows:2", "prompt": "x"}, {"prompt": "y"}], "rows:2"),
        ],
        ids=["other text", "number", "no prompt", "bad prompt", "same text", "name of a line"],
    )
    def test_both_lines_are_named_before_a_model_loads(
        self, tmp_path: Path, rows: list[Row], row_id: str
    ) -> None:
        path = tmp_path / "rows.jsonl"
        config = make_job(tmp_path, [*rows, *questions(2)])
        both = f"two rows have the id '{row_id}': {path}, line 1 and {path}, line 2"
        with pytest.raises(ConfigError, match=both), JobRun.open(config):
            pytest.fail("it began")
        with Ledger.open(config.resolved_ledger_url) as ledger:
            assert ledger.list_jobs() == []

    def test_the_lines_of_a_batch_file_too(self, tmp_path: Path) -> None:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x"},
        }
        config = make_job(
            tmp_path,
            [line, {**line, "custom_id": "b"}, {**line, "custom_id": "a"}],
            sources=[{"path": str(tmp_path / "rows.jsonl"), "format": "openai_batch"}],
        )
        with (
            pytest.raises(ConfigError, match=r"id 'a': .*, line 1 and .*, line 3"),
            JobRun.open(config),
        ):
            pytest.fail("it began")


class TestNastyLines:
    """A line that is no object, or holds a separator, crashed the job or shifted the rows."""

    LINES: Iterable[bytes] = (
        b'\xef\xbb\xbf{"id": "bom", "prompt": "x"}\r\n',
        '{"id": "separators", "prompt": "a\u2028b\u2029c\x85d", "n": [1e300, 10], "m": {"k": null}}\n'.encode(),
        b"null\n",
        b"[1]\n",
        b'"text"\n',
        b" \t\r\n",
        b'{"id": "surrogate", "prompt": "\\ud800 alone", "note": "\\udfff"}\n',
        b'{"id": "encoded surrogate", "prompt": "\xed\xa0\x80 alone"}\n',
        b'{"id": "nul", "prompt": "a\\u0000b", "note": "\\u0000", "big": 123456789012345678901234567890}\n',
        '{"id": "zeile\u2028ende", "prompt": "x"}\n'.encode(),
        b"\xff\xfe\n",
        b'{"id": "last but one", "prompt": "x", "note": NaN}\n',
        b'{"id": 2, "te',
    )
    ERRORS = {
        "rows:3": ("bad_row", "line 3: found null"),
        "rows:4": ("bad_row", "line 4: found an array"),
        "rows:5": ("bad_row", "line 5: found a string"),
        "rows:11": ("bad_json", "line 11: "),
        "rows:13": ("bad_json", "line 13: "),
    }

    @pytest.mark.usefixtures("_nasty_answers")
    def test_good_ones_are_answered_and_bad_ones_named_on_every_ledger(
        self, tmp_path: Path, ledger_url: str
    ) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(self.LINES))
        config = make_job(tmp_path, ledger_url=ledger_url, stream_output=True)
        outcome, _ = run_job(config)
        assert outcome.message.split(";")[0] == "7 ok, 5 failed"

        def read(name: str) -> list[dict[str, Any]]:
            data = (tmp_path / "runs" / "job-1" / name).read_bytes()
            # Whatever a reader takes for the end of a line, there are as many of them.
            assert len(data.decode("utf-8").splitlines()) == data.count(b"\n")
            return [json.loads(line, parse_constant=pytest.fail) for line in data.splitlines()]

        lines = read("output.jsonl")
        assert [line["row_id"] for line in lines] == [
            "bom", "separators", "rows:3", "rows:4", "rows:5", "surrogate", "encoded surrogate",
            "nul", "zeile\u2028ende", "rows:11", "last but one", "rows:13",
        ]  # fmt: skip
        for line in lines:
            if line["row_id"] in self.ERRORS:
                code, message = self.ERRORS[line["row_id"]]
                assert line["error"]["code"] == code
                assert line["error"]["message"].startswith(f"{path}, {message}")
            else:
                assert line["error"] is None
                assert line["text"] == f"{line['row_id']} {NASTY_TEXT}"
        by_id = {line["row_id"]: line for line in lines}
        assert by_id["separators"]["prompt"] == "a\u2028b\u2029c\x85d"
        assert (by_id["separators"]["n"], by_id["separators"]["m"]) == ([1e300, 10], {"k": None})
        assert by_id["surrogate"]["prompt"] == "\ud800 alone"
        assert by_id["surrogate"]["note"] == "\udfff"
        assert (by_id["nul"]["prompt"], by_id["nul"]["note"]) == ("a\x00b", "\x00")
        assert by_id["nul"]["big"] == 123456789012345678901234567890
        assert by_id["last but one"]["note"] is None
        assert len(read("errors.jsonl")) == 5
        streamed = read("stream.jsonl")
        assert {line["row_id"]: line["text"] for line in streamed} == {
            line["row_id"]: line["text"] for line in lines if line["error"] is None
        }

        plain = make_job(tmp_path, job_id="plain", job_dir=str(tmp_path / "plain"))
        run_job(plain)
        assert output_path_of(plain).read_bytes() == output_path_of(config).read_bytes()


class TestTornFiles:
    """The torn last line that a kill leaves swallowed the next good one."""

    STREAMED = '{"row_id": "q0", "text": "x", "error": null}\n'

    @pytest.mark.parametrize(
        "torn", ['{"row_id": "q1", "te', "{", "\x00" * 5000, '"' + "x" * 100_000, ""]
    )
    def test_what_is_shown_after_it_begins_on_a_line_of_its_own(
        self, tmp_path: Path, torn: str
    ) -> None:
        config = make_job(tmp_path, questions(3), shards=1, stream_output=True)
        path = tmp_path / "runs" / "job-1" / "stream.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(self.STREAMED + torn)
        run_job(config)
        first, *others = read_rows(path)
        assert first == json.loads(self.STREAMED)
        assert sorted(line["row_id"] for line in others) == ["q0", "q1", "q2"]

    def test_an_output_that_was_torn_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        config = make_job(tmp_path, questions(3))
        run_job(config)
        path = output_path_of(config)
        whole = path.read_bytes()
        for garbage in (whole[:40], whole + b'{"row_id": "q9", "te', b"\x00" * 9):
            path.write_bytes(garbage)
            run_job(config)
            assert path.read_bytes() == whole

    def test_a_source_whose_torn_line_was_mended_since_is_another_input(
        self, tmp_path: Path
    ) -> None:
        config = make_job(tmp_path, [*questions(3), '{"id": "torn", "pro'])
        with JobRun.open(config) as run:
            run.run_shard(0)
        write_rows(tmp_path / "rows.jsonl", [*questions(3), {"id": "torn", "prompt": "y"}])
        with pytest.raises(LedgerError, match=r"(?s)cannot be resumed.*\n  input: was "):
            run_job(config)


class TestOrder:
    """Outputs in the order of finishing were joined by position, to the wrong rows."""

    @pytest.mark.parametrize("order", ["fcfs", "shortest_first", "longest_first", "priority"])
    def test_the_output_is_in_the_order_of_the_input_however_rows_finish(
        self, tmp_path: Path, order: str
    ) -> None:
        rows = [
            {
                "id": f"r{index * 7 % 30}",
                "prompt": "x" * (1 + index * 11 % 30),
                "priority": index * 13 % 5,
                "sampling": {"max_tokens": 1 + index * 17 % 12},
                "place": index,
            }
            for index in range(30)
        ]
        config = make_job(
            tmp_path,
            rows,
            shards=3,
            stream_output=True,
            engine__scheduler={"max_num_seqs": 3, "order": order},
        )
        outcome, _ = run_job(config)
        assert outcome.exit_code == ExitCode.OK
        finished = [row["row_id"] for row in read_rows(tmp_path / "runs/job-1/stream.jsonl")]
        asked = [row["id"] for row in rows]
        assert finished != asked
        lines = read_rows(output_path_of(config))
        assert [line["row_id"] for line in lines] == asked
        for line, row in zip(lines, rows, strict=True):
            assert {name: line[name] for name in row} == row
