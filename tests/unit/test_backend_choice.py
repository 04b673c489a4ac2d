"""Which backend a device name gives, with stand-ins for devices that are not here."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

import engine.backends
from engine.backends import device_kinds, load_backend
from engine.errors import ConfigError

AddDevice = Callable[..., None]


@pytest.fixture
def add_device(monkeypatch: pytest.MonkeyPatch) -> AddDevice:
    """Put a module in the place of a backend, with so many devices, or one that fails."""

    def add(kind: str, count: int, *, failure: str | None = None) -> None:
        class StandIn:
            name = kind

            def __init__(self) -> None:
                if failure is not None:
                    raise ConfigError(failure)

            def count_devices(self) -> int:
                return count

        module = ModuleType(f"engine.backends.{kind}")
        setattr(module, f"{kind.capitalize()}Backend", StandIn)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if kind == "npu":
            monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))

    return add


def test_auto_takes_an_npu_before_a_gpu(add_device: AddDevice):
    add_device("npu", 8)
    add_device("cuda", 1)
    assert load_backend("auto").name == "npu"


def test_auto_takes_a_gpu_where_torch_npu_finds_no_device(add_device: AddDevice):
    add_device("npu", 0)
    add_device("cuda", 1)
    assert load_backend("auto").name == "cuda"


def test_auto_takes_the_cpu_where_nothing_else_is(add_device: AddDevice):
    add_device("cuda", 0)
    assert load_backend("auto").name == "cpu"


def test_auto_takes_the_cpu_where_torch_npu_is_installed_without_an_npu(
    add_device: AddDevice, monkeypatch: pytest.MonkeyPatch
):
    add_device("npu", 0, failure="no CANN")
    add_device("cuda", 0)
    nothing = SimpleNamespace(device_files=())
    monkeypatch.setattr(engine.backends, "read_installation", lambda: nothing)
    assert load_backend("auto").name == "cpu"


def test_auto_does_not_hide_an_npu_that_cannot_be_used(
    add_device: AddDevice, monkeypatch: pytest.MonkeyPatch
):
    add_device("npu", 0, failure="source set_env.sh")
    add_device("cuda", 0)
    machine = SimpleNamespace(device_files=("/dev/davinci0",))
    monkeypatch.setattr(engine.backends, "read_installation", lambda: machine)
    with pytest.raises(ConfigError, match=r"source set_env\.sh"):
        load_backend("auto")


def test_kinds_name_an_npu_only_where_torch_npu_is_installed(add_device: AddDevice):
    assert device_kinds() == ("cpu", "cuda")
    add_device("npu", 1)
    assert device_kinds() == ("cpu", "cuda", "npu")


def test_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'tpu'.*cpu, cuda, npu only"):
        load_backend("tpu")
