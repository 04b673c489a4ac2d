"""Why a request ended in ERROR, in words with the numbers."""

from engine.errors import RequestError, RequestErrorCode
from engine.request import InferRequest


def never_fits(request: InferRequest, num_cache_tokens: int) -> RequestError:
    """Return the error of a request that an empty KV cache has no room for."""
    return RequestError(
        RequestErrorCode.KV_CAPACITY,
        f"the prompt of {request.num_prompt_tokens} tokens and max_tokens "
        f"{request.params.max_tokens} need up to {request.max_total_tokens} tokens of KV cache, "
        f"which has {num_cache_tokens}; lower max_tokens or raise engine.cache.kv_cache_gib",
    )


def too_late(request: InferRequest) -> RequestError:
    """Return the error of a request whose deadline has passed."""
    return RequestError(
        RequestErrorCode.TIMEOUT,
        f"not finished in time: {len(request.output_token_ids)} of at most "
        f"{request.params.max_tokens} tokens generated; raise the row's timeout",
    )
