"""`tokenmill doctor` as a process, with real devices, real Prefect settings, and broken packages."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def doctor(
    folder: Path, *arguments: str, **variables: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """Run it in a folder; return the exit code and the findings by check."""
    unset = ("PREFECT_API_URL", "TOKENMILL_LEDGER_URL", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", "from flows.cli import main; main()", "doctor", "--json", *arguments],
        cwd=folder, env=environment | {"PREFECT_HOME": str(folder / "prefect")} | variables,
        capture_output=True, text=True,
    )  # fmt: skip
    findings = json.loads(done.stdout)
    return done.returncode, {finding["check"]: finding for finding in findings}


def test_this_machine_can_run_a_job(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path)
    assert [finding for finding in findings.values() if finding["status"] == "error"] == []
    assert code == 0
    assert "GiB free" in findings["device"]["found"]
    assert "none is configured" in findings["prefect api"]["found"]
    assert not (tmp_path / "runs").exists()


def test_a_torch_that_hangs_when_it_is_imported_is_cut_off(tmp_path: Path) -> None:
    broken = tmp_path / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import time\ntime.sleep(300)\n")
    started = time.monotonic()
    code, findings = doctor(
        tmp_path, "--device-timeout", "5", PYTHONPATH=str(broken.parent)
    )  # fmt: skip
    assert time.monotonic() - started < 60
    assert code == 2
    assert findings["devices"]["found"] == "cpu gave no answer within 5 s"
    assert findings["clock"]["status"] == "ok"


def test_a_torch_that_cannot_be_imported_is_an_error_of_the_device_alone(tmp_path: Path) -> None:
    broken = tmp_path / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    code, findings = doctor(tmp_path, PYTHONPATH=str(broken.parent))
    assert code == 2
    assert "ImportError: libhccl.so: cannot open" in findings["device"]["found"]
    assert findings["ledger"]["status"] == "ok"


def test_an_api_that_a_prefect_profile_names_is_the_one_that_is_asked(tmp_path: Path) -> None:
    home = tmp_path / "prefect"
    home.mkdir()
    (home / "profiles.toml").write_text(
        'active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
        'PREFECT_API_KEY = "pnu_1"\n'
    )
    code, findings = doctor(tmp_path)
    assert code == 2
    assert findings["prefect api"]["status"] == "error"
    assert findings["prefect api"]["found"].startswith("http://127.0.0.1:9/api gives no usable")
