"""The weight files of a model folder, by their headers; no weight is read.

Source: the safetensors format: eight bytes with the length of a header, then the header in JSON.
The library would map the whole file, which fails for one that is larger than the memory.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

_MAX_HEADER_BYTES = 100_000_000


class SavedTensor(NamedTuple):
    """A tensor as its file describes it: dtype in the format's words, [start, end) in the file."""

    dtype: str
    shape: list[int]
    start: int
    end: int


def read_header(file: Path) -> list[SavedTensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ValueError: the file has no such header.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(min(length, _MAX_HEADER_BYTES)))
    try:
        header.pop("__metadata__", None)
        return [
            SavedTensor(t["dtype"], t["shape"], *(8 + length + at for at in t["data_offsets"]))
            for t in header.values()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has no header of the safetensors format") from error
