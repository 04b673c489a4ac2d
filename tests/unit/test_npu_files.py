"""What we ship for NPUs beside the code: engine sections to copy, and the image."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.backends.npu_capabilities import check_block_size
from engine.layers.decode_graphs import capture_sizes
from flows.config import JobConfig

ROOT = Path(__file__).parents[2]
ENGINES = sorted((ROOT / "configs/engines").glob("npu-910b-*.yaml"))
DOCKERFILE = (ROOT / "docker/npu.Dockerfile").read_text(encoding="utf-8")


def engine_of(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(content) == ["engine"]  # a section to be copied, and nothing else
    section: dict[str, Any] = content["engine"]
    return section


def test_there_is_one_for_each_case():
    assert [path.stem for path in ENGINES] == [
        "npu-910b-32b-4cards",
        "npu-910b-7b-32gib",
        "npu-910b-7b-64gib",
    ]


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_engine_section_makes_a_job_valid(path: Path):
    job = {"name": "copied", "sources": [{"path": "rows.jsonl"}], "engine": engine_of(path)}
    config = JobConfig.model_validate(job).engine
    assert (config.device, config.dtype) == ("npu", "bfloat16")
    assert config.cache.block_size is not None
    check_block_size(config.cache.block_size)


def test_small_card_has_the_step_that_was_asked_for():
    (path,) = (path for path in ENGINES if path.stem.endswith("32gib"))
    assert engine_of(path)["scheduler"]["max_num_batched_tokens"] == 8192


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_every_value_is_explained(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    settings = [number for number, line in enumerate(lines) if re.match(r" +\w+: ", line)]
    unexplained = [lines[number].strip() for number in settings if "#" not in lines[number - 1]]
    assert unexplained == ["device: npu"]


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_stated_bytes_of_a_token_and_number_of_graphs_are_right(path: Path):
    text = path.read_text(encoding="utf-8")
    found = re.search(r"one token +(.+?) bytes +(\d+) KiB", text)
    assert found is not None
    product = 1.0
    for term in re.findall(r"(?:x|/|^)\s*\d+", re.sub(r"[a-wyz]+", "", found[1])):
        number = int(re.sub(r"\D", "", term))
        product = product / number if term.startswith("/") else product * number
    assert product == int(found[2]) * 1024
    stated = re.search(r"requests: (\d+) of\s", text)
    assert stated is not None
    assert int(stated[1]) == len(capture_sizes(engine_of(path)["scheduler"]["max_num_seqs"]))


def test_image_is_for_both_kinds_of_host():
    named = re.findall(r"(?i)\b(x86_64|amd64|aarch64-linux|x86_64-linux|arm64)\b", DOCKERFILE)
    assert named == []
    # A torch for CUDA, which the ordinary index has for both, would only fail when a job starts.
    assert "torch.version.cuda is None" in DOCKERFILE


def test_container_loads_the_environment_of_old_and_new_cann():
    entry = re.search(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)
    assert entry is not None
    shell, option, script, end = json.loads(entry[1])
    assert (shell, option, end) == ("bash", "-lc", "--")
    for folder in ("cann", "ascend-toolkit", "nnal/atb"):
        assert f"/usr/local/Ascend/{folder}/set_env.sh" in script
    assert script.endswith('exec "$@"')
