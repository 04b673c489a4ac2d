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

# Sizes of blocks that are tried. Seen on a Zen 4: float32 products differ for 1 to 3 rows, and with
# two threads for most numbers up to 11; bfloat16 ones for 1 or 2, and for narrow weights beyond 16.
_BLOCK_ROWS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
# The size that the others have to agree with; what is left over at the end is padded.
_REFERENCE_ROWS = 16
# Weights with more numbers are tried as they are: a copy would cost memory, and so many results
# betray another order of summing anyway.
_MOST_TRIAL_NUMBERS = 1 << 24
_ALIGNMENT_BYTES = 64  # of torch's own allocations on the CPU
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
        count = len(rows)
        sizes = self._sizes_for(weight, bias)
        if count in sizes:
            output = _product(rows, weight, bias)
        else:
            output = rows.new_empty(count, weight.shape[1])
            start = 0
            for size in sizes:
                while count - start >= max(size, _REFERENCE_ROWS):
                    end = start + size
                    _product(rows[start:end], weight, bias, output[start:end])
                    start = end
            if left := count - start:
                size = min(size for size in sizes if size >= left)
                last = F.pad(rows[start:], (0, 0, 0, size - left))
                output[start:] = _product(last, weight, bias)[:left]
        return output.view(*inputs.shape[:-1], weight.shape[1])

    def _sizes_for(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
        layout = (weight.shape, weight.stride(), weight.data_ptr() % _ALIGNMENT_BYTES)
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
    """Return the sizes of blocks, falling, that give every row the bits of the reference size.

    Raises:
        ConfigError: in blocks of the reference size, a row's bits depend on its place.
    """
    rows, trial = _make_trial(weight)
    no_bias = None if bias is None else torch.zeros_like(bias)

    def block(first: int, size: int) -> torch.Tensor:
        return _product(rows[first : first + size], trial, no_bias)

    starts = range(0, len(rows), _REFERENCE_ROWS)
    wanted = torch.cat([block(first, _REFERENCE_ROWS) for first in starts])
    for shift in (1, _REFERENCE_ROWS // 2):
        shifted = block(shift, _REFERENCE_ROWS)
        if not torch.equal(shifted, wanted[shift : shift + _REFERENCE_ROWS]):
            raise ConfigError(
                "engine.deterministic is true, but on this machine the bits of a product of "
                f"{weight.dtype} with {tuple(weight.shape)} weights depend on the place of a row; "
                "try another engine.dtype or engine.runtime.num_threads, or set "
                "engine.deterministic to false"
            )
    return tuple(
        size
        for size in _BLOCK_ROWS
        if all(
            torch.equal(block(first, size), wanted[first : first + size])
            for first in range(0, max(size, _REFERENCE_ROWS), size)
        )
    )


def _make_trial(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and weights in the layout of these, whose product is nothing but rounding.

    Every term comes once more with the other sign, elsewhere in the sum, so that the exact result
    is 0: another order of summing shows, where real numbers would hide it behind the rounding of
    the result. Terms of many magnitudes make for much rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    width, num_columns = weight.shape
    if weight.numel() > _MOST_TRIAL_NUMBERS:
        return random(_BLOCK_ROWS[0], width).to(weight.dtype), weight
    half = width // 2
    order = torch.randperm(2 * half, generator=generator)
    column = random(half, num_columns)
    powers = torch.randint(-6, 7, (half,), generator=generator)
    row = random(_BLOCK_ROWS[0], half) * 2.0**powers
    rows = F.pad(torch.cat([row, row], dim=1)[:, order], (0, width - 2 * half))
    trial = _empty_like(weight)
    trial.zero_()[: 2 * half] = torch.cat([column, -column])[order].to(weight.dtype)
    return rows.to(weight.dtype), trial


def _empty_like(weight: torch.Tensor) -> torch.Tensor:
    """Return memory of the same shape, strides and alignment."""
    pairs = zip(weight.shape, weight.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in pairs)
    skipped = weight.data_ptr() % _ALIGNMENT_BYTES // weight.itemsize
    memory = weight.new_empty(count + skipped)
    return memory.as_strided(weight.shape, weight.stride(), skipped)


def _on_whole_vectors(func: Any, args: Any, options: dict[str, Any]) -> Any:
    values, *others = args
    is_alone = not any(isinstance(other, torch.Tensor) for other in others)
    if not isinstance(values, torch.Tensor) or not is_alone or _is_rounded_once(func, args):
        return func(*args, **options)
    count = values.numel()
    if count <= _PIECE and count % _VECTORS == 0 and values.is_contiguous():
        return func(*args, **options)
    flat = values.reshape(-1)
    pieces = []
    for start in range(0, count, _PIECE):
        piece = flat[start : start + _PIECE]
        padded = F.pad(piece, (0, -len(piece) % _VECTORS))
        pieces.append(func(padded, *others, **options)[: len(piece)])
    result = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return result.view(values.shape)


def _is_rounded_once(func: Any, args: Any) -> bool:
    """Tell the steps of a norm: a square, and in float32 a square root and its reciprocal.

    What is rounded as IEEE 754 says is the same on a vector as on a number.
    """
    if func.__name__ == "rsqrt":
        return bool(args[0].dtype == torch.float32)
    return bool(func.__name__ == "pow" and args[1:] == (2,))


def _is_sum_of_one_row(values: torch.Tensor, dim: Any = None, **_options: Any) -> bool:
    """Tell whether a reduction makes one number of so many that threads share them out."""
    is_over_row = dim in (-1, (-1,), [-1]) and values.dim() > 1
    return is_over_row and values.numel() == values.shape[-1] and values.numel() > _PIECE
