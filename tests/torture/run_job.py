"""The program that tests kill: a job without Prefect, as a process of its own.

`python -m torture.run_job [MODULE...]` imports what a job needs, and the modules, once. Then it
forks a process for each order, a line of JSON, and says `started PID`; it says `ended PID STATUS`
when one has ended. A fork has nothing to import, so that many a kill costs seconds.
"""

import ctypes
import json
import logging
import os
import pwd
import resource
import select
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from job_builders import make_job, questions
from job_builders import run_job as run_quickly

from engine import ExitCode, TokenmillError
from flows.job_file import load_job_config
from flows.job_run import JobRun
from flows.shard_runner import ShardSummary
from torture.failpoints import arm
from torture.trace import TraceWriter, watch

_POLL_SECONDS = 0.003
_IMPORTED_LATE = ("alembic.command", "alembic.config")  # by the first process on a new ledger


def main(preloaded: list[str]) -> None:
    """Serve orders until stdin ends."""
    for name in (*_IMPORTED_LATE, *preloaded):
        import_module(name)
    children: set[int] = set()
    _say("ready")
    while True:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            pid = _fork(json.loads(line))
            children.add(pid)
            _say(f"started {pid}")
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            children.discard(pid)
            _say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def _fork(order: dict[str, Any]) -> int:
    """Start a process for one order, in a session of its own, and return its id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        _end_with(parent)
        _redirect(Path(order["said_path"]))
        code = _obey(order)
    except BaseException:  # noqa: BLE001 - whatever it is, it must not go on as the parent
        logging.exception("the program itself failed")
    finally:
        logging.shutdown()
        os._exit(code)


def _obey(order: dict[str, Any]) -> int:
    """Run the job under the order's handicaps, and return the exit code of the command line."""
    trace = TraceWriter(Path(order["trace_path"]))
    trace.phase("starting")
    if order["user"] is not None:
        _become(order["user"])
    watch(trace)
    if order["failpoint"] is not None:
        arm(*order["failpoint"], trace)
    if order["max_file_bytes"] is not None:
        limit = order["max_file_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        return _run(Path(order["config_path"]))
    except TokenmillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _run(config_path: Path) -> ExitCode:
    summaries: list[ShardSummary] = []
    failures: dict[int, BaseException] = {}
    with JobRun.open(load_job_config(config_path)) as run:
        with ThreadPoolExecutor(run.num_slots) as threads:
            running = {
                index: threads.submit(run.run_shard, index) for index in run.pending_shards()
            }
            for index, future in running.items():
                error = future.exception()
                if error is None:
                    summaries.append(future.result())
                else:
                    failures[index] = error
        outcome = run.finish(summaries, failures)
    print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code


def _become(user: str) -> None:
    """Give up root's rights, after a small job has imported all that is imported late."""
    with tempfile.TemporaryDirectory() as folder:
        run_quickly(make_job(Path(folder), questions(2)))
    account = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)


def _redirect(said_path: Path) -> None:
    silence = os.open(os.devnull, os.O_RDONLY)
    said = os.open(said_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for target, source in ((0, silence), (1, said), (2, said)):
        os.dup2(source, target)
    logging.basicConfig(level=logging.INFO, force=True, stream=sys.stderr)


def _end_with(parent: int) -> None:
    """Let the system kill this process when the program that started it ends."""
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(99)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
