"""A device without a model: answers by rule, so that a whole job runs on any machine.

The answer is a function of the prompt's tokens, the sampling key and the seed, so it depends on
nothing that a kill, a batch or another number of shards could change.
"""

import logging
import os
import signal
import time
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from engine.config import EngineConfig
from engine.errors import WorkerFailure
from engine.layers.pending_step import Answered, PendingStep
from engine.logprobs import ScoredPart, TokenLogprob
from engine.messages import NewRequest, SamplerSpec, ScheduleBatch, StepDone, WorkerTimings
from engine.model_source import MOCK_EOS_TOKEN_ID
from engine.worker.runner import Runner

logger = logging.getLogger(__name__)
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz      ."
_FIRST_BYTE = 3
_MAX_ANSWER_TOKENS = 48
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_NUM_BLOCKS = 16384


class _DeviceLostError(Exception):
    """The mock device is gone, as mock_device_lost_after_steps demands."""


@dataclass(slots=True, kw_only=True)
class _Answer:
    prompt_token_ids: list[int]
    token_ids: list[int]
    num_output_tokens: int
    num_tokens: int
    num_computed_tokens: int
    sampler: SamplerSpec


class MockRunner(Runner):
    """Each prompt has one answer, known from its tokens."""

    device = "mock"
    dtype = "none"

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.cache.block_size or _DEFAULT_BLOCK_SIZE
        self._step_seconds = config.runtime.mock_step_seconds
        self._num_blocks = config.cache.num_blocks or _DEFAULT_NUM_BLOCKS
        self._max_tokens = config.runtime.mock_max_step_tokens
        self._crash_text = (config.runtime.mock_crash_text or "").encode()
        self._steps_until_lost = config.runtime.mock_device_lost_after_steps
        self._answers: dict[int, _Answer] = {}

    def load(self) -> int:
        """Return the number of blocks that the configuration names, or a middling one."""
        return self._num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Do nothing: there is no memory."""

    def launch(self, batch: ScheduleBatch) -> PendingStep:
        """Give each request that is computed to its end the next token of its answer."""
        started = time.perf_counter()
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._play_trouble(batch)
        for uid in (*batch.preempted, *batch.finished):
            self._answers.pop(uid, None)
        scheduled = [(item.uid, item.num_scheduled_tokens) for item in batch.running]
        for new in batch.new:
            self._answers[new.uid] = _answer(new)
            scheduled.append((new.uid, new.num_scheduled_tokens))
        num_tokens = sum(count for _, count in scheduled)
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise MemoryError(f"the mock device has no memory for {num_tokens} tokens")
        tokens: dict[int, int] = {}
        scores: dict[int, ScoredPart] = {}
        for uid, count in scheduled:
            answer = self._answers[uid]
            if answer.sampler.prompt_logprobs is not None:
                scores[uid] = _score_prompt(answer, count)
            answer.num_computed_tokens += count
            is_computed = answer.num_computed_tokens == answer.num_tokens
            if is_computed and not answer.sampler.is_scoring_only:
                tokens[uid] = _next_token(answer)
        done = StepDone(
            step_id=batch.step_id,
            uids=list(tokens),
            token_ids=list(tokens.values()),
            logprobs={
                uid: _score(token, self._answers[uid].sampler.logprobs)
                for uid, token in tokens.items()
                if self._answers[uid].sampler.logprobs is not None
            },
            prompt_logprobs=scores,
            timings=WorkerTimings(forward_seconds=time.perf_counter() - started),
        )
        return Answered(done)

    def classify_error(self, error: BaseException) -> str:
        """Tell the mock's own lack of memory from a bug."""
        if isinstance(error, _DeviceLostError):
            return WorkerFailure.DEVICE_LOST.value
        is_memory = isinstance(error, MemoryError)
        return (WorkerFailure.OUT_OF_MEMORY if is_memory else WorkerFailure.OTHER).value

    def forget_all(self) -> None:
        """Forget every request."""
        self._answers = {}

    def close(self) -> None:
        """Forget every answer."""
        self._answers = {}

    def _play_trouble(self, batch: ScheduleBatch) -> None:
        """Die of a poison row, or lose the device, where the configuration says so."""
        if self._crash_text and any(self._is_poison(new) for new in batch.new):
            logger.error("step %d has a row with mock_crash_text", batch.step_id)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._steps_until_lost is not None:
            self._steps_until_lost -= 1
            if self._steps_until_lost < 0:
                raise _DeviceLostError("the mock device is lost")

    def _is_poison(self, new: NewRequest) -> bool:
        """Tell whether the text is in a prompt: the mock's tokens are bytes."""
        values = (token - _FIRST_BYTE for token in new.token_ids[: new.num_prompt_tokens])
        return self._crash_text in bytes(value for value in values if 0 <= value < 256)


def _answer(new: NewRequest) -> _Answer:
    prompt = np.asarray(new.token_ids[: new.num_prompt_tokens], np.int32).tobytes()
    sampler = new.sampler
    key = (
        f"{sampler.seed}/{sampler.sampling_key}/{sampler.sample_index}"
        if sampler.temperature
        else ""
    )
    digest = blake2b(prompt + key.encode(), digest_size=_MAX_ANSWER_TOKENS + 1).digest()
    length = 1 + digest[0] % _MAX_ANSWER_TOKENS
    letters = [_ALPHABET[byte % len(_ALPHABET)] + _FIRST_BYTE for byte in digest[1 : 1 + length]]
    return _Answer(
        prompt_token_ids=new.token_ids[: new.num_prompt_tokens],
        token_ids=[*letters, MOCK_EOS_TOKEN_ID],
        num_output_tokens=len(new.token_ids) - new.num_prompt_tokens,
        num_tokens=len(new.token_ids),
        num_computed_tokens=new.num_computed_tokens,
        sampler=sampler,
    )


def _next_token(answer: _Answer) -> int:
    """Return the next token; past the end of the answer, a dot until EOS may come."""
    index = answer.num_output_tokens
    answer.num_output_tokens += 1
    answer.num_tokens += 1
    is_early = index < answer.sampler.min_tokens
    last = len(answer.token_ids) - 1
    if index < last:
        return answer.token_ids[index]
    return _ALPHABET[-1] + _FIRST_BYTE if is_early else MOCK_EOS_TOKEN_ID


def _score_prompt(answer: _Answer, count: int) -> ScoredPart:
    start = answer.num_computed_tokens + 1
    token_ids = answer.prompt_token_ids[start : start + count]
    return ScoredPart(start, [_score(t, answer.sampler.prompt_logprobs) for t in token_ids])


def _score(token_id: int, num_top: int | None) -> TokenLogprob:
    """Call a token certain, as the only one that the rule allows."""
    return TokenLogprob(token_id, 0.0, 1, ((token_id, 0.0),) if num_top else ())
