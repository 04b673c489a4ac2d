"""A look, before the first batch, at whether this model's rows really are exact on this machine.

A model may bring an operation that the backend does not know. So one request is computed alone,
and again in pieces beside another, and every bit of its logits has to be the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.backends.attention_metadata import AttentionMetadata
from engine.backends.base import DeviceBackend
from engine.errors import ConfigError
from engine.layers.loaded_model import LoadedModel

_MOST_TOKENS = 40
# Rotary embeddings that are computed from the longest request of a batch.
_ROPES_OF_A_BATCH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    token_ids: torch.Tensor  # [number of tokens] int64
    first_block: int


@torch.inference_mode()
def check_rows(
    model: LoadedModel, backend: DeviceBackend, *, block_size: int, num_tokens: int
) -> None:
    """Compute up to `num_tokens` tokens in two ways; the pool has room for twice as many.

    Raises:
        ConfigError: the logits differ, or the model's positions depend on the batch.
    """
    _refuse_ropes_of_a_batch(model.module.config)
    count = min(_MOST_TOKENS, num_tokens)
    if count < 3:
        return  # there is no other schedule
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.module.config.vocab_size, (2, count), generator=generator)
    one = _Sequence(token_ids=tokens[0], first_block=0)
    other = _Sequence(token_ids=tokens[1], first_block=-(-count // block_size))
    cut, half = count // 3, count // 2
    with backend.row_exact():
        alone = _run(model, backend, block_size, [(one, 0, count)])
        pieces = [
            _run(model, backend, block_size, [(one, 0, cut), (other, 0, half)])[:cut],
            _run(model, backend, block_size, [(one, cut, cut + 1)]),
            _run(model, backend, block_size, [(other, half, count), (one, cut + 1, count)])[
                count - half :
            ],
        ]
    # As bytes, for a number that is none does not equal itself.
    if not torch.equal(torch.cat(pieces).view(torch.uint8), alone.view(torch.uint8)):
        raise ConfigError(
            f"engine.deterministic is true, but {type(model.module).__name__} computes something "
            "for a row that depends on the rows beside it; set engine.deterministic to false"
        )


def _run(
    model: LoadedModel,
    backend: DeviceBackend,
    block_size: int,
    parts: list[tuple[_Sequence, int, int]],
) -> torch.Tensor:
    """Compute tokens from start to end of each sequence; return the logits of all of them."""
    positions = [torch.arange(start, end) for _, start, end in parts]
    starts = [sequence.first_block * block_size for sequence, _, _ in parts]
    slots = [start + part for start, part in zip(starts, positions, strict=True)]
    num_blocks = max(-(-end // block_size) for _, _, end in parts)
    tables = [torch.arange(num_blocks) + sequence.first_block for sequence, _, _ in parts]
    seq_lens = [end for _, _, end in parts]
    metadata = AttentionMetadata(
        query_lens=[end - start for _, start, end in parts],
        seq_lens=seq_lens,
        slot_mapping=torch.cat(slots).to(backend.device),
        block_tables=torch.stack(tables).int().to(backend.device),
        seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32, device=backend.device),
    )
    input_ids = torch.cat([sequence.token_ids[start:end] for sequence, start, end in parts])
    rows = torch.arange(len(input_ids), device=backend.device)
    with model.attention.step(metadata):
        return model.logits(
            input_ids.to(backend.device), torch.cat(positions).to(backend.device), rows
        )


def _refuse_ropes_of_a_batch(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *parameters.values()):
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind in _ROPES_OF_A_BATCH:
            raise ConfigError(
                f"engine.deterministic is true, but this model's rope_type is {kind}: its positions "
                "depend on the longest request of a batch; set engine.deterministic to false"
            )
