"""Ascend NPUs (Atlas A2 and A3) through torch_npu: its streams, memory, and fused operators.

No NPU was at hand when this was written. It rests on torch_npu's documentation and schemas, and
runs on a simulated device (tests/npu_sim), which proves our reading of them and nothing else.

Shapes: as in base.py.
"""

import logging
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from engine.backends import reference
from engine.backends.accelerator import AcceleratorBackend
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches, Capabilities, CapturedGraph, DeviceHolder, Profile
from engine.backends.cann import read_installation
from engine.backends.npu_attention import FusedAttention, as_tensor
from engine.backends.npu_capabilities import AttentionChecks, check_block_size, check_cache
from engine.backends.npu_devices import VisibleDevices, check_chip, read_holders
from engine.backends.npu_environment import load_torch_npu, reason_without_graphs
from engine.backends.npu_errors import NpuTrouble, read_trouble
from engine.backends.npu_graphs import GraphCapture
from engine.errors import ConfigError, WorkerError, WorkerFailure

logger = logging.getLogger(__name__)

_DTYPES = ("float16", "bfloat16")
_MAX_TOP_K = 1024  # of npu_top_k_top_p
_MAX_ROTARY_WIDTH = 896  # of npu_rotary_mul, and the width is even


class NpuBackend(AcceleratorBackend):
    """One Ascend NPU. Nothing in here waits for the device but what says so."""

    name = "npu"
    dist_backend = "hccl"
    slot_dtype = torch.int32
    capabilities = Capabilities(dtypes=_DTYPES, default_memory_fraction=0.9, default_block_size=128)

    def __init__(self) -> None:
        """Import torch_npu; a ConfigError says what is missing."""
        self._torch_npu = load_torch_npu()
        super().__init__(self._torch_npu.npu)
        self._visible = VisibleDevices.of(os.environ)
        self._attention_checks = AttentionChecks()
        self._chip = ""

    def holders(self, device_id: int) -> tuple[DeviceHolder, ...]:
        """Ask npu-smi who else is on the device."""
        return read_holders(self._visible.physical_id(device_id))

    def check_device(self, device_id: int) -> None:
        """Refuse a device that cannot be had, in the numbers of ASCEND_RT_VISIBLE_DEVICES too."""
        self._visible.check(device_id, self.count_devices())
        super().check_device(device_id)

    def bind(self, device_id: int, num_threads: int | None) -> str:
        """Take the device for this process; say which one of the machine it really is.

        Raises:
            ConfigError: its chip lacks the kernels.
            WorkerError: the driver does not give it.
        """
        self._visible.check(device_id, self.count_devices())
        try:
            self._api.set_device(device_id)
            self._chip = str(self._api.get_device_name(device_id))
            self._api.synchronize()  # a card that is lost says so here
        except RuntimeError as error:
            raise WorkerError(
                f"npu {device_id} cannot be bound: {self.explain_error(error)}",
                failure=WorkerFailure.START_FAILED,
            ) from error
        if (warning := check_chip(self._chip)) is not None:
            logger.warning("npu: %s", warning)
        # Kernels of CANN's own, not compiled for every new shape; A2 and A3 have them for all.
        self._api.set_compile_mode(jit_compile=False)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = torch.device("npu", device_id)
        words = self._visible.describe(device_id, self._chip)
        logger.info("bound %s", words)
        return words

    def classify_error(self, error: BaseException) -> WorkerFailure:
        """Say what kind of trouble an exception is."""
        return _read(error).failure

    def explain_error(self, error: BaseException) -> str:
        """Return an exception in words: Ascend's codes, what they mean, and what to do."""
        return f"{type(error).__name__}: {_read(error).words}"

    def check_block_size(self, block_size: int) -> None:
        """Refuse a KV block size that the kernels do not page by."""
        check_block_size(block_size)

    def check_attention(
        self,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: AttentionOptions,
    ) -> None:
        """Refuse a layer that the operator cannot serve."""
        self._attention_checks.check(states, options)

    def make_profile(self, scratch: Path) -> Profile:
        """Return torch_npu's profile, which takes in the device; it writes to scratch on its way.

        Source: torch_npu 2.13.0, torch_npu.profiler. It has not recorded a card.
        """
        profiler = self._torch_npu.profiler
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        raw_data = profiler.tensorboard_trace_handler(str(scratch), analyse_flag=False)
        made: Profile = profiler.profile(activities=activities, on_trace_ready=raw_data)
        return made

    def kernel_facts(self) -> dict[str, str]:
        """Say what compiled kernels and measured numbers depend on besides our own versions."""
        toolkit = read_installation().toolkit
        return {
            "device": self._chip,
            "torch_npu": str(self._torch_npu.__version__),
            "cann": (toolkit.version if toolkit is not None else None) or "unknown",
        }

    def keep_kernels(self, folder: Path) -> None:
        """Keep in a folder the operators that CANN compiles because it has none ready."""
        self._api.set_option(
            {"ACL_OP_COMPILER_CACHE_MODE": "enable", "ACL_OP_COMPILER_CACHE_DIR": str(folder)}
        )

    # Between host and device.

    @cached_property
    def _capture(self) -> GraphCapture:
        return GraphCapture(self._api, self._transfers.compute)

    @cached_property
    def has_graphs(self) -> bool:
        """Tell whether this environment can capture graphs."""
        if (reason := reason_without_graphs()) is not None:
            logger.warning("npu: %s; every kernel of a decode step is launched anew", reason)
        return reason is None

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture what run launches.

        Raises:
            ConfigError: the environment forbids it.
        """
        if not self.has_graphs:
            raise ConfigError(f"{reason_without_graphs()}; set engine.enforce_eager to true")
        return self._capture.capture(run)

    # Kernels.

    @cached_property
    def _attention(self) -> FusedAttention:
        return FusedAttention(self._torch_npu, self.device)

    def allocate_kv(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed KV memory [N, S, G, D].

        Raises:
            ConfigError: it has more numbers than the operator can count.
        """
        check_cache(shape)
        return super().allocate_kv(shape, dtype)

    def write_kv(self, states: Caches, caches: Caches, slot_mapping: torch.Tensor) -> None:
        """Write keys and values [T, G, D] to their slots of a layer's caches."""
        self._attention.write(states, caches, slot_mapping)

    def attention(
        self,
        query: torch.Tensor,
        caches: Caches,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend by one call of the fused operator, whatever rows the step has."""
        return self._attention.attend(query, caches, metadata, options)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Normalise hidden [T, M] by its root mean square and weight [M]."""
        return as_tensor(self._torch_npu.npu_rms_norm(hidden, weight, epsilon)[0])

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum of hidden and residual [T, M], and the sum."""
        normed, _, summed = self._torch_npu.npu_add_rms_norm(hidden, residual, weight, epsilon)
        return normed, summed

    def rotary(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn states [T, H, D] by the angles of their positions, cos and sin [T, D].

        As layout BSND with one batch: a batch of more than 999 is not documented, T may be more.
        """
        width = states.shape[-1]
        if width % 2 or width >= _MAX_ROTARY_WIDTH:
            return reference.rotary(states, cos, sin)
        angles = (cos[None, :, None], sin[None, :, None])
        return as_tensor(self._torch_npu.npu_rotary_mul(states[None], *angles)[0])

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [T, I] of the two halves of gate_up [T, 2 I]."""
        return as_tensor(self._torch_npu.npu_swiglu(gate_up, -1))

    def top_k_top_p(
        self,
        logits: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *,
        max_top_k: int,
    ) -> torch.Tensor:
        """Return logits [R, V] with minus infinity for what the filters leave out.

        The operator keeps all tokens that equal the k-th, where the reference takes the first.
        It takes no k above 1024, and such a batch goes through the reference, on the device.
        """
        if top_k is None and top_p is None:
            return logits
        if top_k is not None and max_top_k > _MAX_TOP_K:
            return reference.top_k_top_p(logits, top_k, top_p)
        return as_tensor(self._torch_npu.npu_top_k_top_p(logits, p=top_p, k=top_k))


def _read(error: BaseException) -> NpuTrouble:
    return read_trouble(str(error), is_memory_error=isinstance(error, torch.OutOfMemoryError))
