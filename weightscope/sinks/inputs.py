"""The inputs that are searched for sinks: photographs or texts as the model takes them, and their kinds of token."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.model import Model
from weightscope.runner.framing import framing_of
from weightscope.text.kinds import Tokens, image_tokens, text_tokens
from weightscope.text.sequences import Texts, paragraph_pairs, read_texts, token_windows
from weightscope.text.tokenizer import shortened

CHARACTERS_A_TOKEN = 5  # of English


class Inputs(NamedTuple):
    """Images or texts."""

    sequences: dict[str, np.ndarray]  # (channels, height, width): By name
    tokens: Tokens  # The kinds of the tokens made from them
    note: str  # What they are and where they come from, in a sentence


def read_inputs(
    model: Model,
    text: Sequence[Path] = (),
    images: Path | None = None,
    *,
    n: int = 64,
    length: int = 256,
    seed: int = 0,
) -> Inputs:
    """Texts for a language model, images for a vision model: those given, or those that come with the package."""
    if not model.family.inputs.tokens:
        if text:
            raise CheckpointError(f"{model.name} sees images, not texts")
        return _image_inputs(model, images, n, seed)
    if images is not None:
        raise CheckpointError(f"{model.name} reads texts, not images")
    return _text_inputs(model, read_texts(text, characters=CHARACTERS_A_TOKEN * n * length), n, length, seed)


def _image_inputs(model: Model, path: Path | None, n: int, seed: int) -> Inputs:
    """The first images of a folder, or scikit-learn's two photographs and crops of them."""
    from weightscope.runner.images import image_processor, photographs, read_images

    process = image_processor(model)
    images = photographs(n, seed) if path is None else read_images(path, n)
    source = "scikit-learn's two photographs and crops of them" if path is None else f"images from {path}"
    note = f"Run on {len(images)} images: {source}; {process}."
    return Inputs({name: process(image) for name, image in images.items()}, image_tokens(model), note)


def _text_inputs(model: Model, texts: Texts, n: int, length: int, seed: int) -> Inputs:
    """Pairs of paragraphs where the model's tokenizer frames them with special tokens, else windows of one length."""
    framing = framing_of(model)
    length = min(length, model.config.n_positions or length)
    sequences = (paragraph_pairs if framing.takes_pairs else token_windows)(framing, texts.texts, n, length, seed)
    if not sequences:
        raise CheckpointError(f"the texts are too short for inputs of {length} tokens")
    first = shortened(str(framing.tokenizer.tokens.get(int(sequences[0][0]))))
    shape = f"at most {length} tokens each, pairs of paragraphs" if framing.takes_pairs else f"{length} tokens each"
    note = f"Run on {len(sequences)} texts, {shape}, beginning with {first}, from {texts.source}."
    return Inputs({f"text {index}": each for index, each in enumerate(sequences)}, text_tokens(framing.tokenizer), note)
