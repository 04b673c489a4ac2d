"""What the attention kernels of an NPU take, said in sentences before anything runs.

Source: the documentation of npu_fused_infer_attention_score and its v2 in torch_npu 2.13.0, for
layout TND with paged keys and values. Where a document forbids what is known to be run by others
on such cards, there is a warning; where the operator refuses, or would compute something else,
there is an error. Nothing here was tried on a card.

Shapes: T tokens, H query heads, G key-value heads, D width of a key, E width of a value.
"""

import logging
from math import prod

import torch

from engine.backends.attention_metadata import AttentionOptions
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

BLOCK_SIZES = (128, 256, 384, 512)
MAX_REQUESTS = 4096  # in one call
_DOCUMENTED_WIDTHS = (128, 192)
_WIDTH_STEP = 16
_MAX_WIDTH = 512
_MAX_SINK_WIDTH = 128
_MAX_HEADS_PER_KV_HEAD = 64
# A block's row holds the keys of all heads, and the hardware counts it in 16 bits.
_MAX_ROW = 65535
_MAX_CACHE_NUMBERS = 2**31 - 1


def check_block_size(block_size: int) -> None:
    """Refuse a KV block size that the kernels do not page by.

    Raises:
        ConfigError: with the documented sizes.
    """
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"engine.cache.block_size is {block_size}, but attention on an NPU takes "
            f"{', '.join(map(str, BLOCK_SIZES))}: multiples of 128 up to 512 are documented for "
            "rows of more than one query token; leave it out, and it is 128"
        )


def check_cache(shape: tuple[int, int, int, int]) -> None:
    """Refuse a layer's cache [N, S, G, D] that the operator cannot count.

    Raises:
        ConfigError: with the most blocks that it can.
    """
    num_blocks, *rest = shape
    most = _MAX_CACHE_NUMBERS // prod(rest)
    if num_blocks > most:
        raise ConfigError(
            f"{num_blocks} KV blocks of {prod(rest)} numbers a layer are more than attention on an "
            f"NPU can count in 32 bits; set engine.cache.num_blocks to at most {most - 1}"
        )


class AttentionChecks:
    """Checks each layer of a model; warns of each thing once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(
        self,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: AttentionOptions,
    ) -> None:
        """Refuse a layer that the kernels cannot serve; states as in PagedAttention.

        Raises:
            ConfigError: which property of the layer it is.
        """
        query, key, value = states
        num_heads, width = query.shape[1:]
        num_kv_heads = key.shape[1]
        if options.softcap is not None:
            raise _refusal(
                f"a soft cap of {options.softcap:g} on its attention scores, which the operator "
                "does not know, so that models like Gemma 2 do not run on an NPU yet"
            )
        if value.shape[1:] != key.shape[1:]:
            raise _refusal(
                f"values of {value.shape[1]} heads by {value.shape[2]} and keys of {num_kv_heads} "
                f"heads by {width}; in the paged cache both must have one shape"
            )
        if num_heads % num_kv_heads or num_heads // num_kv_heads > _MAX_HEADS_PER_KV_HEAD:
            raise _refusal(
                f"{num_heads} query heads for {num_kv_heads} key-value heads; they must be a "
                f"multiple, at most {_MAX_HEADS_PER_KV_HEAD} times as many"
            )
        if width % _WIDTH_STEP or width > _MAX_WIDTH:
            raise _refusal(
                f"heads of width {width}; they must be a multiple of {_WIDTH_STEP}, at most "
                f"{_MAX_WIDTH}"
            )
        if num_kv_heads * width > _MAX_ROW:
            raise _refusal(
                f"{num_kv_heads} key-value heads of width {width}, {num_kv_heads * width} numbers "
                f"for a token; {_MAX_ROW} are the most, so raise engine.tensor_parallel_size"
            )
        if options.sinks is not None:
            self._check_sinks(options.sinks, value.shape[2])
        self._warn(query)

    def _check_sinks(self, sinks: torch.Tensor, width: int) -> None:
        if sinks.dtype != torch.bfloat16 or width > _MAX_SINK_WIDTH:
            raise _refusal(
                f"attention sinks in {sinks.dtype} with values of width {width}; the operator "
                f"takes torch.bfloat16 and a width of at most {_MAX_SINK_WIDTH}, so set "
                "engine.dtype to bfloat16"
            )

    def _warn(self, query: torch.Tensor) -> None:
        width = query.shape[2]
        if width not in _DOCUMENTED_WIDTHS:
            self._warn_once(
                f"heads are {width} wide; for layout TND torch_npu documents 128 and 192 only. "
                "Others run such models, so this one is not refused: compare some answers with "
                "those of engine.device cpu"
            )
        if query.dtype != torch.bfloat16:
            self._warn_once(
                f"attention in {query.dtype}; for layout TND torch_npu documents bfloat16 only. "
                "Set engine.dtype to bfloat16, or compare some answers with those of engine.device "
                "cpu"
            )

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning("npu: %s", sentence)


def _refusal(found: str) -> ConfigError:
    return ConfigError(
        f"this model does not run on an NPU: a layer has {found}; set engine.device to cpu or "
        "cuda, or take another model"
    )
