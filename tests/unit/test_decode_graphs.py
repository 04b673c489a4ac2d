"""Captured decode steps: the answers of eager ones, and no bit of memory changed beside theirs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from graphed_cpu import GraphedCpu, GraphedCpuWithHostLengths
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import CapturedGraph, DeviceBackend
from engine.errors import ConfigError
from engine.layers import decode_graphs
from engine.layers.decode_graphs import (
    DecodeGraphs,
    GraphLimits,
    capture_sizes,
    count_spare_blocks,
    table_widths,
)
from engine.layers.model_input import ModelInput, ScoredSpan
from engine.layers.slot import Slot
from engine.messages import SamplerSpec

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_SEQS = 4, 64, 600, 11
HEADS, KV_HEADS, WIDTH, VOCAB = 4, 2, 8, 50
SPEC = SamplerSpec(
    seed=0, sampling_key=0, sample_index=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
)


def slot(uid: int) -> Slot:
    return Slot(
        uid=uid,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[],
        sampler=SPEC,
    )


class Toy:
    """A model of one layer and its KV memory, as a runner holds them."""

    def __init__(self, backend: DeviceBackend, num_spare_blocks: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.backend = backend
        self.embeddings = weight(VOCAB, HEADS * WIDTH)
        self.positions = weight(MAX_MODEL_LEN, HEADS * WIDTH)
        self.key, self.value = (weight(HEADS * WIDTH, KV_HEADS * WIDTH) / 4 for _ in range(2))
        self.head = weight(HEADS * WIDTH, VOCAB)
        shape = (NUM_BLOCKS + num_spare_blocks, BLOCK_SIZE, KV_HEADS, WIDTH)
        self.caches = tuple(weight(*shape) for _ in range(2))
        self.num_calls = 0

    def forward(self, step: ModelInput) -> torch.Tensor:
        self.num_calls += 1
        hidden = self.embeddings[step.input_ids] + self.positions[step.positions]
        caches = (self.caches[0], self.caches[1])
        states = tuple((hidden @ w).view(-1, KV_HEADS, WIDTH) for w in (self.key, self.value))
        self.backend.write_kv((states[0], states[1]), caches, step.attention.slot_mapping)
        query = hidden.view(-1, HEADS, WIDTH)
        attended = self.backend.attention(
            query, caches, step.attention, AttentionOptions(scale=WIDTH**-0.5)
        )
        return (attended.flatten(1) @ self.head)[step.logit_rows]


@dataclass
class Request:
    block_ids: list[int]
    tokens: list[int]
    num_computed: int = 0


def make_step(
    requests: Sequence[Request], backend: DeviceBackend, *, num_tokens: int = 1
) -> ModelInput:
    """Return the step that computes the next tokens of each request."""
    ids, positions, slots, lens = [], [], [], []
    for request in requests:
        first = request.num_computed
        for position in range(first, first + num_tokens):
            ids.append(request.tokens[position])
            positions.append(position)
            block = request.block_ids[position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        request.num_computed += num_tokens
        lens.append(request.num_computed)
    width = max(len(request.block_ids) for request in requests)
    tables = [request.block_ids + [0] * (width - len(request.block_ids)) for request in requests]
    last_rows = torch.arange(1, len(requests) + 1) * num_tokens - 1
    return ModelInput(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        logit_rows=last_rows,
        sampling=tuple(slot(uid) for uid in range(len(requests))),
        scored=(),
        attention=AttentionMetadata(
            query_lens=[num_tokens] * len(requests),
            seq_lens=lens,
            slot_mapping=torch.tensor(slots, dtype=backend.slot_dtype),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            seq_lens_tensor=torch.tensor(lens, dtype=torch.int32),
        ),
        extra={},
    )


def make_requests(count: int) -> list[Request]:
    """Return requests of several lengths, their blocks strewn over the pool."""
    generator = torch.Generator().manual_seed(count)
    strewn = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    requests = []
    for uid in range(count):
        length = 3 + 5 * uid % 17
        blocks = [strewn.pop() for _ in range(-(-(length + 3) // BLOCK_SIZE))]
        tokens = torch.randint(VOCAB, (length + 3,), generator=generator).tolist()
        requests.append(Request(blocks, tokens, num_computed=length))
    return requests


def limits_of(max_num_seqs: int) -> GraphLimits:
    return GraphLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
    )


def make_graphs(
    backend: DeviceBackend, max_num_seqs: int = MAX_NUM_SEQS
) -> tuple[Toy, DecodeGraphs]:
    toy = Toy(backend, count_spare_blocks(max_num_seqs, BLOCK_SIZE))
    graphs = DecodeGraphs(backend, toy.forward, limits_of(max_num_seqs))
    graphs.capture()
    return toy, graphs


@pytest.fixture
def _narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a device that gathers have graphs for tables of 2, 8, 32 and 64 blocks."""
    monkeypatch.setattr(decode_graphs, "_NARROWEST_TOKENS", 2 * BLOCK_SIZE)


both_kinds = pytest.mark.parametrize("kind", [GraphedCpu, GraphedCpuWithHostLengths])


@pytest.mark.usefixtures("_narrow_tables")
@both_kinds
def test_every_batch_size_gives_the_logits_of_eager_steps(
    kind: Callable[[], GraphedCpu],
) -> None:
    backend = kind()
    toy, graphs = make_graphs(backend)
    eager = Toy(backend, 0)
    num_calls = toy.num_calls
    # Small batches after large ones: what those have left behind must not count.
    for count in [*range(1, MAX_NUM_SEQS + 1), *range(MAX_NUM_SEQS, 0, -1)]:
        requests, same = make_requests(count), make_requests(count)
        for cache, other in zip(toy.caches, eager.caches, strict=True):
            other.copy_(cache[:NUM_BLOCKS])
        for _ in range(3):
            found = graphs.replay(make_step(requests, backend))
            wanted = eager.forward(make_step(same, backend))
            assert found is not None
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted)
            assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert graphs.num_replayed == backend.num_replays == toy.num_calls - num_calls
    assert graphs.num_replayed == 3 * 2 * MAX_NUM_SEQS
    assert graphs.num_eager_decodes == 0


@pytest.mark.usefixtures("_narrow_tables")
@both_kinds
@pytest.mark.parametrize("count", range(1, MAX_NUM_SEQS + 1))
def test_padding_rows_change_no_bit_of_the_pool(kind: Callable[[], GraphedCpu], count: int) -> None:
    backend = kind()
    toy, graphs = make_graphs(backend)
    before = [cache.clone() for cache in toy.caches]
    requests = make_requests(count)
    step = make_step(requests, backend)
    written = step.attention.slot_mapping.long()
    assert graphs.replay(step) is not None
    for cache, old in zip(toy.caches, before, strict=True):
        new, old = (t[:NUM_BLOCKS].flatten(0, 1) for t in (cache, old))
        changed = (new != old).flatten(1).any(dim=1).nonzero()[:, 0]
        assert changed.tolist() == sorted(written.tolist())


def test_the_capture_itself_changes_no_bit_of_the_pool() -> None:
    backend = GraphedCpu()
    toy, _ = make_graphs(backend)
    fresh = Toy(backend, count_spare_blocks(MAX_NUM_SEQS, BLOCK_SIZE))
    for cache, untouched in zip(toy.caches, fresh.caches, strict=True):
        assert torch.equal(cache[:NUM_BLOCKS], untouched[:NUM_BLOCKS])
        assert not torch.equal(cache, untouched)  # the spare blocks are written


def test_prompts_and_chunks_are_left_to_eager_steps() -> None:
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend)
    num_calls = toy.num_calls
    requests = make_requests(3)
    assert graphs.replay(make_step(requests, backend, num_tokens=2)) is None
    mixed = make_step(requests, backend)
    attention = replace(mixed.attention, query_lens=[1, 2, 1])
    assert graphs.replay(replace(mixed, attention=attention)) is None
    assert toy.num_calls == num_calls
    assert graphs.num_replayed == graphs.num_eager_decodes == 0


def test_a_step_that_no_graph_holds_is_left_to_eager_steps_and_counted() -> None:
    backend = GraphedCpu()
    _, graphs = make_graphs(backend, max_num_seqs=2)
    assert graphs.replay(make_step(make_requests(3), backend)) is None
    assert graphs.num_eager_decodes == 1
    long = Request([0] * (MAX_MODEL_LEN // BLOCK_SIZE), [0] * MAX_MODEL_LEN, num_computed=599)
    assert graphs.replay(make_step([long], backend)) is None
    assert graphs.num_eager_decodes == 2
    assert graphs.num_replayed == 0


def test_tables_of_reserved_blocks_are_as_wide_as_their_text() -> None:
    """With kv_reservation full a table is long from the first token on."""
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend)
    request = make_requests(1)[0]
    reserved = replace(request, block_ids=request.block_ids + [0] * 1000)
    found = graphs.replay(make_step([reserved], backend))
    assert found is not None
    torch.testing.assert_close(found, toy.forward(make_step([request], backend)))


def test_rows_that_do_not_sample_and_rows_of_scored_prompts_are_picked_out() -> None:
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend)
    whole = toy.forward(make_step(make_requests(5), backend))
    rows = [3, 0, 4]  # two that sample, then one whose prompt is scored
    step = replace(
        make_step(make_requests(5), backend),
        logit_rows=torch.tensor(rows),
        sampling=(slot(3), slot(0)),
        scored=(ScoredSpan(slot=slot(4), start=1, token_ids=[1]),),
    )
    found = graphs.replay(step)
    assert found is not None
    torch.testing.assert_close(found, whole[rows])
    # Scored when the next step may have been replayed, so it must not change then.
    kept = found.clone()
    graphs.replay(make_step(make_requests(7), backend))
    assert torch.equal(found, kept)


@given(st.integers(1, 5000))
def test_the_biggest_batch_is_always_covered_and_little_is_wasted(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert larger - smaller <= max(smaller, 8)
        assert larger - smaller <= (8 if larger <= 256 else 16)


@settings(deadline=None)
@given(st.integers(1, 10_000), st.sampled_from([1, 16, 128]), st.booleans())
def test_the_longest_request_is_always_covered(
    max_num_blocks: int, block_size: int, is_narrow_cheaper: bool
) -> None:
    widths = table_widths(max_num_blocks, block_size, is_narrow_cheaper=is_narrow_cheaper)
    assert widths[-1] == max_num_blocks
    assert widths == sorted(set(widths))
    assert is_narrow_cheaper or len(widths) == 1
    assert all(width * block_size >= 512 for width in widths[:-1])


@given(st.integers(1, 600), st.sampled_from([1, 3, 16, 128]))
def test_every_padding_row_has_a_slot_of_its_own(max_num_seqs: int, block_size: int) -> None:
    count = count_spare_blocks(max_num_seqs, block_size)
    assert count * block_size >= max_num_seqs > (count - 1) * block_size


def test_no_request_has_more_blocks_than_the_pool() -> None:
    limits = GraphLimits(max_num_seqs=1, max_model_len=100_000, block_size=16, num_blocks=70)
    assert limits.max_request_blocks == 70
    limits = replace(limits, max_model_len=1000)
    assert limits.max_request_blocks == 63


@pytest.mark.usefixtures("_narrow_tables")
def test_a_long_text_is_replayed_with_a_wider_table_and_a_short_one_with_a_narrow_one() -> None:
    backend = GraphedCpu()
    widths: list[int] = []
    forward = Toy(backend, 1).forward

    def note(step: ModelInput) -> torch.Tensor:
        widths.append(step.attention.block_tables.shape[1])
        return forward(step)

    graphs = DecodeGraphs(backend, note, limits_of(1))
    graphs.capture()
    widths.clear()
    for num_blocks in (64, 1, 3, 33, 2, 9):
        length = num_blocks * BLOCK_SIZE
        request = Request(list(range(num_blocks)), [7] * length, num_computed=length - 1)
        found = graphs.replay(make_step([request], backend))
        request.num_computed -= 1
        assert found is not None
        torch.testing.assert_close(found, forward(make_step([request], backend)))
    assert widths == [64, 2, 8, 64, 2, 32]


def test_the_log_says_what_is_captured_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_graphs(GraphedCpu(), max_num_seqs=10)
    first, last = caplog.messages
    assert first.startswith("capturing 5 graphs of decode steps")
    assert "[1, 2, 4, 8, 10]" in first
    assert last.startswith("captured 5 graphs of decode steps seconds=")


class Refusing(GraphedCpu):
    """Captures nothing, for a reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def capture_graph(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("operation not permitted"), "not permitted.*; set engine.enforce_eager to"),
        (MemoryError(), "memory_fraction or engine.scheduler.max_num_seqs, or set engine.enforce"),
        (ConfigError("no graphs here"), "^no graphs here$"),
    ],
)
def test_what_cannot_be_captured_is_said_with_a_remedy(error: Exception, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_graphs(Refusing(error))


def test_released_graphs_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    backend = GraphedCpu()
    _, graphs = make_graphs(backend)
    graphs.replay(make_step(make_requests(2), backend))
    with caplog.at_level(logging.INFO):
        graphs.release()
    assert caplog.messages == ["decode steps: replayed=1 without_a_graph=0"]
    assert graphs.replay(make_step(make_requests(2), backend)) is None
