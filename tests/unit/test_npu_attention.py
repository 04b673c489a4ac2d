"""The calls that attention on an NPU makes, seen by a stand-in of torch_npu that records them.

That the operators answer them as we read their documentation, the simulator's tests show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.npu_attention import FusedAttention
from engine.backends.npu_graphs import GraphCapture
from engine.errors import ConfigError

HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 16, 128


class RecordingOps:
    """torch_npu, as far as attention calls it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: torch.Tensor, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return torch.zeros_like(args[0]), torch.empty(0)

        return call


def metadata(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    count = sum(query_lens)
    return AttentionMetadata(
        query_lens=query_lens,
        seq_lens=seq_lens,
        slot_mapping=torch.arange(count, dtype=torch.int32),
        block_tables=torch.zeros(len(seq_lens), 2, dtype=torch.int32),
        seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32),
    )


def attend(options: AttentionOptions) -> tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Attend for a decode row, a whole prompt and a chunk; return the one call."""
    ops = RecordingOps()
    caches = tuple(torch.zeros(3, BLOCK, KV_HEADS, WIDTH) for _ in range(2))
    query = torch.zeros(HEADS, 36, WIDTH).transpose(0, 1)  # as models have it: not contiguous
    FusedAttention(ops, torch.device("cpu")).attend(
        query, (caches[0], caches[1]), metadata([1, 5, 30], [200, 5, 130]), options
    )
    (call,) = ops.calls
    return call


def test_mixed_step_is_one_call_with_lengths_from_the_host():
    name, tensors, arguments = attend(AttentionOptions(scale=0.25))
    assert name == "npu_fused_infer_attention_score"
    assert arguments["actual_seq_lengths"] == [1, 6, 36]  # where each request's queries end
    assert arguments["actual_seq_lengths_kv"] == [200, 5, 130]
    assert (arguments["input_layout"], arguments["sparse_mode"]) == ("TND", 3)
    assert (arguments["num_heads"], arguments["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (arguments["scale"], arguments["block_size"]) == (0.25, BLOCK)
    assert arguments["block_table"].dtype == torch.int32
    query, keys, values = tensors
    assert keys.shape == values.shape == (3, BLOCK, KV_HEADS * WIDTH)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert query.shape == (36, HEADS, WIDTH)


def test_mask_forbids_what_comes_after():
    mask = attend(AttentionOptions(scale=1.0))[2]["atten_mask"]
    assert (mask.shape, mask.dtype) == ((2048, 2048), torch.int8)
    assert mask[0].tolist() == [0] + [1] * 2047
    assert mask[-1].sum() == 0


def test_window_of_w_keys_looks_at_w_minus_one_before_its_own():
    arguments = attend(AttentionOptions(scale=1.0, sliding_window=64))[2]
    assert arguments["sparse_mode"] == 4
    assert (arguments["pre_tokens"], arguments["next_tokens"]) == (63, 0)


def test_sinks_take_the_second_version_with_its_own_names():
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16)
    name, _, arguments = attend(AttentionOptions(scale=0.5, sinks=sinks, sliding_window=8))
    assert name == "npu_fused_infer_attention_score_v2"
    assert arguments["learnable_sink"] is sinks
    assert arguments["actual_seq_qlen"] == [1, 6, 36]
    assert arguments["actual_seq_kvlen"] == [200, 5, 130]
    assert (arguments["num_query_heads"], arguments["softmax_scale"]) == (HEADS, 0.5)
    assert (arguments["sparse_mode"], arguments["pre_tokens"]) == (4, 7)


def test_ends_are_counted_anew_for_a_new_step():
    ops = RecordingOps()
    attention = FusedAttention(ops, torch.device("cpu"))
    caches = (torch.zeros(1, BLOCK, 1, WIDTH), torch.zeros(1, BLOCK, 1, WIDTH))
    for lens in ([1, 1], [1, 1], [2, 1]):
        step = metadata(lens, [9, 9])
        attention.attend(torch.zeros(sum(lens), 1, WIDTH), caches, step, AttentionOptions(scale=1))
    assert [call[2]["actual_seq_lengths"] for call in ops.calls] == [[1, 2], [1, 2], [2, 3]]


def test_step_of_more_requests_than_the_operator_takes_is_refused():
    attention = FusedAttention(RecordingOps(), torch.device("cpu"))
    caches = (torch.zeros(1, BLOCK, 1, WIDTH), torch.zeros(1, BLOCK, 1, WIDTH))
    step = metadata([1] * 4097, [1] * 4097)
    with pytest.raises(ConfigError, match="4097 requests.*lower engine.scheduler.max_num_seqs"):
        attention.attend(torch.zeros(4097, 1, WIDTH), caches, step, AttentionOptions(scale=1))


def test_keys_and_values_are_written_contiguous_in_the_plain_layout():
    ops = RecordingOps()
    states = tuple(torch.zeros(KV_HEADS, 5, WIDTH).transpose(0, 1) for _ in range(2))
    caches = tuple(torch.zeros(3, BLOCK, KV_HEADS, WIDTH) for _ in range(2))
    FusedAttention(ops, torch.device("cpu")).write(
        (states[0], states[1]), (caches[0], caches[1]), torch.arange(5, dtype=torch.int32)
    )
    name, tensors, arguments = ops.calls[0]
    assert (name, arguments) == ("npu_scatter_pa_kv_cache", {"cache_mode": "Norm"})
    assert [tensor.is_contiguous() for tensor in tensors] == [True] * 5
    assert tensors[2] is caches[0]
    assert tensors[3] is caches[1]


class RecordingNpu:
    """torch.npu, as far as graphs call it; one log for all."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.inputs: list[dict[str, Any]] = []
        self.captures: list[dict[str, Any]] = []

    def NPUGraph(self) -> "RecordingNpu":  # noqa: N802 - torch's name
        return self

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextmanager
    def graph(self, _graph: Any, **options: Any) -> Iterator[None]:
        self.captures.append(options)
        yield

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        self.log.append("update")
        self.inputs += cpu_update_input

    def replay(self) -> None:
        self.log.append("replay")

    def current_stream(self) -> "RecordingNpu":
        return self

    def record_event(self) -> "RecordingNpu":
        self.log.append("record")
        return self

    def synchronize(self) -> None:
        self.log.append("wait")


def test_replay_brings_the_lengths_of_its_step_but_not_into_one_that_runs():
    npu = RecordingNpu()
    output = torch.zeros(2)
    graph = GraphCapture(npu, "compute").capture(lambda: output)
    for lens in ([5, 9], [6, 10]):
        assert graph.replay(metadata([1, 1], lens)) is output
    assert npu.log == ["update", "replay", "record", "wait", "update", "replay", "record"]
    assert [given["actual_seq_lengths_kv"] for given in npu.inputs] == [[5, 9], [6, 10]]
    assert [given["actual_seq_kvlen"] for given in npu.inputs] == [[5, 9], [6, 10]]


def test_graphs_share_one_pool_and_are_captured_where_they_will_run():
    npu = RecordingNpu()
    capture = GraphCapture(npu, "compute")
    for _ in range(2):
        capture.capture(lambda: torch.zeros(1))
    options = {"pool": "pool", "stream": "compute", "auto_dispatch_capture": True}
    assert npu.captures == [options, options]
