"""What cannot run, refused from the names of files and from config.json, before any weights.

The lists name what transformers 5.24 knows. A model that is on none of them is found out when it
is loaded: attention that does not reach the interface, or weights that are missing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from engine.errors import ConfigError

WEIGHT_SUFFIX = ".safetensors"
_SAVED_MODEL = "saved_model.pb"
_SAVE = (
    "convert the weights to safetensors with from_pretrained and save_pretrained of transformers"
)
_EXPORTED = (
    "it holds a program and no attention that could be given a paged KV cache; take the model "
    "folder that it was exported from"
)
_HOW_TO_GO_ON = {
    "TorchScript": _EXPORTED,
    "ONNX": _EXPORTED,
    "a TensorFlow SavedModel": _EXPORTED,
    "GGUF": "convert it once through transformers, from_pretrained(folder, gguf_file=NAME) and "
    "save_pretrained, as flows/demo.py does",
    "pickled PyTorch weights": _SAVE,
    "TensorFlow weights": "find the model's safetensors, or convert the weights with an older "
    "transformers that reads TensorFlow",
    "Flax weights": "find the model's safetensors, or convert the weights with an older "
    "transformers that reads Flax",
}
_FORMATS = {
    ".onnx": "ONNX",
    ".gguf": "GGUF",
    ".pt": "pickled PyTorch weights",
    ".pth": "pickled PyTorch weights",
    ".bin": "pickled PyTorch weights",
    ".h5": "TensorFlow weights",
    ".msgpack": "Flax weights",
}
_PICKLES = (".pt", ".pth", ".bin")

_QUANT_DESCRIPTIONS = (
    "quant_model_description*.json",
    "quantize_config.json",
    "hf_quant_config.json",
)
_GENERATING = ("ForCausalLM", "LMHeadModel")
_OTHER_SENSES = ("vision_config", "audio_config", "speech_config")
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "attention"}
# Where config.json does not list its layers, the type tells that some carry a recurrent state.
_WITH_STATE = {
    "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid",
    "inkling", "inkling2", "inkling2_loop", "jamba", "kimi_linear", "lara_mini", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "qwen4_exp", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2", "zaya",
}  # fmt: skip
# Their modules compute attention by themselves.
_OWN_ATTENTION = {
    "big_bird", "bloom", "cpmant", "falcon", "flaubert", "fuyu", "gpt_neo", "gpt_neox_japanese",
    "megatron-bert", "mpt", "mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer",
    "trocr", "xglm", "xlm", "xlnet",
}  # fmt: skip
# They send their attention through the interface, with a mask that ours would not see.
_OWN_MASK = {
    "axk2", "deepseek_v32", "doge", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "llama4",
    "minimax_m3_vl", "mistral_large4",
}  # fmt: skip


def check_weights(path: Path) -> None:
    """Refuse a folder, or a file, that holds a model in another format than safetensors.

    Raises:
        ConfigError: the format found, and how to convert it.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(file.suffix == WEIGHT_SUFFIX for file in files) and path.is_dir():
        return
    for file in files:
        if (format_name := _format_of(file)) is not None:
            raise ConfigError(
                f"engine.model_path: {path} has no *{WEIGHT_SUFFIX}, and {file.name} is "
                f"{format_name}: {_HOW_TO_GO_ON[format_name]}"
            )


def check_architecture(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config.json of a model that tokenmill cannot run.

    Raises:
        ConfigError: what the model is, and what was wanted.
    """
    text = config.get("text_config") or config
    reason = (
        _quantisation(path, config, text)
        or _other_kind_of_model(config)
        or _unusable_layers(config, text)
    )
    if reason:
        raise ConfigError(f"{path}: {reason}")


def reason_of(error: Exception) -> str:
    """Return why transformers does not load a folder, in our words where it wants to run code."""
    if "trust_remote_code" in str(error):
        return (
            "it brings Python code of its own, which is run only when engine.trust_remote_code is "
            "true; read the code before you set it"
        )
    return str(error)


def _format_of(file: Path) -> str | None:
    if file.name == _SAVED_MODEL:
        return "a TensorFlow SavedModel"
    if file.suffix in _PICKLES and _is_torch_script(file):
        return "TorchScript"
    return _FORMATS.get(file.suffix)


def _is_torch_script(file: Path) -> bool:
    """Tell a traced program from pickled weights: both are zip files, only one has code."""
    try:
        with ZipFile(file) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (BadZipFile, OSError):
        return False


def _quantisation(path: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    found = config.get("quantization_config") or text.get("quantization_config")
    found = found or config.get("compression_config")
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
        origin = f"config.json has a quantization_config of method {method}"
    else:
        names = sorted(file.name for pattern in _QUANT_DESCRIPTIONS for file in path.glob(pattern))
        if not names:
            return None
        origin = f"there is a {names[0]}"
    return (
        f"the checkpoint is quantised ({origin}); W8A8 and other quantised weights do not run yet, "
        "take the float or bfloat16 checkpoint of the same model"
    )


def _other_kind_of_model(config: Mapping[str, Any]) -> str | None:
    model_type = config.get("model_type", "unknown")
    if config.get("is_encoder_decoder"):
        return (
            f"{model_type} is an encoder-decoder model; tokenmill runs decoders alone, models that "
            "continue one text"
        )
    senses = sorted(key for key in config if key.endswith(_OTHER_SENSES) and config[key])
    if senses:
        return (
            f"{model_type} is made for more than text (config.json has {', '.join(senses)}); "
            "tokenmill runs models of text alone"
        )
    architectures = config.get("architectures") or []
    # Code that comes with a model may name its class as it likes.
    is_causal = "AutoModelForCausalLM" in (config.get("auto_map") or {})
    if architectures and not is_causal and not str(architectures[0]).endswith(_GENERATING):
        return (
            f"its architecture is {architectures[0]}, which does not generate text token by token; "
            "tokenmill runs architectures whose names end in ForCausalLM"
        )
    return None


def _unusable_layers(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    named = text.get("model_type") or config.get("model_type") or "unknown"
    model_type = str(named).removesuffix("_text")
    kinds = text.get("layer_types") or text.get("layers_block_type") or []
    others = sorted({str(kind) for kind in kinds} - _ATTENTION_KINDS)
    if others or (model_type in _WITH_STATE and not kinds):
        what = f"layers of kind {', '.join(others)}" if others else "layers of state-space kind"
        return (
            f"{named} has {what}, whose state is no paged KV cache; tokenmill runs models in which "
            "every layer is full or sliding-window attention"
        )
    if model_type in _OWN_ATTENTION:
        return (
            f"the modules of {named} compute attention by themselves and ignore transformers' "
            "attention interface, so they cannot use a paged KV cache; take another model"
        )
    if model_type in _OWN_MASK or text.get("use_bidirectional_attention") in (True, "all"):
        return (
            f"{named} chooses by a rule of its own which tokens attention sees; tokenmill knows "
            "causal attention and sliding windows alone"
        )
    return None
