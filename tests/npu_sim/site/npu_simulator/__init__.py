"""A simulated Ascend device: see tests/npu_sim/README.md for what it shows and what it does not."""

import threading
from typing import Any


def start() -> None:
    """Simulate for this thread from now on, and for every thread that is started later."""
    from npu_simulator import collectives, graphs, reference_kernels
    from npu_simulator.mode import SimulatedNpu

    reference_kernels.register()
    collectives.install()
    graphs.install()
    SimulatedNpu().__enter__()
    plain_run = threading.Thread.run

    def run(self: threading.Thread) -> Any:
        with SimulatedNpu():
            return plain_run(self)

    threading.Thread.run = run  # type: ignore[method-assign]
