"""One call of OfflineInference.run: its requests on their way in, its completions on their way out.

Three threads meet here, under one lock: the intake encodes, the driver schedules, the outbox
turns tokens into text. What waits for other requests (dependencies, later turns of a
conversation) is kept here until its prompt can be written.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from engine.errors import RequestError, RequestErrorCode
from engine.intake import EncodedRequest, Intake
from engine.partials import usable_partials
from engine.request import (
    Completion,
    GenerateRequest,
    PartialOutput,
    Reply,
    failed_completion,
    sampling_key_of,
)

_MAX_MAIL = 4096
Encode = Callable[[GenerateRequest], EncodedRequest]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of a row: which request, which samples, and what was said before."""

    request: GenerateRequest
    token_ids: list[int]
    error: RequestError | None = None
    sample_indices: tuple[int, ...] | None = None  # None: every sample that the request wants
    replies: tuple[Reply, ...] = ()
    is_truncated: bool = False  # the prompt of this turn, or of one before

    def partial_of(self, sample_index: int) -> PartialOutput | None:
        """Return what an earlier run has left of this turn of a sample."""
        for partial in self.request.partials:
            is_of_turn = len(partial.replies) == len(self.replies)
            if partial.sample_index == sample_index and is_of_turn:
                return partial
        return None


class Session:
    """Keeps count of a run's requests; it is finished when every one has its completion.

    context is the caller's, to which log lines of the outbox belong. When stop is set, nobody
    wants more than the steps in flight.
    """

    def __init__(
        self, intake: Intake, encode: Encode, stop: threading.Event, deadline: float | None = None
    ) -> None:
        self.intake = intake
        self.stop = stop
        self.deadline = deadline
        self.context = contextvars.copy_context()
        self._encode = encode
        self._lock = threading.Lock()
        self._ready: deque[Turn] = deque()
        self._mail: deque[Completion] = deque()
        self._parked: dict[str, GenerateRequest] = {}
        self._dependents_of: dict[str, list[str]] = {}
        self._dependencies: set[str] = set()
        self._kept: dict[str, Completion] = {}
        self._num_open = 0
        self.is_abandoned = False

    # The driver's side.

    def take(self) -> Turn | None:
        """Return the next turn to schedule; None when there is none yet."""
        # One lock from the intake on: a request on its way must not be missed by is_finished.
        with self._lock:
            while not self._ready:
                item = self.intake.poll()
                if item is None:
                    return None
                self._note(item.request)
                if item.request.depends_on:
                    self._park(item.request)
                else:
                    self._begin(item.request, item)
            self._num_open += 1
            return self._ready.popleft()

    def partials(self) -> list[PartialOutput]:
        """Return what there is of the conversations that wait for their next turn to start."""
        with self._lock:
            return [
                turn.partial_of(index)
                or PartialOutput(
                    request_id=turn.request.request_id, sample_index=index, replies=turn.replies
                )
                for turn in self._ready
                if turn.replies
                for index in turn.sample_indices or ()
            ]

    @property
    def is_congested(self) -> bool:
        """True when the caller leaves so many completions lying that no more should be made."""
        with self._lock:
            return len(self._mail) >= _MAX_MAIL

    def add_open(self, count: int) -> None:
        """Note that a turn became `count` more generations."""
        with self._lock:
            self._num_open += count

    def is_finished(self) -> bool:
        """Tell whether every request has its completion, and each was taken.

        Parked requests that wait for nothing that could still come get an error here.
        """
        is_exhausted = self.is_abandoned or self.intake.is_exhausted
        with self._lock:
            if not is_exhausted or self._num_open or self._ready:
                return False
            stuck = {r.request_id: (r, _deadlock(r, self._parked)) for r in self._parked.values()}
            for request_id, (request, reason) in stuck.items():
                if request_id in self._parked:
                    self._fail_parked(request, reason)
            return not self._mail

    def abandon(self) -> None:
        """Give up what is not inside the engine; what the outbox still has is delivered."""
        with self._lock:
            self.is_abandoned = True
            self._ready.clear()
            self._parked.clear()

    # The outbox's side.

    def finish_turn(self, turn: Turn, completion: Completion) -> None:
        """Take a turn's answer: go on with the next turn, or deliver the row's completion."""
        following = self._next_turn(turn, completion) if completion.error is None else None
        with self._lock:
            self._num_open -= 1
            if following is not None:
                if not self.is_abandoned:
                    self._ready.append(following)
                return
            self._deliver(replace(completion, replies=turn.replies))

    def drop_turn(self) -> None:
        """Note that a generation was given up without a completion."""
        with self._lock:
            self._num_open -= 1

    # The caller's side.

    @property
    def has_mail(self) -> bool:
        """True when `pop` has something to return."""
        with self._lock:
            return bool(self._mail)

    def pop(self) -> Completion | None:
        """Return the next completion, if one is there."""
        with self._lock:
            return self._mail.popleft() if self._mail else None

    # Turns.

    def _next_turn(self, turn: Turn, completion: Completion) -> Turn | None:
        if len(turn.replies) >= len(turn.request.turns):
            return None
        reply = Reply(
            text=completion.text, token_ids=completion.token_ids, logprobs=completion.logprobs
        )
        return self._following(turn, completion.sample_index, reply)

    def _following(self, turn: Turn, sample_index: int, reply: Reply) -> Turn:
        request, number = turn.request, len(turn.replies)
        asked = [
            *(request.messages or [{"role": "user", "content": request.prompt}]),
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": request.turns[number]},
        ]
        following = replace(
            request,
            prompt=None,
            messages=asked,
            sampling_key=sampling_key_of(f"{request.request_id}\0turn {number + 1}"),
        )
        encoded = self._encode(following)
        return Turn(
            request=following,
            token_ids=encoded.token_ids,
            error=encoded.error,
            sample_indices=(sample_index,),
            replies=(*turn.replies, reply),
            is_truncated=turn.is_truncated or encoded.is_truncated,
        )

    def _begin(self, request: GenerateRequest, encoded: EncodedRequest) -> None:
        """Make a request ready: its first turn, and the later ones that samples had come to."""
        if request.partials:
            request = replace(request, partials=usable_partials(request))
        first = Turn(
            request=request,
            token_ids=encoded.token_ids,
            error=encoded.error,
            is_truncated=encoded.is_truncated,
        )
        later = [p for p in request.partials if p.replies and encoded.error is None]
        if later:
            moved = {partial.sample_index for partial in later}
            rest = tuple(index for index in request.wanted_samples if index not in moved)
            first = replace(first, sample_indices=rest)
        if first.sample_indices != ():
            self._ready.append(first)
        self._ready.extend(self._resume(first, partial) for partial in later)

    def _resume(self, turn: Turn, partial: PartialOutput) -> Turn:
        """Return the turn that follows the replies, each of which is asked for as it was before."""
        for reply in partial.replies:
            if turn.error is None:
                turn = self._following(turn, partial.sample_index, reply)
        return turn

    # Dependencies. Everything below holds the lock, or is called by what does.

    def _park(self, request: GenerateRequest) -> None:
        self._parked[request.request_id] = request
        for other in request.depends_on:
            self._dependents_of.setdefault(other, []).append(request.request_id)
        self._release_if_met(request)

    def _note(self, request: GenerateRequest) -> None:
        if request.is_dependency:
            self._dependencies.add(request.request_id)

    def _deliver(self, completion: Completion) -> None:
        self._mail.append(completion)
        request_id = completion.request_id
        if completion.sample_index:
            return  # dependants read the first sample
        if request_id in self._dependents_of or request_id in self._dependencies:
            self._kept[request_id] = completion
        self._dependencies.discard(request_id)
        for dependent in self._dependents_of.pop(request_id, []):
            if dependent in self._parked:
                self._release_if_met(self._parked[dependent])

    def _release_if_met(self, request: GenerateRequest) -> None:
        found = {other: self._kept.get(other) for other in request.depends_on}
        for other, completion in found.items():
            if completion is not None and completion.error is not None:
                self._fail_parked(request, f"it depends on {other!r}, which failed")
                return
        met = {other: completion for other, completion in found.items() if completion is not None}
        if len(met) < len(found):
            return
        del self._parked[request.request_id]
        build = request.build_messages
        if build is not None:
            texts = {other: completion.text for other, completion in met.items()}
            try:
                messages = build(texts)
            except Exception as error:  # noqa: BLE001 - the caller's code, and one row's trouble
                self._fail_parked(request, f"build_messages raised {error!r}")
                return
            request = replace(request, prompt=None, messages=messages, build_messages=None)
        self._begin(request, self._encode(request))

    def _fail_parked(self, request: GenerateRequest, reason: str) -> None:
        self._parked.pop(request.request_id, None)
        error = RequestError(RequestErrorCode.DEPENDENCY_FAILED, reason)
        for sample_index in request.wanted_samples:
            self._deliver(failed_completion(request.request_id, sample_index, error))


def _deadlock(request: GenerateRequest, parked: dict[str, GenerateRequest]) -> str:
    """Say why a parked request can never run: a cycle, or an id that nobody has."""
    path = [request.request_id]
    while True:
        waits_for = next((o for o in parked[path[-1]].depends_on if o in parked), None)
        if waits_for is None:
            missing = parked[path[-1]].depends_on
            return (
                f"it waits for {', '.join(map(repr, missing))}, and no request of this run that "
                "is marked is_dependency has such an id"
            )
        if waits_for in path:
            cycle = [*path[path.index(waits_for) :], waits_for]
            return f"its dependencies go round in a circle: {' -> '.join(map(repr, cycle))}"
        path.append(waits_for)
