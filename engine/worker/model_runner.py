"""One step of a real model: build the input, run the modules, sample."""

import time
from pathlib import Path

import torch

from engine.backends import load_backend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import ScheduleBatch, StepDone, WorkerTimings
from engine.model_source import ModelSource
from engine.models import load_model
from engine.worker.kv_pool import allocate_pool, count_blocks
from engine.worker.model_input import SlotTable
from engine.worker.runner import Runner
from engine.worker.sampler import sample


class ModelRunner(Runner):
    """Runs a transformers model on one device."""

    def __init__(self, config: EngineConfig, device_id: int) -> None:
        self._config = config
        self._source = ModelSource.inspect(config)
        self._backend = load_backend(config.device)
        self.device = self._backend.bind(device_id, config.runtime.num_threads)
        self.dtype = self._source.dtype
        if self.dtype not in self._backend.capabilities.dtypes:
            raise ConfigError(
                f"dtype {self.dtype} does not run on {self.device}; set engine.dtype to one of "
                f"{', '.join(self._backend.capabilities.dtypes)}"
            )
        self._slots = SlotTable(
            block_size=config.cache.block_size,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def load(self) -> int:
        """Load the weights; return the number of KV blocks that there is room for."""
        self._model = load_model(
            Path(self._config.model_path),
            dtype=self.dtype,
            backend=self._backend,
            trust_remote_code=self._config.trust_remote_code,
        )
        return count_blocks(
            self._config.cache,
            self._model.kv_layouts,
            self._model.dtype,
            self._backend,
            max_useful_tokens=self._config.scheduler.max_num_seqs * self._source.max_model_len,
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

    @torch.inference_mode()
    def execute(self, batch: ScheduleBatch) -> StepDone:
        """Run one step; only the sampled token ids come back to the host."""
        started = time.perf_counter()
        step = self._slots.prepare(batch, self._backend.device)
        prepared = time.perf_counter()
        with self._model.attention.step(step.attention):
            logits = self._model.logits(step.input_ids, step.positions, step.sample_rows)
        self._backend.synchronize()
        computed = time.perf_counter()
        token_ids = sample(logits, step.sampling) if step.sampling else []
        for slot, token_id in zip(step.sampling, token_ids, strict=True):
            slot.token_ids.append(token_id)
        return StepDone(
            step_id=batch.step_id,
            uids=[slot.uid for slot in step.sampling],
            token_ids=token_ids,
            timings=WorkerTimings(
                prepare_seconds=prepared - started,
                forward_seconds=computed - prepared,
                sample_seconds=time.perf_counter() - computed,
            ),
        )

    def classify_error(self, error: BaseException) -> str:
        """Ask the backend what kind of trouble this is."""
        return self._backend.classify_error(error).value

    def close(self) -> None:
        """Let go of the pool and of the model."""
        if hasattr(self, "_model"):
            self._model.attention.bind_caches(())
            del self._model
