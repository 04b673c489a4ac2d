"""Python reads this at the start of every process that has this folder in PYTHONPATH.

With NPU_SIMULATOR set, whatever imports torch_npu gets the simulated devices, in every thread;
processes that do not import it are left alone.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _StartingLoader(Loader):
    """Loads torch_npu as ever, then starts the simulator."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import npu_simulator

        npu_simulator.start()


class _TorchNpuFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _StartingLoader(spec.loader)
        return spec


if os.environ.get("NPU_SIMULATOR"):
    # A thread that launches what Python handed it would run a copy after what depends on it.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    sys.meta_path.insert(0, _TorchNpuFinder())
