"""NpuBackend on a simulated device: what it binds, calls, and waits for."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from npu_simulator.acl import NoteKind
from npu_simulator.recorder import DEVICE_TO_HOST, HOST_TO_DEVICE, recorder

from engine.backends import load_backend, reference
from engine.backends.attention_metadata import AttentionMetadata, AttentionOptions
from engine.backends.base import Caches
from engine.backends.npu import NpuBackend
from engine.errors import ConfigError, WorkerError, WorkerFailure

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, WIDTH, BLOCK, NUM_BLOCKS = 4, 2, 128, 128, 8
WAITS = {NoteKind.EVENT_SYNC, NoteKind.STREAM_SYNC, NoteKind.DEVICE_SYNC}


@pytest.fixture(scope="module")
def backend() -> NpuBackend:
    backend = load_backend("npu")
    assert isinstance(backend, NpuBackend)
    backend.bind(0, None)
    return backend


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def make_caches(device: torch.device) -> Caches:
    shape = (NUM_BLOCKS, BLOCK, KV_HEADS, WIDTH)
    return random(*shape, seed=1).to(device), random(*shape, seed=2).to(device)


def make_metadata(
    query_lens: list[int], seq_lens: list[int], device: torch.device
) -> AttentionMetadata:
    tables = torch.tensor([[3, 0], [1, 7], [6, 4]], dtype=torch.int32)[: len(seq_lens)]
    return AttentionMetadata(
        query_lens=query_lens,
        seq_lens=seq_lens,
        slot_mapping=torch.arange(sum(query_lens), dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )


# Binding.


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Another device, or another number of them, takes a process of its own.
    return subprocess.run(
        [sys.executable, "-c", f"from engine.backends import load_backend\n{code}"],
        env=os.environ | environment | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_bound_device_is_named_by_its_number_on_the_machine() -> None:
    done = run_python(
        "b = load_backend('npu'); print(b.bind(1, None)); print(b.device)",
        ASCEND_RT_VISIBLE_DEVICES="4,6",
        NPU_SIM_DEVICES="2",
    )
    assert done.stdout.splitlines()[-2:] == [
        "npu 1 (Ascend910B1, npu 6 of the machine by ASCEND_RT_VISIBLE_DEVICES=4,6)",
        "npu:1",
    ]


def test_number_of_the_machine_is_refused_before_anything_is_bound() -> None:
    done = run_python(
        "load_backend('npu').check_device(6)",
        ASCEND_RT_VISIBLE_DEVICES="4,6",
        NPU_SIM_DEVICES="2",
    )
    assert "write 1 in engine.device_ids for npu 6" in done.stderr


def test_auto_takes_the_npu_and_without_one_something_else() -> None:
    name = "print(load_backend('auto').name)"
    assert run_python(name).stdout.splitlines()[-1] == "npu"
    assert run_python(name, NPU_SIM_DEVICES="0").stdout.splitlines()[-1] != "npu"


def test_device_that_the_driver_does_not_give_is_told_in_words(
    backend: NpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_device_id: int) -> None:
        raise RuntimeError("npuSetDevice: NPU function error: aclrtSetDevice, error code is 507033")

    monkeypatch.setattr(torch.npu, "set_device", fail)
    with pytest.raises(WorkerError, match="npu 1 cannot be bound.*could not be started") as caught:
        backend.bind(1, None)
    assert caught.value.failure is WorkerFailure.START_FAILED


def test_facts_of_compiled_kernels_name_chip_and_versions(backend: NpuBackend) -> None:
    facts = backend.kernel_facts()
    assert facts["device"] == "Ascend910B1"
    assert facts["torch_npu"].startswith("2.13.0")


def test_environment_of_the_device_is_set_where_the_user_has_not_set_it() -> None:
    done = run_python(
        "import os; load_backend('npu')\n"
        "print(os.environ['ASCEND_GLOBAL_LOG_LEVEL'], os.environ['PYTORCH_NPU_ALLOC_CONF'])",
        ASCEND_GLOBAL_LOG_LEVEL="1",
    )
    assert done.stdout.splitlines()[-1] == "1 expandable_segments:True"


# Kernels.


@pytest.mark.parametrize("window", [None, 1, 64, 129])
def test_sinks_in_bfloat16_equal_the_reference(backend: NpuBackend, window: int | None) -> None:
    sinks = random(HEADS, seed=3)
    query_lens, seq_lens = [5, 1, 30], [5, 200, 130]
    query = random(sum(query_lens), HEADS, WIDTH)

    def attend(device: torch.device) -> torch.Tensor:
        options = AttentionOptions(scale=0.1, sliding_window=window, sinks=sinks.to(device))
        arguments = (
            query.to(device),
            make_caches(device),
            make_metadata(query_lens, seq_lens, device),
            options,
        )
        if device.type == "cpu":
            return reference.reference_attention(*arguments)
        return backend.attention(*arguments).cpu()

    with recorder.recording():
        found = attend(backend.device)
    assert [call.name for call in recorder.kernel_calls] == [
        "npu::npu_fused_infer_attention_score_v2"
    ]
    torch.testing.assert_close(found, attend(torch.device("cpu")), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("max_top_k", "is_fused"), [(1024, True), (1025, False)])
def test_filters_beyond_what_the_operator_takes_stay_on_the_device(
    backend: NpuBackend, max_top_k: int, *, is_fused: bool
) -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    top_k = torch.tensor([3, max_top_k], dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.9])
    there = [tensor.to(backend.device) for tensor in (logits, top_k, top_p)]
    with recorder.recording():
        filtered = backend.top_k_top_p(*there, max_top_k=max_top_k)
        waits = [note for note in recorder.notes if note.kind in WAITS]
        copied = recorder.copies(DEVICE_TO_HOST)
        is_called = "npu::npu_top_k_top_p" in recorder.operations
    assert (is_called, waits, copied) == (is_fused, [], [])
    assert torch.equal(filtered.cpu(), reference.top_k_top_p(logits, top_k, top_p))


def test_nothing_that_a_layer_does_waits_for_the_device(backend: NpuBackend) -> None:
    hidden, weight = random(4, 256).npu(), random(256, seed=1).npu()
    states, angles = random(4, KV_HEADS, WIDTH).npu(), random(4, WIDTH, seed=2).npu()
    query, caches = random(4, HEADS, WIDTH).npu(), make_caches(backend.device)
    step = make_metadata([2, 1, 1], [2, 9, 200], backend.device)
    backend.attention(query, caches, step, AttentionOptions(scale=1.0))  # makes the mask
    with recorder.recording():
        backend.rms_norm(hidden, weight, 1e-5)
        backend.add_rms_norm(hidden, hidden, weight, 1e-5)
        backend.silu_mul(hidden)
        backend.rotary(states, angles, angles)
        backend.write_kv((states, states), caches, step.slot_mapping)
        backend.attention(query, caches, step, AttentionOptions(scale=1.0, sliding_window=8))
        kinds = {note.kind for note in recorder.notes}
    assert kinds == {NoteKind.OP}
    assert [call.name.removeprefix("npu::npu_") for call in recorder.kernel_calls] == [
        "rms_norm",
        "add_rms_norm",
        "swiglu",
        "rotary_mul",
        "scatter_pa_kv_cache",
        "fused_infer_attention_score",
    ]


def test_width_that_the_rotary_operator_lacks_goes_through_the_reference(
    backend: NpuBackend,
) -> None:
    states, angles = random(3, 2, 1024), random(3, 1024, seed=1)
    with recorder.recording():
        turned = backend.rotary(states.npu(), angles.npu(), angles.npu())
    assert recorder.kernel_calls == []
    assert torch.equal(turned.cpu(), reference.rotary(states, angles, angles))


# Streams.


def test_copies_and_kernels_run_on_streams_of_their_own(backend: NpuBackend) -> None:
    with recorder.recording():
        uploaded = backend.upload({"numbers": np.arange(6, dtype=np.float32)})
        with backend.computing():
            doubled = uploaded["numbers"] * 2
            fetched = backend.fetch(doubled)
        assert fetched.numpy().tolist() == [0, 2, 4, 6, 8, 10]
    (up,) = recorder.copies(HOST_TO_DEVICE)
    (down,) = recorder.copies(DEVICE_TO_HOST)
    (kernel,) = (note for note in recorder.notes if note.name == "aten::mul.Tensor")
    assert up.kind is down.kind is NoteKind.PINNED_COPY
    assert len({up.stream, kernel.stream, down.stream}) == 3


# Graphs.


def test_captured_attention_takes_the_lengths_of_each_step(backend: NpuBackend) -> None:
    caches = make_caches(backend.device)
    query = random(3, HEADS, WIDTH).npu()
    for window, sinks in [(None, None), (64, None), (64, random(HEADS, seed=3).npu())]:
        options = AttentionOptions(scale=0.1, sliding_window=window, sinks=sinks)
        longest = make_metadata([1, 1, 1], [2 * BLOCK] * 3, backend.device)
        with backend.computing():

            def run(step: AttentionMetadata, options: AttentionOptions = options) -> torch.Tensor:
                return backend.attention(query, caches, step, options).float()

            run(longest)
            graph = backend.capture_graph(lambda run=run, step=longest: run(step))
            for lens in ([1, 200, 130], [2, 201, 131]):
                step = make_metadata([1, 1, 1], lens, backend.device)
                replayed = graph.replay(step).clone()
                torch.testing.assert_close(replayed.cpu(), run(step).cpu())


def test_environment_that_forbids_graphs_is_said_and_obeyed(
    backend: NpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert backend.has_graphs
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    other = NpuBackend()
    with caplog.at_level(logging.WARNING):
        assert not other.has_graphs
    assert "TASK_QUEUE_ENABLE is 2" in caplog.text
    with pytest.raises(ConfigError, match="set engine.enforce_eager to true"):
        other.capture_graph(lambda: torch.zeros(1))
