"""Captured decode steps: the answers of eager ones, and no bit of memory changed beside theirs."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_toy import (
    Toy,
    ToyRequest,
    ToyShape,
    assert_graphs_equal_eager_steps,
    assert_padding_writes_nowhere,
    make_graphs,
    make_requests,
    make_step,
    toy_slot,
)
from graphed_cpu import GraphedCpu, GraphedCpuWithHostLengths
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import CapturedGraph
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

SHAPE = ToyShape()
MAX_NUM_SEQS = 11


@pytest.fixture
def _narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a device that gathers have graphs for tables of 2, 8, 32 and 64 blocks."""
    monkeypatch.setattr(decode_graphs, "_NARROWEST_TOKENS", 2 * SHAPE.block_size)


both_kinds = pytest.mark.parametrize("kind", [GraphedCpu, GraphedCpuWithHostLengths])


@pytest.mark.usefixtures("_narrow_tables")
@both_kinds
def test_every_batch_size_gives_the_logits_of_eager_steps(
    kind: Callable[[], GraphedCpu],
) -> None:
    backend = kind()
    graphs = assert_graphs_equal_eager_steps(backend, SHAPE, MAX_NUM_SEQS)
    assert graphs.num_replayed == backend.num_replays


@pytest.mark.usefixtures("_narrow_tables")
@both_kinds
def test_padding_rows_change_no_bit_of_the_pool(kind: Callable[[], GraphedCpu]) -> None:
    assert_padding_writes_nowhere(kind(), SHAPE, MAX_NUM_SEQS)


def test_padding_rows_are_one_token_long_and_hold_nothing_of_earlier_requests() -> None:
    backend = GraphedCpu()
    toy, _ = make_graphs(backend, SHAPE, 8)
    seen: list[ModelInput] = []

    def note(step: ModelInput) -> torch.Tensor:
        seen.append(step)
        return toy.forward(step)

    graphs = DecodeGraphs(backend, note, SHAPE.limits(8))
    graphs.capture()
    graphs.replay(make_step(make_requests(8, SHAPE), toy))
    graphs.replay(make_step(make_requests(5, SHAPE), toy))
    step, size = seen[-1], SHAPE.block_size
    assert len(step.input_ids) == 8
    spare = [SHAPE.num_blocks * size + row for row in (5, 6, 7)]
    assert step.attention.slot_mapping[5:].tolist() == spare
    assert step.attention.block_tables[5:, 0].tolist() == [slot // size for slot in spare]
    assert step.attention.seq_lens_tensor[5:].tolist() == [1, 1, 1]
    assert step.input_ids[5:].tolist() == step.positions[5:].tolist() == [0, 0, 0]


def test_the_capture_itself_changes_no_bit_of_the_pool() -> None:
    backend = GraphedCpu()
    toy, _ = make_graphs(backend, SHAPE, MAX_NUM_SEQS)
    fresh = Toy(backend, SHAPE, count_spare_blocks(MAX_NUM_SEQS, SHAPE.block_size))
    for cache, untouched in zip(toy.caches, fresh.caches, strict=True):
        assert torch.equal(cache[: SHAPE.num_blocks], untouched[: SHAPE.num_blocks])
        assert not torch.equal(cache, untouched)  # the spare blocks are written


def test_prompts_and_chunks_are_left_to_eager_steps() -> None:
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend, SHAPE, MAX_NUM_SEQS)
    num_calls = toy.num_calls
    requests = make_requests(3, SHAPE)
    assert graphs.replay(make_step(requests, toy, num_tokens=2)) is None
    mixed = make_step(requests, toy)
    attention = replace(mixed.attention, query_lens=[1, 2, 1])
    assert graphs.replay(replace(mixed, attention=attention)) is None
    assert toy.num_calls == num_calls
    assert graphs.num_replayed == graphs.num_eager_decodes == 0


def test_a_step_that_no_graph_holds_is_left_to_eager_steps_and_counted() -> None:
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend, SHAPE, 2)
    assert graphs.replay(make_step(make_requests(3, SHAPE), toy)) is None
    assert graphs.num_eager_decodes == 1
    long = ToyRequest(
        [0] * (SHAPE.max_model_len // SHAPE.block_size), [0] * SHAPE.max_model_len, num_computed=599
    )
    assert graphs.replay(make_step([long], toy)) is None
    assert graphs.num_eager_decodes == 2
    assert graphs.num_replayed == 0


def test_tables_of_reserved_blocks_are_as_wide_as_their_text() -> None:
    """With kv_reservation full a table is long from the first token on."""
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend, SHAPE, MAX_NUM_SEQS)
    request = make_requests(1, SHAPE)[0]
    reserved = replace(request, block_ids=request.block_ids + [0] * 1000)
    found = graphs.replay(make_step([reserved], toy))
    assert found is not None
    torch.testing.assert_close(found, toy.forward(make_step([request], toy)))


def test_rows_that_do_not_sample_and_rows_of_scored_prompts_are_picked_out() -> None:
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend, SHAPE, MAX_NUM_SEQS)
    whole = toy.forward(make_step(make_requests(5, SHAPE), toy))
    rows = [3, 0, 4]  # two that sample, then one whose prompt is scored
    step = replace(
        make_step(make_requests(5, SHAPE), toy),
        logit_rows=torch.tensor(rows),
        sampling=(toy_slot(3), toy_slot(0)),
        scored=(ScoredSpan(slot=toy_slot(4), start=1, token_ids=[1]),),
    )
    found = graphs.replay(step)
    assert found is not None
    torch.testing.assert_close(found, whole[rows])
    # Scored when the next step may have been replayed, so it must not change then.
    kept = found.clone()
    graphs.replay(make_step(make_requests(7, SHAPE), toy))
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
    toy = Toy(backend, SHAPE, 1)

    def note(step: ModelInput) -> torch.Tensor:
        widths.append(step.attention.block_tables.shape[1])
        return toy.forward(step)

    graphs = DecodeGraphs(backend, note, SHAPE.limits(1))
    graphs.capture()
    widths.clear()
    for num_blocks in (64, 1, 3, 33, 2, 9):
        length = num_blocks * SHAPE.block_size
        request = ToyRequest(list(range(num_blocks)), [7] * length, num_computed=length - 1)
        found = graphs.replay(make_step([request], toy))
        request.num_computed -= 1
        assert found is not None
        torch.testing.assert_close(found, toy.forward(make_step([request], toy)))
    assert widths == [64, 2, 8, 64, 2, 32]


def test_the_log_says_what_is_captured_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_graphs(GraphedCpu(), SHAPE, 10)
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
        make_graphs(Refusing(error), SHAPE, MAX_NUM_SEQS)


def test_released_graphs_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    backend = GraphedCpu()
    toy, graphs = make_graphs(backend, SHAPE, MAX_NUM_SEQS)
    graphs.replay(make_step(make_requests(2, SHAPE), toy))
    with caplog.at_level(logging.INFO):
        graphs.release()
    assert caplog.messages[-1] == "decode steps: replayed=1 without_a_graph=0"
    assert graphs.replay(make_step(make_requests(2, SHAPE), toy)) is None
