"""Rows of the mock device, and their answers cut at every place where a run may be killed."""

from typing import Any

from msgspec.structs import replace

from engine import (
    Completion,
    EngineConfig,
    GenerateRequest,
    OfflineInference,
    PartialOutput,
    Reply,
    SamplingParams,
)

CHAT = [{"role": "user", "content": "one"}]


def mock_config(**sections: Any) -> EngineConfig:
    """Return a configuration of the mock device in this process."""
    runtime = {"inline": True, **sections.pop("runtime", {})}
    values = {"model_path": "mock", "device": "mock", "runtime": runtime, **sections}
    return EngineConfig.model_validate(values)


def params(**sampling: Any) -> SamplingParams:
    """Return parameters of a greedy answer that is long enough to be cut."""
    return SamplingParams(**({"temperature": 0, "max_tokens": 40, "min_tokens": 20} | sampling))


def request(request_id: str = "row", **fields: Any) -> GenerateRequest:
    """Return a row whose prompt is its id, unless another is given."""
    fields = {"sampling_params": params(), **fields}
    if "messages" not in fields:
        fields = {"prompt": request_id, **fields}
    return GenerateRequest(request_id=request_id, **fields)


def conversation(request_id: str = "row", **sampling: Any) -> GenerateRequest:
    """Return a row of three turns."""
    return request(
        request_id, messages=CHAT, turns=("two", "three"), sampling_params=params(**sampling)
    )


def rows(count: int) -> list[GenerateRequest]:
    """Return rows of one turn."""
    return [request(f"row {number}") for number in range(count)]


def what_counts(completion: Completion) -> dict[str, Any]:
    """Return everything that must not depend on whether a run was interrupted."""
    names = (
        "request_id", "sample_index", "text", "token_ids", "finish_reason", "num_prompt_tokens",
        "num_output_tokens", "replies", "logprobs", "prompt_logprobs", "is_truncated",
    )  # fmt: skip
    return {name: getattr(completion, name) for name in names} | {"error": str(completion.error)}


def cuts_of(completion: Completion) -> list[PartialOutput]:
    """Return what there may have been before the answer ended, in every turn, token by token."""
    last = Reply(text=completion.text, token_ids=completion.token_ids, logprobs=completion.logprobs)
    turns = (*completion.replies, last)
    return [
        PartialOutput(
            request_id=completion.request_id,
            sample_index=completion.sample_index,
            replies=turns[:number],
            token_ids=turn.token_ids[:count],
            logprobs=None if turn.logprobs is None else turn.logprobs[:count],
        )
        for number, turn in enumerate(turns)
        for count in range(len(turn.token_ids))
    ]


def continued(
    engine: OfflineInference, request: GenerateRequest, cuts: list[PartialOutput]
) -> list[dict[str, Any]]:
    """Return the ends of one sample that goes on from each of these cuts, all in one run."""
    requests = [
        replace(request, sample_indices=(cut.sample_index,), partials=(cut,)) for cut in cuts
    ]
    return [what_counts(completion) for completion in engine.run(requests)]


def uninterrupted(engine: OfflineInference, request: GenerateRequest) -> list[Completion]:
    """Return the answers to a request, one a sample, in order."""
    return sorted(engine.run([request]), key=lambda completion: completion.sample_index)
