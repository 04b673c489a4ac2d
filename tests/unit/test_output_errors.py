"""The file of failed rows: one line for each, with what to do about it."""

from collections.abc import Callable

import pytest
from export_builders import ExportedJob

from engine import RequestErrorCode
from flows.outputs.faults import FAULTS, fault_of
from flows.schema import RowState

MakeJob = Callable[..., ExportedJob]
ERRORS = "output_errors.jsonl"


def test_each_failed_row_says_where_it_is_what_is_wrong_and_what_to_do(
    make_exported_job: MakeJob,
) -> None:
    job = make_exported_job(
        '{"id":"a","prompt":"x"}\n{"id":"b","code":1}\n{"id":"c","prompt":""}\n'
    )
    job.fail(0, "a", "timeout", "not answered in 5 seconds")
    job.answer(2, "c", "fine")
    summary = job.export()
    late, bad = job.lines(ERRORS)
    assert late == {
        "row_id": "a",
        "where": f"{job.source_path}, line 1",
        "code": "timeout",
        "message": "not answered in 5 seconds",
        "remedy": FAULTS[RequestErrorCode.TIMEOUT].remedy,
        "columns": {"id": "a", "prompt": "x"},
    }
    assert (bad["code"], bad["columns"]) == ("bad_row", {"id": "b", "code": 1})
    assert summary.errors_path == job.output_path.with_name(ERRORS)


def test_a_job_without_failed_rows_has_no_such_file_and_an_old_one_goes(
    make_exported_job: MakeJob,
) -> None:
    job = make_exported_job('{"prompt":"x"}\n{"prompt":"y"}\n')
    job.fail(0, "rows:1", "timeout", "too slow")
    job.export()
    assert ERRORS in job.files()
    job.answer(0, "rows:1", "after a retry")
    job.answer(1, "rows:2", None, state=RowState.SKIPPED)
    summary = job.export()
    assert (ERRORS in job.files(), summary.errors_path) == (False, None)


def test_a_row_of_several_samples_has_one_line_of_the_first_that_failed(
    make_exported_job: MakeJob,
) -> None:
    job = make_exported_job('{"prompt":"x"}\n')
    job.answer(0, "rows:1", "fine", sample_index=0, num_samples=3)
    for index in (1, 2):
        job.fail(0, "rows:1", "timeout", f"no {index}", sample_index=index, num_samples=3)
    job.export()
    (line,) = job.lines(ERRORS)
    assert (line["sample_index"], line["message"]) == (1, "no 1")


def test_columns_of_a_failed_row_cannot_hide_what_went_wrong(make_exported_job: MakeJob) -> None:
    job = make_exported_job('{"prompt":"x","code":"mine","message":null,"remedy":5}\n')
    job.fail(0, "rows:1", "aborted", "stopped")
    job.export()
    (line,) = job.lines(ERRORS)
    assert (line["code"], line["message"]) == ("aborted", "stopped")
    assert line["columns"] == {"prompt": "x", "code": "mine", "message": None, "remedy": 5}


def test_every_error_code_has_a_remedy() -> None:
    assert set(FAULTS) == set(RequestErrorCode)


@pytest.mark.parametrize("code", [None, "a_code_of_tomorrow"])
def test_an_unknown_code_is_a_fault_of_ours(code: str | None) -> None:
    assert fault_of(code).status_code == 500
