"""A GPT-2 of two layers, trained on books; kept figures and frozen results use it."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures" / "two-layers"
TWO_LAYERS = str(FOLDER)
