"""The CPU's paged attention to the bit: a token's row is the same in every step, batch and block."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.backends import load_backend
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import DeviceBackend
from engine.backends.reference import reference_attention

DTYPES = [torch.float32, torch.bfloat16]
SEQ_LENS = (1, 2, 17, 31, 32, 33, 64, 75, 100)
NUM_HEADS, NUM_KV_HEADS, KEY_WIDTH, VALUE_WIDTH = 6, 2, 24, 20
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 9},
    {"sliding_window": 40},
    {"softcap": 2.0},
    {"has_sinks": True},
]


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    threads = torch.get_num_threads()
    backend = load_backend("cpu")
    backend.bind(0, 2)
    yield backend
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A whole text: queries [L, H, D], keys [L, G, D], values [L, G, E]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __len__(self) -> int:
        return len(self.query)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens from start to end of a request, as one step has them."""

    request: int
    start: int
    end: int


class Pool:
    """KV memory with blocks of one size in any order, all other slots full of NaN."""

    def __init__(self, requests: Sequence[Request], block_size: int, seed: int) -> None:
        self.requests = requests
        counts = [-(-len(request) // block_size) for request in requests]
        order = list(range(sum(counts) + 5))
        random.Random(seed).shuffle(order)
        self._tables = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 5, block_size, NUM_KV_HEADS)
        dtype = requests[0].key.dtype
        self.caches = (
            torch.full((*shape, KEY_WIDTH), float("nan"), dtype=dtype),
            torch.full((*shape, VALUE_WIDTH), float("nan"), dtype=dtype),
        )
        for request, table in zip(requests, self._tables, strict=True):
            for position in range(len(request)):
                block, slot = table[position // block_size], position % block_size
                self.caches[0][block, slot] = request.key[position]
                self.caches[1][block, slot] = request.value[position]

    def attend(
        self, backend: DeviceBackend, parts: Sequence[Part], options: AttentionOptions
    ) -> list[torch.Tensor]:
        """Return the rows of each part."""
        width = max(len(table) for table in self._tables)
        padded = [table + [0] * (width - len(table)) for table in self._tables]
        metadata = AttentionMetadata(
            query_lens=[part.end - part.start for part in parts],
            seq_lens=[part.end for part in parts],
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            block_tables=torch.tensor([padded[part.request] for part in parts], dtype=torch.int32),
            seq_lens_tensor=torch.tensor([part.end for part in parts], dtype=torch.int32),
        )
        query = torch.cat([self.requests[p.request].query[p.start : p.end] for p in parts])
        with backend.row_exact():
            rows = backend.attention(query, self.caches, metadata, options)
        return list(rows.split(metadata.query_lens))


def make_requests(dtype: torch.dtype) -> list[Request]:
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        Request(
            query=values(length, NUM_HEADS, KEY_WIDTH),
            key=values(length, NUM_KV_HEADS, KEY_WIDTH),
            value=values(length, NUM_KV_HEADS, VALUE_WIDTH),
        )
        for length in SEQ_LENS
    ]


def make_options(has_sinks: bool = False, **options: Any) -> AttentionOptions:
    sinks = torch.linspace(-1, 2, NUM_HEADS) if has_sinks else None
    return AttentionOptions(scale=KEY_WIDTH**-0.5, sinks=sinks, **options)


def whole(requests: Sequence[Request]) -> list[Part]:
    return [Part(request=i, start=0, end=len(one)) for i, one in enumerate(requests)]


def random_steps(requests: Sequence[Request], seed: int) -> Iterator[list[Part]]:
    """Yield steps that bring every request to its end, in chunks, in ever other company."""
    chance = random.Random(seed)
    done = [0] * len(requests)
    while unfinished := [i for i, one in enumerate(requests) if done[i] < len(one)]:
        parts = []
        for i in chance.sample(unfinished, chance.randint(1, len(unfinished))):
            count = min(chance.choice([1, 1, 2, 5, 16, 17, 40]), len(requests[i]) - done[i])
            parts.append(Part(request=i, start=done[i], end=done[i] + count))
            done[i] += count
        yield parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_chunks_in_any_company_give_the_bits_of_one_prefill(
    backend: DeviceBackend, options: dict[str, Any], dtype: torch.dtype
) -> None:
    requests, asked = make_requests(dtype), make_options(**options)
    pool = Pool(requests, 16, seed=0)
    wanted = pool.attend(backend, whole(requests), asked)
    for seed in range(4):
        for parts in random_steps(requests, seed):
            for part, rows in zip(parts, pool.attend(backend, parts, asked), strict=True):
                assert torch.equal(rows, wanted[part.request][part.start : part.end]), part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_the_size_nor_the_place_of_blocks_changes_a_bit(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    requests, options = make_requests(dtype), make_options()
    wanted = Pool(requests, 16, seed=0).attend(backend, whole(requests), options)
    for block_size, seed in itertools.product([1, 5, 16, 128], range(2)):
        found = Pool(requests, block_size, seed).attend(backend, whole(requests), options)
        for row, expected in zip(found, wanted, strict=True):
            assert torch.equal(row, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_request_alone_has_the_bits_it_has_among_many(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    """One or two decoding tokens are cut up by heads to busy every core; many are not."""
    requests, options = make_requests(dtype), make_options()
    pool = Pool(requests, 16, seed=0)
    decoding = [Part(request=i, start=len(one) - 1, end=len(one)) for i, one in enumerate(requests)]
    together = pool.attend(backend, decoding, options)
    for part, expected in zip(decoding, together, strict=True):
        assert torch.equal(pool.attend(backend, [part], options)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_later_in_a_text_does_not_reach_back(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    requests, options = make_requests(dtype), make_options()
    wanted = Pool(requests, 16, seed=0).attend(backend, whole(requests), options)
    for request in requests:
        request.key[-1:] = float("nan")
        request.value[-1:] = float("inf")
    found = Pool(requests, 16, seed=0).attend(backend, whole(requests), options)
    for rows, expected in zip(found, wanted, strict=True):
        assert torch.equal(rows[:-1], expected[:-1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_attention(backend: DeviceBackend, options: dict[str, Any]) -> None:
    requests, asked = make_requests(torch.float32), make_options(**options)
    for rows, request in zip(
        Pool(requests, 16, seed=0).attend(backend, whole(requests), asked), requests, strict=True
    ):
        metadata = AttentionMetadata(
            query_lens=[len(request)],
            seq_lens=[len(request)],
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            seq_lens_tensor=torch.tensor([len(request)], dtype=torch.int32),
        )
        caches = (request.key[None], request.value[None])
        expected = reference_attention(request.query, caches, metadata, asked)
        torch.testing.assert_close(rows, expected, atol=2e-5, rtol=2e-5)
