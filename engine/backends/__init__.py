"""The one door to a device. `load_backend` imports only the backend that is asked for."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from engine.backends.cann import read_installation
from engine.backends.npu_environment import is_installed
from engine.errors import ConfigError

# Facts of an installation are asked for where torch cannot be imported.
if TYPE_CHECKING:
    from engine.backends.base import DeviceBackend

logger = logging.getLogger(__name__)

_CLASS_OF = {"cpu": "CpuBackend", "cuda": "CudaBackend", "npu": "NpuBackend"}


def load_backend(device: str) -> "DeviceBackend":
    """Return the backend of a device name; auto takes an NPU, else a GPU, else the CPU.

    Raises:
        ConfigError: there is no backend for the device, or its software cannot be loaded.
    """
    if device == "auto":
        return _load_best()
    if device not in _CLASS_OF:
        raise ConfigError(
            f"engine.device is {device!r}, but there are backends for {', '.join(_CLASS_OF)} only"
        )
    return _load(device)


def device_kinds() -> tuple[str, ...]:
    """Return the kinds of device that may be here: torch_npu is an extra, the rest is in torch."""
    return tuple(kind for kind in _CLASS_OF if kind != "npu" or is_installed())


def _load_best() -> "DeviceBackend":
    """Take what the machine has. Nobody gets the CPU who has paid for an NPU.

    Raises:
        ConfigError: the machine has an NPU, but its software cannot be loaded.
    """
    if is_installed():
        try:
            npu = _load("npu")
        except ConfigError:
            if read_installation().device_files:
                raise
            logger.info("no NPU here: torch_npu is installed, and cannot be loaded")
        else:
            if npu.count_devices() > 0:
                return npu
    cuda = _load("cuda")
    return cuda if cuda.count_devices() > 0 else _load("cpu")


def _load(device: str) -> "DeviceBackend":
    module = import_module(f"engine.backends.{device}")
    backend: DeviceBackend = getattr(module, _CLASS_OF[device])()
    return backend
