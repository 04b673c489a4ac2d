"""Operations under RowExactMode: a row has the same bits in any company, unlike in plain torch."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from engine.backends import row_exact
from engine.backends.row_exact import RowExactMode
from engine.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16]
# Around the sizes of blocks, and where plain torch was seen to change its mind.
COUNTS = [1, 3, 11, 12, 17, 100, 255, 300]
MOST = max(COUNTS)

Operation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Run with three threads, so that the cuts between threads lie at odd places."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).mul(2).to(dtype)


def assert_rows_are_exact(operation: Operation, rows: torch.Tensor) -> None:
    """Compute rows [n, ...] together, some of them in every number, and in another order."""
    with torch.inference_mode(), RowExactMode():
        wanted = operation(rows)
        for count in COUNTS:
            some = slice(min(7, MOST - count), min(7, MOST - count) + count)
            assert torch.equal(operation(rows[some]), wanted[some]), f"{count} rows differ"
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        assert torch.equal(operation(rows[order]), wanted[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("sizes", [(64, 96), (64, 4), (24, 64), (1536, 576)], ids=str)
def test_a_linear_layer_gives_a_row_the_same_bits_among_any_number_of_rows(
    sizes: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    weight = random(sizes[1], sizes[0], dtype=dtype)
    bias = random(sizes[1], dtype=dtype) if has_bias else None
    assert_rows_are_exact(
        lambda rows: F.linear(rows, weight, bias), random(MOST, sizes[0]).to(dtype)
    )


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_any_number_of_threads_will_do(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    weight = random(200, 64)
    assert_rows_are_exact(lambda rows: F.silu(F.linear(rows, weight)), random(MOST, 64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_to_write_a_product_is_exact(dtype: torch.dtype) -> None:
    weight, bias = random(64, 48, dtype=dtype), random(48, dtype=dtype)
    rows = random(MOST, 64, dtype=dtype)
    assert_rows_are_exact(lambda rows: rows @ weight, rows)
    assert_rows_are_exact(lambda rows: torch.matmul(rows[None], weight)[0], rows)
    assert_rows_are_exact(lambda rows: torch.mm(rows, weight), rows)
    assert_rows_are_exact(lambda rows: torch.addmm(bias, rows, weight), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_equals_plain_torch_within_rounding(dtype: torch.dtype) -> None:
    rows, weight, bias = random(300, 64, dtype=dtype), random(40, 64, dtype=dtype), random(40)
    with RowExactMode():
        found = F.linear(rows[None], weight, bias.to(dtype))
    torch.testing.assert_close(found, F.linear(rows[None], weight, bias.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expert_gives_a_row_the_same_bits_however_many_come_to_it(dtype: torch.dtype) -> None:
    rows, experts = random(90, 64, dtype=dtype), random(3, 64, 48, dtype=dtype)

    def grouped(rows: torch.Tensor, *ends: int) -> torch.Tensor:
        return F.grouped_mm(rows, experts, offs=torch.tensor(ends, dtype=torch.int32))

    with RowExactMode():
        together = grouped(rows, 50, 50, 90)
        assert torch.equal(grouped(rows[3:4], 1, 1, 1), together[3:4])
        assert torch.equal(grouped(rows[40:60], 10, 10, 20), together[40:60])
        assert torch.equal(together[50:], F.linear(rows[50:], experts[2].t()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [6, 96, 1536])
@pytest.mark.parametrize(
    "function",
    [
        F.silu,
        F.gelu,
        lambda values: F.gelu(values, approximate="tanh"),
        torch.nn.SiLU(),
        torch.sigmoid,
        torch.tanh,
        torch.exp,
        torch.cos,
        F.softplus,
        lambda values: torch.pow(values, 3.0),
        lambda values: values.abs().rsqrt(),
    ],
)
def test_a_function_of_single_numbers_does_not_see_where_they_lie(
    function: Operation, width: int, dtype: torch.dtype
) -> None:
    assert_rows_are_exact(function, random(MOST, width, dtype=dtype))


@pytest.mark.parametrize("width", [6, 100, 1536])
@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda rows: F.layer_norm(rows, (rows.shape[-1],)),
        lambda rows: rows.softmax(-1),
        lambda rows: rows.log_softmax(-1),
        lambda rows: rows.topk(2).values,
        lambda rows: rows.sum(-1),
    ],
    ids=["rms-norm", "layer-norm", "softmax", "log-softmax", "topk", "sum"],
)
def test_what_goes_over_a_row_is_exact(function: Operation, width: int) -> None:
    assert_rows_are_exact(function, random(MOST, width))


@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.logsumexp])
def test_a_sum_over_a_large_vocabulary_is_the_same_for_one_row_as_for_two(
    function: Callable[..., torch.Tensor],
) -> None:
    torch.set_num_threads(2)  # each takes half of the row
    rows = random(2, 49152)
    with RowExactMode():
        assert torch.equal(function(rows[:1], -1), function(rows, -1)[:1])
        assert torch.equal(function(rows[1:], dim=-1, keepdim=True)[:, 0], function(rows, -1)[1:])


def test_no_rows_stay_no_rows() -> None:
    with RowExactMode():
        assert F.linear(random(0, 8), random(5, 8)).shape == (0, 5)
        assert torch.tanh(random(0, 8)).shape == (0, 8)


class TestOnAMachineWithOtherLibraries:
    def test_blocks_that_disagree_with_the_smallest_are_not_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used: list[int] = []

        def product(
            rows: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            used.append(len(rows))
            result = torch.mm(rows, weight, out=out)
            return result.add_(1e-4) if len(rows) in (128, 64, 2, 1) else result

        monkeypatch.setattr(row_exact, "_product", product)
        rows, mode = random(603, 8), RowExactMode()
        with mode:
            F.linear(rows, random(8, 8))
            used.clear()
            F.linear(rows, random(8, 8))
        assert used == [256, 256, 32, 32, 16, 16]  # 11 rows are left, and padded

    def test_a_product_that_depends_on_the_place_of_a_row_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def product(
            rows: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            out: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return torch.mm(rows, weight, out=out).add_(torch.arange(len(rows))[:, None] * 1e-4)

        monkeypatch.setattr(row_exact, "_product", product)
        with RowExactMode(), pytest.raises(ConfigError, match="place of a row"):
            F.linear(random(3, 8), random(8, 8))
