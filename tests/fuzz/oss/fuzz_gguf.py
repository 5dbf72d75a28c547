"""A GGUF file."""

from pathlib import Path

from tests.fuzz.checkpoints import read_all
from tests.fuzz.oss import harness
from weightscope.model.text.tokenizer import TokenList


def meet(folder: Path, content: bytes) -> str:
    """Open it as a model, read every tensor, and name its tokens."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    outcome = read_all(path)
    tokens = TokenList.of_gguf(path)
    assert all(tokens.text(token) is not None for token in tokens.tokens)
    return outcome


if __name__ == "__main__":
    harness.fuzz(meet, "weightscope.checkpoint", "weightscope.model.rows.gguf")
