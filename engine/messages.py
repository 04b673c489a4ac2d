"""What crosses the wall between the main process and a worker: frozen structs in msgpack.

A request is called by its uid, a number that the engine gives it; ids of users stay in the main
process. The scheduler sends differences: a NewRequest once, then Running until it ends or is
preempted.
"""

from typing import Any

import msgspec

from engine.logprobs import ScoredPart, TokenLogprob


class SamplerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker picks a request's next token, in SamplingParams' names.

    One uniform number is drawn per (seed, sampling_key, sample_index, output position).
    forbidden_token_ids may not be sampled before min_tokens tokens are there. bad_words are given
    as tokens. With is_scoring_only nothing is sampled when the prompt is computed.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sampling_key: int
    sample_index: int
    min_tokens: int = 0
    forbidden_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_scoring_only: bool = False


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the worker does not know, or forgot when it was preempted.

    token_ids are the prompt and all tokens generated before a preemption.
    """

    uid: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: list[int]
    sampler: SamplerSpec


class Running(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request that the worker knows: how far to go, and the blocks it was given since."""

    uid: int
    num_scheduled_tokens: int
    new_block_ids: list[int]


class ScheduleBatch(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step. preempted and finished are uids whose slots the worker may forget, before it."""

    step_id: int
    new: list[NewRequest]
    running: list[Running]
    preempted: list[int]
    finished: list[int]


class StartWorker(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First message to a worker: what to load, and which share of it.

    rendezvous_dir is an empty folder where the ranks of this engine meet.
    """

    config: dict[str, Any]
    rank: int
    world_size: int
    device_id: int
    rendezvous_dir: str = ""


class AllocateCache(msgspec.Struct, frozen=True, kw_only=True, tag="allocate"):
    """Second message: the number of KV blocks, the minimum over all ranks."""

    num_blocks: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Last message: release everything and end."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded. num_blocks is what this rank has room for.

    sliding_window is set when every layer has one: no token sees further back.
    """

    num_blocks: int
    block_size: int
    sliding_window: int | None = None
    device: str
    dtype: str
    load_seconds: float
    pid: int


class CacheAllocated(msgspec.Struct, frozen=True, kw_only=True, tag="allocated"):
    """The KV pool is there and the device is warm."""

    warmup_seconds: float


class WorkerTimings(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds that a step took inside the worker."""

    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="done", omit_defaults=True):
    """One token for each request that sampled in this step, in the order of uids.

    logprobs and prompt_logprobs hold, by uid, what requests have asked for. is_graph_replay tells
    that the device ran a captured graph.
    """

    step_id: int
    uids: list[int]
    token_ids: list[int]
    timings: WorkerTimings
    logprobs: dict[int, TokenLogprob] = {}
    prompt_logprobs: dict[int, ScoredPart] = {}
    is_graph_replay: bool = False


class StepFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A step did not happen; kind is a WorkerFailure, as the backend classified it."""

    step_id: int
    kind: str
    message: str


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="start_failed"):
    """The worker cannot start. is_config_error tells that only the user can mend it."""

    is_config_error: bool
    message: str


ToWorker = StartWorker | AllocateCache | ScheduleBatch | Shutdown


class LogLine(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """A line that the worker has logged, on its way to an answer; level as in `logging`."""

    name: str
    level: int
    text: str


FromWorker = WorkerReady | CacheAllocated | StepDone | StepFailed | StartFailed | LogLine

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return the message as msgpack."""
    return _ENCODER.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Read what the main process sent."""
    return _TO_WORKER.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Read what a worker sent."""
    return _FROM_WORKER.decode(data)
