"""Uploads and fetches while nobody waits: only events keep the streams in order."""

import numpy as np
import torch
from npu_simulator.acl import NoteKind
from npu_simulator.recorder import recorder

from engine.backends import load_backend

NUM_STEPS = 6


@torch.inference_mode()
def test_steps_that_nobody_waits_for_do_not_write_what_others_still_read() -> None:
    backend = load_backend("npu")
    backend.bind(0, None)
    fetched = []
    with recorder.recording():
        for step in range(NUM_STEPS):
            tensors = backend.upload({"numbers": np.arange(5) * step})
            with backend.computing():
                doubled = tensors["numbers"] * 2
                fetched.append(backend.fetch(doubled))
        ordering = recorder.find_races()
        found = [numbers.numpy().tolist() for numbers in fetched]
        kinds = {note.kind for note in recorder.notes}
    assert ordering.races == []
    [doubling] = {note.stream for note in recorder.notes if note.name == "aten::mul.Tensor"}
    followers = {after for before, after in ordering.ordered if before == doubling}
    # The fetch of what was computed, and the upload to where it was computed from.
    assert len(followers) == 2
    assert found == [[2 * step * number for number in range(5)] for step in range(NUM_STEPS)]
    assert NoteKind.HOST_OVERWRITE not in kinds
