"""`tokenmill doctor` as a shell sees it."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from cann_builders import AscendMachine, healthy_machine
from job_builders import make_job
from terminal import Terminal

from engine import Finding, WorkerError, check_ascend, probe_devices
from flows import doctor
from flows.doctor import Check, run_checks
from flows.ledger import Ledger

CPU = (
    'print(\'tokenmill-probe {"kind": "cpu", "device": "cpu (2 threads)", '
    '"free_bytes": 3221225472, "total_bytes": 4294967296}\')'
)


@pytest.fixture
def terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Terminal:
    """Give a shell in an empty folder, where devices answer at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENMILL_LEDGER_URL", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ask_devices(monkeypatch, CPU)
    monkeypatch.setattr(doctor, "check_prefect_api", lambda environment: Finding.ok("api", "none"))
    return Terminal(monkeypatch, capfd)


def ask_devices(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    probe = partial(probe_devices, command=[sys.executable, "-c", code])
    monkeypatch.setattr(doctor, "probe_devices", probe)


def be_on(monkeypatch: pytest.MonkeyPatch, machine: AscendMachine) -> None:
    def check(environment: object) -> list[Finding]:
        return check_ascend(machine.root, machine.environment, machine.packages)

    monkeypatch.setattr(doctor, "check_ascend", check)


def test_a_machine_that_is_well_is_a_line_for_each_check_and_exit_code_0(
    terminal: Terminal, tmp_path: Path
) -> None:
    ended = terminal("doctor")
    assert ended.code == 0, ended.out
    lines = ended.out.splitlines()
    assert [line.split(": ")[0].split(maxsplit=1)[1] for line in lines] == [
        "python", "torch", "transformers", "numba", "prefect", "cores", "npu", "device", "api",
        "ledger", "folder runs", "folder device locks", "clock",
    ]  # fmt: skip
    assert "ok      device: cpu (2 threads): 3.0 of 4.0 GiB free" in lines
    assert f"ok      ledger: none yet; the first run makes {tmp_path}/runs/ledger.sqlite" in lines
    assert ended.err.startswith("0 error(s)")
    assert list(tmp_path.iterdir()) == []


def test_an_ascend_machine_that_is_well_ends_with_0(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, healthy_machine(tmp_path / "root"))
    ended = terminal("doctor")
    assert ended.code == 0
    assert "ok      cann and driver: driver 25.5.1 is listed for CANN 9.2.0" in ended.out


def test_a_warning_does_not_change_the_exit_code(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, healthy_machine(tmp_path / "root").driver("27.0.0"))
    ended = terminal("doctor")
    assert ended.code == 0
    assert "warning cann and driver: driver 27.0.0 is in no list known here" in ended.out


def test_an_error_is_a_line_with_its_remedy_and_exit_code_2(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = AscendMachine(tmp_path / "root").cards().driver().toolkit().nnal().source_nnal()
    be_on(monkeypatch, machine)
    ended = terminal("doctor")
    assert ended.code == 2
    (line,) = [line for line in ended.out.splitlines() if line.startswith("error")]
    assert line.startswith("error   cann environment: the environment of CANN is not loaded")
    assert "-> run `source /usr/local/Ascend/cann/set_env.sh` first" in line
    assert ended.err.startswith("1 error(s)")


def test_a_hanging_driver_is_one_error_among_the_other_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_devices(monkeypatch, "import time; time.sleep(300)")
    ended = terminal("doctor", "--device-timeout", "1")
    assert ended.code == 2
    assert "error   devices: any kind gave no answer within 1 s -> see what" in ended.out
    assert ended.out.splitlines()[-1].startswith("ok      clock: ")


def test_json_is_for_machines(terminal: Terminal) -> None:
    ended = terminal("doctor", "--json")
    assert (ended.code, ended.err) == (0, "")
    findings = json.loads(ended.out)
    assert findings[0]["check"] == "python"
    assert {tuple(finding) for finding in findings} == {("check", "status", "found", "remedy")}
    assert {finding["status"] for finding in findings} <= {"ok", "warning", "error"}


class TestLedger:
    def test_the_ledger_that_is_named_is_the_one_that_is_looked_at(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        url = f"sqlite:///{tmp_path}/other.sqlite"
        Ledger.open(url).close()
        assert (
            f"ok      ledger: {tmp_path}/other.sqlite, " in terminal("doctor", "--ledger", url).out
        )

    def test_the_variable_names_it_too(
        self, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKENMILL_LEDGER_URL", f"sqlite:///{tmp_path}/third.sqlite")
        assert f"the first run makes {tmp_path}/third.sqlite" in terminal("doctor").out

    def test_a_ledger_that_is_refused_is_an_error_in_the_refusals_own_words(
        self, terminal: Terminal
    ) -> None:
        ended = terminal("doctor", "--ledger", "mysql://host/database")
        assert ended.code == 2
        assert "error   ledger: ledger_url: mysql is not supported; use sqlite" in ended.out


class TestJobFile:
    def test_a_jobs_ledger_folders_and_device_are_what_is_checked(
        self, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_job(tmp_path, ["one"]).model_dump(mode="json", exclude_none=True)
        config["engine"]["device"] = "cuda"
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(config))
        ask_devices(monkeypatch, 'print(\'tokenmill-probe {"kind": "cuda", "count": 0}\')')
        ended = terminal("doctor", str(file))
        assert ended.code == 2
        lines = ended.out.splitlines()
        assert lines[0] == f"ok      job file: {file} is valid"
        assert "error   device: engine.device is cuda, and there is none" in ended.out
        assert "folder job_dir: " in ended.out
        path = config["ledger_url"].removeprefix("sqlite:///")
        assert f"none yet; the first run makes {path}" in ended.out

    def test_a_job_file_that_is_wrong_is_one_error_and_the_rest_is_checked(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        ended = terminal("doctor", str(tmp_path / "nowhere.yaml"))
        assert ended.code == 2
        assert ended.out.startswith("error   job file: ")
        assert "ok      python: " in ended.out


class TestChecksThatFail:
    def test_what_a_check_raises_is_its_finding_with_the_name_of_the_exception(self) -> None:
        def fail() -> Finding:
            raise RuntimeError("no such\n  file")

        def succeed() -> Finding:
            return Finding.ok("other", "well")

        assert list(run_checks([Check(name="one", ask=fail), Check(name="two", ask=succeed)])) == [
            Finding.error("one", "the check itself failed: RuntimeError: no such file"),
            Finding.ok("other", "well"),
        ]

    def test_a_deliberate_error_speaks_for_itself(self) -> None:
        def refuse() -> Finding:
            raise WorkerError("the card is gone; insert it")

        assert list(run_checks([Check(name="card", ask=refuse)])) == [
            Finding.error("card", "the card is gone; insert it")
        ]
