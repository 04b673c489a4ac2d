"""The doctor's checks of Python, packages and cores."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from engine import Finding, FindingStatus
from flows import doctor_software
from flows.doctor_software import check_cores, check_packages, check_python


def by_name() -> dict[str, Finding]:
    return {finding.check: finding for finding in check_packages()}


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, found: str | None) -> None:
    def fake(name: str) -> str:
        if name != package:
            return version(name)
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor_software, "version", fake)


def test_this_environment_is_the_one_that_tokenmill_asks_for() -> None:
    assert check_python().status is FindingStatus.OK
    findings = by_name()
    assert list(findings) == ["torch", "transformers", "numba", "prefect"]
    assert {finding.status for finding in findings.values()} == {FindingStatus.OK}
    assert findings["torch"].found == version("torch")


@pytest.mark.parametrize("found", ["3.10.14", "3.13.0"])
def test_another_python_is_an_error(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("platform.python_version", lambda: found)
    finding = check_python()
    assert finding.status is FindingStatus.ERROR
    assert finding.found.startswith(f"{found}, wanted ")


def test_another_minor_version_of_torch_is_an_error_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, "torch", "2.12.1+cpu")
    finding = by_name()["torch"]
    assert (finding.status, finding.found) == (
        FindingStatus.ERROR,
        "2.12.1+cpu, wanted ==2.13.0",
    )
    assert finding.remedy == "pip install 'torch==2.13.0'"


def test_a_package_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "numba", None)
    assert (by_name()["numba"].status, by_name()["numba"].found) == (
        FindingStatus.ERROR,
        "not installed",
    )


class TestCores:
    @pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "NUMBA_NUM_THREADS"])
    @pytest.mark.parametrize(
        ("value", "status"),
        [("2", FindingStatus.WARNING), ("8", FindingStatus.OK), ("", FindingStatus.OK)],
    )
    def test_a_variable_that_leaves_cores_idle_is_a_warning(
        self, tmp_path: Path, name: str, value: str, status: FindingStatus
    ) -> None:
        finding = check_cores({name: value}, tmp_path / "none", cores=8)
        assert finding.status is status
        assert (name in finding.found) == (status is FindingStatus.WARNING)

    @pytest.mark.parametrize(
        ("quota", "threads"),
        [("200000 100000\n", "2"), ("50000 100000\n", "1"), ("250000 100000\n", "2")],
    )
    def test_a_container_that_may_use_fewer_cores_than_it_sees_is_a_warning(
        self, tmp_path: Path, quota: str, threads: str
    ) -> None:
        file = tmp_path / "cpu.max"
        file.write_text(quota)
        finding = check_cores({}, file, cores=8)
        assert finding.status is FindingStatus.WARNING
        assert f"engine.runtime.num_threads to {threads}," in str(finding.remedy)

    @pytest.mark.parametrize("quota", ["max 100000\n", "800000 100000\n", "odd"])
    def test_a_container_that_may_use_all_is_ok(self, tmp_path: Path, quota: str) -> None:
        file = tmp_path / "cpu.max"
        file.write_text(quota)
        assert check_cores({}, file, cores=8).status is FindingStatus.OK
