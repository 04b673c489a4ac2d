"""The one door to a device. `load_backend` imports only the backend that is asked for."""

from importlib import import_module
from importlib.util import find_spec

from engine.backends.base import DeviceBackend
from engine.errors import ConfigError

_CLASS_OF = {"cpu": "CpuBackend"}


def load_backend(device: str) -> DeviceBackend:
    """Return the backend of a device name; auto takes an NPU, else a GPU, else the CPU.

    Raises:
        ConfigError: this version has no backend for the device.
    """
    name = _best_device() if device == "auto" else device
    if name not in _CLASS_OF:
        raise ConfigError(
            f"engine.device is {name!r}, but this version of tokenmill has backends for "
            f"{', '.join(_CLASS_OF)} only"
        )
    module = import_module(f"engine.backends.{name}")
    backend: DeviceBackend = getattr(module, _CLASS_OF[name])()
    return backend


def _best_device() -> str:
    if "npu" in _CLASS_OF and find_spec("torch_npu") is not None:
        return "npu"
    return "cpu"
