"""What a model folder says without its weights: shapes, length, EOS ids, dtype, fingerprint.

Reading is cheap (config files and safetensors headers), so every fault of a model folder comes
out before anything is loaded. It never imports torch by itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_checks import WEIGHT_SUFFIX, check_architecture, check_weights
from engine.sampling_params import SamplingParams
from engine.weight_files import read_header

_CONFIG_NAME = "config.json"
_GENERATION_CONFIG_NAME = "generation_config.json"
# Bytes of a weights file that its fingerprint reads at the head, in the middle and at the end.
_SAMPLE_BYTES = 1 << 20
# Bytes of each tensor, from its middle: a fine-tune may leave all but a few tensors as they were.
_TENSOR_SAMPLE_BYTES = 1 << 12
# The sampling defaults that a generation_config.json may set, and our names of them.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
MOCK_VOCAB_SIZE = 512
MOCK_EOS_TOKEN_ID = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model folder, read but not loaded.

    generation_defaults are sampling fields that the folder's generation_config.json sets, under
    SamplingParams' names. A number of heads is 0 when config.json does not say it.
    """

    path: Path
    model_type: str
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    is_deterministic: bool = False
    is_mock: bool = False

    @classmethod
    def inspect(cls, config: EngineConfig) -> "ModelSource":
        """Read the folder that the configuration names.

        Raises:
            ConfigError: no such folder, no config.json, no safetensors, an unreadable file, a
                model that cannot run, or a max_model_len beyond what it has positions for.
        """
        if config.device == "mock":
            return cls._mock(config)
        path = Path(config.model_path)
        _check_folder(path)
        data = _read_json(path / _CONFIG_NAME)
        check_architecture(path, data)
        text = data.get("text_config", data)
        limit = _max_positions(text, path)
        wanted = config.max_model_len or limit
        if wanted > limit:
            raise ConfigError(
                f"engine.max_model_len is {wanted}, but {path} has positions for {limit}; lower it"
            )
        generation = _read_json(path / _GENERATION_CONFIG_NAME, is_optional=True)
        num_heads = _first_int(text, "num_attention_heads", "n_head", "num_heads")
        return cls(
            path=path,
            model_type=str(data.get("model_type", "unknown")),
            vocab_size=int(text.get("vocab_size", 0)),
            max_model_len=wanted,
            dtype=_dtype(config, data, text),
            eos_token_ids=_eos_ids(text, generation),
            generation_defaults=_generation_defaults(generation),
            num_attention_heads=num_heads,
            num_key_value_heads=_first_int(text, "num_key_value_heads") or num_heads,
            is_deterministic=config.deterministic,
        )

    @classmethod
    def _mock(cls, config: EngineConfig) -> "ModelSource":
        return cls(
            path=Path(config.model_path),
            model_type="mock",
            vocab_size=MOCK_VOCAB_SIZE,
            max_model_len=config.max_model_len or 8192,
            dtype="float32",
            eos_token_ids=(MOCK_EOS_TOKEN_ID,),
            is_deterministic=config.deterministic,
            is_mock=True,
        )

    def sampling_defaults(self, config: EngineConfig) -> SamplingParams:
        """Return SamplingParams with what the model's own generation_config sets, if it counts."""
        if config.generation_config == "ignore":
            return SamplingParams()
        return SamplingParams().overlaid(self.generation_defaults)

    def fingerprint(self) -> dict[str, str]:
        """Return what decides the answers: a hash of the folder's files, dtype, length, EOS ids.

        Small files are hashed whole; of a weights file its size, three samples and a piece of
        each tensor are.
        """
        facts = {
            "max_model_len": str(self.max_model_len),
            "dtype": self.dtype,
            "eos_token_ids": ",".join(str(token) for token in self.eos_token_ids),
        }
        if self.is_deterministic:
            facts["deterministic"] = "true"  # it rounds otherwise
        facts["model"] = "mock" if self.is_mock else _hash_folder(self.path)
        return facts


def _check_folder(path: Path) -> None:
    if path.exists():
        check_weights(path)
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {path.parent / close[0]}?" if close else "."
        raise ConfigError(
            f"engine.model_path: found no folder {path}{hint} Wanted a folder with {_CONFIG_NAME} "
            "and *.safetensors; tokenmill loads local folders only, it never downloads"
        )
    if not (path / _CONFIG_NAME).is_file():
        raise ConfigError(f"engine.model_path: {path} has no {_CONFIG_NAME}; is it a model folder?")
    if not any(path.glob(f"*{WEIGHT_SUFFIX}")):
        found = sorted({p.suffix for p in path.iterdir() if p.is_file() and p.suffix})
        raise ConfigError(
            f"engine.model_path: {path} has no *{WEIGHT_SUFFIX} (it has {', '.join(found)}); is it "
            "a whole model folder?"
        )
    index = path / f"model{WEIGHT_SUFFIX}.index.json"
    names = set(_read_json(index, is_optional=True).get("weight_map", {}).values())
    # Whatever else it names, transformers would unpickle, or look for outside of the folder.
    if wrong := sorted(n for n in names if Path(n).name != n or Path(n).suffix != WEIGHT_SUFFIX):
        raise ConfigError(f"{index} names {wrong[0]}, wanted *{WEIGHT_SUFFIX} beside it alone")


def _read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found {type(data).__name__}, wanted an object")
    return data


def _first_int(text: dict[str, Any], *names: str) -> int:
    return next((text[name] for name in names if isinstance(text.get(name), int)), 0)


def _max_positions(text: dict[str, Any], path: Path) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(text.get(name), int):
            return int(text[name])
    raise ConfigError(
        f"{path / _CONFIG_NAME} does not say how many positions the model has "
        "(max_position_embeddings); add it"
    )


def _dtype(config: EngineConfig, data: dict[str, Any], text: dict[str, Any]) -> str:
    if config.dtype != "auto":
        return config.dtype
    saved = text.get("dtype") or data.get("dtype") or data.get("torch_dtype") or "float32"
    return str(saved).removeprefix("torch.")


def _eos_ids(text: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Return every EOS id: chat models often list more in generation_config than in config."""
    ids: set[int] = set()
    for source in (text, generation):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        ours: generation[theirs]
        for theirs, ours in _GENERATION_FIELDS.items()
        if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _hash_folder(path: Path) -> str:
    digest = blake2b(digest_size=16)
    for file in sorted(p for p in path.iterdir() if p.is_file()):
        if file.suffix not in (".json", ".jinja", ".model", ".txt", ".py", WEIGHT_SUFFIX):
            continue
        digest.update(file.name.encode())
        digest.update(_file_digest(file))
    return digest.hexdigest()


def _file_digest(file: Path) -> bytes:
    """Hash a file: whole when small, else its size, its head, middle and end, and each tensor."""
    digest = blake2b(digest_size=16)
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= 4 * _SAMPLE_BYTES or file.suffix != WEIGHT_SUFFIX:
            while chunk := stream.read(_SAMPLE_BYTES):
                digest.update(chunk)
        else:
            for offset in (0, size // 2, size - _SAMPLE_BYTES):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
            for offset in _tensor_middles(file):
                stream.seek(offset)
                digest.update(stream.read(_TENSOR_SAMPLE_BYTES))
    return digest.digest()


def _tensor_middles(file: Path) -> list[int]:
    """Return the middle of each tensor of a safetensors file; none when it has no such header."""
    try:
        return sorted((tensor.start + tensor.end) // 2 for tensor in read_header(file))
    except ValueError:
        return []
