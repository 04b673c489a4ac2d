"""Runs shards on another host: facts in, a summary out. Knows no Ray.

What a shard needs of the host is checked first. A node stops a shard in order when it is told to,
and by itself when the process that drives the job has gone: the job's lease in the ledger says so.
"""

import contextvars
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine import ConfigError, TokenmillError
from flows import leases
from flows.config import JobConfig
from flows.engine_part import ShardJob
from flows.ledger import Ledger
from flows.ray_terms import engine_of_shard
from flows.records import RecordReader
from flows.shard_runner import ShardSummary, run_shard
from flows.stacks import StackPool

logger = logging.getLogger(__name__)
# How often a node looks whether its job is still driven, at most: a third of the lease.
_LOOK_SECONDS = 5.0
_LOOKS_PER_LEASE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What a node is told. driver is the Owner that drives the job; the URL may hold a password."""

    shard_job: ShardJob
    shard_index: int
    driver: str
    ledger_url: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAnswer:
    """What a node says: a summary, or an error that was foreseen; num_loads counts engines."""

    summary: ShardSummary | None = None
    error: TokenmillError | None = None
    num_loads: int = 0


class ShardNode:
    """One engine on one host, for one shard after the other; `stop` comes from another thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._stacks: StackPool | None = None
        self._is_logging = False

    def where(self) -> str:
        """Return the name of the host."""
        return socket.gethostname()

    def run_shard(self, spec: ShardSpec) -> ShardAnswer:
        """Answer the pending rows of a shard; the loaded engine stays for the next one."""
        shard_job = _on_this_host(spec.shard_job)
        try:
            check_paths(shard_job)
            self._log_to(shard_job.config)
            if self._stacks is None:
                # No locks: Ray has given the devices to this process.
                engine, warm = shard_job.config.engine, shard_job.config.warm_seconds
                self._stacks = StackPool(engine, warm_seconds=warm)
            num_before = self._stacks.num_loads
            with _open_ledger(spec.ledger_url) as ledger, self._watching(spec, ledger) as stop:
                summary = run_shard(
                    shard_job, spec.shard_index, ledger=ledger, stacks=self._stacks, stop=stop
                )
            return ShardAnswer(summary=summary, num_loads=self._stacks.num_loads - num_before)
        except TokenmillError as error:
            return ShardAnswer(error=error)

    def stop(self) -> None:
        """Let the shard finish its step and commit; the next one is not begun."""
        self._stop.set()

    def close(self) -> None:
        """Unload the engine."""
        if self._stacks is not None:
            self._stacks.close()

    @contextmanager
    def _watching(self, spec: ShardSpec, ledger: Ledger) -> Iterator[threading.Event]:
        """Give an event that is set when the shard is to stop, for whichever reason."""
        stop, done = _Stop(self._stop), threading.Event()
        watch = threading.Thread(
            target=contextvars.copy_context().run,
            args=(watch_driver, spec, ledger, stop, done),
            name="driver-watch",
            daemon=True,
        )
        watch.start()
        try:
            yield stop
        finally:
            done.set()
            watch.join()

    def _log_to(self, config: JobConfig) -> None:
        """Write the lines of this process to a file beside the logs of its workers."""
        if self._is_logging:
            return
        self._is_logging = True
        folder = config.engine.log_dir
        assert folder is not None, "resolve it first"
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"node-{os.getpid()}.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("engine", "flows"):
            package = logging.getLogger(name)
            package.setLevel(config.engine.log_level)
            package.addHandler(handler)


class _Stop(threading.Event):
    """Set when one shard is to stop, or the node as a whole."""

    def __init__(self, node_stop: threading.Event) -> None:
        super().__init__()
        self._node_stop = node_stop

    def is_set(self) -> bool:
        return super().is_set() or self._node_stop.is_set()


def watch_driver(
    spec: ShardSpec, ledger: Ledger, stop: threading.Event, done: threading.Event
) -> None:
    """Set `stop` when the job is driven no longer, or by another process; ends when done is set."""
    job_id = spec.shard_job.job.job_id
    pause = min(_LOOK_SECONDS, spec.shard_job.config.lease_seconds / _LOOKS_PER_LEASE)
    while not done.wait(pause):
        job = ledger.find_job(job_id)
        is_driven = (
            job is not None
            and job.lease_owner == spec.driver
            and leases.is_held(job, ledger.database.read_clock())
        )
        if not is_driven:
            logger.error(
                "stopping shard=%d of job=%s: %s drives the job no longer",
                spec.shard_index,
                job_id,
                leases.name_of(spec.driver),
            )
            stop.set()
            return


def check_paths(shard_job: ShardJob) -> None:
    """Check that what the shard reads and writes is on this host.

    Raises:
        ConfigError: names the path and the host.
    """
    config = shard_job.config
    engine = config.engine
    needed: list[tuple[str, Path | str | None]] = [
        ("job_dir", shard_job.job_dir),
        ("the job's row index", shard_job.index_path),
        ("engine.model_path", None if engine.device == "mock" else engine.model_path),
        ("engine.tokenizer_path", engine.tokenizer_path),
        ("engine.chat.chat_template", engine.chat.template_path),
    ]
    host = socket.gethostname()
    for what, path in needed:
        if path is not None and not Path(path).exists():
            raise ConfigError(
                f"host {host} of the Ray cluster has no {path} ({what}); put it on a file system "
                "that every node has at the same path"
            )
    try:
        RecordReader(config.sources, config.prompt).close()
    except ConfigError as error:
        raise ConfigError(
            f"host {host} of the Ray cluster cannot read the sources: {error}; put them on a file "
            "system that every node has at the same path"
        ) from error


def _on_this_host(shard_job: ShardJob) -> ShardJob:
    """Return the job with an engine of this process's devices, and a folder of its own for logs."""
    config = shard_job.config
    engine = engine_of_shard(config)
    if engine.log_dir is not None:  # a pid, by which logs are called, is of one host alone
        engine = engine.model_copy(update={"log_dir": engine.log_dir / socket.gethostname()})
    return replace(shard_job, config=config.model_copy(update={"engine": engine}))


@contextmanager
def _open_ledger(url: str) -> Iterator[Ledger]:
    try:
        ledger = Ledger.open(url, must_exist=True)
    except TokenmillError as error:
        raise ConfigError(
            f"host {socket.gethostname()} of the Ray cluster: {error}; the ledger's URL must name "
            "a server that every node reaches"
        ) from error
    with ledger:
        yield ledger
