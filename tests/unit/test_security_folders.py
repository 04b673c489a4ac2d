"""No other user of a host can put a link where files of ours go, or read along."""

import os
from pathlib import Path

import pytest

from engine import ConfigError, EngineConfig, OfflineInference
from engine.backends.compile_cache import CacheKey, CompileCache
from engine.private_folder import private_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def own_folder(temporary: Path) -> Path:
    return temporary / f"tokenmill-{os.getuid()}"


def test_logs_that_no_setting_gives_a_place_are_for_this_user_alone(temporary: Path):
    config = EngineConfig(model_path="none", device="mock")
    with OfflineInference(config) as llm:
        llm.generate(["hello"])
    assert len(list((own_folder(temporary) / "logs").glob("worker-*.log"))) == 1
    assert own_folder(temporary).stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_there_is_taken_again(temporary: Path):
    assert private_folder() == private_folder() == own_folder(temporary)


def test_a_link_in_its_place_is_not_followed(temporary: Path):
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    own_folder(temporary).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="remove it, or set engine.log_dir"):
        private_folder()


def test_a_folder_that_others_can_write_to_is_refused(temporary: Path):
    own_folder(temporary).mkdir()
    own_folder(temporary).chmod(0o777)
    with pytest.raises(ConfigError, match="that this user alone writes to"):
        private_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away")
def test_a_folder_that_somebody_else_made_is_refused(temporary: Path):
    own_folder(temporary).mkdir(mode=0o700)
    os.chown(own_folder(temporary), 65534, 65534)
    with pytest.raises(ConfigError, match="that this user alone writes to"):
        private_folder()


@pytest.mark.parametrize("which", ["parent", "key"])
def test_compiled_code_is_not_taken_from_where_everybody_may_put_it(temporary: Path, which: str):
    key = CacheKey(model={}, device={}, versions={}, shapes={})
    CompileCache.open(temporary / "cache", key)
    folder = temporary / "cache" if which == "parent" else temporary / "cache" / key.digest
    folder.chmod(0o1777)
    with pytest.raises(ConfigError, match="what lies there is run.*chmod o-w"):
        CompileCache.open(temporary / "cache", key)
