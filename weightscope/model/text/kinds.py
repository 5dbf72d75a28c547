"""The kinds of tokens: CLS, registers and patches of an image; first, special and other tokens of a
text.
"""

from dataclasses import dataclass

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.model import Model
from weightscope.model.text.sequences import Framing
from weightscope.model.text.tokenizer import Tokenizer, shortened

PUNCTUATION = ".,"
TEXT_KINDS = ("first", "special", "punctuation", "other")


@dataclass(frozen=True, eq=False, repr=False)
class TokenKinds(ShowsShapes):
    """Which tokens are special, which are commas and periods, and which are any other."""

    # The special tokens around a text in their order ("[CLS]", "[SEP]"); then ". or ,"; then
    # "other".
    names: tuple[str, ...]
    of_token: np.ndarray  # (vocab,): Each token's kind, an index into `names`

    def __call__(self, tokens: np.ndarray | None) -> np.ndarray:
        """Kinds of tokens, in the same shape."""
        if tokens is None:
            raise CheckpointError("kinds of token need text; these are images")
        return self.of_token[tokens]


def token_kinds(framing: Framing) -> TokenKinds:
    """The kinds of token that papers on encoders tell apart."""
    tokenizer, special = framing.tokenizer, framing.special
    of_token = np.full(tokenizer.size, len(special) + 1, np.int8)
    for token in {tokenizer.ids[mark] for mark in PUNCTUATION if mark in tokenizer.ids}:
        of_token[token] = len(special)
    for kind, token in enumerate(special):
        of_token[token] = kind
    names = (shortened(str(tokenizer.tokens.get(token))) for token in special)
    return TokenKinds((*names, ". or ,", "other"), of_token)


@dataclass(frozen=True)
class ImageTokens:
    """Leading tokens, then patches row by row."""

    leading: tuple[str, ...]  # The kind of each token before the patches
    patch: int  # Side of a patch in pixels

    @property
    def names(self) -> tuple[str, ...]:
        return (*dict.fromkeys(self.leading), "patch")

    def kinds(self, sequence: np.ndarray, n: int) -> np.ndarray:
        """Each token's kind, an index into `names`: (n,) int array for the n tokens made of a
        sequence.
        """
        before = [self.names.index(kind) for kind in self.leading]
        return np.array([*before, *[len(self.names) - 1] * (n - len(before))])

    def label(self, sequence: np.ndarray, position: int) -> str:
        """One token in words."""
        if position >= len(self.leading):
            row, column = divmod(position - len(self.leading), sequence.shape[-1] // self.patch)
            return f"patch {row}, {column}"
        kind = self.leading[position]
        return (
            kind
            if self.leading.count(kind) == 1
            else f"{kind} {self.leading[: position + 1].count(kind)}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class TextTokens(ShowsShapes):
    """Tokens of a tokenizer."""

    tokenizer: Tokenizer
    of_token: np.ndarray  # (vocab,): Each token's kind wherever it does not stand first

    @property
    def names(self) -> tuple[str, ...]:
        return TEXT_KINDS

    def kinds(self, sequence: np.ndarray, n: int) -> np.ndarray:
        kinds = self.of_token[sequence]
        kinds[0] = TEXT_KINDS.index("first")
        return kinds

    def label(self, sequence: np.ndarray, position: int) -> str:
        return self.tokenizer.text(int(sequence[position]))


# the kinds of token in a model's inputs, and how to call a single one
Tokens = ImageTokens | TextTokens


def image_tokens(model: Model) -> ImageTokens:
    """The tokens that a vision model makes of an image."""
    if model.family.inputs.tokens:
        raise CheckpointError(f"{model.family.name} reads text and sees no images", file=model.name)
    counts = (
        (kind, n if isinstance(n, int) else model.config.count(n))
        for kind, n in model.family.inputs.leading
    )
    leading = tuple(kind for kind, count in counts for _ in range(count))
    return ImageTokens(leading, model.config.size("patch_size"))


def text_tokens(tokenizer: Tokenizer) -> TextTokens:
    """The tokens of a text: the first one, special ones, those without a letter or digit, all
    others.
    """
    special = {token for token, added in tokenizer.added.items() if added.special} | {
        *tokenizer.around
    }
    of_token = np.full(tokenizer.size, TEXT_KINDS.index("other"), np.int8)
    for token in tokenizer.ids.values():
        if token in special:
            of_token[token] = TEXT_KINDS.index("special")
        elif not any(character.isalnum() for character in tokenizer.text(token)):
            of_token[token] = TEXT_KINDS.index("punctuation")
    return TextTokens(tokenizer, of_token)
