"""What a model folder says before its weights are loaded, and how its faults read."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_source import ModelSource
from engine.sampling_params import SamplingParams

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def write_model(
    folder: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def inspect(folder: Path, **settings: Any) -> ModelSource:
    return ModelSource.inspect(EngineConfig(model_path=str(folder), **settings))


def test_the_facts_of_a_model_come_from_its_config(tmp_path: Path) -> None:
    source = inspect(write_model(tmp_path / "m"))
    assert source.model_type == "llama"
    assert source.vocab_size == 100
    assert source.max_model_len == 64
    assert source.dtype == "bfloat16"
    assert source.eos_token_ids == (2,)


def test_the_text_part_of_a_larger_config_counts(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "text_config": LLAMA, "vocab_size": 7}
    source = inspect(write_model(tmp_path / "m", nested))
    assert (source.vocab_size, source.max_model_len, source.eos_token_ids) == (100, 64, (2,))


def test_eos_ids_of_both_files_count(tmp_path: Path) -> None:
    source = inspect(write_model(tmp_path / "m", generation={"eos_token_id": [5, 2, 9]}))
    assert source.eos_token_ids == (2, 5, 9)


def test_a_model_without_eos_has_none(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "m", LLAMA | {"eos_token_id": None})).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (LLAMA, "bfloat16"),
        (LLAMA | {"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
        (LLAMA | {"dtype": None}, "float32"),
    ],
)
def test_dtype_auto_is_what_the_checkpoint_was_saved_in(
    tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    folder = write_model(tmp_path / "m", config)
    assert inspect(folder).dtype == dtype
    assert inspect(folder, dtype="float32").dtype == "float32"


def test_max_model_len_may_be_lowered_but_not_raised(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert inspect(folder, max_model_len=10).max_model_len == 10
    with pytest.raises(ConfigError, match="max_model_len is 65, .* has positions for 64; lower it"):
        inspect(folder, max_model_len=65)


def test_sampling_defaults_of_the_model_count_unless_ignored(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 7, "odd": 1}
    folder = write_model(tmp_path / "m", generation=generation)
    config = EngineConfig(model_path=str(folder))
    ours = SamplingParams(temperature=0.6, top_k=20, max_tokens=7)
    assert ModelSource.inspect(config).sampling_defaults(config) == ours
    ignoring = config.model_copy(update={"generation_config": "ignore"})
    assert ModelSource.inspect(ignoring).sampling_defaults(ignoring) == SamplingParams()


def test_a_model_that_does_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", generation={"do_sample": False, "temperature": 0.6})
    config = EngineConfig(model_path=str(folder))
    assert ModelSource.inspect(config).sampling_defaults(config).is_greedy


# Faults.


def test_a_missing_folder_is_answered_with_the_one_that_was_meant(tmp_path: Path) -> None:
    write_model(tmp_path / "smol-model")
    with pytest.raises(ConfigError, match=r"did you mean .*smol-model\? Wanted a folder"):
        inspect(tmp_path / "smoll-model")
    with pytest.raises(ConfigError, match=r"found no folder .*elsewhere\. Wanted a folder"):
        inspect(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="found no folder"):
        inspect(tmp_path / "no" / "such" / "parent")


def test_a_folder_that_is_no_model_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; is it a model folder\?"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "merges.txt").touch()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors \(it has \.json, \.txt\); is it"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read as JSON"), ("[1]", "found list, wanted an object")],
)
def test_an_unreadable_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        inspect(folder)


def test_a_config_without_a_length_is_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    with pytest.raises(ConfigError, match="how many positions"):
        inspect(write_model(tmp_path / "m", config))


# Fingerprint.


@pytest.fixture
def big_model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "big")
    (folder / "model.safetensors").write_bytes(bytes(5 << 20))
    return folder


@pytest.mark.parametrize("offset", [0, (5 << 20) // 2, (5 << 20) - 1])
def test_other_weights_of_the_same_size_have_another_fingerprint(
    big_model: Path, offset: int
) -> None:
    before = inspect(big_model).fingerprint()
    with (big_model / "model.safetensors").open("r+b") as weights:
        weights.seek(offset)
        weights.write(b"\x01")
    after = inspect(big_model).fingerprint()
    assert {key for key in before if before[key] != after[key]} == {"model"}


@pytest.mark.parametrize("changed", range(9))
def test_a_fine_tune_of_a_single_tensor_has_another_fingerprint(
    tmp_path: Path, changed: int
) -> None:
    folder = write_model(tmp_path / "tuned")
    tensor_bytes = 1 << 20
    header = {"__metadata__": {"format": "pt"}} | {
        f"layers.{n}.q_proj.weight": {
            "dtype": "F32",
            "shape": [tensor_bytes // 4],
            "data_offsets": [n * tensor_bytes, (n + 1) * tensor_bytes],
        }
        for n in range(9)
    }
    encoded = json.dumps(header).encode()
    start = len(encoded).to_bytes(8, "little") + encoded
    weights = folder / "model.safetensors"
    weights.write_bytes(start + bytes(9 * tensor_bytes))
    before = inspect(folder).fingerprint()
    with weights.open("r+b") as stream:
        stream.seek(len(start) + changed * tensor_bytes)
        stream.write(b"\x01" * tensor_bytes)
    assert inspect(folder).fingerprint() != before


def test_the_fingerprint_does_not_depend_on_where_or_when_the_folder_was_written(
    tmp_path: Path,
) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    (two / "README.md").write_text("a note changes no answer")
    assert inspect(one).fingerprint() == inspect(two).fingerprint()


def test_settings_that_change_answers_are_in_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    base = inspect(folder).fingerprint()
    assert inspect(folder, dtype="float32").fingerprint()["dtype"] != base["dtype"]
    assert inspect(folder, max_model_len=10).fingerprint()["max_model_len"] == "10"
    write_model(folder, generation={"eos_token_id": 7})
    assert inspect(folder).fingerprint()["eos_token_ids"] == "2,7"


def test_the_mock_needs_no_folder() -> None:
    source = ModelSource.inspect(EngineConfig(model_path="none", device="mock", max_model_len=9))
    assert source.is_mock
    assert source.max_model_len == 9
    assert source.fingerprint()["model"] == "mock"
