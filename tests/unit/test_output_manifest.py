"""The manifest beside an output: hashes, counts, and nothing that differs from run to run."""

import os
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest
from export_builders import ExportedJob

from engine import SamplingParams
from flows.config import OutputConfig
from flows.schema import RowState

MakeJob = Callable[..., ExportedJob]


def damaged_files(job: ExportedJob) -> list[str]:
    """Return the files that are not what the manifest says."""
    folder = job.output_path.parent
    return [
        name
        for name, file in job.manifest()["files"].items()
        if not (folder / name).exists()
        or sha256((folder / name).read_bytes()).hexdigest() != file["sha256"]
        or (folder / name).stat().st_size != file["num_bytes"]
    ]


def test_it_vouches_for_every_file_and_says_what_is_in_them(make_exported_job: MakeJob) -> None:
    job = make_exported_job("".join('{"prompt":"x"}\n' for _ in range(5)) + "[]\n")
    job.answer(0, "rows:1", "a", finish_reason="length", is_truncated=True)
    for index in range(2):
        job.answer(1, "rows:2", "b", sample_index=index, num_samples=2)
    job.fail(2, "rows:3", "timeout", "too slow")
    job.answer(3, "rows:4", None, state=RowState.SKIPPED)
    summary = job.export()
    manifest = job.manifest()
    assert summary.manifest_path.name == "output.jsonl.manifest.json"
    assert list(manifest["files"]) == ["output.jsonl", "output_errors.jsonl"]
    assert damaged_files(job) == []
    assert manifest["counts"] == {
        "num_rows": 6,
        "num_ok": 2,
        "num_error": 2,
        "num_skipped": 1,
        "num_pending": 1,
        "num_samples": 6,
        "num_length": 1,
        "num_truncated": 1,
    }
    assert manifest["job_id"] == "test-1"
    assert (manifest["model"], manifest["format"]) == ("none", "jsonl")
    assert manifest["seed"] == 2**62
    assert manifest["fingerprint"] == {"model": "aa11"}
    assert manifest["manifest_hash"] == job.row.manifest_hash
    for package in ("tokenmill", "torch", "transformers"):
        assert manifest["versions"][package] == version(package)
    assert "python" in manifest["versions"]


def test_two_runs_of_one_job_have_the_same_bytes_throughout(make_exported_job: MakeJob) -> None:
    runs = []
    for order in ((0, 1, 2), (2, 0, 1)):
        job = make_exported_job('{"prompt":"x"}\n{"prompt":"y"}\n{"prompt":"z"}\n')
        for index in order:
            job.answer(index, f"rows:{index + 1}", f"answer {index}")
        job.export()
        runs.append({name: (job.output_path.parent / name).read_bytes() for name in job.files()})
    assert runs[0] == runs[1]


def test_the_seed_of_the_sampling_goes_before_that_of_the_job(make_exported_job: MakeJob) -> None:
    job = make_exported_job('{"prompt":"x"}\n', sampling=SamplingParams(seed=0))
    job.export()
    assert job.manifest()["seed"] == 0


def test_files_elsewhere_are_named_from_where_the_manifest_is(
    make_exported_job: MakeJob, tmp_path: Path
) -> None:
    errors = tmp_path / "bad" / "rows.jsonl"
    job = make_exported_job("[]\n", output=OutputConfig(errors_path=errors))
    job.export()
    relative = os.path.relpath(errors, job.output_path.parent)
    assert list(job.manifest()["files"]) == ["output.jsonl", relative]
    assert damaged_files(job) == []


@pytest.mark.parametrize("last_name", ["output.jsonl", "output_errors.jsonl"])
def test_an_export_that_is_killed_between_its_renames_is_seen_and_mended(
    make_exported_job: MakeJob, monkeypatch: pytest.MonkeyPatch, last_name: str
) -> None:
    job = make_exported_job('{"prompt":"x"}\n{"prompt":"y"}\n')
    job.fail(0, "rows:1", "timeout", "too slow")
    job.export()
    job.fail(1, "rows:2", "timeout", "too slow")

    class Killed(BaseException):
        pass

    rename = Path.replace

    def rename_and_die(temporary: Path, path: Path) -> Path:
        renamed = rename(temporary, path)
        if path.name == last_name:
            raise Killed
        return renamed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", rename_and_die)
        pytest.raises(Killed, job.export)
    assert damaged_files(job) != []
    job.export()
    assert damaged_files(job) == []
    assert job.manifest()["counts"]["num_error"] == 2
