"""What a user writes about a Ray cluster, on which a job's shards may run."""

from typing import Annotated

from pydantic import Field, field_validator

from engine import Section

RAY_ADDRESS_VARIABLES = ("TOKENMILL_RAY_ADDRESS", "RAY_ADDRESS")
_OTHER_SETTINGS = {
    "CPU": "ray.num_cpus",
    "GPU": "engine.tensor_parallel_size",
    "NPU": "engine.tensor_parallel_size",
}


class RayConfig(Section):
    """Which cluster, and what of it one shard takes; read with `runner: ray` alone."""

    address: str | None = Field(
        default=None,
        description="HOST:PORT of the cluster's head, or auto for the cluster that this host "
        "belongs to; TOKENMILL_RAY_ADDRESS, else RAY_ADDRESS, when left out.",
    )
    start_local: bool = Field(
        default=False,
        description="Without an address, start a Ray of this host alone, which ends with the run.",
    )
    num_cpus: float = Field(
        default=1, gt=0,
        description="Cores that one shard takes; with device cpu, so many threads too.",
    )  # fmt: skip
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Custom resources that one shard takes beside its devices, by their names.",
    )

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, address: str | None) -> str | None:
        if address is not None and (problem := problem_of_address(address)):
            raise ValueError(problem)
        return address

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in resources:
            if name in _OTHER_SETTINGS:
                raise ValueError(f"{name} is no custom resource; it is {_OTHER_SETTINGS[name]}")
            if name in ("memory", "object_store_memory"):
                raise ValueError(f"{name} is no custom resource; leave it out")
        return resources


def problem_of_address(address: str) -> str | None:
    """Return why no job can be driven from there, None when nothing speaks against it."""
    if "://" in address:
        return (
            f"{address} is the address of a Ray client, which a job cannot be driven through; run "
            "it on a host of the cluster, and write HOST:PORT of the head"
        )
    _, colon, port = address.rpartition(":")
    if address != "auto" and not (colon and port.isdigit()):
        return f"found {address!r}, wanted HOST:PORT of the cluster's head, or auto"
    return None
