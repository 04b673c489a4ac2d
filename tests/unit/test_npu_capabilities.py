"""What attention on an NPU takes: refused in sentences, or warned of once."""

import logging

import pytest
import torch

from engine.backends.attention_metadata import AttentionOptions
from engine.backends.npu_capabilities import AttentionChecks, check_block_size, check_cache
from engine.errors import ConfigError

PLAIN = AttentionOptions(scale=1.0)


def states(
    *,
    heads: int = 8,
    kv_heads: int = 2,
    width: int = 128,
    value_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width or width)]
    query, key, value = (torch.empty(1, *shape, dtype=dtype, device="meta") for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("block_size", [16, 64, 100, 192, 640])
def test_block_size_that_is_not_documented_is_refused(block_size: int):
    with pytest.raises(ConfigError, match="128, 256, 384, 512") as caught:
        check_block_size(block_size)
    assert f"engine.cache.block_size is {block_size}" in str(caught.value)


@pytest.mark.parametrize("block_size", [128, 256, 512])
def test_documented_block_size_is_taken(block_size: int):
    check_block_size(block_size)


def test_plain_layer_passes_without_a_word(caplog: pytest.LogCaptureFixture):
    AttentionChecks().check(states(), PLAIN)
    assert caplog.records == []


def test_soft_cap_is_refused_with_the_models_that_have_it():
    with pytest.raises(ConfigError, match="models like Gemma 2 do not run on an NPU yet"):
        AttentionChecks().check(states(), AttentionOptions(scale=1.0, softcap=50.0))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (states(value_width=64), "both must have one shape"),
        (states(heads=130, kv_heads=1), "at most 64 times"),
        (states(heads=9, kv_heads=2), "must be a multiple"),
        (states(width=100), "multiple of 16"),
        (states(width=1024), "at most 512"),
        (states(heads=512, kv_heads=512), "65535 are the most"),
    ],
)
def test_shape_that_the_operator_refuses_is_refused_at_the_load(
    layer: tuple[torch.Tensor, torch.Tensor, torch.Tensor], words: str
):
    with pytest.raises(ConfigError, match="does not run on an NPU") as caught:
        AttentionChecks().check(layer, PLAIN)
    assert words in str(caught.value)


def test_sinks_want_bfloat16_and_narrow_values():
    sinks = torch.empty(8, dtype=torch.bfloat16, device="meta")
    AttentionChecks().check(states(width=64), AttentionOptions(scale=1.0, sinks=sinks))
    with pytest.raises(ConfigError, match="attention sinks in torch.float32"):
        AttentionChecks().check(states(), AttentionOptions(scale=1.0, sinks=sinks.float()))
    with pytest.raises(ConfigError, match="width 192"):
        AttentionChecks().check(states(width=192), AttentionOptions(scale=1.0, sinks=sinks))


def test_width_that_others_run_is_warned_of_once_for_all_layers(caplog: pytest.LogCaptureFixture):
    checks = AttentionChecks()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            checks.check(states(width=64), PLAIN)
    assert len(caplog.records) == 1
    assert "heads are 64 wide" in caplog.text


def test_float16_is_warned_of(caplog: pytest.LogCaptureFixture):
    AttentionChecks().check(states(dtype=torch.float16), PLAIN)
    assert "documents bfloat16 only" in caplog.text


def test_cache_that_32_bits_cannot_count_is_refused_with_the_most_blocks():
    check_cache((4095, 128, 32, 128))
    with pytest.raises(ConfigError, match="at most 4094"):
        check_cache((4096, 128, 32, 128))
