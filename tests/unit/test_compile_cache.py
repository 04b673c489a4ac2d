"""What one start keeps for the next: found again by all that it depends on, and never half."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from engine import ConfigError, EngineConfig
from engine.backends import cpu_kernels
from engine.backends.compile_cache import CacheKey, CompileCache
from engine.backends.cpu import CpuBackend
from engine.model_source import ModelSource

MODEL = {"model": "0123abcd", "dtype": "bfloat16"}
DEVICE = {"device": "Ascend910B3", "cann": "8.3.RC1"}


def key_of(**settings: Any) -> CacheKey:
    config = EngineConfig.model_validate({"model_path": "none", **settings})
    return CacheKey.of(config, MODEL, DEVICE, capture_sizes=[1, 2, 4])


def open_cache(folder: Path, **settings: Any) -> CompileCache:
    return CompileCache.open(folder, key_of(**settings))


def folder_of(cache: CompileCache) -> Path:
    return cache.kernel_folder.parent


class KeepingBackend(CpuBackend):
    """Notes where its kernels are to be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: list[Path] = []

    def keep_kernels(self, folder: Path) -> None:
        self.folders.append(folder)


def cache_of(cache_dir: Path | None, backend: CpuBackend) -> CompileCache:
    config = EngineConfig(model_path="none", device="mock", cache_dir=cache_dir)
    source = ModelSource.inspect(config)
    return CompileCache.of(config, source, backend, capture_sizes=[1, 2])


def test_without_a_folder_nothing_is_kept_and_each_start_measures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    backend = KeepingBackend()
    cache = cache_of(None, backend)
    assert cache.remember("peak_bytes", lambda: 7) == 7
    assert cache.remember("peak_bytes", lambda: 8) == 8
    assert cache.load_number("peak_bytes") is None
    assert backend.folders == []
    assert warnings_of(caplog) == []


def test_device_keeps_its_kernels_in_the_folder_of_the_key(tmp_path: Path) -> None:
    backend = KeepingBackend()
    cache = cache_of(tmp_path, backend)
    assert backend.folders == [cache.kernel_folder]
    assert cache.kernel_folder.is_dir()
    parts = json.loads((folder_of(cache) / "key.json").read_text())
    assert parts["device"] == backend.kernel_facts()
    assert parts["model"]["model"] == "mock"
    assert parts["shapes"]["capture_sizes"] == [1, 2]


def test_a_number_is_measured_once(tmp_path: Path) -> None:
    first, second = (open_cache(tmp_path) for _ in range(2))
    assert first.remember("peak_bytes", lambda: 7) == 7
    assert second.remember("peak_bytes", lambda: pytest.fail("measured again")) == 7


def test_first_start_misses_and_the_second_hits_and_tells_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = open_cache(tmp_path / "cache")
    first.store_number("peak_bytes", 7)
    (first.kernel_folder / "deep").mkdir()
    (first.kernel_folder / "deep" / "attend.bin").write_bytes(b"0" * (3 << 20))
    second = open_cache(tmp_path / "cache")
    digest, folder = key_of().digest, folder_of(first)
    assert caplog.messages == [
        f"cache miss key={digest} folder={folder} contents=none",
        f"cache hit key={digest} folder={folder} "
        "contents=peak_bytes=7, 1 files of kernels (3.0 MiB)",
    ]
    assert folder == tmp_path / "cache" / digest
    assert second.load_number("peak_bytes") == 7
    assert second.load_number("other") is None


def test_key_is_listed_in_clear(tmp_path: Path) -> None:
    folder = folder_of(open_cache(tmp_path, scheduler={"max_num_seqs": 48}))
    parts = json.loads((folder / "key.json").read_text())
    assert parts["model"] == MODEL
    assert parts["device"] == DEVICE
    assert parts["shapes"] == {
        "max_num_seqs": 48, "max_num_batched_tokens": 2048, "block_size": None,
        "tensor_parallel_size": 1, "capture_sizes": [1, 2, 4],
    }  # fmt: skip
    assert set(parts["versions"]) >= {"tokenmill", "torch", "torch_npu", "transformers", "numba"}
    assert parts["versions"]["torch"].startswith("2.13")


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": {"max_num_seqs": 65}},
        {"scheduler": {"max_num_batched_tokens": 2049}},
        {"cache": {"block_size": 128}},
        {"tensor_parallel_size": 2, "device_ids": [0, 1]},
    ],
)
def test_other_shapes_have_another_folder(settings: dict[str, Any]) -> None:
    assert key_of(**settings).digest != key_of().digest


@pytest.mark.parametrize("part", ["model", "device", "versions", "shapes"])
def test_a_key_that_differs_in_one_fact_has_another_folder(part: str) -> None:
    key = key_of()
    facts = dict(getattr(key, part))
    facts[min(facts)] = "another"
    assert replace(key, **{part: facts}).digest != key.digest


def test_what_does_not_matter_to_kernels_does_not_change_the_folder() -> None:
    assert key_of(log_level="DEBUG", cache={"kv_cache_gib": 2}).digest == key_of().digest


def test_a_second_number_leaves_the_first_as_it_is(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.store_number("peak_bytes", 7)
    cache.store_number("other_bytes", 8)
    assert (cache.load_number("peak_bytes"), cache.load_number("other_bytes")) == (7, 8)


@pytest.mark.parametrize(
    "content", [b"", b'{"peak_bytes": 7', b"[7]", b'{"peak_bytes": "7"}', b'{"a": true}', b"\xff"]
)
def test_damaged_numbers_are_a_miss_with_a_warning_and_healed_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    cache = open_cache(tmp_path)
    path = folder_of(cache) / "numbers.json"
    path.write_bytes(content)
    assert cache.load_number("peak_bytes") is None
    assert str(path) in caplog.text
    cache.store_number("peak_bytes", 9)
    assert open_cache(tmp_path).load_number("peak_bytes") == 9


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_damaged_list_of_a_keys_parts_is_written_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = folder_of(open_cache(tmp_path)) / "key.json"
    whole = path.read_bytes()
    path.write_bytes(content)
    for _ in range(2):
        open_cache(tmp_path)
    assert warnings_of(caplog) == [f"{path} was damaged, and is written anew"]
    assert path.read_bytes() == whole


def test_a_start_that_left_nothing_behind_is_a_miss_for_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        open_cache(tmp_path)
    assert [message[:10] for message in caplog.messages] == ["cache miss"] * 2


def test_folder_that_cannot_be_used_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"no cache can be kept in .*set engine\.cache_dir"):
        open_cache(tmp_path / "cache")


def test_number_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(tmp_path)
    (folder_of(cache) / "numbers.json").mkdir()
    cache.store_number("peak_bytes", 7)
    assert "peak_bytes is not kept for the next start" in caplog.text
    assert [path.name for path in folder_of(cache).glob(".*")] == []


def test_many_workers_at_once_read_whole_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(value: int) -> set[int | None]:
        seen = set()
        for _ in range(40):
            cache = open_cache(tmp_path)
            cache.store_number("peak_bytes", value)
            seen.add(cache.load_number("peak_bytes"))
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = set().union(*pool.map(work, range(8)))
    assert seen <= set(range(8))
    assert warnings_of(caplog) == []
    assert sorted(path.name for path in folder_of(open_cache(tmp_path)).iterdir()) == [
        "kernels", "key.json", "numbers.json",
    ]  # fmt: skip


def test_every_kernel_of_the_cpu_is_among_those_that_are_kept() -> None:
    kernels = [value for value in vars(cpu_kernels).values() if isinstance(value, Dispatcher)]
    assert len(kernels) > 5
    assert set(kernels) == set(cpu_kernels._KERNELS)


def test_cpu_names_itself_without_what_differs_between_its_processes() -> None:
    (name,) = CpuBackend().kernel_facts().values()
    assert name.startswith("cpu ")
    bound = CpuBackend()
    bound.bind(0, 1)
    assert bound.kernel_facts() == CpuBackend().kernel_facts()
