"""A step that was launched: of a model, or of the mock. torch is not needed for it."""

from abc import ABC, abstractmethod

from engine.messages import StepDone


class PendingStep(ABC):
    """A step that was launched, and its answer when that is there."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Tell whether `result` would not wait."""

    @abstractmethod
    def result(self) -> StepDone:
        """Wait for the answer; raises what went wrong on the device."""


class Answered(PendingStep):
    """A step whose answer is there."""

    def __init__(self, answer: StepDone) -> None:
        self._answer = answer

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def result(self) -> StepDone:
        """Return the answer."""
        return self._answer
