"""What a job asks of a Ray cluster, and what is refused before a cluster is asked."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from job_builders import make_job, questions

from engine import ConfigError
from flows.job_run import JobRun
from flows.preparation import check_model_and_sources
from flows.ray_terms import (
    address_of,
    check_ray,
    count_places,
    describe_offer,
    engine_of_shard,
    refuse_if_silent,
    resources_of,
)

POSTGRES = "postgresql://postgres@db/ledger"
ON_RAY: dict[str, Any] = {
    "runner": "ray",
    "ledger_url": POSTGRES,
    "ray__address": "10.0.0.1:6379",
}


@pytest.fixture(autouse=True)
def _no_cluster_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENMILL_RAY_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"engine__device": "npu"}, {"CPU": 1, "NPU": 1}),
        (
            {
                "engine__device": "npu",
                "engine__runtime": {},
                "engine__device_ids": list(range(8)),
                "engine__tensor_parallel_size": 4,
            },
            {"CPU": 1, "NPU": 4},
        ),
        ({"engine__device": "cuda", "ray__num_cpus": 2}, {"CPU": 2, "GPU": 1}),
        ({"engine__device": "cpu", "ray__num_cpus": 8}, {"CPU": 8}),
        ({"ray__resources": {"card": 2}}, {"CPU": 1, "card": 2}),
    ],
)
def test_a_shard_takes_the_devices_of_one_engine(
    tmp_path: Path, changes: dict[str, Any], wanted: dict[str, float]
) -> None:
    assert resources_of(make_job(tmp_path, questions(1), **ON_RAY, **changes)) == wanted


def test_device_ids_count_within_what_ray_lets_the_process_see(tmp_path: Path) -> None:
    wide = {"engine__device_ids": [4, 5, 6, 7], "engine__tensor_parallel_size": 2}
    config = make_job(tmp_path, questions(1), **ON_RAY, engine__runtime={}, **wide)
    assert engine_of_shard(config).device_ids == (0, 1)


def test_the_cpu_gets_as_many_threads_as_cores_were_taken(tmp_path: Path) -> None:
    cpu = ON_RAY | {"engine__device": "cpu", "ray__num_cpus": 6}
    assert engine_of_shard(make_job(tmp_path, questions(1), **cpu)).runtime.num_threads == 6
    own = cpu | {"engine__runtime": {"num_threads": 3}}
    assert engine_of_shard(make_job(tmp_path, questions(1), **own)).runtime.num_threads == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"ledger_url": "sqlite:///ledger.sqlite"},
            "takes a ledger in PostgreSQL: .* several hosts",
        ),
        ({"ledger_url": None}, "takes a ledger in PostgreSQL"),
        ({"engine__device": "auto"}, "engine.device: auto does not say .* write npu, cuda or cpu"),
        ({"device_lock_dir": "/tmp/locks"}, "device_lock_dir has no place .* Ray's own resources"),
        ({"stream_output": True}, "stream_output has no place .* several hosts cannot append"),
        ({"ray__address": None}, "runner: ray has no cluster: .* ray.start_local to true"),
    ],
)
def test_what_cannot_work_is_refused_before_a_cluster_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], complaint: str
) -> None:
    monkeypatch.delenv("TOKENMILL_LEDGER_URL", raising=False)
    config = make_job(tmp_path, questions(1), **(ON_RAY | changes))
    with pytest.raises(ConfigError, match=complaint):
        check_model_and_sources(config)


def test_the_same_job_is_not_refused_when_it_runs_here(tmp_path: Path) -> None:
    check_model_and_sources(make_job(tmp_path, questions(1), stream_output=True))
    check_ray(make_job(tmp_path, questions(1), **ON_RAY))


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("ray__address", "ray://head:10001", "is the address of a Ray client"),
        ("ray__address", "head", "found 'head', wanted HOST:PORT"),
        ("ray__resources", {"NPU": 2}, "NPU is no custom resource; it is engine.tensor_parallel"),
        ("ray__resources", {"CPU": 2}, "CPU is no custom resource; it is ray.num_cpus"),
        ("ray__resources", {"memory": 2}, "memory is no custom resource"),
        ("ray__resources", {"card": 0}, "greater than 0"),
        ("ray__num_cpus", 0, "greater than 0"),
        ("runner", "slurm", "'local' or 'ray'"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, field: str, value: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_job(tmp_path, questions(1), **(ON_RAY | {field: value}))


def test_the_address_comes_from_the_job_then_from_our_variable_then_from_rays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = make_job(tmp_path, questions(1), **(ON_RAY | {"ray__address": None}))
    local = make_job(tmp_path, questions(1), **ON_RAY | {"ray": {"start_local": True}})
    assert address_of(local) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:1")
    assert address_of(silent) == address_of(local) == "10.0.0.3:1"
    monkeypatch.setenv("TOKENMILL_RAY_ADDRESS", "10.0.0.2:1")
    assert address_of(silent) == "10.0.0.2:1"
    assert address_of(make_job(tmp_path, questions(1), **ON_RAY)) == "10.0.0.1:6379"
    monkeypatch.setenv("TOKENMILL_RAY_ADDRESS", "ray://10.0.0.2:1")
    with pytest.raises(ConfigError, match="TOKENMILL_RAY_ADDRESS: ray://10.0.0.2:1 is the address"):
        address_of(silent)


def test_auto_gives_way_to_rays_variable_and_never_starts_a_ray_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = make_job(tmp_path, questions(1), **ON_RAY | {"ray__address": "auto"})
    assert address_of(auto) == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:1")
    assert address_of(auto) == "10.0.0.3:1"
    monkeypatch.setenv("RAY_ADDRESS", "local")  # which Ray takes for a wish to start one
    with pytest.raises(ConfigError, match="RAY_ADDRESS: found 'local', wanted HOST:PORT"):
        address_of(auto)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        refuse_if_silent(address)
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {address}: .*ray start"):
        refuse_if_silent(address)


def test_places_are_counted_node_by_node_for_a_shard_cannot_span_two() -> None:
    wanted = {"CPU": 1.0, "NPU": 4.0}
    big, small = {"CPU": 32.0, "NPU": 8.0}, {"CPU": 32.0, "NPU": 2.0}
    assert count_places([big, small, small], wanted) == 2
    assert count_places([small] * 5, wanted) == 0
    assert count_places([{"CPU": 1.0, "NPU": 8.0}], wanted) == 1
    assert count_places([], wanted) == 0
    assert count_places([{"CPU": 0.3}], {"CPU": 0.1}) == 3
    offer = describe_offer([big, small], {"CPU": 1, "NPU": 16})
    assert offer == (
        "the best of its 2 nodes offer CPU 32, NPU 8; a shard takes CPU 1, NPU 16 of one node"
    )


def test_without_the_extra_a_job_on_ray_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("flows.ray_runner", "flows.ray_places"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    sqlite = f"sqlite:///{tmp_path / 'ledger.sqlite'}"  # a server is of no use here
    monkeypatch.setattr("flows.preparation.check_ray", lambda config: None)
    config = make_job(tmp_path, questions(1), **(ON_RAY | {"ledger_url": sqlite}))
    with (
        pytest.raises(ConfigError, match=r"pip install 'tokenmill\[ray\]'"),
        JobRun.open(config),
    ):
        pass
