"""Operations on the CPU whose rows do not depend, to the bit, on the rows beside them.

torch and its libraries choose a kernel by the shape of a whole tensor. With another number of
rows, a matrix product may sum in another order, and a function computed on vectors rounds
otherwise in the last few elements that fill no vector. So products are taken in blocks of rows of
a few sizes, which are seen to agree on this machine before they are used, and functions on whole
vectors. Everything else that a model does is exact per element, or works row by row as it is.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from engine.errors import ConfigError

# Fewer rows than the smallest block are padded. Float32 products differ for many numbers of rows
# up to 11, bfloat16 ones for 1; larger blocks are there for speed alone.
_BLOCK_ROWS = (256, 128, 64, 32, 16)
_SMALLEST = _BLOCK_ROWS[-1]
# Elements that torch computes on one thread: with more, the cuts between threads lie anywhere.
# gelu is the first to be shared out, beyond this many.
_PIECE = 1 << 14
# A multiple of the elements of two vectors on every CPU that torch supports.
_VECTORS = 128
# Functions that torch approximates otherwise on a vector than on a single number.
_POINTWISE = frozenset(
    [
        "cos",
        "elu",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "gelu",
        "log",
        "log1p",
        "logsigmoid",
        "mish",
        "pow",
        "rsqrt",
        "sigmoid",
        "silu",
        "sin",
        "softplus",
        "tanh",
    ]
)
# Sums over a row: a single row is shared out to threads, more than one are not.
_REDUCTIONS = frozenset(("logsumexp", "mean", "sum"))


class RowExactMode(TorchFunctionMode):
    """While it is entered, every operation that is not row-exact by nature is made so."""

    def __init__(self) -> None:
        super().__init__()
        self._products: dict[str, Callable[..., torch.Tensor]] = {
            "linear": self._linear,
            "matmul": self._matmul,
            "mm": self._matmul,
            "addmm": self._addmm,
            "_grouped_mm": self._grouped_mm,
        }
        self._sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation of torch; modes are off in here."""
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self._products:
            return self._products[name](*args, **options)
        if name in _POINTWISE:
            return _on_whole_vectors(func, args, options)
        if name in _REDUCTIONS and _is_sum_of_one_row(*args, **options):
            return func(torch.cat([args[0], args[0]]), *args[1:], **options)[:1]
        return func(*args, **options)

    # The arguments are called as torch calls them, for models may do so too.

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(input, weight.t(), bias)

    def _matmul(self, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        # A sum of one product, as rotary embeddings make it, is exact.
        if other.dim() != 2 or input.dim() < 2 or input.shape[-1] == 1:
            return torch.matmul(input, other)
        return self._multiply(input, other, None)

    def _addmm(self, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
        return self._multiply(mat1, mat2, input)

    def _grouped_mm(
        self, input: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor, **_kwargs: Any
    ) -> torch.Tensor:
        """Multiply the rows of each expert, which end at `offs`, with that expert's weights."""
        borders = pairwise([0, *offs.tolist()])
        return torch.cat(
            [
                self._multiply(input[start:end], weight, None)
                for weight, (start, end) in zip(mat2, borders, strict=True)
            ]
        )

    def _multiply(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return inputs [..., K] times weight [K, N] plus bias [N], in blocks of rows."""
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        count = rows.shape[0]
        output = rows.new_empty(count, weight.shape[1])
        start = 0
        for size in self._sizes_for(weight, bias):
            while count - start >= size:
                _product(rows[start : start + size], weight, bias, output[start : start + size])
                start += size
        if start < count:
            last = F.pad(rows[start:], (0, 0, 0, _SMALLEST - (count - start)))
            output[start:] = _product(last, weight, bias)[: count - start]
        return output.view(*inputs.shape[:-1], weight.shape[1])

    def _sizes_for(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
        layout = (weight.shape, weight.stride(), weight.data_ptr() % 64)
        key = (*layout, weight.dtype, bias is not None)
        if key not in self._sizes:
            self._sizes[key] = _agreeing_sizes(weight, bias)
        return self._sizes[key]


def _product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if bias is None:
        return torch.mm(rows, weight, out=out)
    return torch.addmm(bias, rows, weight, out=out)


def _agreeing_sizes(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Return the sizes of blocks, falling, that give every row the bits of the smallest block.

    Raises:
        ConfigError: in the smallest block, a row's bits depend on its place.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_BLOCK_ROWS[0], weight.shape[0])
    rows = torch.randn(shape, generator=generator).to(weight.dtype)

    def small_block(first: int) -> torch.Tensor:
        return _product(rows[first : first + _SMALLEST], weight, bias)

    def agrees(size: int) -> bool:
        block = _product(rows[:size], weight, bias)
        return all(
            torch.equal(block[first : first + _SMALLEST], small_block(first))
            for first in range(0, size, _SMALLEST)
        )

    for shift in (1, _SMALLEST // 2):
        if not torch.equal(small_block(0)[shift:], small_block(shift)[:-shift]):
            raise ConfigError(
                "engine.deterministic is true, but on this machine the bits of a product of "
                f"{weight.dtype} with {tuple(weight.shape)} weights depend on the place of a row; "
                "try another engine.dtype or engine.runtime.num_threads, or set "
                "engine.deterministic to false"
            )
    return tuple(size for size in _BLOCK_ROWS if agrees(size))


def _on_whole_vectors(func: Any, args: Any, options: dict[str, Any]) -> Any:
    values, *others = args
    is_alone = not any(isinstance(other, torch.Tensor) for other in others)
    is_handled = isinstance(values, torch.Tensor) and values.numel() > 0 and is_alone
    # Of the powers, a square is one product, which is rounded alike everywhere.
    if not is_handled or others == [2]:
        return func(*args, **options)
    flat = values.reshape(-1)
    pieces = []
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        padded = F.pad(piece, (0, -len(piece) % _VECTORS))
        pieces.append(func(padded, *args[1:], **options)[: len(piece)])
    result = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return result.view(values.shape)


def _is_sum_of_one_row(values: torch.Tensor, dim: Any = None, **_options: Any) -> bool:
    """Tell whether a reduction makes one number of so many that threads share them out."""
    is_over_row = dim in (-1, (-1,), [-1]) and values.dim() > 1
    return is_over_row and values.numel() == values.shape[-1] and values.numel() > _PIECE
