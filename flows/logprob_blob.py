"""Log probabilities as the ledger keeps them: one compressed blob for each sample."""

import zlib

import msgspec
from sqlalchemy import Dialect, LargeBinary, TypeDecorator

from engine import LedgerError, TokenLogprob

_COMPRESSION_LEVEL = 1  # the writer waits for it


class StoredLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What was asked for of one sample; an empty tuple where nothing was.

    output has one entry a token of the text. prompt has None for the prompt's first token. turns
    are those of the replies before the last.
    """

    output: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob | None, ...] = ()
    turns: tuple[tuple[TokenLogprob, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.output or self.prompt or any(self.turns))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StoredLogprobs)


class LogprobsBlob(TypeDecorator[StoredLogprobs]):
    """StoredLogprobs as zlib-compressed msgpack; NULL when there are none."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: StoredLogprobs | None, dialect: Dialect) -> bytes | None:
        """Pack what there is."""
        if not value:
            return None
        return zlib.compress(_ENCODER.encode(value), _COMPRESSION_LEVEL)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> StoredLogprobs | None:
        """Unpack; infinities and NaN come back as they were.

        Raises:
            LedgerError: what is stored is damaged.
        """
        if value is None:
            return None
        try:
            return _DECODER.decode(zlib.decompress(value))
        except (zlib.error, msgspec.DecodeError) as error:
            raise LedgerError(f"its log probabilities cannot be unpacked: {error}") from error
