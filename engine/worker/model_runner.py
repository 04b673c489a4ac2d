"""One step of a real model: build the input, run the modules, sample."""

import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from engine.backends import load_backend
from engine.backends.compile_cache import CompileCache
from engine.backends.profiler import StepProfiler
from engine.backends.weight_size import count_weight_bytes
from engine.config import EngineConfig
from engine.layers.decode_graphs import DecodeGraphs, GraphLimits, capture_sizes, count_spare_blocks
from engine.layers.kv_pool import PoolLimits, allocate_pool, count_blocks, run_largest_step
from engine.layers.model_input import ModelInput, SlotTable
from engine.layers.model_step import ModelStep
from engine.layers.pending_step import PendingStep
from engine.layers.row_check import check_rows
from engine.layers.step_scores import StepScores, asking_rows, score_step
from engine.layers.token_picker import TokenPicker
from engine.messages import ScheduleBatch, StartWorker
from engine.model_source import ModelSource
from engine.models import load_model
from engine.parallel import ParallelGroup, Rendezvous
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
        self._backend.check_dtype(self.dtype)
        self.block_size = config.cache.block_size or self._backend.capabilities.default_block_size
        self._backend.check_block_size(self.block_size)
        self._has_graphs = self._backend.has_graphs and not config.enforce_eager
        graph_sizes = capture_sizes(config.scheduler.max_num_seqs) if self._has_graphs else []
        self._cache = CompileCache.of(config, self._source, self._backend, graph_sizes)
        self._profiler = StepProfiler.of(config, self._backend, rank=start.rank)
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
            self._backend,
            block_size=self.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        self._picker = TokenPicker(self._backend, self._group, config.scheduler.max_num_seqs)
        self._newest: ModelStep | None = None  # of the steps that were launched
        self._graphs: DecodeGraphs | None = None

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
            PoolLimits(
                block_size=self.block_size,
                max_useful_tokens=self._config.scheduler.max_num_seqs * self._source.max_model_len,
                reserved_bytes=self._peak_bytes(),
                num_sharing_ranks=self._group.world_size if self._backend.name == "cpu" else 1,
            ),
        )

    def _peak_bytes(self) -> int:
        """Return what the largest step holds beyond weights and cache."""
        measure = partial(self._backend.measure_peak_bytes, self._run_largest_step)
        if self._backend.is_host or self._group.world_size > 1:  # see CompileCache.remember
            return measure()
        return self._cache.remember("peak_bytes", measure)

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        with self._model.attention.recording():
            run_largest_step(
                self._model.logits,
                self._backend.device,
                self._config.scheduler,
                self._source.max_model_len,
            )

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool, run one small step of each kind, and capture graphs."""
        max_num_seqs = self._config.scheduler.max_num_seqs
        num_spare = count_spare_blocks(max_num_seqs, self.block_size) if self._has_graphs else 0
        caches = allocate_pool(
            num_blocks + num_spare,
            self.block_size,
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
                block_size=self.block_size,
                num_tokens=min(num_blocks * self.block_size // 2, self._source.max_model_len),
            )
        if self._has_graphs:
            limits = GraphLimits(
                max_num_seqs=max_num_seqs,
                max_model_len=self._source.max_model_len,
                block_size=self.block_size,
                num_blocks=num_blocks,
            )
            self._graphs = DecodeGraphs(self._backend, self._forward, limits)
            self._graphs.capture()

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> PendingStep:
        """Begin one step; only token ids and asked-for log probabilities come to the host."""
        exactly = self._backend.row_exact() if self._config.deterministic else nullcontext()
        with self._profiler.step(batch), exactly:
            return self._launch(batch)

    def _launch(self, batch: ScheduleBatch) -> PendingStep:
        started_at = time.perf_counter()
        with self._profiler.phase("prepare"):
            step = self._slots.prepare(batch, self._picker.arrays)
        prepared_at = time.perf_counter()
        count = len(step.sampling)
        with self._backend.computing():
            with self._profiler.phase("forward"):
                self._picker.feed(step)
                replayed = self._graphs.replay(step) if self._graphs is not None else None
                logits = self._forward(step) if replayed is None else replayed
            computed_at = time.perf_counter()
            asking = asking_rows(step)
            raw = logits[asking] if asking else logits[:0]  # a copy: sampling changes the logits
            with self._profiler.phase("sample"):
                drawn = self._picker.pick(logits[:count], step, self._newest)
                fetched = self._backend.fetch(drawn)
        launched = ModelStep(
            batch.step_id,
            step,
            self._profiler.watch(batch.step_id, fetched),
            lambda drawn: self._score(raw, logits[count:], step, drawn),
            previous=self._newest,
        )
        launched.started_at, launched.prepared_at = started_at, prepared_at
        launched.is_graph_replay = replayed is not None
        if self._backend.is_host:
            launched.computed_at = computed_at
            launched.result()
        else:
            self._newest = launched
        return launched

    def _forward(self, step: ModelInput) -> torch.Tensor:
        """Return the logits that the step asks for, [rows, V]."""
        with self._model.attention.step(step.attention):
            return self._model.logits(step.input_ids, step.positions, step.logit_rows)

    @torch.inference_mode()
    def _score(
        self, raw: torch.Tensor, prompt_logits: torch.Tensor, step: ModelInput, drawn: list[int]
    ) -> StepScores:
        if self._group.rank > 0:
            return {}, {}  # only rank 0's answer counts
        with self._backend.computing():
            return score_step(raw, prompt_logits, step, drawn)

    def forget_all(self) -> None:
        """Forget every request."""
        self._slots.clear()
        self._newest = None

    def classify_error(self, error: BaseException) -> str:
        """Ask the backend what kind of trouble this is."""
        return self._backend.classify_error(error).value

    def explain_error(self, error: BaseException) -> str:
        """Ask the backend for words."""
        return self._backend.explain_error(error)

    def close(self) -> None:
        """Let go of the graphs, of the pool and of the model."""
        self._profiler.close()
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None
        self._newest = None
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
