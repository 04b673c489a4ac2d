"""What one start of a worker can keep for the next, in a folder for each kind of worker.

    CACHE_DIR/KEY/key.json              what the key was made of, in clear
                  kernels/              machine code, as the compilers of the device lay it down:
                                        numba's of the CPU, compiled operators of an NPU
                  numbers.json          what was measured, such as the memory of the largest step

The key is made of all that could make a content wrong: the model, the versions of what compiles,
the device, and the shapes. Nothing is ever deleted here; a folder may be, at any time.

Captured graphs are not kept and cannot be: they hold addresses of this process's memory, and
neither NPUs nor GPUs write them to a file. They are captured anew by each worker.

Several workers may use a folder at once. Numbers and key are replaced whole. The compilers see to
their own files; since one key has one dtype and one version, all its workers compile the same.
"""

import json
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from uuid import uuid4

from engine.backends.base import DeviceBackend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_source import ModelSource

logger = logging.getLogger(__name__)
_PACKAGES = ("tokenmill", "torch", "torch_npu", "transformers", "numba", "numpy")
_KEY_NAME = "key.json"
_KERNELS_NAME = "kernels"
_NUMBERS_NAME = "numbers.json"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """All that a content of the cache depends on, each a mapping of name to value."""

    model: Mapping[str, str]
    device: Mapping[str, str]
    versions: Mapping[str, str]
    shapes: Mapping[str, int | list[int] | None]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: Mapping[str, str],
        device: Mapping[str, str],
        capture_sizes: Sequence[int] = (),
    ) -> "CacheKey":
        """Return the key of a worker of this process's versions.

        model is ModelSource.fingerprint, device is DeviceBackend.kernel_facts, capture_sizes are
        the batch sizes of which there are graphs.
        """
        return cls(
            model=model,
            device=device,
            versions={name: _version_of(name) for name in _PACKAGES},
            shapes={
                "max_num_seqs": config.scheduler.max_num_seqs,
                "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
                "block_size": config.cache.block_size,
                "tensor_parallel_size": config.tensor_parallel_size,
                "capture_sizes": list(capture_sizes),
            },
        )

    def as_json(self) -> str:
        """Return its parts as a person reads them, always the same text for the same key."""
        parts = {
            "model": dict(self.model),
            "device": dict(self.device),
            "versions": dict(self.versions),
            "shapes": dict(self.shapes),
        }
        return json.dumps(parts, indent=2, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """Its name as a folder."""
        return blake2b(self.as_json().encode(), digest_size=10).hexdigest()


class CompileCache:
    """The folder of one key, or, without a cache_dir, a cache that keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        source: ModelSource,
        backend: DeviceBackend,
        capture_sizes: Sequence[int] = (),
    ) -> "CompileCache":
        """Return the cache of a worker, and let its bound device keep compiled kernels there.

        Raises:
            ConfigError: engine.cache_dir cannot be used.
        """
        if config.cache_dir is None:
            return cls(None)
        key = CacheKey.of(config, source.fingerprint(), backend.kernel_facts(), capture_sizes)
        cache = cls.open(config.cache_dir, key)
        backend.keep_kernels(cache.kernel_folder)
        return cache

    @classmethod
    def open(cls, cache_dir: Path, key: CacheKey) -> "CompileCache":
        """Find the key's folder or make it, and say in the log which it was.

        Raises:
            ConfigError: the folder cannot be used, or anybody could put code there.
        """
        folder = cache_dir.absolute() / key.digest
        try:
            (folder / _KERNELS_NAME).mkdir(parents=True, exist_ok=True)
            _write_key(folder / _KEY_NAME, key)
            is_safe = not (cache_dir.stat().st_mode | folder.stat().st_mode) & stat.S_IWOTH
        except OSError as error:
            raise ConfigError(
                f"no cache can be kept in {folder}: {error}; set engine.cache_dir to another "
                "folder, or leave it out"
            ) from error
        if not is_safe:
            raise ConfigError(
                f"engine.cache_dir: every user of this host may write to {cache_dir}, or to {folder}, "
                "and what lies there is run; take that right away (chmod o-w), or name another folder"
            )
        contents = _contents_of(folder)
        logger.info(
            "cache %s key=%s folder=%s contents=%s",
            "hit" if contents else "miss",
            key.digest,
            folder,
            ", ".join(contents) or "none",
        )
        return cls(folder)

    @property
    def kernel_folder(self) -> Path:
        """Where compiled kernels are kept."""
        assert self._folder is not None
        return self._folder / _KERNELS_NAME

    def remember(self, name: str, measure: Callable[[], int]) -> int:
        """Return a number that was stored, or measure it and store it.

        Not for what ranks measure together: one of them might find its number and not take part.
        """
        number = self.load_number(name)
        if number is None:
            number = measure()
            self.store_number(name, number)
        return number

    def load_number(self, name: str) -> int | None:
        """Return a number that a worker of this key has stored, if there is one."""
        return None if self._folder is None else _read_numbers(self._folder).get(name)

    def store_number(self, name: str, value: int) -> None:
        """Keep a number for the next start; a full disk only costs the time to measure it again."""
        if self._folder is None:
            return
        numbers = _read_numbers(self._folder) | {name: value}
        try:
            _replace(
                self._folder / _NUMBERS_NAME, json.dumps(numbers, indent=2, sort_keys=True) + "\n"
            )
        except OSError as error:
            logger.warning("%s is not kept for the next start: %s", name, error)


def _read_numbers(folder: Path) -> dict[str, int]:
    path = folder / _NUMBERS_NAME
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, its numbers are measured anew: %s", path, error)
        return {}
    if not isinstance(numbers, dict) or not all(type(n) is int for n in numbers.values()):
        logger.warning("%s holds other than numbers by name, they are measured anew", path)
        return {}
    return numbers


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _write_key(path: Path, key: CacheKey) -> None:
    """List what the key was made of, for people: the folder's name decides."""
    try:
        found = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        found = None
    if found != key.as_json():
        if found is not None:
            logger.warning("%s was damaged, and is written anew", path)
        _replace(path, key.as_json())


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _contents_of(folder: Path) -> list[str]:
    """Say what there is for a worker to take."""
    contents = [f"{name}={number}" for name, number in _read_numbers(folder).items()]
    sizes = []
    for parent, _, names in os.walk(folder / _KERNELS_NAME):
        for name in names:
            with suppress(OSError):  # another worker has just replaced it
                sizes.append((Path(parent) / name).stat().st_size)
    if sizes:
        contents.append(f"{len(sizes)} files of kernels ({sum(sizes) / _MIB:.1f} MiB)")
    return contents
