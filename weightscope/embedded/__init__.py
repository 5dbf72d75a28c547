"""A small GPT-2 that comes with weightscope, so that everything can be tried where no Hub can be reached.

Two layers, eight heads, width 256, context 256, a byte-level BPE of 8,000 tokens, trained on public-domain English
books by analyses/train_embedded.py; training.json says on what, for how long and to which loss. counts.npz holds the
bigram counts of the same books.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
COUNTS = FOLDER / "counts.npz"


def resolved(source: str | Path) -> str | Path:
    """`embedded` is this checkpoint, unless a folder of that name stands here."""
    return FOLDER if source == "embedded" and not Path(source).exists() else source
