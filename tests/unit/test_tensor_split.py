"""A split module gives what the whole one gives; ranks are threads that speak gloo."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rank_threads import run_ranks
from torch import nn

from engine.backends import load_backend
from engine.config import CacheConfig, EngineConfig
from engine.errors import ConfigError
from engine.layers.kv_pool import PoolLimits, count_blocks
from engine.layers.paged_attention import LayerShape
from engine.layers.slices import can_share_heads, packed_ranges, range_of, range_of_heads
from engine.layers.tensor_parallel import check_plan, split_model
from engine.parallel import ParallelGroup, Rendezvous
from engine.worker.model_runner import share_of_threads

HIDDEN, INNER, VOCAB = 8, 10, 11
PATH = Path("models/toy")


class Toy(nn.Module):
    """What split_model needs of a model of transformers: modules, a configuration and a plan."""

    def __init__(self, plan: dict[str, str], **modules: nn.Module) -> None:
        super().__init__()
        self.tp_plan = plan
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
        self.config.get_text_config = lambda: self.config
        for name, module in modules.items():
            self.add_module(name, module)


class Chain(Toy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class GateAndUp(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = super().forward(x).chunk(2, dim=-1)
        return gate.sigmoid() * up


class Experts(nn.Module):
    """Two experts of the shape that transformers gives them; each token goes to both."""

    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * inner, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(2, HIDDEN, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for expert in range(2):
            gate, up = (x @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            outputs.append((gate.sigmoid() * up) @ self.down_proj[expert].T)
        return torch.stack(outputs).sum(0)


def split(model: Toy, group: ParallelGroup) -> Toy:
    part = copy.deepcopy(model)
    split_model(part, group, PATH)
    return part


@torch.no_grad()
def assert_same_split(folder: Path, model: Toy, x: torch.Tensor, world_size: int) -> list[int]:
    """Compare whole and split; return how many numbers each rank keeps."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_()
    expected = model(x)

    def run(group: ParallelGroup) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            part = split(model, group)
            return part(x), sum(parameter.numel() for parameter in part.parameters())

    results = run_ranks(folder / "ranks", world_size, run)
    for output, _ in results:
        torch.testing.assert_close(output, expected)
        assert torch.equal(output, results[0][0])
    return [count for _, count in results]


INPUT = torch.linspace(-1, 1, 5 * HIDDEN).view(5, HIDDEN)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("colwise", "rowwise"),
        ("colwise_gather_output", "rowwise_split_input"),
        ("colwise_rep", "rowwise_rep"),
    ],
)
def test_two_linear_layers_give_the_same_though_their_width_does_not_divide(
    first: str, second: str, world_size: int, tmp_path: Path
) -> None:
    plan = {"up": first, "down": second}
    model = Chain(plan, up=nn.Linear(HIDDEN, INNER), act=nn.SiLU(), down=nn.Linear(INNER, HIDDEN))
    kept = assert_same_split(tmp_path, model, INPUT, world_size)
    whole = 2 * HIDDEN * INNER + INNER
    assert sum(kept) == whole + HIDDEN  # one rank alone has the bias of the second layer


def test_packed_halves_are_split_each_for_itself(tmp_path: Path) -> None:
    plan = {"gate_up": "packed_colwise", "down": "rowwise"}
    layers = {"gate_up": GateAndUp(HIDDEN, 2 * INNER), "down": nn.Linear(INNER, HIDDEN)}
    assert_same_split(tmp_path, Chain(plan, **layers), INPUT, 3)


def test_rows_of_the_vocabulary_are_looked_up_where_they_are(tmp_path: Path) -> None:
    model = Chain({"embed": "embedding_rowwise"}, embed=nn.Embedding(VOCAB, HIDDEN, padding_idx=9))
    kept = assert_same_split(tmp_path, model, torch.arange(VOCAB), 3)
    assert kept == [4 * HIDDEN, 4 * HIDDEN, 3 * HIDDEN]


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    plan = {"embed": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    embed, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight = embed.weight
    kept = assert_same_split(
        tmp_path, Chain(plan, embed=embed, lm_head=head), torch.arange(VOCAB), 2
    )
    assert sum(kept) == VOCAB * HIDDEN


EXPERT_PLAN = {
    "experts": "moe_tp_experts",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
}


def test_each_rank_has_a_part_of_every_expert(tmp_path: Path) -> None:
    kept = assert_same_split(tmp_path, Chain(EXPERT_PLAN, experts=Experts()), INPUT, 2)
    assert kept == [2 * 3 * 8 * HIDDEN // 2] * 2


def test_key_value_heads_are_replicated_when_there_are_fewer_than_ranks(tmp_path: Path) -> None:
    attention = nn.Module()
    attention.head_dim, attention.num_heads, attention.num_key_value_groups = 3, 4, 2
    attention.q_proj, attention.k_proj = nn.Linear(HIDDEN, 12), nn.Linear(HIDDEN, 6)
    attention.v_proj = nn.Linear(HIDDEN, 8)  # values may be wider than keys
    attention.sinks = nn.Parameter(torch.arange(4.0))
    plan = {f"0.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")}
    plan = {key.replace("0", "layers.*"): style for key, style in plan.items()}
    model = Toy(plan, layers=nn.ModuleList([attention]))

    parts = run_ranks(tmp_path / "ranks", 4, lambda group: split(model, group).layers[0])
    for rank, part in enumerate(parts):
        head = rank // 2
        assert torch.equal(part.q_proj.weight, attention.q_proj.weight[3 * rank : 3 * rank + 3])
        assert torch.equal(part.k_proj.weight, attention.k_proj.weight[3 * head : 3 * head + 3])
        assert torch.equal(part.v_proj.bias, attention.v_proj.bias[4 * head : 4 * head + 4])
        assert part.sinks.tolist() == [rank]
        assert (part.num_heads, part.num_key_value_groups) == (1, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Toy({}), "Toy has no tensor-parallel plan"),
        (Toy({"x": "sequence_parallel", "y": "colwise"}), "plan uses sequence_parallel, unknown"),
        (Toy({"x": "colwise"}, x=nn.Conv1d(4, 4, 1)), "x is a Conv1d, its plan wants a Linear"),
        (Toy({"x": "moe_tp_experts"}, x=Experts()), "not say how to split x.gate_up_proj"),
        (Toy(EXPERT_PLAN, experts=Experts(6)), "rows of 3 numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_split_is_refused_by_name(model: Toy, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run_ranks(tmp_path / "ranks", 2, lambda group: split(model, group))
    assert str(caught.value).startswith("models/toy: ")
    assert str(caught.value).endswith("; set engine.tensor_parallel_size to 1")


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    attention = nn.Module()
    attention.head_dim = 3
    attention.q_proj, attention.k_proj = nn.Linear(HIDDEN, 12), nn.Linear(HIDDEN, 6)
    model = Toy({"layers.*.q_proj": "colwise"}, layers=nn.ModuleList([attention]))
    with pytest.raises(ConfigError, match=r"the 4 heads of layers\.0\.q_proj .* to 3 ranks"):
        run_ranks(tmp_path / "ranks", 3, lambda group: split(model, group))


def test_plan_is_judged_before_weights_are_read() -> None:
    def config(plan: dict[str, str] | None) -> Any:
        text = SimpleNamespace(base_model_tp_plan=plan)
        return SimpleNamespace(model_type="toy", get_text_config=lambda: text)

    check_plan(config({"layers.*.up": "colwise", "norm": "replicated_with_grad_allreduce"}), PATH)
    with pytest.raises(ConfigError, match="no tensor-parallel plan for toy models"):
        check_plan(config(None), PATH)
    with pytest.raises(ConfigError, match="plan uses packed_rowwise, unknown"):
        check_plan(config({"layers.*.up": "packed_rowwise"}), PATH)


# Ranges.


@pytest.mark.parametrize(("size", "world_size"), [(12, 4), (11, 4), (3, 4), (0, 2)])
def test_ranges_of_the_ranks_make_up_the_whole(size: int, world_size: int) -> None:
    ranges = [range_of(size, rank, world_size) for rank in range(world_size)]
    assert [index for start, end in ranges for index in range(start, end)] == list(range(size))
    lengths = [end - start for start, end in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_packed_ranges_take_the_same_part_of_both_halves() -> None:
    assert [packed_ranges(10, rank, 2) for rank in range(2)] == [
        ((0, 3), (5, 8)),
        ((3, 5), (8, 10)),
    ]


def test_heads_are_kept_whole() -> None:
    assert [range_of_heads(40, 4, rank, 2) for rank in range(2)] == [(0, 20), (20, 40)]
    assert [range_of_heads(20, 2, rank, 4) for rank in range(4)] == [
        (0, 10), (0, 10), (10, 20), (10, 20),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "is_possible"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 1, 8, True), (8, 8, 3, False), (12, 4, 6, False)],
)
def test_ranks_share_heads_evenly_or_not_at_all(
    heads: int, kv_heads: int, ranks: int, is_possible: bool
) -> None:
    assert can_share_heads(heads, kv_heads, ranks) is is_possible


# The group.


def test_group_of_one_exchanges_nothing() -> None:
    group, tensor = ParallelGroup(), torch.ones(2)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) == [tensor]
    assert group.broadcast(torch.tensor([1, 2])).tolist() == [1, 2]
    group.leave()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_is_the_same_to_the_bit_on_every_rank(dtype: torch.dtype, tmp_path: Path) -> None:
    parts = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = run_ranks(tmp_path / "ranks", 3, lambda group: group.all_reduce(parts[group.rank]))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    tolerance = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(
        sums[0].float(), parts.clone().float().sum(0), atol=tolerance, rtol=1
    )


def test_every_rank_takes_the_tokens_of_rank_0(tmp_path: Path) -> None:
    drawn = [[5, 7, 1 << 40], [0, 0, 0]]
    taken = run_ranks(
        tmp_path / "ranks", 2, lambda group: group.broadcast(torch.tensor(drawn[group.rank]))
    )
    assert [tokens.tolist() for tokens in taken] == [drawn[0], drawn[0]]


def test_rank_that_waits_alone_gives_up(tmp_path: Path) -> None:
    lonely = Rendezvous(folder=tmp_path, rank=0, world_size=2, timeout_seconds=0.2)
    with pytest.raises(RuntimeError):
        ParallelGroup.join(lonely, "gloo")


# Configuration.


def engine_config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model_path": "models/toy", **settings})


def test_ranks_on_the_cpu_share_its_one_device() -> None:
    config = engine_config(device="cpu", tensor_parallel_size=2)
    assert config.device_ids == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 2}, "does not split layers over devices; use tensor_parallel"),
        ({"tensor_parallel_size": 2}, "1 device_ids cannot be shared out"),
        ({"tensor_parallel_size": 2, "device_ids": [0, 1, 2]}, "3 device_ids cannot be shared out"),
        ({"tensor_parallel_size": 2, "device_ids": [1, 1]}, "names a device twice"),
        ({"device_ids": [-1]}, "greater than or equal to 0"),
        (
            {"tensor_parallel_size": 2, "device": "cpu", "runtime": {"inline": True}},
            "set runtime.inline to false",
        ),
    ],
)
def test_ranks_without_a_place_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        engine_config(**settings)


def test_ranks_share_the_threads_equally() -> None:
    assert [share_of_threads(8, size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert share_of_threads(None, 1) is None
    assert (share_of_threads(None, 2) or 0) >= 1


def test_ranks_on_one_device_share_its_memory() -> None:
    backend = load_backend("cpu")
    layouts = (
        LayerShape(
            num_key_heads=1, key_width=64, num_value_heads=1, value_width=64, sliding_window=None
        ),
    )
    config = CacheConfig(kv_cache_gib=0.25)
    whole, half = (
        count_blocks(
            config,
            layouts,
            torch.float32,
            backend,
            PoolLimits(block_size=16, max_useful_tokens=1 << 40, num_sharing_ranks=ranks),
        )
        for ranks in (1, 2)
    )
    assert whole == 2 * half
