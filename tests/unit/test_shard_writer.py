"""ShardWriter: what is put is committed, in few transactions, by a thread that keeps the lease."""

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from job_builders import make_job
from ledger_builders import acquire, error_row, lose, new_job, ok_row, silence, stored

from engine import LedgerError
from flows.config import JobConfig
from flows.ledger import CompletionRow, JobRow, Lease, Ledger
from flows.outages import LedgerUnreachableError
from flows.shard_writer import AnswersNotStoredError, ShardWriter

WAIT_SECONDS = 30
NEVER = 3600.0


class WatchedLedger(Ledger):
    """A ledger that remembers its commits and heartbeats, and can be held up."""

    def watch(self) -> None:
        self.commits: list[int] = []
        self.num_heartbeats = 0
        self.is_free = threading.Event()
        self.is_free.set()

    def commit(
        self, lease: Lease, rows: Sequence[CompletionRow], *, device: str | None = None
    ) -> None:
        assert self.is_free.wait(WAIT_SECONDS)
        super().commit(lease, rows, device=device)
        self.commits.append(len(rows))

    def renew_lease(self, lease: Lease) -> None:
        super().renew_lease(lease)
        self.num_heartbeats += 1


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedLedger]:
    with Ledger.open(f"sqlite:///{tmp_path / 'ledger.sqlite'}") as opened:
        ledger = WatchedLedger(opened.database)
        ledger.watch()
        yield ledger


@pytest.fixture
def job(watched: WatchedLedger) -> JobRow:
    return watched.create_job(new_job(num_rows=100, num_shards=1))


@pytest.fixture
def lease(watched: WatchedLedger, job: JobRow) -> Lease:
    return acquire(watched, job)


def make_config(folder: Path, **changes: object) -> JobConfig:
    changes = {"commit_rows": 4, "commit_seconds": NEVER, "lease_seconds": NEVER} | changes
    return make_job(folder, **changes)


def write(
    ledger: Ledger,
    lease: Lease,
    config: JobConfig,
    rows: Sequence[CompletionRow],
    *,
    then: Callable[[], object] = lambda: None,
    stream_path: Path | None = None,
) -> None:
    """Put the rows, do something else, and end."""
    with ShardWriter(ledger, lease, config, stream_path=stream_path) as writer:
        for row in rows:
            writer.put(row)
        then()


def fall_off() -> None:
    raise RuntimeError("the device fell off")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_commit_happens_when_enough_rows_wait(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path
) -> None:
    with ShardWriter(watched, lease, make_config(tmp_path), stream_path=None) as writer:
        for index in range(4):
            writer.put(ok_row(index))
        wait_until(lambda: watched.commits == [4])
        for index in range(4, 7):
            writer.put(ok_row(index))
    assert watched.commits == [4, 3]  # the rest at the end
    assert [row.row_index for row in stored(watched, job)] == list(range(7))


def test_a_single_row_is_committed_when_it_has_waited_long_enough(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    config = make_config(tmp_path, commit_seconds=0.01)
    with ShardWriter(watched, lease, config, stream_path=None) as writer:
        for index in range(2):
            writer.put(ok_row(index))
            wait_until(lambda count=index + 1: watched.commits == [1] * count)  # type: ignore[misc]


def test_rows_carry_the_device_that_answered_them(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    with ShardWriter(watched, lease, make_config(tmp_path), stream_path=None) as writer:
        writer.device = "npu:3"
        writer.put(ok_row(0))
    with watched.database.read() as connection:
        devices = connection.exec_driver_sql("SELECT device FROM completions").scalars()
        assert list(devices) == ["npu:3"]


def test_the_engine_waits_when_the_ledger_is_slow_and_nothing_is_lost(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path
) -> None:
    watched.is_free.clear()
    num_put = 0

    def put_all(writer: ShardWriter) -> None:
        nonlocal num_put
        for index in range(100):
            writer.put(ok_row(index))
            num_put += 1

    with ShardWriter(watched, lease, make_config(tmp_path), stream_path=None) as writer:
        engine = threading.Thread(target=put_all, args=(writer,), daemon=True)
        engine.start()
        # Of commits of 4 rows eight may wait, beside the rows that are being committed.
        wait_until(lambda: num_put >= 32)
        engine.join(0.1)
        assert engine.is_alive()
        assert num_put <= 64
        watched.is_free.set()
        engine.join(WAIT_SECONDS)
        assert not engine.is_alive()
    assert len(stored(watched, job)) == 100


def test_a_commit_that_fails_stops_the_one_who_puts(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path
) -> None:
    lose(watched, lease)
    with pytest.raises(LedgerError, match="lease of shard 0 was lost"):
        write(
            watched, lease, make_config(tmp_path), [ok_row(index) for index in range(100)],
            then=lambda: pytest.fail("put took rows that nobody will commit"),
        )  # fmt: skip
    assert stored(watched, job) == []


def test_one_who_waits_for_room_is_woken_by_the_failure(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    watched.is_free.clear()
    caught: list[LedgerError] = []

    def put_all() -> None:
        try:
            write(watched, lease, make_config(tmp_path), [ok_row(index) for index in range(100)])
        except LedgerError as error:
            caught.append(error)

    engine = threading.Thread(target=put_all, daemon=True)
    engine.start()
    engine.join(0.1)
    assert engine.is_alive()  # no room
    lose(watched, lease)
    watched.is_free.set()
    engine.join(WAIT_SECONDS)
    assert not engine.is_alive()
    assert "lease of shard 0 was lost" in str(caught[0])


def test_the_last_commit_fails_aloud_too(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    with pytest.raises(LedgerError, match="lease of shard 0 was lost"):
        write(watched, lease, make_config(tmp_path), [ok_row(0)], then=lambda: lose(watched, lease))


def test_an_error_of_the_engine_is_not_hidden_by_one_of_the_ledger(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    def lose_everything() -> None:
        lose(watched, lease)
        fall_off()

    with pytest.raises(RuntimeError, match="the device fell off"):
        write(watched, lease, make_config(tmp_path), [ok_row(0)], then=lose_everything)


def test_an_error_of_the_engine_leaves_its_answers_committed(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="the device fell off"):
        write(watched, lease, make_config(tmp_path), [ok_row(0)], then=fall_off)
    assert [row.row_index for row in stored(watched, job)] == [0]


def test_a_stream_that_cannot_be_written_stops_nothing(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    no_folder = tmp_path / "none" / "stream.jsonl"
    rows = [ok_row(index) for index in range(12)]
    with ShardWriter(watched, lease, make_config(tmp_path), stream_path=no_folder) as writer:
        for row in rows:
            writer.put(row)
            writer.flush()
    assert stored(watched, job) == rows
    assert len(watched.commits) == 12
    assert caplog.text.count("none/stream.jsonl is written no longer: ") == 1


def test_a_fault_that_nobody_foresaw_is_told_as_one_of_the_ledger(
    watched: WatchedLedger, lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "commit", lambda *_, **__: fall_off())
    with pytest.raises(LedgerError, match="the ledger cannot be written: the device fell off"):
        write(watched, lease, make_config(tmp_path), [ok_row(0)])


def test_answers_that_a_server_which_went_away_did_not_take_are_counted(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def give_up(*_: object, **__: object) -> None:
        assert watched.is_free.wait(WAIT_SECONDS)
        raise LedgerUnreachableError("the server is gone")

    def answer_ten() -> None:
        with ShardWriter(watched, lease, make_config(tmp_path)) as writer:
            for index in range(4):
                writer.put(ok_row(index))
            wait_until(lambda: watched.commits == [4])
            monkeypatch.setattr(watched, "commit", give_up)
            watched.is_free.clear()
            for index in range(4, 10):
                writer.put(ok_row(index))
            watched.is_free.set()

    with pytest.raises(AnswersNotStoredError, match="the last 6 answer") as lost:
        answer_ten()
    assert lost.value.num_answers == 6
    again = pickle.loads(pickle.dumps(lost.value))
    assert (str(again), again.num_answers) == (str(lost.value), 6)
    assert len(stored(watched, job)) == 4


def test_answers_that_were_committed_before_the_server_went_away_do_not_count_as_lost(
    watched: WatchedLedger, lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*_: object) -> None:
        raise LedgerUnreachableError("the server is gone")

    monkeypatch.setattr(watched, "renew_lease", give_up)
    config = make_config(tmp_path, lease_seconds=1)
    writer = ShardWriter(watched, lease, config)
    writer.__enter__()
    writer.put(ok_row(0))
    writer.flush()
    wait_until(lambda: not writer._thread.is_alive())  # at the next heartbeat
    with pytest.raises(AnswersNotStoredError, match="the last 0 answer"):
        writer.__exit__(None, None, None)


def test_a_heartbeat_keeps_the_lease_while_nothing_is_put(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    config = make_config(tmp_path, lease_seconds=1)  # a heartbeat every third of it
    silence(watched)
    with ShardWriter(watched, lease, config, stream_path=None):
        wait_until(lambda: watched.num_heartbeats >= 2)
    (shard,) = watched.list_shards(lease.job_key)
    assert shard.heartbeat_at is not None
    assert time.time() - shard.heartbeat_at < NEVER / 2


def test_rows_that_wait_for_their_commit_do_not_hold_up_the_heartbeat(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    config = make_config(tmp_path, lease_seconds=1)
    with ShardWriter(watched, lease, config, stream_path=None) as writer:
        writer.put(ok_row(0))
        wait_until(lambda: watched.commits == [1])  # a commit is a heartbeat


def test_a_lease_that_was_lost_while_nothing_was_put_is_told_at_the_next_row(
    watched: WatchedLedger, job: JobRow, lease: Lease, tmp_path: Path
) -> None:
    lose(watched, lease)
    writer = ShardWriter(watched, lease, make_config(tmp_path, lease_seconds=1), stream_path=None)
    writer.__enter__()
    wait_until(lambda: not writer._thread.is_alive())
    with pytest.raises(LedgerError, match="lease of shard 0 was lost"):
        writer.put(ok_row(0))
    with pytest.raises(LedgerError, match="lease of shard 0 was lost"):
        writer.__exit__(None, None, None)
    assert stored(watched, job) == []


def test_a_stream_shows_each_answer_once_it_is_committed(
    watched: WatchedLedger, lease: Lease, tmp_path: Path
) -> None:
    stream = tmp_path / "stream.jsonl"
    stream.write_text('{"row_id": "of an earlier run"}\n', encoding="utf-8")
    with ShardWriter(watched, lease, make_config(tmp_path), stream_path=stream) as writer:
        for row in (ok_row(0, "zażółć\u2028"), error_row(1), ok_row(2), ok_row(3)):
            writer.put(row)
        wait_until(lambda: stream.read_text(encoding="utf-8").count("\n") == 5)
    lines = [json.loads(line) for line in stream.read_text(encoding="utf-8").split("\n")[1:-1]]
    assert [line["row_id"] for line in lines] == ["row-0", "row-1", "row-2", "row-3"]
    assert lines[0]["text"] == "zażółć\u2028"
    assert (lines[1]["text"], lines[1]["error"]) == (None, "prompt has 9 tokens, limit 8")
