"""Weights are read from safetensors alone: nothing in a model folder is unpickled."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import open_engine, save_tiny_llama

from engine import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Give a model folder that has safetensors, and in them not what the model needs."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / WEIGHTS).unlink()
    save_file({"other": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


def name_as_shard(folder: Path, whole: Path, name: str) -> None:
    weight_map = dict.fromkeys(load_file(whole / WEIGHTS), name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def generate(folder: Path) -> tuple[int, ...]:
    with open_engine(folder) as llm:
        return tuple(llm.generate(["hello"])[0].token_ids)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_pickle_is_never_opened(folder: Path, whole: Path, tmp_path: Path, is_indexed: bool):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    (folder / "pytorch_model.bin").write_bytes(bomb)
    if is_indexed:
        name_as_shard(folder, whole, "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        generate(folder)
    assert not (tmp_path / "exploded").exists()


def test_pickled_weights_that_are_whole_are_not_taken_either(folder: Path, whole: Path):
    torch.save(load_file(whole / WEIGHTS), folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
        generate(folder)


def test_an_index_leads_out_of_no_folder(folder: Path, whole: Path):
    name_as_shard(folder, whole, f"../{whole.name}/{WEIGHTS}")
    with pytest.raises(ConfigError, match=r"index\.json names \.\./.*beside it alone"):
        generate(folder)


def test_shards_beside_the_index_are_taken(folder: Path, whole: Path):
    shutil.copy(whole / WEIGHTS, folder / "model-00001-of-00001.safetensors")
    name_as_shard(folder, whole, "model-00001-of-00001.safetensors")
    assert generate(folder)
