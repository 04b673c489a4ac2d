"""Tiny random models of every family that the engine claims, made on the spot."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 256
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW: dict[str, Any] = {"sliding_window": 8}
_HEAD: dict[str, Any] = {"head_dim": 16}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": _WINDOW,
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
    },
    "ernie4_5": _HEAD,
    "exaone4": _WINDOW,
    "gemma": _HEAD,
    "gemma2": _HEAD | _WINDOW | {"query_pre_attn_scalar": 16},
    "gemma3_text": _HEAD | _WINDOW | {"query_pre_attn_scalar": 16},
    "glm4": _HEAD,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": _HEAD | _WINDOW | _MOE,
    "granite": {},
    "hunyuan_v1_dense": _HEAD,
    "llama": {},
    "mistral": _WINDOW,
    "mixtral": _MOE,
    "nemotron": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi3": {},
    "phimoe": _MOE,
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3": _HEAD,
    "qwen3_moe": _HEAD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "seed_oss": _HEAD,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}  # fmt: skip


def make_model(family: str, folder: Path, **settings: Any) -> Any:
    """Save a random model of the family and a tokenizer to the folder; return the model.

    The weights are larger than at initialisation, so that logits lie apart and greedy tokens do
    not hang on the last bit.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_BASE, **FAMILIES.get(family, {}), **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(folder)
    vocabulary = {f"t{token}": token for token in range(VOCAB_SIZE)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return model


def every_layer_slides(model: Any) -> bool:
    """Tell whether no layer of the model sees the whole text."""
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"]
    return bool(getattr(model.config, "sliding_window", None)) and set(kinds) == {
        "sliding_attention"
    }


def make_prompts(*lengths: int) -> list[list[int]]:
    """Return random prompts without special tokens, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


@torch.inference_mode()
def generate_reference(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return what transformers generates greedily, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers
