"""What a worker needs of whatever makes its tokens.

ModelRunner (model_runner.py) runs a real model, MockRunner (mock.py) answers by rule.
"""

from abc import ABC, abstractmethod

from engine.layers.pending_step import PendingStep
from engine.messages import ScheduleBatch


class Runner(ABC):
    """What a worker needs of whatever makes its tokens."""

    device: str
    dtype: str
    block_size: int
    sliding_window: int | None = None

    @abstractmethod
    def load(self) -> int:
        """Load the model; return the number of KV blocks that there is room for."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool and warm up."""

    @abstractmethod
    def launch(self, batch: ScheduleBatch) -> PendingStep:
        """Begin one step. Another may be launched before its answer is there, but no third."""

    @abstractmethod
    def forget_all(self) -> None:
        """Forget every request, after a step that failed; each will be sent anew."""

    @abstractmethod
    def classify_error(self, error: BaseException) -> str:
        """Return the WorkerFailure of an exception of a step."""

    def explain_error(self, error: BaseException) -> str:
        """Return an exception of a step in words."""
        return repr(error)

    @abstractmethod
    def close(self) -> None:
        """Release model and memory."""
