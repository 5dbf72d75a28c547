"""Kinds of tokens: CLS, registers and patches of an image; first and special tokens of a text."""

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
    """Kinds that papers on encoders tell apart: special tokens, commas and periods, others."""

    names: tuple[str, ...]  # special tokens in their order ("[CLS]", "[SEP]"), ". or ,", "other"
    of_token: np.ndarray  # (vocab,): each token's kind, an index into `names`

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

    leading: tuple[str, ...]  # the kind of each token before the patches
    patch: int  # side of a patch in pixels

    @property
    def names(self) -> tuple[str, ...]:
        return (*dict.fromkeys(self.leading), "patch")

    def kinds(self, sequence: np.ndarray, n: int) -> np.ndarray:
        """(n,) kind of each of a sequence's n tokens, an index into `names`."""
        before = [self.names.index(kind) for kind in self.leading]
        return np.array([*before, *[len(self.names) - 1] * (n - len(before))])

    def label(self, sequence: np.ndarray, position: int) -> str:
        """One token in words."""
        if position >= len(self.leading):
            row, column = divmod(position - len(self.leading), sequence.shape[-1] // self.patch)
            return f"patch {row}, {column}"
        kind = self.leading[position]
        if self.leading.count(kind) == 1:
            return kind
        return f"{kind} {self.leading[: position + 1].count(kind)}"


@dataclass(frozen=True, eq=False, repr=False)
class TextTokens(ShowsShapes):
    """Tokens of a tokenizer."""

    tokenizer: Tokenizer
    of_token: np.ndarray  # (vocab,): each token's kind wherever it is not first

    @property
    def names(self) -> tuple[str, ...]:
        return TEXT_KINDS

    def kinds(self, sequence: np.ndarray, n: int) -> np.ndarray:
        kinds = self.of_token[sequence]
        kinds[0] = TEXT_KINDS.index("first")
        return kinds

    def label(self, sequence: np.ndarray, position: int) -> str:
        return self.tokenizer.text(int(sequence[position]))


Tokens = ImageTokens | TextTokens  # the kinds of token in a model's inputs


def image_tokens(model: Model) -> ImageTokens:
    """The tokens that a vision model makes of an image."""
    if model.family.inputs.tokens:
        raise CheckpointError(f"{model.family.name} reads text and sees no images", file=model.name)
    leading: list[str] = []
    for kind, n in model.family.inputs.leading:
        leading += [kind] * (n if isinstance(n, int) else model.config.count(n))
    return ImageTokens(tuple(leading), model.config.size("patch_size"))


def text_tokens(tokenizer: Tokenizer) -> TextTokens:
    """The tokens of a text: first, special, without letter or digit, and others."""
    special = {token for token, added in tokenizer.added.items() if added.special}
    special.update(tokenizer.around)
    of_token = np.full(tokenizer.size, TEXT_KINDS.index("other"), np.int8)
    for token in tokenizer.ids.values():
        if token in special:
            of_token[token] = TEXT_KINDS.index("special")
        elif not any(character.isalnum() for character in tokenizer.text(token)):
            of_token[token] = TEXT_KINDS.index("punctuation")
    return TextTokens(tokenizer, of_token)
