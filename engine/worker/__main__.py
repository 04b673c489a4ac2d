"""`python -m engine.worker FD PARENT LEVEL RANK`: a worker, speaking over an inherited pipe."""

import ctypes
import logging
import os
import signal
import sys

from engine.worker.channel import Channel, LineSender
from engine.worker.model_worker import serve

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the request
        sys.exit(1)


def main() -> None:
    """Serve one main process."""
    file_descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    level, rank = sys.argv[3], sys.argv[4]
    _die_with_parent(parent_pid)
    # The parent finishes the step and says Shutdown; a Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level="WARNING",  # of libraries
        format=f"%(asctime)s %(levelname)s rank={rank} pid=%(process)d %(name)s: %(message)s",
    )
    channel = Channel.inherited(file_descriptor)
    logger = logging.getLogger("engine")
    logger.setLevel(level)
    logger.addHandler(LineSender(channel))
    serve(channel)


if __name__ == "__main__":
    main()
