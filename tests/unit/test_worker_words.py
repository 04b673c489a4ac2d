"""What a worker says of an exception: its device's words, once there is a device."""

from typing import Any

import pytest

import engine.worker.model_worker as model_worker
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import AllocateCache, StartFailed, StartWorker
from engine.worker.model_worker import ModelWorker
from engine.worker.runner import Runner


class FailingRunner(Runner):
    """Fails to load, or to allocate, with an error that its device can explain."""

    device, dtype, block_size = "npu 0", "bfloat16", 128

    def __init__(self, load: Exception | None = None, allocate: Exception | None = None) -> None:
        self._errors = {"load": load, "allocate": allocate}

    def load(self) -> int:
        return self._raise("load")

    def allocate(self, num_blocks: int) -> None:
        self._raise("allocate")

    def _raise(self, what: str) -> int:
        error = self._errors[what]
        if error is not None:
            raise error
        return 4

    def launch(self, batch: Any) -> Any:
        raise NotImplementedError

    def forget_all(self) -> None:
        """Forget nothing."""

    def classify_error(self, error: BaseException) -> str:
        return "other"

    def explain_error(self, error: BaseException) -> str:
        return f"in words: {error}"

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def start() -> StartWorker:
    config = EngineConfig(model_path="none", device="mock")
    return StartWorker(
        config=config.model_dump(mode="json"),
        rank=0,
        world_size=1,
        device_id=0,
        rendezvous_dir="",
    )


def test_error_while_loading_is_told_in_the_words_of_the_device(
    monkeypatch: pytest.MonkeyPatch, start: StartWorker
):
    runner = FailingRunner(load=RuntimeError("507015"))
    monkeypatch.setattr(model_worker, "_make_runner", lambda *_: runner)
    reply = ModelWorker().handle(start)
    assert isinstance(reply, StartFailed)
    assert (reply.is_config_error, reply.message) == (False, "in words: 507015")


def test_error_while_allocating_is_told_in_the_words_of_the_device(
    monkeypatch: pytest.MonkeyPatch, start: StartWorker
):
    runner = FailingRunner(allocate=RuntimeError("207001"))
    monkeypatch.setattr(model_worker, "_make_runner", lambda *_: runner)
    worker = ModelWorker()
    worker.handle(start)
    reply = worker.handle(AllocateCache(num_blocks=4))
    assert isinstance(reply, StartFailed)
    assert reply.message == "no KV cache: in words: 207001"


def test_our_own_errors_are_words_already(monkeypatch: pytest.MonkeyPatch, start: StartWorker):
    runner = FailingRunner(load=ConfigError("no room"), allocate=ConfigError("no room"))
    monkeypatch.setattr(model_worker, "_make_runner", lambda *_: runner)
    reply = ModelWorker().handle(start)
    assert isinstance(reply, StartFailed)
    assert (reply.is_config_error, reply.message) == (True, "no room")


def test_error_before_there_is_a_device_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch, start: StartWorker
):
    def fail(*_: Any) -> Runner:
        raise RuntimeError("nothing yet")

    monkeypatch.setattr(model_worker, "_make_runner", fail)
    reply = ModelWorker().handle(start)
    assert isinstance(reply, StartFailed)
    assert reply.message == "RuntimeError('nothing yet')"
