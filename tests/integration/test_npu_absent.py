"""torch_npu is installed and CANN is not: everything but an NPU works, and that says why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_LIBRARY = "libhccl.so: cannot open shared object file: No such file or directory"
CODE = """
import json, sys
from engine import EngineConfig, GenerateRequest, OfflineInference, SamplingParams, TokenmillError

if __name__ == "__main__":
    config = EngineConfig.model_validate(json.loads(sys.argv[1]))
    request = GenerateRequest(
        request_id="a", prompt_token_ids=[5, 6, 7], sampling_params=SamplingParams(max_tokens=2)
    )
    try:
        with OfflineInference(config) as engine:
            answer = {"tokens": len(engine.generate([request])[0].token_ids)}
            answer["device"] = engine.device
    except TokenmillError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a torch_npu that fails as the real one does without CANN."""
    site = tmp_path_factory.mktemp("site")
    (site / "torch_npu").mkdir()
    (site / "torch_npu/__init__.py").write_text(f"raise ImportError({NO_LIBRARY!r})\n")
    facts = site / "torch_npu-2.13.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return site


@pytest.mark.integration
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "process"])
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_cpu_works_and_npu_names_what_to_source(
    tiny_llama: Path, site: Path, device: str, *, inline: bool
) -> None:
    config = {
        "model_path": str(tiny_llama),
        "device": device,
        "cache": {"num_blocks": 64},
        "runtime": {"inline": inline, "num_threads": 1},
    }
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}"}
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(config)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if device == "cpu":
        assert answer == {"tokens": 2, "device": "cpu (1 threads)"}
    else:
        assert answer["kind"] == "ConfigError"
        assert "libhccl.so" in answer["error"]
        assert "set_env.sh" in answer["error"]
        assert "\n" not in answer["error"]
