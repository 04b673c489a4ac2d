"""An engine that is opened and closed twenty times leaves the process as it was."""

import gc
import threading
from pathlib import Path

import psutil
import pytest

from engine import EngineConfig, OfflineInference, SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

PARAMS = SamplingParams(temperature=0, max_tokens=16)
_MIB = 1 << 20


def test_memory_files_threads_and_processes_stay_flat(tmp_path: Path) -> None:
    process = psutil.Process()
    llm = OfflineInference(
        EngineConfig.model_validate({"model_path": "mock", "device": "mock", "log_dir": tmp_path})
    )
    seen: list[tuple[int, int, int]] = []
    memory: list[float] = []
    for _ in range(20):
        with llm:
            assert len(llm.generate(["one", "two"], PARAMS)) == 2
        gc.collect()
        children = len(process.children(recursive=True))
        seen.append((process.num_fds(), threading.active_count(), children))
        memory.append(process.memory_info().rss / _MIB)
    # The first round imports and starts what stays for the life of the process.
    assert set(seen[1:]) == {seen[1]}
    assert memory[-1] - memory[4] < 8, memory
