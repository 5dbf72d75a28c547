"""What a model's sinks are looked for in: photographs or texts, as the model takes them, and what their tokens are."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.model import Model
from weightscope.runner.tokenizer import framing_of
from weightscope.text.inputs import Texts, read_texts
from weightscope.text.kinds import Tokens, image_tokens, text_tokens
from weightscope.text.sequences import paragraph_pairs, token_windows
from weightscope.text.tokenizer import shortened

CHARACTERS_A_TOKEN = 5  # of English


class Inputs(NamedTuple):
    """Images or texts.

    Attributes
    ----------
    sequences : dict of (channels, height, width) float arrays or of (n,) int arrays
        By name.
    tokens : Tokens
        What the tokens made of them are.
    note : str
        What they are and where they come from, in a sentence.
    """

    sequences: dict[str, np.ndarray]
    tokens: Tokens
    note: str


def read_inputs(
    model: Model,
    text: Sequence[Path] = (),
    images: Path | None = None,
    *,
    n: int = 64,
    length: int = 256,
    seed: int = 0,
) -> Inputs:
    """Texts for a model that reads, images for one that sees: those given, or those that come with the package.

    Parameters
    ----------
    model : Model
    text : sequence of Path
        Files and folders of text; see `weightscope.text.corpus`.
    images : Path or None
        A folder of images, or an image.
    n : int
        Inputs wanted.
    length : int
        Tokens of a text.
    seed : int
        Of the choice of texts and of the crops of photographs.

    Raises
    ------
    CheckpointError
        Texts are given for a model that sees, or images for one that reads; they cannot be read, are too short, or
        cannot be made into what the model takes.
    """
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
    first = shortened(str(framing.tokenizer.id_to_token(int(sequences[0][0]))))
    shape = f"at most {length} tokens each, pairs of paragraphs" if framing.takes_pairs else f"{length} tokens each"
    note = f"Run on {len(sequences)} texts, {shape}, beginning with {first}, from {texts.source}."
    return Inputs({f"text {index}": each for index, each in enumerate(sequences)}, text_tokens(framing.tokenizer), note)
