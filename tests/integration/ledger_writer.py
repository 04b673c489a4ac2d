"""A process that the tests start, talk to by lines, and kill.

Arguments: URL JOB_ID SHARD BATCH_ROWS. It prints `ready`, opens the ledger at the line `open`,
takes its shard at the line `acquire`, commits it at the line `write`, and prints each row that
was committed.
"""

import sys

from flows.ledger import CompletionRow, Ledger, Owner
from flows.schema import RowState, ShardState


def say(line: str) -> None:
    print(line, flush=True)


def wait_for(line: str) -> None:
    assert sys.stdin.readline().strip() == line


def main(url: str, job_id: str, shard_index: int, batch_rows: int) -> None:
    say("ready")
    wait_for("open")
    with Ledger.open(url) as ledger:
        say("opened")
        wait_for("acquire")
        job = ledger.get_job(job_id)
        lease = ledger.acquire_shard(
            job.job_key, shard_index, owner=Owner.current(), lease_seconds=3600
        )
        say("acquired")
        wait_for("write")
        done = ledger.done_samples(job.job_key, range(job.num_rows))
        end_row = lease.first_row + lease.num_rows
        todo = [index for index in range(lease.first_row, end_row) if index not in done]
        for first in range(0, len(todo), batch_rows):
            batch = todo[first : first + batch_rows]
            ledger.commit(lease, [make_row(index) for index in batch])
            say(" ".join(str(index) for index in batch))
        ledger.release_shard(lease, ShardState.DONE)
        say("done")


def make_row(row_index: int) -> CompletionRow:
    return CompletionRow(
        row_index=row_index,
        row_id=f"row-{row_index}",
        state=RowState.OK,
        num_prompt_tokens=row_index,
        num_output_tokens=2,
        text=f"answer {row_index}",
        token_ids=(row_index, 1),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
