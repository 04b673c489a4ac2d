"""Captured graphs: the wheel's own NPUGraph, its task groups and its update of host lengths."""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from attention_call import BLOCK_SIZE, KV_LENS, make_options, make_tensors, numbers
from npu_simulator.acl import NoteKind
from npu_simulator.recorder import recorder

ONE_EACH = [1, 2, 3]


class CapturedAttention:
    """Decode steps of three rows, in a graph, and the same without one."""

    def __init__(self) -> None:
        self.stream = torch.npu.Stream()
        _, key, value = make_tensors("npu")
        self.cache = (key, value)
        self.options = make_options("npu", actual_seq_lengths=ONE_EACH)
        self.query = numbers(3, 4, 128).npu()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.stream(self.stream):
            self.run([1, 1, 1])
            with torch.npu.graph(self.graph, stream=self.stream, auto_dispatch_capture=True):
                self.output = self.run([2 * BLOCK_SIZE] * 3)

    def run(self, kv_lens: list[int]) -> torch.Tensor:
        options = {**self.options, "actual_seq_lengths_kv": kv_lens}
        output, _ = torch_npu.npu_fused_infer_attention_score(
            self.query * 2, *self.cache, **options
        )
        return output.float() + 1

    def update(self, kv_lens: list[int]) -> None:
        self.graph.update([{"actual_seq_lengths_kv": kv_lens}])

    def replay(self) -> None:
        with torch.npu.stream(self.stream):
            self.graph.replay()

    def answer(self) -> torch.Tensor:
        self.stream.synchronize()
        return self.output.cpu()


def test_nothing_is_computed_while_a_graph_is_captured() -> None:
    captured = CapturedAttention()
    assert not torch.equal(captured.answer(), captured.run([2 * BLOCK_SIZE] * 3).cpu())


def update_first(captured: CapturedAttention, kv_lens: list[int]) -> None:
    captured.update(kv_lens)
    captured.replay()


def update_later(captured: CapturedAttention, kv_lens: list[int]) -> None:
    captured.replay()
    captured.update(kv_lens)


@pytest.mark.parametrize("replay", [update_first, update_later])
def test_a_replay_takes_new_lengths_and_new_numbers(
    replay: Callable[[CapturedAttention, list[int]], None],
) -> None:
    captured = CapturedAttention()
    for kv_lens in (KV_LENS, [7, 130, 255]):
        captured.query.copy_(numbers(3, 4, 128, seed=sum(kv_lens)))
        replay(captured, kv_lens)
        assert torch.equal(captured.answer(), captured.run(kv_lens).cpu())


def test_a_replay_without_its_update_never_ends() -> None:
    captured = CapturedAttention()
    captured.replay()
    with pytest.raises(RuntimeError, match="507046"):
        captured.stream.synchronize()
    captured.update(KV_LENS)
    assert torch.equal(captured.answer(), captured.run(KV_LENS).cpu())


def test_a_replay_is_one_launch_whatever_it_holds() -> None:
    captured = CapturedAttention()
    captured.update(KV_LENS)
    with recorder.recording():
        captured.replay()
    assert [note.kind for note in recorder.notes] == [NoteKind.REPLAY]


def test_a_wait_of_the_host_cannot_be_captured() -> None:
    stream, numbers_there = torch.npu.Stream(), torch.ones(3).npu()
    with (
        torch.npu.graph(torch.npu.NPUGraph(), stream=stream),
        pytest.raises(RuntimeError, match="107030"),
    ):
        numbers_there.cpu()
