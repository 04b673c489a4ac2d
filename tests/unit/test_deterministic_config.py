"""Where `deterministic: true` is refused, and that it makes another job."""

from typing import Any

import pytest
from pydantic import ValidationError

from engine import EngineConfig, ModelSource


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model_path": "models/qwen", "device": "cpu", "deterministic": True, **settings}
    )


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_devices_whose_rounding_depends_on_the_batch_are_refused(device: str) -> None:
    with pytest.raises(ValidationError, match=f"on device {device} .* set device to cpu"):
        config(device=device)


def test_ranks_that_add_up_their_shares_are_refused() -> None:
    with pytest.raises(ValidationError, match="set tensor_parallel_size to 1"):
        config(tensor_parallel_size=2)


@pytest.mark.parametrize("device", ["auto", "cpu", "mock"])
def test_the_other_devices_are_accepted(device: str) -> None:
    assert config(device=device).deterministic


def test_it_is_part_of_what_decides_the_answers() -> None:
    exact, fast = (
        ModelSource.inspect(config(device="mock", deterministic=value)).fingerprint()
        for value in (True, False)
    )
    assert exact == {**fast, "deterministic": "true"}
