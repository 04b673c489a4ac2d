"""One step of a real model: build the input, run the modules, sample."""

import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from engine.backends import load_backend
from engine.backends.weight_size import count_weight_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.logprobs import score
from engine.layers.sampler import sample
from engine.logprobs import ScoredPart, TokenLogprob
from engine.messages import ScheduleBatch, StartWorker, StepDone, WorkerTimings
from engine.model_source import ModelSource
from engine.models import load_model
from engine.parallel import ParallelGroup, Rendezvous
from engine.layers.kv_pool import allocate_pool, count_blocks
from engine.layers.model_input import ModelInput, SlotTable
from engine.worker.row_check import check_rows
from engine.worker.runner import Runner

_GIB = 1 << 30


class ModelRunner(Runner):
    """Runs a transformers model on one device."""

    def __init__(self, config: EngineConfig, start: StartWorker) -> None:
        self._config = config
        self._source = ModelSource.inspect(config)
        self._backend = load_backend(config.device)
        self._backend.check_device(start.device_id)
        num_threads = share_of_threads(config.runtime.num_threads, start.world_size)
        self.device = self._backend.bind(start.device_id, num_threads)
        self.dtype = self._source.dtype
        if self.dtype not in self._backend.capabilities.dtypes:
            raise ConfigError(
                f"dtype {self.dtype} does not run on {self.device}; set engine.dtype to one of "
                f"{', '.join(self._backend.capabilities.dtypes)}"
            )
        if config.deterministic:
            self._backend.row_exact()  # refuses before anything is loaded
        # Before the ranks meet, so that none loads while another still looks at what is free.
        self._check_memory(start.world_size)
        self._group = ParallelGroup.join(
            Rendezvous(
                folder=Path(start.rendezvous_dir),
                rank=start.rank,
                world_size=start.world_size,
                # A rank that hangs is the main process's affair, see watchdog_seconds.
                timeout_seconds=max(
                    config.runtime.start_timeout_seconds, config.runtime.watchdog_seconds
                ),
            ),
            self._backend.dist_backend,
        )
        self._slots = SlotTable(
            block_size=config.cache.block_size,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def _check_memory(self, world_size: int) -> None:
        cache = self._config.cache
        cache_gib = 0.0 if cache.num_blocks is not None else cache.kv_cache_gib or 0.0
        weight_bytes = count_weight_bytes(
            self._source.path,
            getattr(torch, self.dtype),
            num_copies=world_size if self._backend.name == "cpu" else 1,
        )
        self._backend.check_memory(
            weight_bytes + int(cache_gib * _GIB),
            f"weights {weight_bytes / _GIB:.2f} in {self.dtype}, KV cache {cache_gib:.2f}",
        )

    def load(self) -> int:
        """Load the weights; return the number of KV blocks that there is room for."""
        self._model = load_model(
            Path(self._config.model_path),
            dtype=self.dtype,
            backend=self._backend,
            group=self._group,
            trust_remote_code=self._config.trust_remote_code,
        )
        self.sliding_window = self._model.sliding_window
        return count_blocks(
            self._config.cache,
            self._model.kv_layouts,
            self._model.dtype,
            self._backend,
            max_useful_tokens=self._config.scheduler.max_num_seqs * self._source.max_model_len,
            num_sharing_ranks=self._group.world_size if self._backend.name == "cpu" else 1,
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool and run one small step of each kind, which compiles kernels."""
        caches = allocate_pool(
            num_blocks,
            self._config.cache.block_size,
            self._model.kv_layouts,
            self._model.dtype,
            self._backend,
        )
        self._model.attention.bind_caches(caches)
        self._backend.warm_up(caches[0])
        if self._config.deterministic:
            check_rows(
                self._model,
                self._backend,
                block_size=self._config.cache.block_size,
                num_tokens=min(
                    num_blocks * self._config.cache.block_size // 2, self._source.max_model_len
                ),
            )

    @torch.inference_mode()
    def execute(self, batch: ScheduleBatch) -> StepDone:
        """Run one step; only token ids and asked-for log probabilities come back to the host."""
        with self._backend.row_exact() if self._config.deterministic else nullcontext():
            return self._execute(batch)

    def _execute(self, batch: ScheduleBatch) -> StepDone:
        started = time.perf_counter()
        step = self._slots.prepare(batch, self._backend.device)
        prepared = time.perf_counter()
        with self._model.attention.step(step.attention):
            logits = self._model.logits(step.input_ids, step.positions, step.logit_rows)
        self._backend.synchronize()
        computed = time.perf_counter()
        token_ids, logprobs = self._sample(logits[: len(step.sampling)], step)
        for slot, token_id in zip(step.sampling, token_ids, strict=True):
            slot.token_ids.append(token_id)
        return StepDone(
            step_id=batch.step_id,
            uids=[slot.uid for slot in step.sampling],
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._score_prompts(logits[len(step.sampling) :], step),
            timings=WorkerTimings(
                prepare_seconds=prepared - started,
                forward_seconds=computed - prepared,
                sample_seconds=time.perf_counter() - computed,
            ),
        )

    def _sample(
        self, logits: torch.Tensor, step: ModelInput
    ) -> tuple[list[int], dict[int, TokenLogprob]]:
        """Return the tokens that rank 0 drew, and there their log probabilities by uid.

        The others do not draw: a plan may leave the last layer whole, and where each rank computes
        logits for itself, one that rounds otherwise would disagree on a token, and ever after.
        """
        slots = step.sampling
        if not slots:
            return [], {}
        if self._group.rank > 0:
            return self._group.broadcast_numbers([0] * len(slots)), {}
        asked = [row for row, slot in enumerate(slots) if slot.sampler.logprobs is not None]
        raw = logits[asked] if asked else logits[:0]  # a copy: sampling changes the logits
        token_ids = self._group.broadcast_numbers(sample(logits, slots))
        scores = score(
            raw,
            [token_ids[row] for row in asked],
            [slots[row].sampler.logprobs or 0 for row in asked],
        )
        return token_ids, {slots[row].uid: found for row, found in zip(asked, scores, strict=True)}

    def _score_prompts(self, logits: torch.Tensor, step: ModelInput) -> dict[int, ScoredPart]:
        """Return the log probabilities of prompt tokens by uid; the logits are theirs, in order."""
        parts: dict[int, ScoredPart] = {}
        if self._group.rank > 0:
            return parts
        start = 0
        for span in step.scored:
            count = len(span.token_ids)
            num_top = span.slot.sampler.prompt_logprobs or 0
            found = score(logits[start : start + count], span.token_ids, [num_top] * count)
            parts[span.slot.uid] = ScoredPart(span.start, found)
            start += count
        return parts

    def forget_all(self) -> None:
        """Forget every request."""
        self._slots.clear()

    def classify_error(self, error: BaseException) -> str:
        """Ask the backend what kind of trouble this is."""
        return self._backend.classify_error(error).value

    def close(self) -> None:
        """Let go of the pool and of the model."""
        if hasattr(self, "_model"):
            self._model.attention.bind_caches(())
            del self._model
        self._group.leave()


def share_of_threads(num_threads: int | None, world_size: int) -> int | None:
    """Return the CPU threads of one rank; None leaves them to the backend.

    Ranks have equal numbers: a product may round otherwise with another number of threads, and
    what ranks compute alike, such as the choice of experts, must be alike.
    """
    if world_size == 1:
        return num_threads
    return max(1, (num_threads or len(os.sched_getaffinity(0))) // world_size)
