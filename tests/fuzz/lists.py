# ruff: noqa: E501 (many to a line)
"""Lists of sources: every one that is read gives each source a folder of its own, inside the folder of results."""

import random
from pathlib import Path

from tests.fuzz.mutate import mutated_bytes
from weightscope.core.errors import CheckpointError
from weightscope.model.sources import RESERVED, Source, folder_names, read_list

LINES = (
    "gpt2", "openai-community/gpt2@main", "# a run", "/models/step1000", "/models/step2000/", "../x", "..", ".", "/", "~",
    "a b", "a  # note", "#", "", "  ", "A/step1", "a/step1", "a//step1", "./a/step1", "=1+1", "+x", "@x", "-rf", "summary.csv",
    "Summary.HTML", ".hidden", "embedded", "hf.co/x", "C:\\models\\a", "x" * 300, "x" * 299 + "y",
    "naïve", "東京", "\x1b[2J", "\u202egnp", "a\tb", "a\x0bb", "a\u2028b", "a\0b", "con", "nul.txt",
)  # fmt: skip
BYTES = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xff", b"\r", b"\r\n", b"\0", "é".encode("latin-1"), b"\xed\xa0\x80")


def mutant(rng: random.Random) -> bytes:
    """Some lines, ended in one of the ways there are."""
    lines = [rng.choice(LINES) for _ in range(rng.choice((0, 1, 2, 3, 5, 12)))]
    content = rng.choice(("\n", "\n", "\r\n", "\r")).join(lines).encode()
    if rng.random() < 0.2:
        place = rng.choice((0, rng.randrange(len(content) + 1)))
        content = content[:place] + rng.choice(BYTES) + content[place:]
    return mutated_bytes(content, rng, content) if rng.random() < 0.4 else content


def meet(folder: Path, content: bytes) -> str:
    """Read a list, and name its folders."""
    (folder / "list.txt").write_bytes(content)
    try:
        sources = read_list(folder / "list.txt")
        names = folder_names([Source.named(source).source for source in sources])
    except CheckpointError as error:
        assert str(error).isprintable()
        return "refused"
    assert len(names) == len(sources) == len({name.casefold() for name in names})
    for name in names:
        assert (
            (folder / name).parent == folder and name not in (".", "..", *RESERVED) and not name.startswith((".", "-"))
        )
        assert name.isprintable() and len(name.encode()) < 700
    return "read"
