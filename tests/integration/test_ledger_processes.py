"""Several processes on one ledger, some of them killed; on SQLite and on PostgreSQL."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ledger_builders import new_job

from engine import LedgerError
from flows.ledger import Ledger, Owner
from flows.schema import ShardState

pytestmark = pytest.mark.integration
PROGRAM = Path(__file__).with_name("ledger_writer.py")
ROOT = Path(__file__).parents[2]


class Writer:
    """A process of ledger_writer.py."""

    def __init__(self, url: str, shard_index: int, batch_rows: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, url, "job", str(shard_index), str(batch_rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on_until(self, *orders: str) -> None:
        """Give orders, each after the answer to the one before."""
        for order, answer in zip(orders, ("opened", "acquired"), strict=False):
            self.tell(order)
            assert self.hear() == answer

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Writer]


@pytest.fixture
def start_writer(ledger_url: str) -> Iterator[Start]:
    writers: list[Writer] = []

    def start(shard_index: int, *, batch_rows: int) -> Writer:
        writers.append(Writer(ledger_url, shard_index, batch_rows))
        return writers[-1]

    yield start
    for writer in writers:
        writer.end()


def test_eight_processes_open_a_new_ledger_together_and_lose_no_row(
    ledger_url: str, start_writer: Start
) -> None:
    writers = [start_writer(index, batch_rows=10) for index in range(8)]
    assert [writer.hear() for writer in writers] == ["ready"] * 8
    for writer in writers:
        writer.tell("open")
    assert [writer.hear() for writer in writers] == ["opened"] * 8
    with Ledger.open(ledger_url) as ledger:
        job = ledger.create_job(new_job(num_rows=8000, num_shards=8))
        for writer in writers:
            writer.tell("acquire")
            writer.tell("write")
        for writer in writers:
            assert writer.hear() == "acquired"
            acknowledged = [int(word) for _ in range(100) for word in writer.hear().split()]
            assert len(acknowledged) == 1000
            assert writer.hear() == "done"
            assert writer.process.wait(timeout=30) == 0
        rows = list(ledger.iter_completions(job.job_key))
        assert [row.row_index for row in rows] == list(range(8000))
        assert all(row.text == f"answer {row.row_index}" for row in rows)
        job = ledger.get_job("job")
        assert (job.num_ok, job.num_pending, job.num_output_tokens) == (8000, 0, 16000)
        assert job.num_prompt_tokens == sum(range(8000))
        shards = ledger.list_shards(job.job_key)
        assert [shard.num_ok for shard in shards] == [1000] * 8
        assert {shard.state for shard in shards} == {ShardState.DONE}


def test_a_killed_process_loses_no_acknowledged_row_and_its_shard_is_taken_over_at_once(
    ledger: Ledger, start_writer: Start
) -> None:
    job = ledger.create_job(new_job(num_rows=5000, num_shards=1))
    victim = start_writer(0, batch_rows=7)
    assert victim.hear() == "ready"
    victim.go_on_until("open", "acquire")
    victim.tell("write")
    acknowledged = [int(word) for _ in range(30) for word in victim.hear().split()]
    victim.process.send_signal(signal.SIGKILL)
    assert victim.process.stdout is not None
    rest = victim.process.stdout.read()  # what it had printed; it is a zombie now
    acknowledged += [
        int(word)
        for line in rest.splitlines(keepends=True)
        if line.endswith("\n")
        for word in line.split()
    ]
    assert len(acknowledged) < 5000

    heir = start_writer(0, batch_rows=500)
    assert heir.hear() == "ready"
    heir.go_on_until("open", "acquire")
    survived = ledger.done_samples(job.job_key, range(5000))
    assert set(acknowledged) <= survived.keys()
    assert len(survived) % 7 == 0  # whole commits only
    assert ledger.get_job("job").num_ok == len(survived)

    heir.tell("write")
    assert heir.process.wait(timeout=60) == 0
    assert [row.row_index for row in ledger.iter_completions(job.job_key)] == list(range(5000))
    (shard,) = ledger.list_shards(job.job_key)
    assert (shard.num_ok, shard.attempt, shard.lease_epoch) == (5000, 2, 2)


def test_a_living_process_is_named_and_keeps_its_shard(ledger: Ledger, start_writer: Start) -> None:
    job = ledger.create_job(new_job(num_rows=5, num_shards=1))
    holder = start_writer(0, batch_rows=5)
    assert holder.hear() == "ready"
    holder.go_on_until("open", "acquire")
    with pytest.raises(LedgerError, match=f"shard 0 is held by process {holder.process.pid} on"):
        ledger.acquire_shard(job.job_key, 0, owner=Owner.current(), lease_seconds=0.001)
    holder.tell("write")
    assert holder.process.wait(timeout=30) == 0
    assert ledger.get_job("job").num_ok == 5
