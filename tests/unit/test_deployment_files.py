"""What is deployed is there, and its settings agree with each other; no server is needed."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.job_file import load_job_config

ROOT = Path(__file__).parents[2]
PREFECT: dict[str, Any] = yaml.safe_load(
    (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")
)
DEPLOYMENTS: dict[str, dict[str, Any]] = {each["name"]: each for each in PREFECT["deployments"]}
README = (ROOT / "deployments" / "README.md").read_text(encoding="utf-8")
DAY_SECONDS = 24 * 60 * 60


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_entrypoint_is_a_flow_of_the_repository(name: str):
    path, function = DEPLOYMENTS[name]["entrypoint"].split(":")
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    (found,) = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == function]
    names = [word.value for node in found.decorator_list for word in ast.walk(node)
             if isinstance(word, ast.Constant)]  # fmt: skip
    assert "batch-inference" in names


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_deployment_is_told_of_with_its_work_pool(name: str):
    assert f"`batch-inference/{name}`" in README
    assert f"--pool {DEPLOYMENTS[name]['work_pool']['name']} " in README


def test_two_nights_wait_for_each_other_and_each_ends_before_the_next():
    night = DEPLOYMENTS["nightly-eval"]
    assert night["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert night["schedules"][0]["cron"] == "0 2 * * *"  # once a day
    job = load_job_config(ROOT / night["parameters"]["config"])
    assert job.max_runtime_seconds is not None
    assert job.max_runtime_seconds < DAY_SECONDS
    assert job.job_id is None  # a new job each night


def test_job_of_the_night_reads_a_file_of_the_repository_and_needs_no_model():
    job = load_job_config(ROOT / "configs" / "jobs" / "nightly.yaml")
    assert (ROOT / job.sources[0].path).exists()
    assert job.engine.device == "mock"


def test_no_secret_is_part_of_a_deployment():
    settings = [
        key for each in DEPLOYMENTS.values() for key in each["work_pool"]["job_variables"]["env"]
    ]
    assert settings
    assert not [key for key in settings if re.search("URL|KEY|PASSWORD|TOKEN(?!MILL)", key)]
    assert "://" not in (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")


def test_five_commands_lead_to_a_run():
    block = re.search(r"```bash\n(.*?)```", README, re.DOTALL)
    assert block is not None
    commands = block[1].splitlines()
    assert len(commands) == 5
    assert commands[0].endswith("prefect server start --host 127.0.0.1")
    assert commands[-1].startswith("prefect deployment run 'batch-inference/nightly-eval' --param")
    assert commands[-1].endswith("--watch")
