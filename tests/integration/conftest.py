"""A tiny random llama, made once a session."""

from pathlib import Path

import pytest
import tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random llama with a byte-level tokenizer, in float32."""
    return tiny_model.save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
