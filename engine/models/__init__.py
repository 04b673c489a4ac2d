"""Models: the modules of transformers with our attention inside."""

from engine.models.loader import load_model as load_model
from engine.models.loader import prepare_model as prepare_model
