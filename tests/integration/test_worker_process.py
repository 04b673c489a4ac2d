"""Worker processes: they end with their parent, and never without a word."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import (
    ConfigError,
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
    WorkerError,
    WorkerFailure,
)
from engine.worker.answers import Patience, receive_from_all
from engine.worker.channel import Channel
from engine.worker.process import WorkerProcess

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

# Only so that a test that fails does not hang.
PATIENCE_SECONDS = 60


def mock_config(log_dir: Path, **runtime: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model_path": "none", "device": "mock", "log_dir": log_dir, "runtime": runtime}
    )


def rows(count: int) -> Iterator[GenerateRequest]:
    for i in range(count):
        yield GenerateRequest(
            request_id=f"row-{i}",
            prompt=f"prompt {i}",
            sampling_params=SamplingParams(temperature=0),
        )


def is_gone(pid: int) -> bool:
    """Return True when the process has ended, reaped by its parent or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_killed_worker_is_an_error_that_names_log_and_rows_and_the_engine_can_reopen(
    tmp_path: Path,
) -> None:
    llm = OfflineInference(mock_config(tmp_path, mock_step_seconds=0.005))
    llm.start()
    run = llm.run(rows(40))
    finished = {next(run).request_id}
    [pid] = llm.worker_pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"pid {pid}\) was killed by signal 9") as caught:
        finished |= {completion.request_id for completion in run}
    error = caught.value
    assert error.failure is WorkerFailure.DIED
    assert error.request_ids
    assert set(error.request_ids) <= {f"row-{i}" for i in range(40)} - finished
    log = re.search(rf"its log ({re.escape(str(tmp_path))}\S+) ends with", str(error))
    assert log is not None
    assert Path(log[1]).is_file()
    with pytest.raises(WorkerError, match="failed while another run"):
        next(llm.run(rows(1)))
    with llm:
        assert len(llm.generate(rows(3))) == 3


def test_a_worker_that_is_silent_for_too_long_is_killed(tmp_path: Path) -> None:
    config = mock_config(tmp_path, mock_step_seconds=3600, watchdog_seconds=0.2)
    llm = OfflineInference(config)
    llm.start()
    [pid] = llm.worker_pids
    with pytest.raises(WorkerError, match=rf"pid {pid}\) was silent .* its log") as caught:
        llm.generate(rows(2))
    assert caught.value.failure is WorkerFailure.TIMEOUT
    assert caught.value.request_ids == ("row-0", "row-1")
    assert is_gone(pid)


def test_a_poison_row_kills_the_mock_worker_each_time_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    llm = OfflineInference(mock_config(tmp_path, mock_crash_text="row of poison"))
    poison = GenerateRequest(request_id="bad", prompt="a row of poison, this")
    for _ in range(2):
        with llm, pytest.raises(WorkerError, match="killed by signal 9") as caught:
            llm.generate([*rows(3), poison])
        assert caught.value.failure is WorkerFailure.DIED
        assert "bad" in caught.value.request_ids
        assert "has a row with mock_crash_text" in str(caught.value)
    with llm:
        assert len(llm.generate([*rows(3), "poison row"])) == 4


PARENT = """
import sys
from engine import EngineConfig, OfflineInference
if __name__ == "__main__":
    runtime = {"mock_step_seconds": 3600.0}
    config = EngineConfig(model_path="none", device="mock", log_dir=sys.argv[1], runtime=runtime)
    llm = OfflineInference(config)
    llm.start()
    print(*llm.worker_pids, flush=True)
    if sys.argv[2] == "busy":
        llm.generate(["a prompt"])
    sys.stdin.read()
"""


@pytest.mark.parametrize("occupation", ["idle", "busy"])
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path, occupation: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), occupation],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    worker = int(parent.stdout.readline())
    assert not is_gone(worker)
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(worker))
    parent.stdout.close()
    parent.stdin.close()


def test_what_a_worker_logs_is_logged_by_the_main_process_too_at_its_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine")
    with OfflineInference(mock_config(tmp_path, mock_device_lost_after_steps=0)) as llm:
        [pid] = llm.worker_pids
        with pytest.raises(WorkerError, match="the mock device is lost"):
            llm.generate(rows(1))
    lines = [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name == "engine.worker.model_worker"
    ]
    assert [(level, text.partition(" seconds=")[0]) for level, text in lines] == [
        (logging.INFO, "rank=0 loading model=none ranks=1"),
        (logging.INFO, "rank=0 model loaded device=mock"),
        (logging.ERROR, "rank=0 step 0 failed: _DeviceLostError('the mock device is lost')"),
    ]
    [log] = tmp_path.glob("worker-*.log")
    assert f"ERROR rank=0 pid={pid} engine.worker.model_worker: step 0 failed" in log.read_text()
    assert "Traceback" in log.read_text()


class SpeakingWorker(WorkerProcess):
    """Logs a line, and then sleeps; rank 1 ends without a word."""

    def _spawn(self, theirs: Channel) -> "subprocess.Popen[bytes]":
        speak = (
            "import logging, sys, time; from engine.worker.channel import Channel, LineSender;"
            "logger = logging.getLogger('engine');"
            "logger.addHandler(LineSender(Channel.inherited(int(sys.argv[1]))));"
            "logger.warning('I wait for rank 1');"
            "time.sleep(600)"
        )
        command = [sys.executable, "-c", "" if self._rank else speak, str(theirs.file_descriptor)]
        return subprocess.Popen(command, pass_fds=(theirs.file_descriptor,))


def test_a_rank_that_logs_and_waits_does_not_hide_that_another_has_died(tmp_path: Path) -> None:
    config = mock_config(tmp_path)
    workers = [SpeakingWorker(config, 0, tmp_path / "0.log")]
    try:
        assert Channel.wait_for_any([workers[0].channel], PATIENCE_SECONDS)
        workers.append(SpeakingWorker(config, 1, tmp_path / "1.log"))
        with pytest.raises(WorkerError, match="rank 1 .* ended with exit code 0") as caught:
            receive_from_all(workers, Patience(PATIENCE_SECONDS))
    finally:
        for worker in workers:
            worker.kill()
    assert caught.value.failure is WorkerFailure.DIED


def test_a_worker_leaves_signals_to_its_parent(tmp_path: Path) -> None:
    with OfflineInference(mock_config(tmp_path)) as llm:
        [pid] = llm.worker_pids
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert len(llm.generate(rows(5))) == 5
        assert llm.worker_pids == (pid,)


def test_opening_and_closing_leaves_no_process_and_no_open_file(tmp_path: Path) -> None:
    me = psutil.Process()
    with OfflineInference(mock_config(tmp_path)):
        pass  # what is opened once for good is open now
    before = me.num_fds(), len(me.children(recursive=True))
    for _ in range(5):
        with OfflineInference(mock_config(tmp_path)) as llm:
            [pid] = llm.worker_pids
            llm.generate(rows(2))
        assert is_gone(pid)
    assert (me.num_fds(), len(me.children(recursive=True))) == before


def test_a_real_model_ends_with_its_engine_too(tiny_llama: Path, tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(tiny_llama), device="cpu", log_dir=tmp_path)
    with OfflineInference(config) as llm:
        [pid] = llm.worker_pids
        assert pid != os.getpid()
        assert llm.device.startswith("cpu")
        assert llm.dtype == "float32"
        [completion] = llm.generate(["def add"], SamplingParams(temperature=0, max_tokens=3))
        assert completion.token_ids
    assert is_gone(pid)
    assert "model loaded" in next(tmp_path.glob("worker-*.log")).read_text()


def test_weights_that_cannot_be_read_are_the_users_to_mend_and_leave_no_process(
    tiny_llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    children = psutil.Process().children(recursive=True)
    config = EngineConfig(model_path=str(folder), device="cpu", log_dir=tmp_path)
    with pytest.raises(ConfigError, match="broken: the model cannot be loaded: .*header"):
        OfflineInference(config).start()
    assert psutil.Process().children(recursive=True) == children
