"""The environment that torch_npu wants, and the import of it, in words where it fails.

torch_npu is imported by nobody but `load_torch_npu`: without CANN its import fails, and with CANN
it costs a second and the device. Sources of what the variables mean: CANN's reference of
environment variables, and torch_npu's.
"""

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.backends.cann import missing_environment_sentence, read_installation
from engine.errors import ConfigError

# Read once, when CANN's libraries are loaded or the device is first used. What a user has set
# stays. Not here: HCCL_DETERMINISTIC and whatever else changes results, which is the user's.
_DEFAULTS = {
    # Errors only, and no events. In a worker they go to stdout, which is its log file.
    "ASCEND_GLOBAL_LOG_LEVEL": "3",
    "ASCEND_GLOBAL_EVENT_ENABLE": "0",
    # Memory of one size can be used for another, so that a full card is not a fragmented one.
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    # A second thread launches kernels. 2 hides more, but takes memory and captures no graphs.
    "TASK_QUEUE_ENABLE": "1",
}
_INSTALL = "pip install tokenmill[npu]"
_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


def prepare_environment(environment: MutableMapping[str, str] | None = None) -> None:
    """Set what the user has not set; before torch_npu is imported."""
    variables = os.environ if environment is None else environment
    for name, value in _DEFAULTS.items():
        variables.setdefault(name, value)


def reason_without_graphs(environment: MutableMapping[str, str] | None = None) -> str | None:
    """Return why nothing can be captured in this environment; None where it can."""
    variables = os.environ if environment is None else environment
    for name, value in (("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1")):
        if variables.get(name) == value:
            return f"{name} is {value}, with which torch_npu captures no graphs"
    return None


def is_installed() -> bool:
    """Tell whether there is a torch_npu, without importing it."""
    return "torch_npu" in sys.modules or find_spec("torch_npu") is not None


@contextmanager
def without_torch_npu() -> Iterator[None]:
    """Let libraries that are imported in this context find no torch_npu.

    transformers imports torch_npu wherever it finds it: where CANN is absent that fails, and where
    it is not, it would come before its environment is ready. What transformers has looked for it
    remembers, and of what it does with an NPU nothing is used here.
    """
    if "torch_npu" in sys.modules:
        yield
        return
    # Python's own way: None stands for a module that cannot be found.
    sys.modules["torch_npu"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch_npu"]


def load_torch_npu() -> Any:
    """Return torch_npu, imported in an environment that was made ready for it.

    Raises:
        ConfigError: it is not installed, or CANN cannot be loaded.
    """
    if not is_installed():
        raise ConfigError(
            f"device npu cannot be used, for torch_npu is not installed in {sys.prefix}; install it "
            f"with `{_INSTALL}`"
        )
    prepare_environment()
    try:
        return import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(_failed_import(error)) from error


def _failed_import(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    found = f"device npu cannot be used, for torch_npu cannot be loaded: {reason}"
    if "Two accelerators" in reason:
        return (
            f"{found}; in this environment torch is built for another device: install the torch "
            f"for the CPU beside torch_npu (`{_INSTALL} {_CPU_INDEX}`), or set engine.device to cuda"
        )
    installation = read_installation()
    sentence = missing_environment_sentence(installation)
    if sentence is not None:
        return f"{found}; {sentence}"
    if installation.toolkit is None:
        return (
            f"{found}; no CANN is installed: install its toolkit and kernels and run "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh`, in what starts cron jobs and "
            "Prefect workers too, or set engine.device to cpu"
        )
    return (
        f"{found}; CANN {installation.toolkit.version or ''} is at {installation.toolkit.home} and "
        "its environment is loaded, so the versions may not fit each other: run `tokenmill doctor`"
    )
