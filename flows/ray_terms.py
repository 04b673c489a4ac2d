"""What a job asks of a Ray cluster, and what it must not ask. Knows no Ray."""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine import ConfigError, EngineConfig
from flows.config import JobConfig
from flows.ledger_url import LEDGER_URL_VARIABLE
from flows.ray_config import RAY_ADDRESS_VARIABLES, problem_of_address

# By these names Ray counts the devices that it finds on a node.
_DEVICE_RESOURCES = {"npu": "NPU", "cuda": "GPU"}
_CONNECT_SECONDS = 10.0
Resources = Mapping[str, float]


def check_ray(config: JobConfig) -> None:
    """Check what can be known of a job before its cluster is asked.

    Raises:
        ConfigError: names the setting and what to write instead.
    """
    if config.resolved_ledger_url.startswith("sqlite"):
        raise ConfigError(
            "runner: ray takes a ledger in PostgreSQL: its shards commit from several hosts, and "
            "SQLite loses rows when more than one host writes to its file; set "
            f"{LEDGER_URL_VARIABLE} to a postgresql:// URL"
        )
    if config.engine.device == "auto":
        raise ConfigError(
            "engine.device: auto does not say which devices of the cluster a shard takes, and this "
            "host may have none; with runner: ray write npu, cuda or cpu"
        )
    for setting, is_set in (
        ("device_lock_dir", config.device_lock_dir is not None),
        ("stream_output", config.stream_output),
    ):
        if is_set:
            raise ConfigError(f"{setting} has no place with runner: ray: {_REASONS[setting]}")
    address_of(config)


_REASONS = {
    "device_lock_dir": "Ray's own resources keep jobs apart; leave it out",
    "stream_output": "several hosts cannot append to one file; leave it out, and export the job "
    "while it runs",
}


def address_of(config: JobConfig) -> str | None:
    """Return the cluster's address; None is a Ray of this host alone, which was asked for.

    Raises:
        ConfigError: there is none, or it is not one that a job can be driven through.
    """
    named = {"ray.address": config.ray.address} | {
        variable: os.environ.get(variable) for variable in RAY_ADDRESS_VARIABLES
    }
    for name, address in named.items():
        # Ray takes auto for RAY_ADDRESS where that is set.
        if address and not (address == "auto" and os.environ.get("RAY_ADDRESS")):
            if problem := problem_of_address(address):
                raise ConfigError(f"{name}: {problem}")
            return address
    if config.ray.start_local:
        return None
    raise ConfigError(
        "runner: ray has no cluster: set ray.address or TOKENMILL_RAY_ADDRESS to HOST:PORT of its "
        "head; or, for a Ray of this host alone, ray.start_local to true"
    )


def refuse_if_silent(address: str) -> None:
    """Check that somebody listens at HOST:PORT; Ray itself would try for minutes.

    Raises:
        ConfigError: nobody does.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error}; start its head there (`ray start "
            "--head`), or change ray.address, TOKENMILL_RAY_ADDRESS or RAY_ADDRESS"
        ) from error


def resources_of(config: JobConfig) -> dict[str, float]:
    """Return what one shard takes, by Ray's names."""
    wanted = {"CPU": config.ray.num_cpus, **config.ray.resources}
    if (name := _DEVICE_RESOURCES.get(config.engine.device)) is not None:
        wanted[name] = float(config.engine.tensor_parallel_size)
    return wanted


def engine_of_shard(config: JobConfig) -> EngineConfig:
    """Return the engine as a node runs it: on the devices that Ray lets the process see.

    Ray sets ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES, within which device_ids count.
    """
    engine = config.engine
    changes: dict[str, Any] = {}
    if engine.device != "cpu":
        changes["device_ids"] = tuple(range(engine.tensor_parallel_size))
    elif engine.runtime.num_threads is None:
        threads = {"num_threads": max(1, int(config.ray.num_cpus))}
        changes["runtime"] = engine.runtime.model_copy(update=threads)
    return engine.model_copy(update=changes)


def count_places(nodes: Iterable[Resources], wanted: Resources) -> int:
    """Return how many shards the nodes can run at a time, whoever uses them now."""
    return sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in wanted.items())
        for node in nodes
    )


def describe_offer(nodes: Sequence[Resources], wanted: Resources) -> str:
    """Return in words what the cluster has of what a shard takes."""
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in wanted}
    if len(nodes) == 1:
        return f"its one node offers {describe(most)}; a shard takes {describe(wanted)}"
    return (
        f"the best of its {len(nodes)} nodes offer {describe(most)}; a shard takes "
        f"{describe(wanted)} of one node"
    )


def describe(resources: Resources) -> str:
    """Return resources as a message shows them: CPU 1, NPU 2."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
