"""Real tokenizers and a real, random model, made on the spot in about a second."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.config import ChatConfig, EngineConfig
from engine.model_source import ModelSource
from engine.offline import OfflineInference
from engine.tokenizer import PretrainedTokenizer

BOS, EOS, UNKNOWN, IM_START, IM_END = SPECIAL_TOKENS = (
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Words come more than once, so that merges are learnt; some characters take several bytes.
CORPUS = [
    "def add(left, right):\n    return left + right\n",
    "def multiply(left, right):\n    return left * right\n",
    "the quick brown fox jumps over the lazy dog and the quick cat",
    "Größe und Straße, Größe und Straße; naïve café, naïve café",
    "你好,世界。你好,世界。 🙂🙂🙂",
] * 4
MAX_POSITIONS = 128


def train_byte_level_bpe(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Return a tokenizer of GPT-2's kind: any text, a token may end in half a character."""
    backend = BackendTokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _finish(backend)


def train_sentencepiece_bpe(vocab_size: int = 120) -> PreTrainedTokenizerFast:
    """Return a tokenizer of Llama 2's kind: spaces are part of tokens, bytes are a fallback."""
    spaces = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    learner = BackendTokenizer(BPE())
    learner.normalizer = spaces
    trainer = BpeTrainer(
        vocab_size=vocab_size, limit_alphabet=40, max_token_length=8, show_progress=False
    )
    learner.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(learner.to_str())["model"]
    by_id = sorted(learnt["vocab"], key=learnt["vocab"].get)
    # Byte tokens are ordinary ones: decoding must not leave them out like special tokens.
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *by_id]
    backend = BackendTokenizer(
        BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            [tuple(pair) for pair in learnt["merges"]],
            byte_fallback=True,
            unk_token=UNKNOWN,
            fuse_unk=True,
        )
    )
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(backend)


def _finish(backend: BackendTokenizer) -> PreTrainedTokenizerFast:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, IM_END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(
    folder: Path, *, vocab_size: int = 400, chat: ChatConfig | None = None
) -> PretrainedTokenizer:
    """Return the engine's tokenizer of a folder that needs to hold no model."""
    source = ModelSource(
        path=folder,
        model_type="llama",
        vocab_size=vocab_size,
        max_model_len=MAX_POSITIONS,
        dtype="float32",
        eos_token_ids=(1,),
    )
    config = EngineConfig(model_path=str(folder), chat=chat or ChatConfig())
    return PretrainedTokenizer(config, source)


def save_tiny_llama(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a model folder: a random llama of two layers, a tokenizer, no EOS that it would hit."""
    tokenizer = train_byte_level_bpe()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.4,  # large, so that two logits are never nearly equal
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**(settings | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def open_engine(
    folder: Path, way: dict[str, Any] | None = None, *, deterministic: bool = False
) -> OfflineInference:
    """Return an engine of the folder's model in this process; `way` changes settings by section."""
    settings: dict[str, Any] = {
        "cache": {"num_blocks": 512},
        # One thread: more of them only wait for each other on a model this small.
        "runtime": {"inline": True, "num_threads": 1},
    }
    for section, values in (way or {}).items():
        is_section = isinstance(values, dict)
        settings[section] = settings.get(section, {}) | values if is_section else values
    config = {
        "model_path": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "deterministic": deterministic,
    }
    return OfflineInference(EngineConfig.model_validate(config | settings))
