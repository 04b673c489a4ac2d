"""One step of a model on its way: from the launch to the answer."""

import time
from collections.abc import Callable

from engine.backends.base import Fetched
from engine.layers.model_input import ModelInput
from engine.layers.pending_step import PendingStep
from engine.layers.step_scores import StepScores
from engine.messages import StepDone, WorkerTimings

Score = Callable[[list[int]], StepScores]  # of the tokens that were drawn


class ModelStep(PendingStep):
    """Gives each slot its token when the host has it.

    prepared_at is when the step's input was written, computed_at when its logits were there; where
    the host does not know yet, None. previous is the step before, which ends first.
    """

    def __init__(
        self,
        step_id: int,
        step: ModelInput,
        fetched: Fetched,
        score: Score,
        *,
        previous: "ModelStep | None",
    ) -> None:
        self._step_id = step_id
        self._step = step
        self._fetched = fetched
        self._score = score
        self._previous = previous
        self._answer: StepDone | None = None
        self.started_at = self.prepared_at = 0.0
        self.computed_at: float | None = None
        self.is_graph_replay = False
        for slot in step.sampling:
            slot.num_pending += 1

    def is_ready(self) -> bool:
        """Ask the device."""
        return self._answer is not None or self._fetched.is_ready()

    def result(self) -> StepDone:
        """Wait for the tokens, and write them to the slots of their requests."""
        if self._answer is None:
            self._answer = self._finish()
            self._previous = None  # or every step of a run would be kept
        return self._answer

    def _finish(self) -> StepDone:
        if self._previous is not None:
            self._previous.result()
        token_ids: list[int] = self._fetched.numpy().tolist()
        if self.computed_at is None:
            self.computed_at = time.perf_counter()
        sampling = self._step.sampling
        for slot, token_id in zip(sampling, token_ids, strict=True):
            slot.token_ids.append(token_id)
            slot.num_pending -= 1
        logprobs, prompt_logprobs = self._score(token_ids)
        return StepDone(
            step_id=self._step_id,
            uids=[slot.uid for slot in sampling],
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            is_graph_replay=self.is_graph_replay,
            timings=self._timings(self.computed_at),
        )

    def _timings(self, computed_at: float) -> WorkerTimings:
        began_at = self.prepared_at
        if self._previous is not None and self._previous.computed_at is not None:
            began_at = max(began_at, self._previous.computed_at)  # the device was not idle before
        return WorkerTimings(
            prepare_seconds=self.prepared_at - self.started_at,
            forward_seconds=computed_at - began_at,
            sample_seconds=time.perf_counter() - computed_at,
        )
