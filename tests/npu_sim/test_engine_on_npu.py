"""The whole engine on npu:0 gives the tokens of the CPU, by operations that an NPU has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import DRAWN, GREEDY, PROMPTS, answer, ids_of, make_config, save_model
from model_families import make_prompts
from npu_simulator.acl import NoteKind, controls
from npu_simulator.recorder import DEVICE_TO_HOST, HOST_TO_DEVICE, recorder
from torch.utils._pytree import tree_leaves

from engine import OfflineInference

NO_PREFIXES = {"cache": {"enable_prefix_caching": False}}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "kernel by kernel": {"enforce_eager": True},
    "chunked prefill": {"scheduler": {"max_num_batched_tokens": 33, "max_num_seqs": 4}},
    "no prefix cache": NO_PREFIXES,
    "one step in flight": {"scheduler": {"num_steps_in_flight": 1}},
    "blocks of 256": {"cache": {"block_size": 256}},
}
# With the settings of the model, and the dtype on the NPU; attention sinks are documented for
# bfloat16 alone.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3": ({}, "float16"),
    "mistral": ({"sliding_window": 150}, "float16"),
    "mixtral": ({}, "float16"),
    # Every token goes to every expert: which ones it would go to may hang on the last bit.
    "gpt_oss": ({"sliding_window": 150, "num_local_experts": 2}, "bfloat16"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(llama: Path) -> list[list[int]]:
    """Return the tokens in float32; float16 is the nearest that an NPU has."""
    return ids_of(answer(make_config(llama, "cpu", {"dtype": "float32"}))[0])


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_those_of_the_cpu(llama: Path, wanted: list[list[int]], way: str) -> None:
    completions, stats = answer(make_config(llama, "npu", {"dtype": "float16", **WAYS[way]}))
    assert ids_of(completions) == wanted
    assert (stats.num_graph_steps > 0) is (way != "kernel by kernel")
    assert (stats.num_cached_tokens > 0) is (way != "no prefix cache")


def test_greedy_tokens_in_bfloat16_are_those_of_the_cpu_in_bfloat16(llama: Path) -> None:
    wanted, _ = answer(make_config(llama, "cpu"))
    found, _ = answer(make_config(llama, "npu"))
    assert ids_of(found) == ids_of(wanted)


def test_preempted_rows_give_the_tokens_of_the_cpu(llama: Path) -> None:
    prompts = make_prompts(126, 126, 126, 126, 60)
    wanted, _ = answer(make_config(llama, "cpu", {"dtype": "float32"}), GREEDY, prompts)
    crowded = make_config(llama, "npu", {"dtype": "float16", "cache": {"num_blocks": 5}})
    with OfflineInference(crowded) as llm:
        completions = llm.generate(prompts, GREEDY)
    assert ids_of(completions) == ids_of(wanted)
    assert sum(completion.num_preemptions for completion in completions) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_give_the_tokens_of_the_cpu_too(family: str, tmp_path: Path) -> None:
    settings, dtype = FAMILIES[family]
    folder = save_model(tmp_path, family, **settings)
    wide = "float32" if dtype == "float16" else dtype
    wanted, _ = answer(make_config(folder, "cpu", {"dtype": wide}))
    found, _ = answer(make_config(folder, "npu", {"enforce_eager": True, "dtype": dtype}))
    assert ids_of(found) == ids_of(wanted)


def test_drawn_tokens_are_those_of_the_cpu(llama: Path) -> None:
    # With other seeds some rows differ: float16 moves the border at which one token ends and the
    # next begins, and a number that falls between draws another. The sampler's own test has many.
    params = DRAWN.model_copy(update={"seed": 1})
    wanted, _ = answer(make_config(llama, "cpu", {"dtype": "float32"}), params)
    found, _ = answer(make_config(llama, "npu", {"dtype": "float16"}), params)
    assert ids_of(found) == ids_of(wanted)
    greedy, _ = answer(make_config(llama, "npu", {"dtype": "float16"}))
    assert ids_of(found) != ids_of(greedy)


def test_drawn_tokens_are_the_same_with_every_filter_when_asked_for_again(llama: Path) -> None:
    params = DRAWN.model_copy(update={"top_k": 40, "top_p": 0.95, "min_p": 0.01})
    first, _ = answer(make_config(llama, "npu", NO_PREFIXES), params)
    again, _ = answer(make_config(llama, "npu", NO_PREFIXES), params)
    assert ids_of(first) == ids_of(again)


def test_every_fused_call_has_the_shapes_of_the_wheels_meta_kernels(llama: Path) -> None:
    params = DRAWN.model_copy(update={"top_k": 40, "top_p": 0.95})
    config = make_config(llama, "npu", {"enforce_eager": True})
    with OfflineInference(config) as llm, recorder.recording():
        llm.generate(PROMPTS, params)
        calls = list(recorder.kernel_calls)
    assert {call.name for call in calls} >= {
        "npu::npu_fused_infer_attention_score",
        "npu::npu_scatter_pa_kv_cache",
        "npu::npu_rms_norm",
        "npu::npu_top_k_top_p",
    }
    for call in calls:
        namespace, name = call.name.split("::")
        meta = getattr(getattr(torch.ops, namespace), name)(*call.args, **call.kwargs)
        assert shapes_of(meta) == shapes_of(call.result), call.name


def test_every_operation_of_a_run_has_a_kernel_in_the_wheel(llama: Path) -> None:
    params = DRAWN.model_copy(update={"top_k": 40, "top_p": 0.95, "min_p": 0.01, "logprobs": 2})
    with OfflineInference(make_config(llama, "npu")) as llm, recorder.recording():
        llm.generate(PROMPTS, params)
        names = set(recorder.operations)
    assert {"aten::matmul", "npu::npu_fused_infer_attention_score"} <= names
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in names if not has_kernel(name, "PrivateUse1")] == []


def shapes_of(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize("is_eager", [True, False], ids=["kernel by kernel", "graphs"])
def test_a_step_takes_one_copy_each_way_and_no_wait_but_for_its_tokens(
    llama: Path, is_eager: bool
) -> None:
    prompts = PROMPTS[:3]
    with OfflineInference(make_config(llama, "npu", {"enforce_eager": is_eager})) as llm:
        llm.generate(prompts, GREEDY)
        llm.take_stats()
        with recorder.recording():
            llm.generate(prompts, GREEDY)
            notes = recorder.notes
        stats = llm.take_stats()
    uploads, fetches = recorder.copies(HOST_TO_DEVICE), recorder.copies(DEVICE_TO_HOST)
    assert len(uploads) == len(fetches) == stats.num_steps
    assert {note.kind for note in uploads + fetches} == {NoteKind.PINNED_COPY}
    token_ids_bytes = 8 * len(prompts)
    assert {note.num_bytes for note in fetches} == {token_ids_bytes}
    assert max(note.num_bytes for note in uploads) <= 8192
    kinds = {note.kind for note in notes}
    assert not kinds & {NoteKind.STREAM_SYNC, NoteKind.DEVICE_SYNC, NoteKind.HOST_OVERWRITE}
    replays = [note for note in notes if note.kind is NoteKind.REPLAY]
    assert len(replays) == stats.num_graph_steps == (0 if is_eager else stats.num_decode_steps)


def test_copies_and_kernels_are_on_streams_of_their_own_with_events_between(llama: Path) -> None:
    with OfflineInference(make_config(llama, "npu", {"enforce_eager": True})) as llm:
        llm.generate(PROMPTS[:3], GREEDY)
        with recorder.recording():
            llm.generate(PROMPTS[:3], GREEDY)
            notes = recorder.notes
    [uploading] = {note.stream for note in recorder.copies(HOST_TO_DEVICE)}
    [fetching] = {note.stream for note in recorder.copies(DEVICE_TO_HOST)}
    [computing] = {note.stream for note in notes if note.kind is NoteKind.OP}
    assert len({uploading, fetching, computing}) == 3
    ordering = recorder.find_races()
    assert ordering.races == []
    assert ordering.ordered.keys() >= {
        (uploading, computing),  # the step waits for its numbers,
        (computing, uploading),  # which go to where no step reads any more,
        (computing, fetching),  # and its tokens come when they are there
    }


def test_tokens_are_right_when_everything_is_late(llama: Path, wanted: list[list[int]]) -> None:
    controls.late_queries = 5
    way = {"dtype": "float16", "scheduler": {"num_steps_in_flight": 2}}
    completions, _ = answer(make_config(llama, "npu", way))
    assert ids_of(completions) == wanted
