"""Two ranks say what one rank says, and end together."""

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from model_families import FAMILIES, VOCAB_SIZE, generate_reference, make_model, make_prompts
from rank_threads import run_ranks

from engine import (
    Completion,
    ConfigError,
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    SamplingParams,
    WorkerError,
)
from engine.backends import load_backend
from engine.backends.attention_metadata import AttentionMetadata
from engine.execution import ExecutionEngine
from engine.layers.kv_pool import allocate_pool
from engine.messages import Running, ScheduleBatch
from engine.models import load_model, prepare_model
from engine.parallel import ParallelGroup

pytestmark = pytest.mark.integration

WITHOUT_A_PLAN = ("gpt2", "opt", "stablelm")
# Not in the README's list, but their plans use what no other does: numbers one for each head
# (attention sinks), and a latent projection that is split by heads.
MORE_PLANS: dict[str, dict[str, Any]] = {
    "granite_swa": {"sliding_window": 8},
    "deepseek_v2": FAMILIES["deepseek_v3"],
}
SPLIT = sorted({*FAMILIES, *MORE_PLANS} - {*WITHOUT_A_PLAN})
PROMPTS = make_prompts(21, 13)
BLOCK_SIZE = 4


def logits_of(module: Any, group: ParallelGroup) -> tuple[torch.Tensor, int]:
    """Return the logits of every token of PROMPTS in one step, and the key heads of a rank."""
    backend = load_backend("cpu")
    model = prepare_model(module, backend, group, Path("model"))
    tables = torch.arange(12, dtype=torch.int32).view(2, 6)
    model.attention.bind_caches(
        allocate_pool(12, BLOCK_SIZE, model.kv_layouts, model.dtype, backend)
    )
    lens = [len(prompt) for prompt in PROMPTS]
    positions = torch.cat([torch.arange(length) for length in lens])
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor(lens))
    metadata = AttentionMetadata(
        query_lens=lens,
        seq_lens=lens,
        slot_mapping=tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE
        + positions % BLOCK_SIZE,
        block_tables=tables,
        seq_lens_tensor=torch.tensor(lens, dtype=torch.int32),
    )
    with torch.inference_mode(), model.attention.step(metadata):
        token_ids = torch.tensor(sum(PROMPTS, []))
        logits = model.logits(token_ids, positions, torch.arange(len(positions)))
    return logits, model.kv_layouts[0].num_key_heads


@torch.no_grad()
def stir(module: Any) -> Any:
    """Fill in what is 0 or 1 in a new model: biases, norms, sinks; to lose one would show."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", SPLIT)
def test_split_model_gives_the_logits_of_the_whole(
    family: str, world_size: int, tmp_path: Path
) -> None:
    # One id more than a multiple of the ranks: the vocabulary does not divide.
    settings = {"vocab_size": VOCAB_SIZE + 1, **MORE_PLANS.get(family, {})}
    module = stir(make_model(family, tmp_path / "model", **settings))
    expected, num_heads = logits_of(copy.deepcopy(module), ParallelGroup())

    modules = [copy.deepcopy(module) for _ in range(world_size)]
    results = run_ranks(
        tmp_path / "ranks", world_size, lambda group: logits_of(modules[group.rank], group)
    )
    for logits, num_local_heads in results:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert num_local_heads in (num_heads, max(1, num_heads // world_size))


@pytest.mark.parametrize("family", WITHOUT_A_PLAN)
def test_family_without_a_plan_is_refused_before_its_weights_are_read(
    family: str, tmp_path: Path
) -> None:
    make_model(family, tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.write_bytes(b"")

    def load(group: ParallelGroup) -> None:
        load_model(
            tmp_path / "model",
            dtype="float32",
            backend=load_backend("cpu"),
            group=group,
            trust_remote_code=False,
        )

    with pytest.raises(ConfigError, match=f"no tensor-parallel plan for {family} models"):
        run_ranks(tmp_path / "ranks", 2, load)


# With real processes.

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
# One of each kind: plain, window and soft cap with tied embeddings, packed attention with biases,
# experts, gathered outputs, packed and gathered, biases of q, k and v, latent attention.
# Every family is compared in one process above; these are what a process adds.
IN_PROCESSES = ("llama", "gemma2", "mixtral", "phi3")


def two_ranks(folder: Path, **settings: Any) -> EngineConfig:
    given = {
        "model_path": str(folder / "model"),
        "log_dir": str(folder / "logs"),
        "device": "cpu",
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "cache": {"block_size": BLOCK_SIZE, "num_blocks": 200},
    }
    return EngineConfig.model_validate({**given, **settings})


def tokens(completions: list[Completion]) -> list[list[int]]:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [list(completion.token_ids) for completion in completions]


def endless_requests() -> Iterator[GenerateRequest]:
    number = 0
    while True:
        yield GenerateRequest(
            request_id=str(number), prompt_token_ids=PROMPTS[0], sampling_params=GREEDY
        )
        number += 1


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("family", IN_PROCESSES)
def test_two_ranks_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    expected = generate_reference(model, PROMPTS, NUM_TOKENS)
    alone = two_ranks(tmp_path, tensor_parallel_size=1, runtime={"inline": True})
    with OfflineInference(alone) as llm:
        drawn = tokens(llm.generate(PROMPTS, DRAWN))

    chunked = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "num_steps_in_flight": 2}
    with OfflineInference(two_ranks(tmp_path, scheduler=chunked)) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        assert tokens(llm.generate(PROMPTS, DRAWN)) == drawn


@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_dies_ends_the_others_and_is_named(rank: int, tmp_path: Path) -> None:
    make_model("llama", tmp_path / "model")
    with OfflineInference(two_ranks(tmp_path)) as llm:
        workers = [psutil.Process(pid) for pid in llm.worker_pids]
        completions = llm.run(endless_requests())
        next(completions)
        workers[rank].kill()
        with pytest.raises(WorkerError, match=f"worker rank {rank} .* killed by signal 9") as error:
            list(completions)
        assert f"rank{rank}.log" in str(error.value)
        assert [worker.is_running() for worker in workers] == [False, False]


def two_mock_ranks(folder: Path, **runtime: Any) -> EngineConfig:
    """Return ranks that exchange nothing: enough to see how the main process treats them."""
    return two_ranks(folder, device="mock", device_ids=[0, 1], runtime=runtime)


@pytest.mark.multiprocess
def test_only_the_rank_that_hangs_is_named_by_the_watchdog(tmp_path: Path) -> None:
    with OfflineInference(two_mock_ranks(tmp_path, watchdog_seconds=2)) as llm:
        workers = [psutil.Process(pid) for pid in llm.worker_pids]
        os.kill(llm.worker_pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"worker rank 1 \(pid \d+\) was silent for 2 s"):
            llm.generate(PROMPTS, GREEDY)
        assert [worker.is_running() for worker in workers] == [False, False]


@pytest.mark.multiprocess
def test_step_that_fails_on_a_rank_is_not_tried_again(tmp_path: Path) -> None:
    engine = ExecutionEngine(two_mock_ranks(tmp_path))
    engine.start()
    try:
        unknown = Running(uid=99, num_scheduled_tokens=1, new_block_ids=[])
        step = engine.submit(
            ScheduleBatch(step_id=0, new=[], running=[unknown], preempted=[], finished=[])
        )
        with pytest.raises(WorkerError, match=r"a step failed in worker \(pid \d+\): KeyError"):
            step.result()
    finally:
        engine.stop()


@pytest.mark.multiprocess
def test_engine_that_cannot_start_leaves_no_process(tmp_path: Path) -> None:
    make_model("gpt2", tmp_path / "model")
    before = children()
    with pytest.raises(ConfigError, match="no tensor-parallel plan for gpt2 models"):
        OfflineInference(two_ranks(tmp_path)).start()
    assert children() == before


@pytest.mark.parametrize(
    ("num_ranks", "message"),
    [(3, "is 3, but .* has 4 attention heads"), (4, "is 4, but .* has 3 key-value heads")],
)
def test_ranks_that_do_not_divide_the_heads_start_nothing(
    num_ranks: int, message: str, tmp_path: Path
) -> None:
    make_model("llama", tmp_path / "model", num_key_value_heads=4)
    config = tmp_path / "model" / "config.json"
    if num_ranks == 4:
        config.write_text(
            config.read_text().replace('"num_key_value_heads": 4', '"num_key_value_heads": 3')
        )
    with pytest.raises(ConfigError, match=message):
        OfflineInference(two_ranks(tmp_path, tensor_parallel_size=num_ranks)).start()
    assert not (tmp_path / "logs").exists()


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_opening_and_closing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path / "model")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    llm = OfflineInference(two_ranks(tmp_path))
    before = children()
    answers: list[list[list[int]]] = []
    num_files: list[int] = []
    for _ in range(3):
        with llm:
            assert len(children() - before) == 2
            answers.append(tokens(llm.generate(PROMPTS, GREEDY)))
        assert children() == before
        assert list(scratch.iterdir()) == []
        num_files.append(psutil.Process().num_fds())
    assert answers == [answers[0]] * 3
    assert num_files == [num_files[0]] * 3


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
