"""Heavy libraries are loaded by what needs them, not by what lies beside it."""

import subprocess
import sys
from importlib import import_module

import pytest

import engine

HEAVY = ("torch", "transformers", "numba", "prefect", "pandas", "ray")


def heavy_after(code: str) -> list[str]:
    """Return the heavy libraries that a fresh interpreter has loaded after running the code."""
    code += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import engine; engine.EngineConfig, engine.SamplingParams, engine.WorkerError",
        "import engine; engine.OfflineInference(engine.EngineConfig(model_path='nowhere'))",
        "import engine.scheduler, engine.cache_manager, engine.output_processor, engine.execution",
        "from engine.worker.model_worker import ModelWorker",
        "import flows.cli, flows.config",
    ],
)
def test_policy_and_configuration_load_nothing_heavy(code: str) -> None:
    assert heavy_after(code) == []


def test_the_mock_engine_answers_without_torch() -> None:
    code = (
        "from engine import EngineConfig, OfflineInference\n"
        "config = EngineConfig(model_path='none', device='mock', runtime={'inline': True})\n"
        "with OfflineInference(config) as llm:\n"
        "    assert llm.generate(['hello'])[0].token_ids\n"
    )
    assert heavy_after(code) == []


def test_every_public_name_is_where_engine_says_it_is() -> None:
    assert sorted(engine.__all__) == dir(engine)
    for name in engine.__all__:
        assert getattr(engine, name).__module__.startswith("engine.")


def test_a_name_that_does_not_exist_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'engine' has no attribute 'Engin'"):
        import_module("engine").Engin  # noqa: B018
