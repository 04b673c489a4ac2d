"""What each error code means to a person: what to do, and which HTTP answer it would have been."""

from dataclasses import dataclass

from engine import RequestErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """status_code is that of an answer of OpenAI's API; None when the request was not executed."""

    remedy: str
    status_code: int | None = 400


FAULTS = {
    RequestErrorCode.BAD_JSON: Fault(
        remedy="Write the row as one JSON object on one line, in UTF-8; run the mended rows as a "
        "new job.",
    ),
    RequestErrorCode.BAD_ROW: Fault(
        remedy="Mend the row as the message says, or name the right column in the source's "
        "columns; run the mended rows as a new job.",
    ),
    RequestErrorCode.BAD_TEMPLATE: Fault(
        remedy="Give the row what the template asks for, or mend the template; run the row in a "
        "new job.",
    ),
    RequestErrorCode.INVALID_SAMPLING_PARAMS: Fault(
        remedy="Correct the row's sampling parameters; run the mended rows as a new job.",
    ),
    RequestErrorCode.PROMPT_TOO_LONG: Fault(
        remedy="Shorten the prompt, raise engine.max_model_len, or set too_long: truncate; run the "
        "row in a new job.",
    ),
    RequestErrorCode.PROMPT_EMPTY: Fault(
        remedy="Give the prompt some text; run the mended rows as a new job.",
    ),
    RequestErrorCode.KV_CAPACITY: Fault(
        remedy="Give the KV cache more room: tokenmill retry-failed JOB --set "
        "engine.cache.kv_cache_gib=N; or shorten the prompt or max_tokens in a new job.",
    ),
    RequestErrorCode.TOKEN_OUT_OF_VOCABULARY: Fault(
        remedy="Use token ids of this model's own tokenizer; run the mended rows as a new job.",
    ),
    RequestErrorCode.TIMEOUT: Fault(
        remedy="Give the row more time: tokenmill retry-failed JOB --set row_timeout_seconds=N, "
        "or its own timeout_seconds in a new job.",
        status_code=None,
    ),
    RequestErrorCode.DEPENDENCY_FAILED: Fault(
        remedy="Mend the row that this one waits for, which has a line of its own; then run tokenmill "
        "retry-failed.",
        status_code=None,
    ),
    RequestErrorCode.ENGINE_CRASH: Fault(
        remedy="The row ends the worker process: read the worker's log, take the row out or "
        "shorten it, and report it as a bug.",
        status_code=500,
    ),
    RequestErrorCode.ABORTED: Fault(remedy="Run tokenmill retry-failed.", status_code=None),
}
_BY_CODE = {code.value: fault for code, fault in FAULTS.items()}
# Of a ledger whose codes this version does not know.
_UNKNOWN = Fault(remedy="Do what the message says.", status_code=500)


def fault_of(code: str | None) -> Fault:
    """Return what is known of an error code."""
    return _BY_CODE.get(code or "", _UNKNOWN)
