"""The requests that own blocks, in the order in which they were admitted."""

from collections.abc import Iterator

from engine.config import SchedulerConfig
from engine.request import InferRequest


class RunningSet:
    """Knows who runs, how many of them are very long, and whom to preempt."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._requests: dict[int, InferRequest] = {}
        self._num_long = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[InferRequest]:
        return iter(list(self._requests.values()))

    @property
    def is_long_allowed(self) -> bool:
        """True when another very long request may run."""
        limit = self._config.max_long_requests
        return limit is None or self._num_long < limit

    def add(self, request: InferRequest) -> None:
        """Add a request that was admitted."""
        self._requests[request.uid] = request
        self._num_long += self._config.is_long(request.num_prompt_tokens)

    def remove(self, request: InferRequest) -> None:
        """Take a request out, if it runs."""
        if self._requests.pop(request.uid, None) is not None:
            self._num_long -= self._config.is_long(request.num_prompt_tokens)

    def choose_victim(self) -> InferRequest:
        """Pick the least computed request of the lowest priority: the least work is lost."""
        return max(
            self._requests.values(), key=lambda r: (r.priority, -r.num_computed_tokens, r.uid)
        )
