"""The tree of deliberate errors. It answers one question: who must act.

TokenmillError
  ConfigError          the user; never retried
  LedgerError          the user: fingerprint mismatch, lease held, schema too new
  RequestError         nobody: that row becomes an error row, the job goes on
  CacheExhaustedError  the user: the configuration is too small for the work
  WorkerError          the machine: a worker died, hangs, or could not start
  InvalidTransitionError  us: a request was moved along an edge that does not exist
"""

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """What a tokenmill command returns to the shell."""

    OK = 0
    ROWS_FAILED = 1
    USER_MUST_ACT = 2
    INFRASTRUCTURE = 3
    INTERRUPTED = 130


class TokenmillError(Exception):
    """Root of every error that tokenmill raises on purpose."""

    exit_code = ExitCode.USER_MUST_ACT


class ConfigError(TokenmillError):
    """A configuration or an input file that only the user can mend."""


class LedgerError(TokenmillError):
    """The ledger refuses: wrong fingerprint, lease held by another, schema too new."""


class RequestErrorCode(StrEnum):
    """Why one row failed; written to the ledger and to the output."""

    BAD_JSON = "bad_json"
    BAD_ROW = "bad_row"
    BAD_TEMPLATE = "bad_template"
    INVALID_SAMPLING_PARAMS = "invalid_sampling_params"
    PROMPT_TOO_LONG = "prompt_too_long"
    PROMPT_EMPTY = "prompt_empty"
    KV_CAPACITY = "kv_capacity"
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"
    TIMEOUT = "timeout"
    DEPENDENCY_FAILED = "dependency_failed"
    ENGINE_CRASH = "engine_crash"
    ABORTED = "aborted"


class RequestError(TokenmillError):
    """One row cannot be answered; every other row goes on.

    Args:
        code: the stable name that outputs and the ledger carry.
        message: what was found, what was wanted, what to change.
    """

    exit_code = ExitCode.ROWS_FAILED

    def __init__(self, code: RequestErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class CacheExhaustedError(TokenmillError):
    """The KV cache is too small for the work that the configuration allows."""


class WorkerFailure(StrEnum):
    """What kind of trouble a worker is in, as the device backend classified it."""

    OUT_OF_MEMORY = "out_of_memory"
    DEVICE_LOST = "device_lost"
    TIMEOUT = "timeout"
    DIED = "died"
    START_FAILED = "start_failed"
    OTHER = "other"


class WorkerError(TokenmillError):
    """A worker process died, hangs, or could not be started.

    Args:
        message: what happened, with the path of the worker's log.
        failure: the class of the failure.
        request_ids: the requests that were in flight.
    """

    exit_code = ExitCode.INFRASTRUCTURE

    def __init__(
        self,
        message: str,
        *,
        failure: WorkerFailure = WorkerFailure.OTHER,
        request_ids: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.request_ids = request_ids


class InvalidTransitionError(TokenmillError):
    """A request was moved along an edge that its state machine does not have."""

    exit_code = ExitCode.INFRASTRUCTURE
