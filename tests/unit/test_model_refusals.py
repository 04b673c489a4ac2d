"""What cannot run is refused before any weights, with a sentence that says why."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.backends import load_backend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_source import ModelSource
from engine.models.loader import prepare_model
from engine.parallel import ParallelGroup

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "is_encoder_decoder": False,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MODELS = Path(transformers.__file__).parent / "models"


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    (folder / "model.safetensors").touch()
    return folder


def inspect(folder: Path) -> ModelSource:
    return ModelSource.inspect(EngineConfig(model_path=str(folder)))


def refusal_of(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        inspect(folder)
    return str(caught.value)


def bare_config_of(model_type: str) -> dict[str, Any]:
    """Return the least that a config.json may say of a model that generates text."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    name = found if isinstance(found, str) else found[0]
    return {"model_type": model_type, "architectures": [name]}


def generating_types_whose_code(*, has: str | None = None, lacks: str | None = None) -> list[str]:
    """Return the types of transformers' own code for text generation that has or lacks a text."""
    found = []
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        files = (MODELS / model_type_to_module_name(model_type)).glob("modeling_*.py")
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        name = names if isinstance(names, str) else names[0]
        if f"class {name}(" not in text:
            continue  # it borrows the code of another type
        if (has is None or has in text) and (lacks is None or lacks not in text):
            found.append(model_type)
    return found


# Kinds of model.


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "t5 is an encoder-decoder model; tokenmill runs decoders alone",
        ),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}},
            "qwen2_5_vl is made for more than text (config.json has vision_config)",
        ),
        (
            {"model_type": "qwen2_audio", "audio_config": {"a": 1}, "text_config": LLAMA},
            "qwen2_audio is made for more than text (config.json has audio_config)",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "its architecture is LlamaForSequenceClassification, which does not generate text",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "qwen3_next has layers of kind linear_attention, whose state is no paged KV cache",
        ),
        (
            {"model_type": "granitemoehybrid", "layers_block_type": ["mamba", "attention"]},
            "granitemoehybrid has layers of kind mamba",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}},
            "qwen3_5_text has layers of state-space kind",
        ),
        (
            {"model_type": "falcon"},
            "the modules of falcon compute attention by themselves and ignore transformers' "
            "attention interface",
        ),
        (
            {"model_type": "llama4_text"},
            "llama4_text chooses by a rule of its own which tokens attention sees",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "gemma3_text chooses by a rule of its own",
        ),
    ],
)
def test_model_that_cannot_run_is_told_what_it_is(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    folder = write_model(tmp_path / "m", config)
    message = refusal_of(folder)
    assert message.startswith(f"{folder}: ")
    assert sentence in message


def test_every_type_that_transformers_marks_as_stateful_is_refused(tmp_path: Path) -> None:
    types = generating_types_whose_code(has="_is_stateful = True")
    assert {"mamba", "mamba2", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba"} < set(types)
    for model_type in types:
        folder = write_model(tmp_path / model_type, bare_config_of(model_type))
        assert "whose state is no paged KV cache" in refusal_of(folder)


def test_every_type_whose_code_does_not_know_the_interface_is_refused(tmp_path: Path) -> None:
    found = generating_types_whose_code(lacks="ALL_ATTENTION_FUNCTIONS")
    # Assistants draft for another model and have no layers in their own code.
    types = [model_type for model_type in found if not model_type.endswith("_assistant")]
    assert {"falcon", "bloom", "mpt"} < set(types)
    for model_type in types:
        folder = write_model(tmp_path / model_type, bare_config_of(model_type))
        assert re.search("whose state is no|by themselves|does not gen", refusal_of(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_is_claimed_passes(tmp_path: Path, family: str) -> None:
    config = bare_config_of(family) | {"layer_types": ["sliding_attention", "full_attention"]}
    assert inspect(write_model(tmp_path / "m", config)).model_type == family


@pytest.mark.parametrize(
    "config",
    [
        {"vision_config": None, "quantization_config": None, "layer_types": None},
        {"architectures": None},
        {"architectures": ["GPT2LMHeadModel"]},
        {
            "architectures": ["ModelOfMine"],
            "auto_map": {"AutoModelForCausalLM": "modeling_mine.ModelOfMine"},
        },
        {"model_type": "granitemoehybrid", "layer_types": ["attention", "full_attention"]},
    ],
)
def test_model_that_only_looks_unusual_passes(tmp_path: Path, config: dict[str, Any]) -> None:
    assert inspect(write_model(tmp_path / "m", config)).max_model_len == 64


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("falcon", "does not send its attention through transformers' attention interface"),
        ("doge", "DogeAttention brings an attention mask of its own"),
    ],
)
def test_model_on_no_list_is_found_out_when_it_is_loaded(family: str, sentence: str) -> None:
    config = CONFIG_MAPPING[family](
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config)
    backend = load_backend("cpu")
    backend.bind(0, None)
    with pytest.raises(ConfigError, match=sentence):
        prepare_model(module, backend, ParallelGroup(), Path("model"))


# Quantised checkpoints.


@pytest.mark.parametrize(
    ("config", "origin"),
    [
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "config.json has a quantization_config of method compressed-tensors",
        ),
        (
            {"quantization_config": {"quant_method": "ascend"}},
            "config.json has a quantization_config of method ascend",
        ),
        (
            {"text_config": LLAMA | {"quantization_config": {"bits": 4}}},
            "config.json has a quantization_config of method unknown",
        ),
    ],
)
def test_quantised_checkpoint_is_refused_for_now(
    tmp_path: Path, config: dict[str, Any], origin: str
) -> None:
    message = refusal_of(write_model(tmp_path / "m", config))
    assert f"the checkpoint is quantised ({origin}); W8A8 and other quantised" in message
    assert "take the float or bfloat16 checkpoint" in message


@pytest.mark.parametrize("name", ["quant_model_description_w8a8.json", "quantize_config.json"])
def test_quantised_checkpoint_is_known_by_the_file_beside_it(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m", {})
    (folder / name).write_text("{}")
    assert f"the checkpoint is quantised (there is a {name})" in refusal_of(folder)


# Formats of files.


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is pickled PyTorch weights: convert the weights"),
        ("weights.pth", "weights.pth is pickled PyTorch weights: convert the weights"),
        ("model.onnx", "model.onnx is ONNX: it holds a program and no attention"),
        ("saved_model.pb", "saved_model.pb is a TensorFlow SavedModel: it holds a program"),
        ("tf_model.h5", "tf_model.h5 is TensorFlow weights: find the model's safetensors"),
        ("flax_model.msgpack", "flax_model.msgpack is Flax weights: find the model's"),
        ("a.Q4_1.gguf", "a.Q4_1.gguf is GGUF: convert it once through transformers"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_folder_without_safetensors_is_told_its_format(
    tmp_path: Path, name: str, sentence: str, *, has_config: bool
) -> None:
    folder = write_model(tmp_path / "m", {})
    (folder / "model.safetensors").unlink()
    if not has_config:
        (folder / "config.json").unlink()
    (folder / name).touch()
    message = refusal_of(folder)
    assert f"{folder} has no *.safetensors, and {sentence}" in message


def test_traced_program_is_told_from_pickled_weights(tmp_path: Path) -> None:
    traced, pickled = tmp_path / "traced.pt", tmp_path / "pickled.pt"
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(1)}, buffer)
    pickled.write_bytes(buffer.getvalue())
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), traced)
    assert "traced.pt is TorchScript: it holds a program" in refusal_of(traced)
    assert "pickled.pt is pickled PyTorch weights" in refusal_of(pickled)


def test_safetensors_are_taken_whatever_lies_beside_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {})
    for name in ("pytorch_model.bin", "model.onnx", "training_args.pt"):
        (folder / name).touch()
    assert inspect(folder).model_type == "llama"
