"""Borrows the mock device as a job of its own does; each line of stdin is an order.

borrow: load the engine and keep it. return: give it back, warm. Its log goes to stdout.
"""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from engine import EngineConfig
from flows.device_locks import DeviceLocks
from flows.stacks import StackPool


def say(line: str) -> None:
    print(line, flush=True)


def main(folder: str, job_id: str) -> None:
    logging.basicConfig(stream=sys.stdout, level="INFO", format="%(message)s")
    logging.getLogger("engine").setLevel("WARNING")
    config = EngineConfig(model_path="mock", device="mock", log_dir=Path(folder) / "logs")
    pool = StackPool(config, locks=DeviceLocks(Path(folder), job_id))
    lent = ExitStack()
    say("ready")
    for line in sys.stdin:
        if line.strip() == "borrow":
            slot = lent.enter_context(pool.borrow())
            say(f"borrowed {slot.engine().worker_pids[0]} num_loads={pool.num_loads}")
        else:
            lent.close()
            say("returned")
    pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
