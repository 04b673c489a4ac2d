"""A Prefect server that is named but does not answer stops the job with one message."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from job_builders import questions, write_job


@pytest.mark.integration
@pytest.mark.e2e
def test_prefect_that_does_not_answer_is_one_message(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
    job = write_job(tmp_path, questions(2))
    result = subprocess.run(
        [sys.executable, "-c", "from flows.cli import main; main()", "run", str(job)],
        env={**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": url},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "unset PREFECT_API_URL" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
