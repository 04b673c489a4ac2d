"""What a device must be able to do. Where it has no kernel of its own, the reference serves.

Shapes: T scheduled tokens, R requests or rows, B blocks per row, N blocks in the pool, S block
size, H query heads, G key-value heads, D width of a key, E width of a value, M hidden size,
I width of the feed-forward layer, V vocabulary.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from engine.backends import reference
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.errors import ConfigError, WorkerError, WorkerFailure

_GIB = 1 << 30
Array = np.ndarray[Any, np.dtype[Any]]
Caches = tuple[torch.Tensor, torch.Tensor]  # keys [N, S, G, D] and values [N, S, G, E] of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Bytes of the device."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHolder:
    """A process that has a device for itself."""

    pid: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can run; checked before anything is loaded."""

    dtypes: tuple[str, ...]
    default_memory_fraction: float
    default_block_size: int = 16


class Fetched(ABC):
    """Numbers on their way from the device to the host."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Tell whether they are there; never waits."""

    @abstractmethod
    def numpy(self) -> Array:
        """Wait for them, and return them. What went wrong on the device may be raised here."""


class CapturedGraph(ABC):
    """Work of a decode step that the device can do again without being told each kernel."""

    @abstractmethod
    def replay(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Do it on what the captured input tensors hold now; return the same output tensor.

        metadata is that of the step: some devices want its host lists anew.
        """


class Profile(Protocol):
    """What torch.profiler.profile does, and the profilers of other devices too."""

    def start(self) -> None:
        """Begin to record what this thread does, and the device for it."""

    def stop(self) -> None:
        """Record no more."""

    def export_chrome_trace(self, path: str) -> None:
        """Write what was recorded as JSON."""


class DeviceBackend(ABC):
    """Runtime, KV memory and kernels of one kind of device."""

    name: str
    dist_backend: str  # what joins ranks on this kind of device, in torch.distributed's names
    capabilities: Capabilities
    # True where tensors lie in the host's memory and every call is done when it returns.
    is_host: bool = False
    slot_dtype: torch.dtype = torch.int64  # of slot mappings
    # True where fewer and larger operations pay, so that llama-shaped layers are replaced.
    prefers_fused_layers: bool = True
    # True where attention costs what block tables are wide, so that graphs for narrow ones pay.
    reads_whole_tables: bool = False

    @abstractmethod
    def count_devices(self) -> int:
        """Return how many devices of this kind there are; their ids count from 0."""

    def holders(self, device_id: int) -> tuple[DeviceHolder, ...]:
        """Return the other processes that hold a device.

        Nobody holds the CPU: processes share it, and its free memory says what they leave.
        """
        return ()

    def check_device(self, device_id: int) -> None:
        """Refuse a device that cannot be had, before it is bound.

        Raises:
            ConfigError: there is no such device.
            WorkerError: another process holds it.
        """
        count = self.count_devices()
        if not 0 <= device_id < count:
            raise ConfigError(
                f"engine.device_ids has {device_id}, but this machine has {count} device(s) of "
                f"kind {self.name}, counted from 0; change engine.device_ids"
            )
        holders = [holder for holder in self.holders(device_id) if holder.pid != os.getpid()]
        if holders:
            names = ", ".join(
                f"pid {holder.pid} ({holder.used_bytes / _GIB:.1f} GiB)" for holder in holders
            )
            raise WorkerError(
                f"{self.name} {device_id} is held by {names}; end that, or take another one in "
                "engine.device_ids",
                failure=WorkerFailure.START_FAILED,
            )

    def check_memory(self, needed_bytes: int, purpose: str) -> None:
        """Refuse to load what the bound device has no room for, before anything is loaded.

        Raises:
            ConfigError: there will never be room.
            WorkerError: there is none now.
        """
        memory = self.memory_info()
        found = (
            f"not enough memory on {self.name}: {needed_bytes / _GIB:.2f} GiB are needed "
            f"({purpose}), and {memory.free_bytes / _GIB:.2f} of {memory.total_bytes / _GIB:.2f} "
            "GiB are free"
        )
        if needed_bytes > memory.total_bytes:
            raise ConfigError(
                f"{found}; take a smaller model, or a smaller engine.dtype or KV cache (engine.cache)"
            )
        if needed_bytes > memory.free_bytes:
            raise WorkerError(
                f"{found}; end what else runs there, or give the KV cache less (engine.cache)",
                failure=WorkerFailure.START_FAILED,
            )

    @abstractmethod
    def bind(self, device_id: int, num_threads: int | None) -> str:
        """Take the device for this process; return what was really bound, in words."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The bound device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return free and total memory."""

    def release_memory(self) -> None:  # noqa: B027 - most keep nothing
        """Give back what an allocator keeps for later, so that memory_info counts it as free."""

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Run something; return the most bytes that it held beyond what was held before.

        Where memory is the host's, nothing is run: the free memory of a host is an estimate.
        """
        return 0

    @abstractmethod
    def classify_error(self, error: BaseException) -> WorkerFailure:
        """Say what kind of trouble an exception of a step is."""

    def explain_error(self, error: BaseException) -> str:
        """Return an exception of a step in words: what it means, and what to do."""
        return repr(error)

    def check_dtype(self, dtype: str) -> None:
        """Refuse a dtype that the device does not compute in.

        Raises:
            ConfigError: with those that it does.
        """
        if dtype not in self.capabilities.dtypes:
            raise ConfigError(
                f"dtype {dtype} does not run on {self.name}; set engine.dtype to one of "
                f"{', '.join(self.capabilities.dtypes)}"
            )

    def check_block_size(self, block_size: int) -> None:  # noqa: B027 - most take any
        """Refuse a KV block size that the kernels cannot use.

        Raises:
            ConfigError: with the sizes that they can.
        """

    def check_attention(  # noqa: B027 - most take any
        self,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: AttentionOptions,
    ) -> None:
        """Refuse a layer that `attention` cannot serve; query, key and value are its own.

        Called for each layer when the model is loaded, with states as in PagedAttention.

        Raises:
            ConfigError: which property of the layer it is.
        """

    def make_profile(self, scratch: Path) -> Profile:
        """Return a profile, not started, of what this process and its device do.

        scratch is an empty folder for what it must write on its way; it is removed when the trace
        has been exported.
        """
        if self.is_host:
            return profile(activities=[ProfilerActivity.CPU])
        return profile(activities=supported_activities())  # type: ignore[no-untyped-call]

    def kernel_facts(self) -> dict[str, str]:
        """Say what compiled kernels and measured numbers depend on besides our own versions.

        The bound device's product name, the same for all devices of its kind, and the versions of
        what compiles for it.
        """
        return {"device": self.name}

    def keep_kernels(self, folder: Path) -> None:  # noqa: B027 - most compile nothing
        """Keep in a folder, and take from it, what is compiled from now on."""

    # Between host and device.

    def computing(self) -> AbstractContextManager[None]:
        """Put what is launched in this context on the stream that computes."""
        return nullcontext()

    @abstractmethod
    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Bring a step's arrays to the device; what computes waits for them, the host does not.

        The arrays may be changed when this returns. The tensors are good until the upload after
        the next, so there are never more than two steps in flight.
        """

    @abstractmethod
    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """Begin to bring a small tensor to the host, when what computes it is done."""

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture what `run` launches; it has run once before, so that kernels are compiled.

        Raises:
            ConfigError: this kind of device has no graphs.
        """
        raise ConfigError(f"device {self.name} has no graphs; set engine.enforce_eager to true")

    @property
    def has_graphs(self) -> bool:
        """Tell whether `capture_graph` works."""
        return False

    # Kernels.

    def warm_up(self, caches: Caches) -> None:
        """Run each attention kernel once on a layer's empty caches, which compiles it."""
        num_heads, width = caches[0].shape[2:]
        query = torch.zeros(3, num_heads, width, dtype=caches[0].dtype, device=self.device)
        lens = [1, 2]
        metadata = AttentionMetadata(
            query_lens=lens,
            seq_lens=lens,
            slot_mapping=torch.zeros(3, dtype=self.slot_dtype, device=self.device),
            block_tables=torch.zeros(2, 2, dtype=torch.int32, device=self.device),
            seq_lens_tensor=torch.tensor(lens, dtype=torch.int32, device=self.device),
        )
        self.attention(query, caches, metadata, AttentionOptions(scale=1.0))

    def row_exact(self) -> AbstractContextManager[None]:
        """Serve forward passes in which a row's bits depend on that row's own tokens only.

        Raises:
            ConfigError: this kind of device cannot do it.
        """
        raise ConfigError(
            f"engine.deterministic is true, but on device {self.name} the last bits of a row "
            "depend on the rows beside it; set engine.device to cpu, or engine.deterministic to "
            "false"
        )

    def allocate_kv(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed KV memory [N, S, G, D]."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def write_kv(self, states: Caches, caches: Caches, slot_mapping: torch.Tensor) -> None:
        """Write keys [T, G, D] and values [T, G, E] to their slots of a layer's caches."""
        for state, cache in zip(states, caches, strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, state)

    @abstractmethod
    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend query [T, H, D] to caches ([N, S, G, D], [N, S, G, E]); return [T, H, E].

        Row i of a request with n tokens in this step and L in all sees keys 0 to L - n + i. The
        step's own keys and values are written already.
        """

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Normalise hidden [T, M] by its root mean square and weight [M]."""
        return reference.rms_norm(hidden, weight, epsilon)

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum of hidden and residual [T, M], and the sum."""
        summed = hidden + residual
        return self.rms_norm(summed, weight, epsilon), summed

    def rotary(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn states [T, H, D] by the angles of their positions, cos and sin [T, D]."""
        return reference.rotary(states, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [T, I] of the two halves of gate_up [T, 2 I]."""
        return reference.silu_mul(gate_up)

    def top_k_top_p(
        self,
        logits: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *,
        max_top_k: int,
    ) -> torch.Tensor:
        """Return float32 logits [R, V] with minus infinity for what the filters leave out.

        top_k [R] int32 is at most max_top_k, a number that the host knows, and that at most V;
        top_p [R] is float32; None filters nothing.
        """
        return reference.top_k_top_p(logits, top_k, top_p)
