"""Which decoder layers are replaced by fused ones, and that nothing is replaced by something else."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import make_model
from rank_threads import run_ranks
from torch import nn

from engine.backends.cpu import CpuBackend
from engine.layers.fused_decoder_layer import FusedDecoderLayer, match_llama
from engine.layers.loaded_model import LoadedModel
from engine.layers.paged_attention import AttentionCall
from engine.models import prepare_model
from engine.parallel import ParallelGroup

PATH = Path("models/toy")
TOKENS, POSITIONS = torch.arange(3, 9), torch.arange(6)


class Plain(CpuBackend):
    """A device that leaves layers as they are."""

    prefers_fused_layers = False


def prepare(
    module: Any, backend: CpuBackend | None = None, group: ParallelGroup | None = None
) -> LoadedModel:
    return prepare_model(
        copy.deepcopy(module), backend or CpuBackend(), group or ParallelGroup(), PATH
    )


def layers(model: LoadedModel) -> list[Any]:
    return list(model.module.model.layers)


def count_fused(model: LoadedModel) -> int:
    return sum(isinstance(layer, FusedDecoderLayer) for layer in layers(model))


@torch.inference_mode()
def run(model: LoadedModel) -> tuple[torch.Tensor, list[AttentionCall]]:
    """Return the logits of TOKENS, and what was asked of attention."""
    with model.attention.trial() as calls:
        return model.logits(TOKENS, POSITIONS, POSITIONS), list(calls)


@torch.no_grad()
def stir(module: Any) -> Any:
    """Fill in what is 0 or 1 in a new model, biases and norms: to lose one would show."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    biases = {"attention_bias": True, "mlp_bias": True}
    return stir(make_model("llama", tmp_path_factory.mktemp("llama"), **biases))


FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "sliding window": ("mistral", {}),
    "biases of q, k and v": ("qwen2", {}),
    "one layer of two slides": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "norms of heads": ("qwen3", {}),
    "scale of its own": ("granite", {"attention_multiplier": 0.3}),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_layers_ask_the_same_of_attention_and_give_the_same_logits(
    case: str, tmp_path: Path
) -> None:
    family, settings = FUSED[case]
    module = stir(make_model(family, tmp_path, **settings))
    wanted, wanted_calls = run(prepare(module, Plain()))

    model = prepare(module)
    logits, calls = run(model)
    assert count_fused(model) == len(layers(model)) == 2
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert [(call.layer_index, call.options) for call in calls] == [
        (call.layer_index, call.options) for call in wanted_calls
    ]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("granite", {"residual_multiplier": 0.9}),
        ("ernie4_5", {}),  # turns neighbours, not halves of a head
        (
            "ministral3",  # scales the queries of far positions
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 256,
                    "llama_4_scaling_beta": 0.1,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
        ),
    ],
    ids=["granite", "ernie4_5", "ministral3"],
)
def test_model_that_is_built_alike_but_computes_otherwise_stays_and_is_named(
    family: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = make_model(family, tmp_path, **settings)
    wanted, _ = run(prepare(module, Plain()))
    with caplog.at_level(logging.INFO, "engine.layers.fused_layers"):
        model = prepare(module)
    assert count_fused(model) == 0
    assert torch.equal(run(model)[0], wanted)
    refused, total = [record.getMessage() for record in caplog.records]
    assert refused.startswith(f"2 decoder layers of {type(module).__name__} stay as they are: ")
    assert total == f"fused 0 decoder layers of {type(module).__name__}"


def test_layers_are_judged_one_by_one(tmp_path: Path) -> None:
    # smollm3 turns nothing in every fourth layer.
    module = make_model("smollm3", tmp_path, num_hidden_layers=4)
    model = prepare(module)
    fused = [isinstance(layer, FusedDecoderLayer) for layer in layers(model)]
    assert fused == [True, True, True, False]
    torch.testing.assert_close(run(model)[0], run(prepare(module, Plain()))[0])


# What one wrong kernel does.


class WrongTurn(CpuBackend):
    def rotary(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotary(states, cos, -sin)


class WrongGate(CpuBackend):
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.nn.functional.silu(up)


class LostSum(CpuBackend):
    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = super().add_rms_norm(hidden, residual, weight, epsilon)
        return normed, residual


class OtherEpsilon(CpuBackend):
    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return super().rms_norm(hidden, weight, 100 * epsilon)


class NoNumber(CpuBackend):
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(gate_up).fill_(float("nan"))


@pytest.mark.parametrize("backend", [WrongTurn, WrongGate, LostSum, OtherEpsilon, NoNumber])
def test_device_whose_kernels_compute_something_else_keeps_the_layers(
    backend: type[CpuBackend], llama: Any
) -> None:
    model = prepare(llama, backend())
    assert count_fused(model) == 0
    torch.testing.assert_close(run(model)[0], run(prepare(llama, Plain()))[0])


class RoundsOnce(CpuBackend):
    """Computes in float32 and rounds at the end, as kernels of devices do."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return super().rms_norm(hidden.float(), weight.float(), epsilon).to(hidden.dtype)

    def rotary(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotary(states.float(), cos.float(), sin.float()).to(states.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(gate_up.float()).to(gate_up.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_device_that_only_rounds_otherwise_gets_its_layers(dtype: torch.dtype, llama: Any) -> None:
    module = copy.deepcopy(llama).to(dtype)
    assert count_fused(prepare(module, RoundsOnce())) == 2
    assert count_fused(prepare(module, WrongGate())) == 0


def test_model_that_turns_in_float32_stays(tmp_path: Path) -> None:
    module = make_model("ernie4_5", tmp_path).to(torch.bfloat16)
    assert count_fused(prepare(module)) == 0


def test_ranks_decide_alike(llama: Any, tmp_path: Path) -> None:
    backends = (CpuBackend(), WrongTurn())
    models = run_ranks(tmp_path, 2, lambda group: prepare(llama, backends[group.rank], group))
    assert [count_fused(model) for model in models] == [0, 0]
    models = run_ranks(tmp_path / "alike", 2, lambda group: prepare(llama, CpuBackend(), group))
    assert [count_fused(model) for model in models] == [2, 2]


# Memory.


def count_bytes(module: Any) -> int:
    """Return the bytes of everything that the parameters keep alive, views counted once."""
    storages = [parameter.untyped_storage() for parameter in module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_merging_keeps_no_weight_twice_even_while_both_layers_live(llama: Any) -> None:
    model = prepare(llama, Plain())
    _, calls = run(model)
    whole = count_bytes(model.module)
    for layer, call in zip(layers(model), calls, strict=True):
        parts = match_llama(layer, ())
        assert parts is not None
        fused = FusedDecoderLayer(parts, call, model.attention, CpuBackend())
        assert count_bytes(nn.ModuleList([model.module, fused])) == whole


@pytest.mark.parametrize("backend", [CpuBackend, WrongTurn])
def test_model_is_as_large_as_before(backend: type[CpuBackend], llama: Any) -> None:
    assert count_bytes(prepare(llama, backend()).module) == count_bytes(llama)


def test_memory_is_given_back_after_each_layer(llama: Any) -> None:
    held: list[int] = []

    class Counting(CpuBackend):
        def release_memory(self) -> None:
            held.append(count_bytes(module))

    module = copy.deepcopy(llama)
    prepare_model(module, Counting(), ParallelGroup(), PATH)
    assert held == [count_bytes(llama)] * 2


# Structure.


class OtherLinear(nn.Linear):
    """As libraries for quantised weights have them."""


def replace_child(name: str, child: nn.Module) -> Callable[[Any], None]:
    parent, _, own = name.rpartition(".")
    return lambda layer: layer.get_submodule(parent).register_module(own, child)


def hook(name: str) -> Callable[[Any], None]:
    return lambda layer: layer.get_submodule(name).register_forward_hook(lambda *_: None)


def give_forward(layer: Any) -> None:
    layer.mlp.forward = layer.mlp.forward


def drop_bias(layer: Any) -> None:
    layer.self_attn.k_proj.bias = None


def cast_norm(layer: Any) -> None:
    layer.input_layernorm.double()


def add_sinks(layer: Any) -> None:
    layer.self_attn.sinks = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    "change",
    [
        replace_child("mlp.gate_proj", OtherLinear(64, 96)),
        replace_child("self_attn.o_proj", OtherLinear(64, 64)),
        replace_child("mlp.act_fn", nn.GELU()),
        replace_child("mlp.act_fn", nn.PReLU()),
        replace_child("mlp.dropout", nn.Dropout()),
        replace_child("self_attn.q_norm", nn.RMSNorm(16)),  # and none of keys
        replace_child("post_feedforward_layernorm", nn.RMSNorm(64)),
        replace_child("input_layernorm", nn.LayerNorm(64)),
        replace_child("input_layernorm", nn.LayerNorm(64, bias=False)),
        hook(""),
        hook("self_attn.q_proj"),
        hook("mlp.up_proj"),
        hook("input_layernorm"),
        give_forward,
        drop_bias,
        cast_norm,
        add_sinks,
    ],
)
def test_layer_of_another_structure_is_no_llama(change: Callable[[Any], Any], llama: Any) -> None:
    layer = copy.deepcopy(llama).model.layers[0]
    assert match_llama(layer, ()) is not None
    change(layer)
    assert match_llama(layer, ()) is None


def test_norms_of_torch_are_taken_too(llama: Any) -> None:
    module = copy.deepcopy(llama)
    for layer in module.model.layers:
        layer.input_layernorm = nn.RMSNorm(64, eps=1e-3)
        layer.post_attention_layernorm = nn.RMSNorm(64)  # torch's own epsilon
    model = prepare(module)
    assert count_fused(model) == 2
    torch.testing.assert_close(run(model)[0], run(prepare(module, Plain()))[0])


def test_layer_that_shares_a_weight_is_left_alone(llama: Any) -> None:
    module = copy.deepcopy(llama)
    first, second = module.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    model = prepare(module)
    assert count_fused(model) == 0
    assert layers(model)[0].mlp.up_proj.weight is layers(model)[1].mlp.up_proj.weight


def test_model_may_still_ask_a_layer_what_it_is(llama: Any) -> None:
    module = copy.deepcopy(llama)
    for layer in module.model.layers:
        layer.attention_type = "full_attention"
    model = prepare(module)
    assert [layer.attention_type for layer in layers(model)] == ["full_attention"] * 2
    assert count_fused(model) == 2
