"""`pytest tests/device --device cpu|cuda|npu`: the same suite on every kind of device."""

from collections.abc import Iterator

import pytest
import torch

from engine.backends import load_backend
from engine.backends.base import DeviceBackend
from engine.errors import TokenmillError

KINDS = ("cpu", "cuda", "npu")
_BACKEND = pytest.StashKey[DeviceBackend]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=KINDS, help="what tests/device runs on; cpu if left out")


def pytest_configure(config: pytest.Config) -> None:
    """End the run at once when the device that was asked for is not there."""
    try:
        _load(config)
    except TokenmillError as error:
        raise pytest.UsageError(f"--device {_kind(config)}: {error}") from error


def _kind(config: pytest.Config) -> str:
    # The option is unknown where this folder is collected with others.
    return config.getoption("--device", default=None) or "cpu"


def _load(config: pytest.Config) -> DeviceBackend:
    """Return the backend that was asked for, one object for all."""
    if _BACKEND not in config.stash:
        backend = load_backend(_kind(config))
        backend.check_device(0)
        config.stash[_BACKEND] = backend
    return config.stash[_BACKEND]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test each dtype that this kind of device computes in."""
    if "dtype" in metafunc.fixturenames:
        names = _load(metafunc.config).capabilities.dtypes
        metafunc.parametrize("dtype", [getattr(torch, name) for name in names], ids=str)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    """Bind device 0 of the kind that was asked for."""
    threads = torch.get_num_threads()
    backend = _load(request.config)
    print(f"\ntests/device runs on {backend.bind(0, None)}")
    yield backend
    torch.set_num_threads(threads)
