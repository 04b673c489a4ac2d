"""The token of a row: the same on every host and in every batch, with the right frequencies."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.sampler import sample, uniform_number
from engine.layers.slot import Slot
from engine.messages import SamplerSpec

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PLAIN = GREEDY | {"temperature": 1.0}


def spec(**fields: Any) -> SamplerSpec:
    keys = {"seed": 1, "sampling_key": 2, "sample_index": 0}
    return SamplerSpec(**(PLAIN | keys | fields))


def slot(sampler: SamplerSpec, position: int = 0) -> Slot:
    """Return a request that has generated `position` tokens."""
    return Slot(
        uid=0,
        token_ids=[0] * (position + 1),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=[],
        sampler=sampler,
    )


def draw(logits: list[float], count: int, **fields: Any) -> np.ndarray:
    """Return `count` draws from one row of logits, one for each output position."""
    sampler = spec(**fields)
    rows = torch.tensor(logits).repeat(count, 1)
    return np.array(sample(rows, [slot(sampler, position) for position in range(count)]))


def reference(logits: list[float], **fields: Any) -> np.ndarray:
    """Return each token's probability, by the definitions of the parameters."""
    asked = spec(**fields)
    values = np.array(logits, np.float64) / asked.temperature
    probabilities = np.exp(values - values.max())
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    likely = [token for token in order if probabilities[token] >= asked.min_p]
    kept = likely[: asked.top_k or len(order)]
    mass = probabilities[kept] / probabilities[kept].sum()
    before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
    kept = [token for token, b in zip(kept, before, strict=True) if b < asked.top_p]
    result = np.zeros(len(values))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


# Uniform numbers.

GOLDEN = [0.4586365818977356, 0.7816110253334045, 0.23756712675094604]
GOLDEN_LARGE = 0.463763952255249


def test_the_numbers_are_the_same_on_every_host_and_in_every_version() -> None:
    assert [uniform_number(spec(), position) for position in range(3)] == GOLDEN
    large = spec(seed=2**63 - 1, sampling_key=2**63 - 1, sample_index=7)
    assert uniform_number(large, 10**6) == GOLDEN_LARGE


@pytest.mark.parametrize("name", ["seed", "sampling_key", "sample_index"])
def test_each_key_has_a_stream_of_its_own(name: str) -> None:
    streams = {
        tuple(uniform_number(spec(**{name: value}), position) for position in range(4))
        for value in range(200)
    }
    assert len(streams) == 200


def test_keys_that_change_places_do_not_share_a_stream() -> None:
    assert uniform_number(spec(seed=1, sampling_key=2), 0) != uniform_number(
        spec(seed=2, sampling_key=1), 0
    )
    assert uniform_number(spec(sample_index=1), 0) != uniform_number(spec(sample_index=0), 1)


@pytest.mark.parametrize("name", ["position", "seed", "sampling_key", "sample_index"])
def test_the_numbers_are_uniform_along_every_key(name: str) -> None:
    count = 8192
    numbers = np.sort(
        [
            uniform_number(spec(), i)
            if name == "position"
            else uniform_number(spec(**{name: i}), 0)
            for i in range(count)
        ]
    )
    assert numbers[0] >= 0.0
    assert numbers[-1] < 1.0
    distance = np.abs(numbers - (np.arange(count) + 0.5) / count).max()
    assert distance < 1.63 / np.sqrt(count)  # Kolmogorov and Smirnov, level 0.01
    assert np.float32(numbers[-1]) < 1.0


# Frequencies.

LOGITS = [0.0, 2.0, 1.0, -1.0, 1.0, 0.5, -3.0, 1.5]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"min_p": 0.3},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.2, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(fields: dict[str, Any]) -> None:
    count = 4000
    expected = count * reference(LOGITS, **fields)
    found = np.bincount(draw(LOGITS, count, **fields), minlength=len(LOGITS))
    assert found[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square <= _critical(possible.sum() - 1)


def _critical(degrees: int) -> float:
    """Return about the 0.01 % point of chi-square (Wilson and Hilferty 1931)."""
    if degrees == 0:
        return 0.0
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * np.sqrt(2 / (9 * degrees))) ** 3


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=9),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.55, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_only_what_the_filters_leave_is_ever_drawn(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    fields = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    assert set(draw(logits, 20, **fields)) <= set(np.flatnonzero(reference(logits, **fields)))


def test_top_p_counts_the_mass_of_what_min_p_and_top_k_have_left() -> None:
    logits = np.log([0.5, 0.3, 0.1, 0.1]).tolist()
    assert set(draw(logits, 300, top_p=0.6)) == {0, 1}
    assert set(draw(logits, 300, top_p=0.6, min_p=0.5)) == {0}
    assert set(draw(logits, 300, top_p=0.6, top_k=2)) == {0}


def test_ties_are_broken_by_the_token_id() -> None:
    assert set(draw([1.0, 1.0, 1.0, 1.0], 200, top_k=2)) == {0, 1}
    assert sample(torch.tensor([[0.0, 3.0, 3.0]]), [slot(spec(**GREEDY))]) == [1]


def test_top_k_one_and_a_tiny_temperature_are_greedy() -> None:
    assert set(draw(LOGITS, 50, top_k=1)) == {1}
    assert set(draw(LOGITS, 50, temperature=1e-30)) == {1}
    assert set(draw([-1e4, 1e4, 0.0], 50, temperature=5e-324)) == {1}


def test_a_token_that_is_impossible_is_not_drawn_by_the_largest_numbers_either() -> None:
    logits = torch.full((1, 3000), float("-inf"))
    logits[0, 5], logits[0, 6] = 0.0, 1e-3
    edges = [position for position in range(20_000) if uniform_number(spec(), position) > 0.9999]
    assert edges
    for position in edges:
        assert sample(logits.clone(), [slot(spec(), position)]) == [6]


# Rows do not meet.


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.7, 1.3]),
            st.sampled_from([0, 3]),
            st.sampled_from([1.0, 0.7]),
            st.integers(0, 1000),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_draws_the_same_alone_as_in_any_batch(
    rows: list[tuple[float, int, float, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 37, generator=generator)
    slots = [
        slot(spec(temperature=t, top_k=k, top_p=p, sampling_key=key), position=key % 5)
        for t, k, p, key in rows
    ]
    together = sample(logits.clone(), slots)
    alone = [sample(logits[i : i + 1].clone(), [slots[i]])[0] for i in range(len(rows))]
    assert together == alone


def test_logits_in_bfloat16_are_sampled_in_float32() -> None:
    logits = torch.tensor([LOGITS], dtype=torch.bfloat16)
    assert sample(logits, [slot(spec(), 3)]) == sample(logits.float(), [slot(spec(), 3)])


# Early stops.


@pytest.mark.parametrize("kind", [GREEDY, PLAIN])
def test_stop_tokens_wait_for_min_tokens(kind: dict[str, Any]) -> None:
    wanting = spec(**kind, min_tokens=4, forbidden_token_ids=(1, 2))
    logits = torch.tensor([[0.0, 100.0, 50.0, 1.0]])
    tokens = [sample(logits.clone(), [slot(wanting, position)])[0] for position in range(6)]
    assert 1 not in tokens[:4]
    assert 2 not in tokens[:4]
    assert tokens[4:] == [1, 1]


def test_a_stop_token_outside_of_the_vocabulary_is_no_matter() -> None:
    wanting = spec(**GREEDY, min_tokens=1, forbidden_token_ids=(1, 7, 2**31 - 1))
    assert sample(torch.tensor([[0.0, 9.0, 1.0]]), [slot(wanting)]) == [2]
