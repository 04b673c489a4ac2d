"""torch_npu where it is missing, where CANN is missing, and where it must not be looked for."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.backends.npu_environment import (
    load_torch_npu,
    prepare_environment,
    reason_without_graphs,
    without_torch_npu,
)
from engine.errors import ConfigError

ROOT = Path(__file__).parents[2]
NO_LIBRARY = "libhccl.so: cannot open shared object file: No such file or directory"


@pytest.fixture(autouse=True)
def _untouched_process() -> Iterator[None]:
    with patch.dict(os.environ):
        yield
    sys.modules.pop("torch_npu", None)


@pytest.fixture
def broken_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a torch_npu that fails as the real one does without CANN; return its folder."""
    site = tmp_path / "site"
    (site / "torch_npu").mkdir(parents=True)
    (site / "torch_npu/__init__.py").write_text(f"raise ImportError({NO_LIBRARY!r})\n")
    facts = site / "torch_npu-2.13.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    monkeypatch.syspath_prepend(str(site))
    return site


def python(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_missing_torch_npu_says_what_to_install():
    with pytest.raises(ConfigError, match=r"not installed.*pip install tokenmill\[npu\]"):
        load_torch_npu()


@pytest.mark.usefixtures("broken_torch_npu")
def test_missing_cann_names_the_library_and_set_env():
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        os.environ.pop(name, None)
    with pytest.raises(ConfigError) as caught:
        load_torch_npu()
    message = str(caught.value)
    assert message.count("\n") == 0
    assert "libhccl.so" in message
    assert "set_env.sh" in message
    assert "cron" in message


@pytest.mark.usefixtures("broken_torch_npu")
def test_cann_that_is_there_but_not_loaded_is_named_with_its_script(tmp_path: Path):
    home = tmp_path / "cann"
    home.mkdir()
    (home / "set_env.sh").touch()
    os.environ["ASCEND_HOME_PATH"] = str(home)
    os.environ.pop("ASCEND_OPP_PATH", None)
    with pytest.raises(ConfigError) as caught:
        load_torch_npu()
    assert f"source {home}/set_env.sh" in str(caught.value)
    assert "Prefect worker" in str(caught.value)


def test_torch_for_another_device_beside_torch_npu_is_explained(tmp_path: Path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text(
        "raise RuntimeError('Two accelerators cannot be used at the same time in PyTorch')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="built for another device"):
        load_torch_npu()


def test_torch_can_be_imported_after_engine_where_cann_is_missing(broken_torch_npu: Path):
    alone = python("import torch", broken_torch_npu)
    assert alone.returncode != 0
    assert "libhccl.so" in alone.stderr  # so there is something to avoid
    after = python("import engine, torch; print(torch.zeros(1).item())", broken_torch_npu)
    assert (after.returncode, after.stdout) == (0, "0.0\n")


def test_choice_of_the_user_to_load_devices_with_torch_stays():
    code = "import engine, os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said == "1\n"


@pytest.mark.usefixtures("broken_torch_npu")
def test_libraries_do_not_find_what_is_hidden_from_them():
    assert importlib.util.find_spec("torch_npu") is not None
    with without_torch_npu():
        assert importlib.util.find_spec("torch_npu") is None
        with pytest.raises(ImportError, match="halted"):
            importlib.import_module("torch_npu")
    assert importlib.util.find_spec("torch_npu") is not None
    assert "torch_npu" not in sys.modules


def test_torch_npu_that_is_in_use_is_not_hidden():
    sys.modules["torch_npu"] = sys.modules["os"]
    with without_torch_npu():
        assert importlib.import_module("torch_npu") is os


def test_environment_is_set_where_the_user_has_not_set_it():
    variables = {"TASK_QUEUE_ENABLE": "2", "HOME": "/home/me"}
    prepare_environment(variables)
    assert variables["TASK_QUEUE_ENABLE"] == "2"
    assert variables["ASCEND_GLOBAL_LOG_LEVEL"] == "3"
    assert variables["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    # What changes results is the user's.
    assert not any(name.startswith("HCCL") for name in variables)


@pytest.mark.parametrize(
    ("name", "value", "has_graphs"),
    [
        ("TASK_QUEUE_ENABLE", "1", True),
        ("TASK_QUEUE_ENABLE", "2", False),
        ("ASCEND_LAUNCH_BLOCKING", "1", False),
        ("ASCEND_LAUNCH_BLOCKING", "0", True),
    ],
)
def test_settings_that_forbid_graphs_are_named(name: str, value: str, *, has_graphs: bool):
    reason = reason_without_graphs({name: value})
    assert (reason is None) is has_graphs
    assert has_graphs or f"{name} is {value}" in (reason or "")
