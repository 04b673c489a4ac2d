"""Runs shards on another host: facts in, a summary out. Knows no Ray.

What a shard needs of the host is checked first. A node stops a shard in order when it is told to,
and by itself when the process that drives the job has gone: the job's lease in the ledger says so.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine import ConfigError, EngineConfig, LedgerError, ModelSource, TokenmillError
from flows import leases
from flows.engine_part import ShardJob
from flows.experiments import collect_versions
from flows.job_changes import find_model_changes
from flows.ledger import Ledger
from flows.ray_terms import engine_of_shard
from flows.records import RecordReader
from flows.schema import ShardState
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

    @property
    def is_done(self) -> bool:
        """True when no row of the shard is left."""
        return self.summary is not None and self.summary.state is ShardState.DONE


class ShardNode:
    """One engine on one host, for one shard of a job after the other.

    `stop` comes from another thread, and is for good.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._stacks: StackPool | None = None

    def introduce(self) -> tuple[str, str]:
        """Return the name of the host, and the version of tokenmill there."""
        return socket.gethostname(), collect_versions()["tokenmill"]

    def run_shard(self, spec: ShardSpec) -> ShardAnswer:
        """Answer the pending rows of a shard; the loaded engine stays for the next one."""
        shard_job = _on_this_host(spec.shard_job)
        try:
            if self._stacks is None:
                check_host(shard_job)
                _log_to_file(shard_job.config.engine)
                engine, warm = shard_job.config.engine, shard_job.config.warm_seconds
                # No locks: Ray has given the devices to this process.
                self._stacks = StackPool(engine, warm_seconds=warm)
            num_before = self._stacks.num_loads
            opened = _open_ledger(spec.ledger_url, self._stop)
            with opened as ledger, self._watching(spec, ledger):
                summary = run_shard(
                    shard_job, spec.shard_index, ledger=ledger, stacks=self._stacks, stop=self._stop
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
    def _watching(self, spec: ShardSpec, ledger: Ledger) -> Iterator[None]:
        """Stop when the driver has gone, while the block runs."""
        done = threading.Event()
        watch = threading.Thread(
            target=watch_driver, args=(spec, ledger, self._stop, done), name="driver-watch",
            daemon=True,
        )  # fmt: skip
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()


def watch_driver(
    spec: ShardSpec, ledger: Ledger, stop: threading.Event, done: threading.Event
) -> None:
    """Set `stop` when the job is driven no longer, or by another process; ends when done is set."""
    pause = min(_LOOK_SECONDS, spec.shard_job.config.lease_seconds / _LOOKS_PER_LEASE)
    while not done.wait(pause):
        try:
            if _is_driven(spec, ledger):
                continue
            reason = f"{leases.name_of(spec.driver)} drives its job no longer"
        except LedgerError as error:
            reason = str(error)
        logger.error("stopping shard=%d: %s", spec.shard_index, reason)
        stop.set()
        return


def _is_driven(spec: ShardSpec, ledger: Ledger) -> bool:
    job = ledger.find_job(spec.shard_job.job.job_id)
    return (
        job is not None
        and job.lease_owner == spec.driver
        and leases.is_held(job, ledger.database.read_clock())
    )


def check_host(shard_job: ShardJob) -> None:
    """Check that what a shard reads and writes is on this host, and that the model is the job's.

    Raises:
        ConfigError: names the path and the host.
    """
    config = shard_job.config
    needed: tuple[tuple[str, Path | str | None], ...] = (
        ("job_dir", shard_job.job_dir),
        ("the job's row index", shard_job.index_path),
        ("engine.tokenizer_path", config.engine.tokenizer_path),
        ("engine.chat.chat_template", config.engine.chat.template_path),
    )
    for what, path in needed:
        if path is not None and not Path(path).exists():
            raise _not_shared(f"has no {path} ({what})")
    try:
        RecordReader(config.sources, config.prompt).close()
        fingerprint = ModelSource.inspect(config.engine).fingerprint()
    except ConfigError as error:
        raise _not_shared(f"cannot use what the job names: {error}") from error
    if changes := find_model_changes(shard_job.job, fingerprint):
        raise _not_shared(f"has another model than the job ({'; '.join(changes)})")


def _not_shared(found: str) -> ConfigError:
    return ConfigError(
        f"host {socket.gethostname()} of the Ray cluster {found}; put model, sources and job_dir "
        "on a file system that every node has at the same path"
    )


def _on_this_host(shard_job: ShardJob) -> ShardJob:
    """Return the job with an engine of this process's devices, and a folder of its own for logs."""
    config = shard_job.config
    engine = engine_of_shard(config)
    if engine.log_dir is not None:  # a pid, by which logs are called, is of one host alone
        engine = engine.model_copy(update={"log_dir": engine.log_dir / socket.gethostname()})
    return replace(shard_job, config=config.model_copy(update={"engine": engine}))


def _log_to_file(engine: EngineConfig) -> None:
    """Write the lines of this process to a file beside the logs of its workers."""
    assert engine.log_dir is not None, "resolve it first"
    engine.log_dir.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(engine.log_dir / f"node-{os.getpid()}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("engine", "flows"):
        package = logging.getLogger(name)
        package.setLevel(engine.log_level)
        package.addHandler(handler)


@contextmanager
def _open_ledger(url: str, stop: threading.Event) -> Iterator[Ledger]:
    try:
        ledger = Ledger.open(url, must_exist=True, stop=stop)
    except TokenmillError as error:
        raise ConfigError(
            f"host {socket.gethostname()} of the Ray cluster: {error}; the ledger's URL must name "
            "a server that every node reaches"
        ) from error
    with ledger:
        yield ledger
