"""What a worker needs of whatever makes its tokens.

ModelRunner (model_runner.py) runs a real model, MockRunner (mock.py) answers by rule.
"""

from abc import ABC, abstractmethod

from engine.messages import ScheduleBatch, StepDone


class Runner(ABC):
    """What a worker needs of whatever makes its tokens."""

    device: str
    dtype: str
    sliding_window: int | None = None

    @abstractmethod
    def load(self) -> int:
        """Load the model; return the number of KV blocks that there is room for."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool and warm up."""

    @abstractmethod
    def execute(self, batch: ScheduleBatch) -> StepDone:
        """Run one step."""

    @abstractmethod
    def forget_all(self) -> None:
        """Forget every request, after a step that failed; each will be sent anew."""

    @abstractmethod
    def classify_error(self, error: BaseException) -> str:
        """Return the WorkerFailure of an exception of `execute`."""

    @abstractmethod
    def close(self) -> None:
        """Release model and memory."""
