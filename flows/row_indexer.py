"""Checks one row before any weights load: its sampling, its tokens, its room in the model.

What comes out is the row as the index holds it: how long, what is wrong with it, what it repeats.
"""

from array import array
from hashlib import blake2b
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from engine import GenerateRequest, RequestError, RequestErrorCode, SamplingParams
from flows.records import RecordReader
from flows.row_index import IndexRow
from flows.row_sampling import ResolvedSampling, RowSampling
from flows.rows import BadRow, PromptRecord, printable
from flows.time_limit import row_time_limit

TooLong = Literal["error", "skip", "truncate"]
# Stands for a reply that is not there yet: one token. Some chat templates refuse an empty one.
_SHORTEST_REPLY = "."
_HASH_BYTES = 16
# What the model is asked, its tokens, and how it is sampled. No class: there is one for each row.
_Asked = tuple[GenerateRequest, list[int], ResolvedSampling]


class PromptEncoder(Protocol):
    """What turns a request into the tokens that the model will see."""

    def encode_request(self, request: GenerateRequest) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            RequestError: the prompt cannot be encoded.
        """
        ...


class RowIndexer:
    """Checks one row at a time and counts its tokens.

    Args:
        reader: says where a row stands.
        encoder: counts the tokens of a prompt.
        default_sampling: the sampling of a row without overrides.
        max_model_len: most tokens of prompt and answer together.
        too_long: what becomes of a row that does not fit.
        deduplicate: whether rows that are the same may be folded.
    """

    def __init__(
        self,
        reader: RecordReader,
        encoder: PromptEncoder,
        default_sampling: SamplingParams,
        *,
        max_model_len: int,
        too_long: TooLong,
        deduplicate: bool,
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._sampling = RowSampling(default_sampling)
        self._max_model_len = max_model_len
        self._too_long = too_long
        self._deduplicate = deduplicate
        self.num_outgrowing = 0  # conversations that long replies would make too long

    def index(self, row: PromptRecord | BadRow) -> IndexRow:
        """Return the row as the index holds it, with what is wrong with it."""
        if isinstance(row, BadRow):
            return _refused(row, row.error, row.error.message)
        try:
            return self._counted(row)
        except RequestError as error:
            message = f"{self._reader.describe(row.location)}: {error.message}"
            refused = _refused(row, error, message)
            if isinstance(error, _TooLongError):
                return refused._replace(
                    num_prompt_tokens=error.num_tokens, is_skipped=int(self._too_long == "skip")
                )
            return refused

    def _counted(self, row: PromptRecord) -> IndexRow:
        limit = None
        try:
            asked = self._ask(row)
        except _TooLongError as error:
            if self._too_long != "truncate":
                raise
            limit = self._room(self._sampling.of(row).params)
            asked = self._ask_truncated(row, limit, error)
        place = row.location
        return IndexRow(
            row_index=row.row_index,
            source_index=place.source_index,
            file_index=place.file_index,
            offset=place.offset,
            line=place.line,
            row_id=row.row_id,
            num_prompt_tokens=len(asked[1]),
            truncate_prompt_tokens=limit,
            request_hash=_hash(asked),
            may_fold=int(asked[2].may_fold and self._deduplicate),
        )

    def _ask(self, row: PromptRecord, limit: int | None = None) -> _Asked:
        sampling = self._sampling.of(row, truncate_prompt_tokens=limit)
        params = sampling.params
        request = row.to_request(params)
        with row_time_limit:
            token_ids = self._encoder.encode_request(request)
        num_tokens = len(token_ids)
        if row.turns:
            self._check_conversation(request, is_truncated=limit is not None)
        elif num_tokens + min(params.max_tokens, 1) > self._max_model_len:
            found = f"the prompt has {num_tokens} tokens"
            raise self._does_not_fit(found, "the prompt", num_tokens)
        return request, token_ids, sampling

    def _ask_truncated(self, row: PromptRecord, limit: int, error: "_TooLongError") -> _Asked:
        try:
            return self._ask(row, limit)
        except RequestError as refusal:
            raise _TooLongError(
                f"{error.message}; too_long: truncate does not help: max_tokens leaves room for "
                f"{limit} token(s) of the prompt, and {refusal.message}",
                error.num_tokens,
            ) from refusal

    def _room(self, params: SamplingParams) -> int:
        """Return how much of a prompt leaves room for the answer."""
        room = max(1, self._max_model_len - params.max_tokens)
        return min(room, params.truncate_prompt_tokens or room)

    def _check_conversation(self, request: GenerateRequest, *, is_truncated: bool) -> None:
        """Refuse a conversation whose last turn cannot fit even after the shortest replies.

        What longer replies leave no room for is the engine's to refuse, turn by turn; or to cut,
        where the policy is to truncate.
        """
        params = request.sampling_params
        if params.is_scoring_only:
            raise RequestError(
                RequestErrorCode.INVALID_SAMPLING_PARAMS,
                "sampling parameter max_tokens is 0, and a conversation needs replies; raise it",
            )
        messages = list(request.messages or ())
        for turn in request.turns:
            messages.append({"role": "assistant", "content": _SHORTEST_REPLY})
            messages.append({"role": "user", "content": turn})
        whole = replace(request, messages=messages, turns=())
        num_tokens = len(self._encoder.encode_request(whole))
        num_turns = len(request.turns) + 1
        longest = num_tokens + num_turns * params.max_tokens
        found = f"the last of its {num_turns} turns has a prompt of {num_tokens} tokens or more"
        if num_tokens + 1 > self._max_model_len:
            raise self._does_not_fit(found, "the conversation", num_tokens)
        if longest > self._max_model_len and not is_truncated:
            if self._too_long == "truncate":
                raise self._does_not_fit(found, "the conversation", num_tokens)
            self.num_outgrowing += 1

    def _does_not_fit(self, found: str, what: str, num_tokens: int) -> "_TooLongError":
        return _TooLongError(
            f"{found} and its answer needs at least one, more than max_model_len "
            f"{self._max_model_len}; shorten {what} or raise engine.max_model_len",
            num_tokens,
        )


class _TooLongError(RequestError):
    """The row does not fit; the policy may be to leave it out or to cut it."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(RequestErrorCode.PROMPT_TOO_LONG, message)
        self.num_tokens = num_tokens


def _hash(asked: _Asked) -> bytes:
    """Return 16 bytes that stand for all that the model is asked, and how.

    The id is no part of it, and of the timeouts only one that the row brings itself.
    """
    request, token_ids, sampling = asked
    packed = array("i", token_ids).tobytes()
    parts = (packed, request.turns, sampling.identity, request.timeout_seconds)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=_HASH_BYTES).digest()


def _refused(row: PromptRecord | BadRow, error: RequestError, message: str) -> IndexRow:
    place = row.location
    return IndexRow(
        row_index=row.row_index,
        source_index=place.source_index,
        file_index=place.file_index,
        offset=place.offset,
        line=place.line,
        row_id=row.row_id,
        error_code=error.code.value,
        error_message=printable(message),
    )
