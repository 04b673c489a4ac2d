"""Opens what a source names as bytes: local or behind a URL, plain or packed, and seekable."""

import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from engine import ConfigError
from flows.source_config import is_url

_BUFFER_BYTES = 1 << 20
CODECS = {".gz": "gzip", ".zst": "zstd"}
# What a file begins with when it is not what its name says.
_PACKED = {
    b"\x1f\x8b\x08": ("packed with gzip", "give it a name that ends in .gz"),
    b"\x28\xb5\x2f\xfd": ("packed with Zstandard", "give it a name that ends in .zst"),
    b"BZh": ("packed with bzip2", "unpack it, or pack it with gzip"),
    b"\xfd7zXZ\x00": ("packed with xz", "unpack it, or pack it with gzip"),
    b"PK\x03\x04": ("a ZIP archive", "unpack it"),
    b"PAR1": ("a Parquet file", "write format: parquet"),
    b"ARROW1": ("an Arrow file", "write it as Parquet"),
}
# No packed file is shorter.
_PEEK_BYTES = 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def codec_of(path: str) -> str | None:
    """Return how the file is packed, by its name."""
    return CODECS.get(PurePosixPath(path).suffix.lower())


def open_bytes(path: str) -> BinaryIO:
    """Open a file as it lies there.

    Raises:
        ConfigError: it cannot be opened, or the package for the URL is not installed.
    """
    if is_url(path):
        return _open_url(path)
    try:
        return Path(path).open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the source: {error.strerror}") from error


def _open_url(url: str) -> BinaryIO:
    file_system, path = file_system_of(url)
    try:
        return file_system.open(path, "rb")  # type: ignore[no-any-return]
    # Each store has errors of its own.
    except Exception as error:
        raise ConfigError(f"{url}: cannot read the source: {error!r}") from error


def file_system_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for the URL, and the path within it.

    Raises:
        ConfigError: no such protocol, or its package is not installed.
    """
    # Only a URL needs it, and it takes a tenth of a second.
    import fsspec
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0].rpartition("::")[2]
    known = known_implementations.get(protocol)
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = "fsspec" if known is None else known["class"].partition(".")[0]
        if package == "fsspec":
            raise ConfigError(f"{url}: cannot read {protocol}:// ({error})") from error
        state = "does not work" if find_spec(package) else "is not installed"
        raise ConfigError(
            f"{url}: reading {protocol}:// takes the package {package}, which {state} ({error}); "
            f"install it: pip install {package}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{url}: not a URL that can be read: {error}") from error
    return file_system, path


def open_lines(path: str) -> io.BufferedReader:
    """Open a file of lines, unpacked by its name. A read beyond damage raises OSError.

    Raises:
        ConfigError: it cannot be opened, or begins like something else.
    """
    codec = codec_of(path)
    raw: Any = open_bytes(path) if codec is None else _Unpacked(lambda: open_bytes(path), codec)
    # The files of fsspec find line ends in Python; a buffered reader does it in C.
    handle: io.BufferedReader[Any] = (
        raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _BUFFER_BYTES)
    )
    try:
        _refuse_wrong_start(path, handle.peek(_PEEK_BYTES)[:_PEEK_BYTES])
    except OSError as error:
        handle.close()
        raise unreadable(path, 0, error) from error
    except ConfigError:
        handle.close()
        raise
    return handle


def unreadable(path: str, line: int, error: Exception) -> ConfigError:
    """Return the error of a file that cannot be read beyond a line."""
    codec = codec_of(path)
    if codec is None:
        return ConfigError(f"{path}: cannot be read beyond line {line}: {error}")
    found = "it was cut off" if "runcated" in str(error) else f"it is damaged, or not {codec}"
    return ConfigError(
        f"{path}: cannot be unpacked beyond line {line}: {found} ({error}); make or fetch the "
        "file again"
    )


def _refuse_wrong_start(path: str, start: bytes) -> None:
    if len(start) < _PEEK_BYTES:
        return
    if start[:2] in _UTF16_MARKS and 0 in start[2:4]:
        raise ConfigError(
            f"{path} is UTF-16, wanted UTF-8; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
        )
    for magic, (what, remedy) in _PACKED.items():
        if start.startswith(magic):
            raise ConfigError(f"{path} is {what}, wanted lines of text; {remedy}")


class _Unpacked(io.RawIOBase):
    """The text of a packed file. Seeking forward reads, seeking back begins anew."""

    def __init__(self, open_packed: Callable[[], BinaryIO], codec: str) -> None:
        self._open_packed = open_packed
        self._codec = codec
        self._begin()

    def _begin(self) -> None:
        import pyarrow

        self._packed = self._open_packed()
        self._stream = pyarrow.CompressedInputStream(
            pyarrow.PythonFile(self._packed, mode="r"), self._codec
        )
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes, at a price."""
        return True

    def tell(self) -> int:
        """Return the place in the text."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what comes next."""
        count = int(self._stream.readinto(buffer))
        self._position += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the text, at most to its end."""
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a packed file is sought from its start only")
        if offset < self._position:
            self._end()
            self._begin()
        while self._position < offset:
            count = len(self._stream.read(min(_BUFFER_BYTES, offset - self._position)))
            if not count:
                break
            self._position += count
        return self._position

    def close(self) -> None:
        """Close the packed file too."""
        if not self.closed:
            self._end()
        super().close()

    def _end(self) -> None:
        self._stream.close()
        self._packed.close()
