"""tokenmill's engine: how tokens are made.

The names below are the whole public surface. They are loaded on first use (PEP 562), so that
importing a config or an error never imports torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# torch would import torch_npu by itself, and fail with it where CANN is not loaded. Here that is
# done by the backend alone, which says in one sentence what is missing.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

if TYPE_CHECKING:
    from engine.backends.ascend_checks import check_ascend as check_ascend
    from engine.backends.device_files import expected_device as expected_device
    from engine.backends.device_probe import probe_devices as probe_devices
    from engine.backends.finding import Finding as Finding
    from engine.backends.finding import FindingStatus as FindingStatus
    from engine.config import ChatConfig as ChatConfig
    from engine.config import EngineConfig as EngineConfig
    from engine.config import Section as Section
    from engine.errors import CacheExhaustedError as CacheExhaustedError
    from engine.errors import ConfigError as ConfigError
    from engine.errors import ExitCode as ExitCode
    from engine.errors import LedgerError as LedgerError
    from engine.errors import RequestError as RequestError
    from engine.errors import RequestErrorCode as RequestErrorCode
    from engine.errors import TokenmillError as TokenmillError
    from engine.errors import WorkerError as WorkerError
    from engine.errors import WorkerFailure as WorkerFailure
    from engine.logprobs import TokenLogprob as TokenLogprob
    from engine.metrics import Bucket as Bucket
    from engine.metrics import RunStats as RunStats
    from engine.model_source import ModelSource as ModelSource
    from engine.offline import OfflineInference as OfflineInference
    from engine.request import Completion as Completion
    from engine.request import FinishReason as FinishReason
    from engine.request import GenerateRequest as GenerateRequest
    from engine.request import PartialOutput as PartialOutput
    from engine.request import Reply as Reply
    from engine.request import StreamedToken as StreamedToken
    from engine.request import sampling_key_of as sampling_key_of
    from engine.sampling_params import SamplingParams as SamplingParams
    from engine.tokenizer import Tokenizer as Tokenizer

_NAMES = {
    "backends.ascend_checks": ("check_ascend",),
    "backends.device_files": ("expected_device",),
    "backends.device_probe": ("probe_devices",),
    "backends.finding": ("Finding", "FindingStatus"),
    "config": ("ChatConfig", "EngineConfig", "Section"),
    "errors": (
        "CacheExhaustedError", "ConfigError", "ExitCode", "LedgerError", "RequestError",
        "RequestErrorCode", "TokenmillError", "WorkerError", "WorkerFailure",
    ),
    "logprobs": ("TokenLogprob",),
    "metrics": ("Bucket", "RunStats"),
    "model_source": ("ModelSource",),
    "offline": ("OfflineInference",),
    "request": (
        "Completion", "FinishReason", "GenerateRequest", "PartialOutput", "Reply",
        "StreamedToken", "sampling_key_of",
    ),
    "sampling_params": ("SamplingParams",),
    "tokenizer": ("Tokenizer",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(f"engine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
