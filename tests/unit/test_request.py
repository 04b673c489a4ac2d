"""The states of a request, and the numbers that the scheduler plans with."""

import subprocess
import sys
from itertools import product

import pytest
from engine_builders import infer_request

from engine.errors import InvalidTransitionError
from engine.request import Completion, FinishReason, RequestState, sampling_key_of

W, R, X, D, E = RequestState
EDGES = {(W, R), (W, E), (R, X), (R, W), (R, E), (X, W), (X, D), (X, E)}


@pytest.mark.parametrize(("start", "end"), list(product(RequestState, RequestState)))
def test_a_request_moves_along_the_edges_of_its_state_machine_only(
    start: RequestState, end: RequestState
) -> None:
    request = infer_request()
    request.state = start
    if (start, end) in EDGES:
        request.transition_to(end)
        assert request.state is end
        return
    message = f"'request-0' cannot go from {start.value} to {end.value}"
    with pytest.raises(InvalidTransitionError, match=message):
        request.transition_to(end)
    assert request.state is start


def test_done_and_error_are_the_ends() -> None:
    assert [state for state in RequestState if state.is_terminal] == [D, E]


def test_tokens_in_flight_count_before_their_values_are_known() -> None:
    request = infer_request(prompt=[1, 2, 3], max_tokens=3)
    request.num_computed_tokens = 3
    assert request.num_uncomputed_tokens == 0
    request.expect_token()
    assert (request.num_known_tokens, request.num_tokens) == (3, 4)
    assert request.num_uncomputed_tokens == 1
    assert not request.is_out_of_budget
    request.append_token(7)
    assert (request.num_known_tokens, request.num_tokens) == (4, 4)
    request.expect_token()
    request.give_up_token()
    assert not request.is_out_of_budget
    request.expect_token()
    request.expect_token()
    assert request.is_out_of_budget


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("stop", [*range(6), None])
def test_known_tokens_are_a_slice_of_prompt_and_answer(start: int, stop: int | None) -> None:
    request = infer_request(prompt=[1, 2, 3])
    for token_id in (4, 5):
        request.expect_token()
        request.append_token(token_id)
    assert request.known_token_ids(start, stop) == [1, 2, 3, 4, 5][start:stop]


def test_a_completion_counts_its_tokens() -> None:
    completion = Completion(
        request_id="a",
        sample_index=0,
        text="xy",
        token_ids=(5, 6, 2),
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=1,
    )
    assert completion.num_output_tokens == 3


def test_the_sampling_key_depends_on_the_id_alone() -> None:
    keys = [sampling_key_of(name) for name in ("a", "b", "", "\ud800", "行")]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    code = "from engine.request import sampling_key_of; print(sampling_key_of('a'))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert int(other) == keys[0]
