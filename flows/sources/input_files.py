"""What a source names: its files in their order, the format of each, and how it is opened."""

import difflib
import glob
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath

from engine import ConfigError
from flows.rows import printable
from flows.source_config import SourceConfig, SourceFormat, stem_of
from flows.sources.byte_streams import CODECS, file_system_of
from flows.sources.csv_file import CsvFile
from flows.sources.jsonl import JsonlFile
from flows.sources.source_file import SourceFile

_FORMAT_OF_SUFFIX = {
    ".jsonl": SourceFormat.JSONL,
    ".ndjson": SourceFormat.JSONL,
    ".csv": SourceFormat.CSV,
    ".tsv": SourceFormat.CSV,
    ".parquet": SourceFormat.PARQUET,
}
_TABLES = (SourceFormat.PARQUET, SourceFormat.DATASET)
# A folder with one of them was written by save_to_disk.
_STATE_NAME, _SPLITS_NAME = "state.json", "dataset_dict.json"
_MAX_NEIGHBOURS = 10_000
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of a source. The id of a row that brings none is row_id_start:LINE."""

    path: str
    format: SourceFormat
    row_id_start: str

    def open(self) -> SourceFile:
        """Return a reader of the file, which opens it when it reads."""
        # pyarrow takes a quarter of a second, which `status` and a job of JSONL need not spend.
        if self.format is SourceFormat.PARQUET:
            from flows.sources.parquet import ParquetFile

            return ParquetFile(self.path)
        if self.format is SourceFormat.DATASET:
            from flows.sources.dataset import DatasetFolder

            return DatasetFolder(self.path)
        return CsvFile(self.path) if self.format is SourceFormat.CSV else JsonlFile(self.path)

    def row_id_of(self, line: int) -> str:
        """Return the id of a row that brings none."""
        return f"{self.row_id_start}:{line}"

    def describe(self, line: int) -> str:
        """Return file and place, as messages name a row."""
        return f"{self.path}, {'row' if self.format in _TABLES else 'line'} {line}"


def find_files(sources: tuple[SourceConfig, ...]) -> list[tuple[InputFile, ...]]:
    """Return the files of each source, in the order in which they are read.

    Raises:
        ConfigError: no such file, no file that matches, a format that cannot be told, or two files
            whose rows would have the same ids.
    """
    found = [_files_of(index, source) for index, source in enumerate(sources)]
    path_of: dict[str, str] = {}
    for file in (file for files in found for file in files):
        other = path_of.setdefault(file.row_id_start, file.path)
        if other is not file.path:
            raise ConfigError(
                f"rows of {other} and of {file.path} that bring no id would both be called "
                f"{file.row_id_start}:LINE; make them two sources, and give one a `name`"
            )
    return found


def source_of_path(sources: tuple[SourceConfig, ...], path: Path) -> str | None:
    """Return the path of the source that reads this file, or would once it is there."""
    for source in sources:
        if source.is_url:
            continue
        pattern = Path(source.path).absolute().parts
        if source.is_pattern and _matches(pattern, path.absolute().parts):
            return source.path
        # There may be no such file yet, or it cannot be seen; then writing it will say why.
        with suppress(OSError):
            if path.samefile(source.path):
                return source.path
    return None


def _files_of(index: int, source: SourceConfig) -> tuple[InputFile, ...]:
    place = f"sources.{index}.path: {source.path}"
    is_literal = not source.is_url and Path(source.path).is_file()
    if source.is_pattern and not is_literal:
        return tuple(
            InputFile(
                path=path,
                format=_format_of(f"{place}: {path}", path, source),
                row_id_start=_row_id_start(source, path),
            )
            for path in _matching(place, source)
        )
    path = _checked_url(place, source) if source.is_url else _checked_path(place, source)
    name = source.name if source.name is not None else stem_of(path)
    file_format = _format_of(place, path, source)
    return (InputFile(path=path, format=file_format, row_id_start=printable(name)),)


def _matching(place: str, source: SourceConfig) -> list[str]:
    if source.is_url:
        file_system, pattern = file_system_of(source.path)
        try:
            found = [file_system.unstrip_protocol(path) for path in file_system.glob(pattern)]
        # Each store has errors of its own.
        except Exception as error:
            raise ConfigError(f"{place}: cannot be listed: {error!r}") from error
    else:
        found = [
            path for path in glob.glob(source.path, recursive=True) if _may_be_read(path, source)
        ]
    if not found:
        raise ConfigError(f"{place}: no file matches; {_hint_for_pattern(source)}")
    return sorted(found, key=_natural_key)


def _may_be_read(path: str, source: SourceConfig) -> bool:
    return Path(path).is_dir() == (source.format is SourceFormat.DATASET)


def _natural_key(path: str) -> tuple[list[tuple[str, int]], str]:
    """Order part-2 before part-10, and part-1 before part-01 whatever the file system says."""
    pieces = re.split(r"(\d+)", path)
    key = [(piece, 0) if n % 2 == 0 else ("", int(piece)) for n, piece in enumerate(pieces)]
    return key, path


def _row_id_start(source: SourceConfig, path: str) -> str:
    """Return the file's stem, with the folders that the pattern leaves open."""
    pattern = PurePosixPath(source.path).parts
    num_fixed = next(i for i, part in enumerate(pattern) if any(sign in part for sign in "*?["))
    folders = PurePosixPath(path).parts[num_fixed:-1]
    start = "/".join((*folders, stem_of(path)))
    return printable(start if source.name is None else f"{source.name}/{start}")


def _checked_path(place: str, source: SourceConfig) -> str:
    path = Path(source.path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{place}: no such file; {_hint_for_missing(path)}") from error
    except OSError as error:
        raise ConfigError(f"{place}: cannot read the source: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        _check_dataset(place, path)
    elif not stat.S_ISREG(mode):
        raise ConfigError(f"{place} is not a regular file; wanted a file, or a dataset's folder")
    else:
        _check_readable(place, path)
    return source.path


def _check_readable(place: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{place}: cannot read the source: {error.strerror}") from error


def _check_dataset(place: str, folder: Path) -> None:
    if (folder / _STATE_NAME).is_file():
        return
    if (folder / _SPLITS_NAME).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{_STATE_NAME}"))
        raise ConfigError(
            f"{place} holds several splits; name one of them: "
            f"{', '.join(str(folder / split) for split in splits) or 'there is none'}"
        )
    raise ConfigError(
        f"{place} is a folder and not a regular file; wanted a file, a pattern such as "
        f"{folder}/*.jsonl, or a folder that save_to_disk of datasets has written"
    )


def _checked_url(place: str, source: SourceConfig) -> str:
    file_system, path = file_system_of(source.path)
    try:
        is_there = file_system.exists(path)
    # Each store has errors of its own.
    except Exception as error:
        raise ConfigError(f"{place}: cannot be reached: {error!r}") from error
    if not is_there:
        raise ConfigError(f"{place}: no such file; check the name")
    return source.path


def _format_of(place: str, path: str, source: SourceConfig) -> SourceFormat:
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    is_packed = bool(suffixes) and suffixes[-1] in CODECS
    suffix = (suffixes[:-1] if is_packed else suffixes)[-1:]
    file_format = source.format or (_FORMAT_OF_SUFFIX.get(suffix[0]) if suffix else None)
    is_folder = not source.is_url and Path(path).is_dir()
    if source.format is None and is_folder:
        return SourceFormat.DATASET
    if file_format is None:
        raise ConfigError(
            f"{place}: the name does not tell the format; write `format:` into the source: "
            f"{', '.join(SourceFormat)}"
        )
    if is_folder != (file_format is SourceFormat.DATASET) and not source.is_url:
        wanted = "a folder" if file_format is SourceFormat.DATASET else "a file"
        raise ConfigError(f"{place}: format is {file_format}, which is {wanted}; change format")
    if is_packed and file_format in _TABLES:
        raise ConfigError(f"{place}: {file_format} is packed by itself; unpack the file")
    return file_format


def _matches(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern or not path:
        return pattern == path
    if pattern[0] == "**":
        return _matches(pattern[1:], path) or _matches(pattern, path[1:])
    return fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


def _hint_for_missing(path: Path) -> str:
    names = _names_in(path.parent)
    if names is None:
        return f"its folder {path.parent} cannot be listed either"
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "check the name"


def _hint_for_pattern(source: SourceConfig) -> str:
    if source.is_url:
        return "check the pattern"
    folder = Path(source.path)
    while any(sign in str(folder) for sign in "*?["):
        folder = folder.parent
    names = _names_in(folder)
    if names is None:
        return f"its folder {folder} cannot be listed either"
    close = difflib.get_close_matches(Path(source.path).name, names, n=_MAX_SHOWN, cutoff=0.0)
    return f"{folder} holds {', '.join(close) or 'nothing'}"


def _names_in(folder: Path) -> list[str] | None:
    try:
        return sorted(islice(_iterate_names(folder), _MAX_NEIGHBOURS))
    except OSError:
        return None


def _iterate_names(folder: Path) -> Iterator[str]:
    return (entry.name for entry in folder.iterdir())
