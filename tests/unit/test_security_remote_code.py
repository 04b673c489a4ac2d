"""Python code that comes with a model is run when the configuration says so, and never else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import save_tiny_llama

from engine import ConfigError, EngineConfig, ModelSource, OfflineInference, Tokenizer

# Leaves a file behind as soon as it is imported.
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "plain")


@pytest.fixture
def folder(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a model folder that wants its own code for configuration, model and tokenizer."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))
    # transformers imports the code under the folder's name, once a process.
    folder = tmp_path / f"model_of_{tmp_path.name}"
    shutil.copytree(plain, folder)
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "has-run")))
    changes = {
        "config.json": {
            "model_type": "own",
            "architectures": ["OwnModel"],
            "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]},
        },
    }
    for name, change in changes.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | change))
    return folder


def config_of(folder: Path, *, is_trusted: bool | None = None) -> EngineConfig:
    settings = {} if is_trusted is None else {"trust_remote_code": is_trusted}
    return EngineConfig.model_validate(
        {
            "model_path": str(folder),
            "device": "cpu",
            "cache": {"num_blocks": 64},
            "runtime": {"inline": True, "num_threads": 1},
            **settings,
        }
    )


def load_tokenizer(config: EngineConfig) -> object:
    return Tokenizer.load(config, ModelSource.inspect(config))


def load_model(config: EngineConfig, plain: Path) -> object:
    with OfflineInference(config.model_copy(update={"tokenizer_path": str(plain)})) as llm:
        return llm.generate(["hello"])


@pytest.mark.parametrize("load", [load_tokenizer, load_model])
def test_it_is_not_run_unless_set_and_the_refusal_names_the_setting(
    load: Callable[..., object], folder: Path, plain: Path, tmp_path: Path
):
    rest = (plain,) if load is load_model else ()
    with pytest.raises(ConfigError, match=r"engine\.trust_remote_code is true; read the code"):
        load(config_of(folder), *rest)
    assert not (tmp_path / "has-run").exists()


def test_it_is_run_when_set(folder: Path, plain: Path, tmp_path: Path):
    config = config_of(folder, is_trusted=True)
    assert type(load_tokenizer(config)).__name__ == "PretrainedTokenizer"
    assert (tmp_path / "has-run").exists()
    assert load_model(config, plain)
