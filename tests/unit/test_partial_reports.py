"""Who is told of partial outputs and when, on the mock device."""

import threading
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from partial_builders import (
    continued,
    conversation,
    cuts_of,
    mock_config,
    params,
    request,
    rows,
    uninterrupted,
    what_counts,
)

from engine import Completion, GenerateRequest, OfflineInference, PartialOutput
from engine.loop import EngineLoop
from engine.outbox import Outbox
from engine.request import InferRequest
from engine.session import Session, Turn


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineInference]:
    with OfflineInference(mock_config()) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(engine: OfflineInference) -> dict[str, Completion]:
    """Return the answers to 60 rows and 20 conversations, by id."""
    chats = [conversation(f"chat {number}") for number in range(20)]
    return {c.request_id: c for c in engine.run([*rows(60), *chats])}


@pytest.fixture(scope="module")
def beginnings(answers: dict[str, Completion]) -> frozenset[PartialOutput]:
    """Return everything that may be told of these rows: something, and nothing that is not so."""
    cuts = [cut for completion in answers.values() for cut in cuts_of(completion)]
    return frozenset(cut for cut in cuts if cut.token_ids or cut.replies)


def mixed() -> list[GenerateRequest]:
    chats = [conversation(f"chat {number}") for number in range(20)]
    plain = rows(60)
    return [item for i, chat in enumerate(chats) for item in (chat, *plain[3 * i : 3 * i + 3])]


@pytest.mark.parametrize("steps", [1, 2])
def test_none_is_told_of_whose_completion_is_there(
    answers: dict[str, Completion], beginnings: frozenset[PartialOutput], steps: int
) -> None:
    yielded: set[str] = set()
    snapshots: list[list[PartialOutput]] = []
    threads = set()

    def keep(snapshot: list[PartialOutput]) -> None:
        threads.add(threading.get_ident())
        assert snapshot
        assert yielded.isdisjoint(partial.request_id for partial in snapshot)
        assert len({partial.request_id for partial in snapshot}) == len(snapshot)
        assert beginnings.issuperset(snapshot)
        snapshots.append(snapshot)

    config = mock_config(scheduler={"max_num_seqs": 8, "num_steps_in_flight": steps})
    with OfflineInference(config) as llm:
        for completion in llm.run(mixed(), on_partials=keep, partial_seconds=0):
            yielded.add(completion.request_id)
    assert yielded == set(answers)
    assert threads == {threading.get_ident()}
    assert any(partial.replies for snapshot in snapshots for partial in snapshot)


def test_a_stopped_run_tells_of_everything_it_has_and_the_next_loses_no_token(
    answers: dict[str, Completion], beginnings: frozenset[PartialOutput]
) -> None:
    config = mock_config(
        runtime={"mock_step_seconds": 0.002},
        scheduler={"max_num_seqs": 8, "num_steps_in_flight": 2},
    )
    done: dict[str, Completion] = {}
    kept: dict[str, PartialOutput] = {}
    num_sampled = num_stops = 0
    with OfflineInference(config) as llm:
        while len(done) < len(answers):
            stop, before = threading.Event(), len(done)
            snapshots: list[list[PartialOutput]] = []
            left = [
                replace(
                    row, partials=tuple(p for p in kept.values() if p.request_id == row.request_id)
                )
                for row in mixed()
                if row.request_id not in done
            ]
            for completion in llm.run(
                left, stop=stop, on_partials=snapshots.append, partial_seconds=60
            ):
                kept.pop(completion.request_id, None)
                done[completion.request_id] = completion
                if len(done) == before + 9:
                    stop.set()
            for snapshot in snapshots:
                assert beginnings.issuperset(snapshot)
                assert not {partial.request_id for partial in snapshot} & set(done)
                kept |= {partial.request_id: partial for partial in snapshot}
            num_stops += stop.is_set()
            num_sampled += llm.take_stats().num_output_tokens
    assert num_stops >= 3
    assert {name: what_counts(c) for name, c in done.items()} == {
        name: what_counts(c) for name, c in answers.items()
    }
    assert num_sampled == sum(c.num_output_tokens for c in answers.values())


def test_a_conversation_between_two_turns_is_told_of(
    engine: OfflineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, snapshots = threading.Event(), []
    put, complete = Outbox.put, Outbox._complete

    def put_and_stop(outbox: Outbox, ended: InferRequest) -> None:
        stop.set()
        put(outbox, ended)

    def complete_slowly(outbox: Outbox, ended: InferRequest) -> None:
        time.sleep(0.1)
        complete(outbox, ended)

    [expected] = uninterrupted(engine, conversation())
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "put", put_and_stop)
        patch.setattr(Outbox, "_complete", complete_slowly)
        assert list(engine.run([conversation()], stop=stop, on_partials=snapshots.append)) == []
    [[partial]] = snapshots
    assert partial == PartialOutput(request_id="row", replies=expected.replies[:1])
    assert continued(engine, conversation(), [partial]) == [what_counts(expected)]


def test_what_waits_to_go_on_with_a_later_turn_is_told_of_with_its_tokens(
    engine: OfflineInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = uninterrupted(engine, conversation(temperature=1, seed=1, n=2))[:1]
    cut = cuts_of(expected)[-1]
    begun = replace(conversation(temperature=1, seed=1, n=2), partials=(cut,))
    stop, snapshots = threading.Event(), []
    take = Session.take

    def take_one(session: Session) -> Turn | None:
        turn = None if stop.is_set() else take(session)
        stop.set()
        return turn

    monkeypatch.setattr(Session, "take", take_one)
    list(engine.run([begun], stop=stop, on_partials=snapshots.append))
    [snapshot] = snapshots
    assert cut in snapshot


def test_a_run_without_trouble_and_without_time_tells_nothing(engine: OfflineInference) -> None:
    snapshots: list[list[PartialOutput]] = []
    done = list(engine.run(rows(20), on_partials=snapshots.append, partial_seconds=60))
    assert (len(done), snapshots) == (20, [])


def test_they_are_told_again_after_so_many_seconds() -> None:
    times: list[float] = []
    config = mock_config(runtime={"mock_step_seconds": 0.01})
    with OfflineInference(config) as llm:
        row = request(sampling_params=params(max_tokens=60, min_tokens=60))
        started = time.monotonic()
        for _ in llm.run(
            [row], on_partials=lambda _: times.append(time.monotonic()), partial_seconds=0.1
        ):
            pass
    assert len(times) >= 2
    gaps = [later - earlier for earlier, later in zip([started, *times], times, strict=False)]
    assert min(gaps) >= 0.1


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_the_callback_raises_ends_the_run_and_the_engine_stays_usable(
    answers: dict[str, Completion], is_stopped: bool
) -> None:
    def broken(_: list[PartialOutput]) -> None:
        raise LookupError("the ledger is gone")

    stop, seconds = threading.Event(), 60 if is_stopped else 0
    with OfflineInference(mock_config()) as llm:
        run = llm.run(mixed(), stop=stop, on_partials=broken, partial_seconds=seconds)
        if is_stopped:
            next(run)
            stop.set()
        with pytest.raises(LookupError, match="the ledger is gone"):
            list(run)
        again = {completion.request_id: completion for completion in llm.run(mixed())}
    assert {name: what_counts(c) for name, c in again.items()} == {
        name: what_counts(c) for name, c in answers.items()
    }


def test_two_runs_on_one_engine_are_each_told_of_their_own(
    answers: dict[str, Completion], beginnings: frozenset[PartialOutput]
) -> None:
    told: dict[str, set[str]] = {"row": set(), "chat": set()}
    done: dict[str, set[str]] = {"row": set(), "chat": set()}
    config = mock_config(runtime={"mock_step_seconds": 0.001}, scheduler={"max_num_seqs": 8})
    with OfflineInference(config) as llm:

        def work(name: str) -> None:
            own = [row for row in mixed() if row.request_id.startswith(name)]

            def keep(snapshot: list[PartialOutput]) -> None:
                ids = {partial.request_id for partial in snapshot}
                assert ids.isdisjoint(done[name])
                assert beginnings.issuperset(snapshot)
                told[name] |= ids

            for completion in llm.run(own, on_partials=keep, partial_seconds=0.02):
                done[name].add(completion.request_id)

        threads = [threading.Thread(target=work, args=(name,)) for name in told]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in told:
        assert done[name] == {row for row in answers if row.startswith(name)}
        assert told[name]
        assert told[name] <= done[name]


def test_a_run_that_is_finished_does_not_wait_for_the_steps_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drains = []
    drain = EngineLoop._drain
    monkeypatch.setattr(EngineLoop, "_drain", lambda loop: (drains.append(1), drain(loop)))
    long = request("long", sampling_params=params(min_tokens=100, max_tokens=100))
    with OfflineInference(mock_config(runtime={"mock_step_seconds": 0.005})) as llm:
        run = llm.run([long, request("short", sampling_params=params(min_tokens=1, max_tokens=1))])
        assert next(run).request_id == "short"
        assert len(list(llm.run(rows(5)))) == 5
        assert drains == []
        run.close()
        assert drains == [1]
