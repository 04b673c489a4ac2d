"""Which devices are for one engine at a time, and by which name every process knows them."""

from collections.abc import Mapping

from engine import EngineConfig, expected_device

_VISIBLE_DEVICES = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def is_exclusive(config: EngineConfig) -> bool:
    """Tell whether a device is for one engine at a time by nature, as an accelerator's memory is.

    The cores of a CPU and the mock device are shared.
    """
    return expected_device(config.device) in _VISIBLE_DEVICES


def device_names(config: EngineConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a name for each of device_ids that means the same device in every process.

    device_ids count the devices that the process may see, and another one may see others.
    """
    kind = expected_device(config.device)
    visible = environment.get(_VISIBLE_DEVICES.get(kind, ""), "")
    seen = [name.strip() for name in visible.split(",")] if visible else []
    names = (
        seen[number] if number < len(seen) else str(number) for number in sorted(config.device_ids)
    )
    return tuple(f"{kind}:{name}" for name in names)
