"""How text from outside and token ids are kept in a column, on SQLite and on PostgreSQL alike."""

import re
import struct
import zlib
from collections.abc import Sequence

from sqlalchemy import Dialect, LargeBinary, Text, TypeDecorator

from engine import LedgerError

# ASCII SUBSTITUTE, "a character that cannot be represented", is the escape, and escapes itself.
_ESCAPE = "\x1a"
_TO_ESCAPE = re.compile("[\x00\x1a\ud800-\udfff]")
_ESCAPED = re.compile("\x1a([0-9a-f]{4})")
# Says that what follows is not compressed; no zlib stream begins with it.
_PLAIN = b"\0"
# Compressing so little takes thirty times as long as packing it, and saves nothing.
_MAX_PLAIN_BYTES = 128
_BYTES_PER_TOKEN = 4


class OutsideText(TypeDecorator[str]):
    """Text that round-trips whatever it holds, and that SQL can read and search.

    PostgreSQL stores neither NUL nor lone surrogates in text. Those, and the escape itself, are
    written as U+001A and four hex digits; every other text is stored as it is.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape what a database cannot hold."""
        if value is None or _TO_ESCAPE.search(value) is None:
            return value
        return _TO_ESCAPE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Undo the escapes."""
        if value is None or _ESCAPE not in value:
            return value
        return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), value)


class TokenIds(TypeDecorator[Sequence[int]]):
    """Token ids as little-endian int32, compressed by zlib unless they are few."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> bytes | None:
        """Pack the ids; level 1, because the writer waits for it."""
        if value is None:
            return None
        packed = struct.pack(f"<{len(value)}i", *value)
        if len(packed) <= _MAX_PLAIN_BYTES:
            return _PLAIN + packed
        return zlib.compress(packed, 1)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[int, ...] | None:
        """Unpack the ids.

        Raises:
            LedgerError: what is stored is damaged.
        """
        if value is None:
            return None
        try:
            is_plain = value.startswith(_PLAIN)
            packed = value[len(_PLAIN) :] if is_plain else zlib.decompress(value)
            return struct.unpack(f"<{len(packed) // _BYTES_PER_TOKEN}i", packed)
        except (zlib.error, struct.error) as error:
            raise LedgerError(f"its token ids cannot be unpacked: {error}") from error
