"""How much memory the weights of a model folder will take, from the headers of its files."""

import json
from math import prod
from pathlib import Path

import torch

from engine.weight_files import read_header

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SUFFIX = "*.safetensors"
# The format's own names of dtypes.
_SAVED_AS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def count_weight_bytes(path: Path, dtype: torch.dtype, num_copies: int = 1) -> int:
    """Return the bytes that the weights of a folder take on the host once they are of a dtype.

    Weights that are converted are in memory num_copies times at most, once for each rank that
    loads them. Others are mapped from their file, and all ranks share the pages. A file that
    cannot be read counts with its size: whoever loads it says what is wrong.
    """
    return sum(_count_bytes(file, dtype, num_copies) for file in _weight_files(path))


def _count_bytes(file: Path, dtype: torch.dtype, num_copies: int) -> int:
    try:
        tensors = read_header(file)
    except (OSError, ValueError):
        return file.stat().st_size if file.is_file() else 0
    return sum(
        prod(tensor.shape)
        * dtype.itemsize
        * (1 if tensor.dtype == _SAVED_AS.get(dtype) else num_copies)
        for tensor in tensors
    )


def _weight_files(path: Path) -> list[Path]:
    """Return the files that transformers reads: a folder may hold the weights in two forms."""
    if (path / _WHOLE).is_file():
        return [path / _WHOLE]
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        return sorted({path / name for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(path.glob(_SUFFIX))
