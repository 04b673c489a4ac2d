"""A place as the driver sees it: what Ray says of it, in words of our own."""

import threading
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError

from engine import ConfigError
from flows import ray_places
from flows.experiments import collect_versions
from flows.ray_places import NodeGoneError, Place

VERSION = collect_versions()["tokenmill"]
NO_TOKENMILL = (
    "The actor died because of an error raised in its creation task, ray::ShardNode.__init__() "
    "(pid=7, ip=10.0.0.7, actor_id=28aa)\nModuleNotFoundError: No module named 'flows'\n"
)


class FakeRay(MagicMock):
    """Stands in for the module; `says` is what a process answers, or how it fails."""

    says: Any = ("far", VERSION)

    def get(self, _: Any, timeout: float | None = None) -> Any:
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs, []


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_places, "ray", fake)
    return fake


@pytest.fixture
def place(ray: FakeRay) -> Place:
    return Place(0, {"CPU": 1, "NPU": 2})


def test_a_shard_takes_its_devices_and_ray_is_to_retry_nothing(ray: FakeRay, place: Place) -> None:
    (asked,) = ray.remote.return_value.options.call_args_list
    assert asked.kwargs == {
        "num_cpus": 1, "num_gpus": 0, "resources": {"NPU": 2},
        "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2,
    }  # fmt: skip


def test_a_host_with_another_tokenmill_is_refused(ray: FakeRay, place: Place) -> None:
    assert place.host() == "far"
    ray.says = ("far", "0.0.9")
    with pytest.raises(ConfigError, match=rf"host far .* has tokenmill 0\.0\.9, .* {VERSION};"):
        place.host()


def test_a_node_where_tokenmill_is_not_installed_is_named(ray: FakeRay, place: Place) -> None:
    ray.says = RayActorError(error_msg=NO_TOKENMILL)
    wanted = "on node 10.0.0.7: ModuleNotFoundError: No module named 'flows'; is tokenmill inst"
    with pytest.raises(NodeGoneError, match=wanted):
        place.host()


def test_a_process_that_is_only_silent_still_holds_its_device(ray: FakeRay, place: Place) -> None:
    assert place.lives()
    for silent in (GetTimeoutError("late"), ActorUnavailableError("no way there", None)):
        ray.says = silent
        assert place.lives()
    ray.says = ActorDiedError()
    assert not place.lives()


@pytest.mark.parametrize(
    ("failure", "wanted"),
    [
        (ActorUnavailableError("no way there", None), NodeGoneError),
        (ActorDiedError(), NodeGoneError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_place_that_did_not_answer_is_ended(
    ray: FakeRay, place: Place, failure: BaseException, wanted: type[BaseException]
) -> None:
    place.host()
    ray.says = failure
    with pytest.raises(wanted) as caught:
        place.run_shard(MagicMock(), threading.Event())
    if wanted is NodeGoneError:
        assert str(caught.value).startswith("the process on host far has ended: ")
    assert ray.kill.call_count == 1


def test_a_shard_is_told_once_to_stop_and_waited_for(ray: FakeRay, place: Place) -> None:
    actor = ray.remote.return_value.options.return_value.remote.return_value
    looks = iter([[], [], []])
    ray.wait = lambda refs, **_: (next(looks, refs), [])  # type: ignore[method-assign]
    ray.says = "an answer"
    stop = threading.Event()
    stop.set()
    assert place.run_shard(MagicMock(), stop) == "an answer"
    assert (actor.stop.remote.call_count, ray.kill.call_count) == (1, 0)
