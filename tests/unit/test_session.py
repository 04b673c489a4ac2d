"""A run's bookkeeping between the threads that meet in it."""

import threading

from engine import EngineConfig, OfflineInference, SamplingParams
from engine.intake import EncodedRequest
from engine.request import GenerateRequest
from engine.session import Session


class IntakeWithAWitness:
    """Has one request; while it is handed over, another thread asks whether the run is over."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.verdicts: list[bool] = []
        self.is_exhausted = False
        self.witness = threading.Thread(target=self._look)

    def poll(self) -> EncodedRequest | None:
        if self.is_exhausted:
            return None
        self.is_exhausted = True
        self.witness.start()
        self.witness.join(0.2)
        return EncodedRequest(request=GenerateRequest(request_id="last"), token_ids=[1])

    def _look(self) -> None:
        assert self.session is not None
        self.verdicts.append(self.session.is_finished())


def test_a_request_on_its_way_in_keeps_its_run_from_being_over() -> None:
    intake = IntakeWithAWitness()
    stop = threading.Event()
    session = Session(intake, lambda request: EncodedRequest(request=request), stop)  # type: ignore[arg-type]
    intake.session = session
    turn = session.take()
    intake.witness.join()
    assert turn is not None
    assert intake.verdicts == [False]


def test_every_sample_of_a_prompt_that_cannot_be_answered_has_its_error() -> None:
    config = EngineConfig(model_path="mock", device="mock", runtime={"inline": True})
    params = SamplingParams(n=3, max_tokens=2)
    bad = GenerateRequest(request_id="bad", prompt_token_ids=[10**6], sampling_params=params)
    waits = GenerateRequest(
        request_id="waits", prompt="x", depends_on=("bad",), sampling_params=params
    )
    with OfflineInference(config) as llm:
        completions = llm.generate([bad, waits])
    assert [(c.request_id, c.sample_index, c.error is not None) for c in completions] == [
        (name, index, True) for name in ("bad", "waits") for index in range(3)
    ]
