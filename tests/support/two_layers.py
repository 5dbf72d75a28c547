"""A GPT-2 of two layers, trained on books, of which kept figures and frozen results are."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures" / "two-layers"
TWO_LAYERS = str(FOLDER)
