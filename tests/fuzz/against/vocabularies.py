"""tokenizer.json read by the package tokenizers in this process too: the same tokens and ids, added ones included.

A mutant may make the library panic, or take all memory, so that it is not asked about what a listed reason refuses.
"""

from pathlib import Path

from tokenizers import Tokenizer as Library

from tests.fuzz.against import READ, Reasons, outcome
from weightscope.core.errors import CheckpointError
from weightscope.model.text.tokenizer import Tokenizer

STRICTER: Reasons = {
    "vocabulary is empty": "no tokens",
    "at most": "more than is read",
}
LAXER: Reasons = {}


def meet(folder: Path, content: bytes) -> str:
    """Read it with both, and compare the vocabularies."""
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    ours = theirs = READ
    try:
        tokenizer = Tokenizer.load(path)
    except CheckpointError as error:
        ours = str(error)
    if any(part in ours for part in STRICTER):
        return outcome(ours, theirs, STRICTER, LAXER)
    try:
        library = Library.from_buffer(content)
    except BaseException as error:  # a panic is no Exception
        theirs = f"tokenizers: {error}"
    if ours == theirs == READ:
        assert tokenizer.ids == library.get_vocab(with_added_tokens=True)
        added = {index: token.content for index, token in library.get_added_tokens_decoder().items()}
        assert {index: token.content for index, token in tokenizer.added.items()} == added
        assert tokenizer.size > max(map(int, [*library.get_vocab().values(), *added]))
    return outcome(ours, theirs, STRICTER, LAXER)
